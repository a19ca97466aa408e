"""The exceptions that tbhooks raises, and the wording of its messages about wrong arguments.

tbhooks raises at the call that was wrong. It raises inside a training step only if the user asked for that.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
from collections.abc import Iterable
from typing import Any


class TbhooksError(Exception):
    """The base class of all exceptions of tbhooks."""


class ArgumentError(TbhooksError, ValueError, TypeError):
    """An argument has a type or a value that tbhooks does not accept.

    It is a `ValueError` and a `TypeError`, so that an `except` for either of them catches it.
    """


class ClosedError(TbhooksError, RuntimeError):
    """A method of a `Watch` was called after `close()`."""


class FindingError(TbhooksError, RuntimeError):
    """A rule found a problem in the model and the user asked for an exception.

    `Watch.on_finding("raise")` and `Watch.on_nonfinite("raise")` ask for it. The attribute `finding` is the `Finding`.
    """

    def __init__(self, finding: Any) -> None:
        super().__init__(finding.message)
        self.finding = finding


class UnknownSiteError(TbhooksError, KeyError):
    """A frame or a history has no data for this path, kind or scalar."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def similar(wrong: str, names: Iterable[str]) -> list[str]:
    """The names that are probably a misspelling away: one letter in four may differ."""
    return difflib.get_close_matches(wrong, list(names), n=3, cutoff=0.75)


def nearest(wrong: str, allowed: Iterable[str], limit: int = 5) -> str:
    """Suggests what the user probably meant: `did you mean 'std'?`, or else the first few allowed names."""
    names = list(dict.fromkeys(allowed))
    close = difflib.get_close_matches(wrong, names, n=limit, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    first = ", ".join(repr(name) for name in names[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"choose from {first}{more}" if names else "there is none"


def check_names(what: str, names: Iterable[object], allowed: Iterable[str]) -> None:
    """Raises an ArgumentError for the first name that is not allowed, with a suggestion."""
    known = tuple(allowed)
    for name in names:
        if name not in known:
            raise ArgumentError(f"unknown {what} {name!r}: {nearest(str(name), known)}")


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """Returns `value` as an int; raises an ArgumentError if it is not an integer or is less than `least`."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
            if number >= least:
                return number
    raise invalid_argument(name, f"an integer >= {least}", value)


def invalid_argument(name: str, expected: str, value: object) -> ArgumentError:
    """Returns the exception for a wrong argument: `every must be an integer >= 1, got 0`."""
    return ArgumentError(f"{name} must be {expected}, got {quoted(value)}")


def quoted(value: object) -> str:
    """A value as messages quote it: its repr, shortened, and its type where the repr does not show it."""
    text = repr(value)
    text = text if len(text) < 80 else text[:77] + "..."
    return text if value is None or isinstance(value, bool | int | float | str) else f"{text} ({type(value).__name__})"
