"""The parameters of a question, checked: what was passed, what is allowed, the nearest right name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tbhooks.data.errors import nearest

LONGEST_SHOWN = 200
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


class RefusedError(Exception):
    """A question that has no answer: it was put wrongly, or what it asks for is missing."""

    def __init__(self, sentence: str, *, missing: bool = False) -> None:
        super().__init__(sentence)
        self.status = 404 if missing else 400

    @classmethod
    def unknown(cls, what: str, name: str, allowed: Iterable[str]) -> RefusedError:
        return cls(f"unknown {what} {_shown(name)}: {nearest(name[:LONGEST_SHOWN], allowed)}")


def _shown(text: str) -> str:
    """What somebody passed, short enough to be told back."""
    return repr(text) if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]!r}... ({len(text)} characters)"


class Asked:
    """The parameters of one question, by name; each may be given once."""

    def __init__(self, parameters: Any) -> None:
        """From what werkzeug makes of a query."""
        self._given: dict[str, list[str]] = {name: parameters.getlist(name) for name in parameters}

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def only(self, *names: str) -> None:
        """Raises for a parameter the question does not have, and for one that is there twice."""
        for name, values in self._given.items():
            if name not in names:
                hint = nearest(name[:LONGEST_SHOWN], names) if names else "there is none here"
                raise RefusedError(f"unknown parameter {_shown(name)}: {hint}")
            if len(values) > 1:
                raise RefusedError(f"parameter {name!r} is there {len(values)} times, and must be there once")

    def text(self, name: str) -> str:
        if name not in self._given:
            raise RefusedError(f"parameter {name!r} is missing")
        return self._given[name][0]

    def one_of(self, name: str, allowed: Iterable[str]) -> str:
        value, known = self.text(name), tuple(allowed)
        if value not in known:
            raise RefusedError.unknown(name, value, known)
        return value

    def whole(self, name: str) -> int:
        """A whole number, as steps are."""
        value = self.text(name)
        if not _WHOLE.fullmatch(value):
            raise RefusedError(f"{name} is {_shown(value)}, and must be a whole number of at most 18 digits")
        return int(value)
