"""What tbhooks raises: at the call that was wrong, and from inside a training step only if it was asked to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class TbhooksError(Exception):
    """Every exception of tbhooks is one of these."""


class ArgumentError(TbhooksError, ValueError, TypeError):
    """An argument tbhooks cannot work with.

    It is a ValueError and a TypeError at once: which of the two a wrong argument "is" should not
    decide whether a caller's `except` sees it.
    """


class ClosedError(TbhooksError, RuntimeError):
    """A closed watch was used again."""


class FindingError(TbhooksError, RuntimeError):
    """Something is wrong with the model, and the user asked for an exception; `finding` says what and where."""

    def __init__(self, finding: Any) -> None:
        super().__init__(finding.message)
        self.finding = finding


class UnknownSiteError(TbhooksError, KeyError):
    """A frame or history was asked for a place it holds no number of."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def nearest(wrong: str, allowed: Iterable[str], limit: int = 5) -> str:
    """Says which of `allowed` the reader most likely meant: `did you mean 'std'?`, or lists a few."""
    names = list(dict.fromkeys(allowed))
    close = difflib.get_close_matches(wrong, names, n=limit, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    shown = ", ".join(repr(name) for name in names[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"there is {shown}{more}" if names else "there is none"


def check_names(what: str, names: Iterable[object], allowed: Iterable[str]) -> None:
    """Raises for the first name that is not allowed, with the nearest that is."""
    known = tuple(allowed)
    for name in names:
        if name not in known:
            raise ArgumentError(f"unknown {what} {name!r}: {nearest(str(name), known)}")


def shown(value: object) -> str:
    """A value as messages quote it."""
    text = repr(value)
    return f"{text if len(text) < 80 else text[:77] + '...'} ({type(value).__name__})"
