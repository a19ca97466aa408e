"""Validation of the query parameters of a request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tbhooks.data.errors import nearest

LONGEST_SHOWN = 200
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)


class QueryError(Exception):
    """A request that cannot be answered: a parameter is wrong (status 400), or the data does not exist (404)."""

    def __init__(self, sentence: str, *, missing: bool = False) -> None:
        super().__init__(sentence)
        self.status = 404 if missing else 400

    @classmethod
    def unknown(cls, what: str, name: str, allowed: Iterable[str]) -> QueryError:
        return cls(f"unknown {what} {_quoted(name)}: {nearest(name[:LONGEST_SHOWN], allowed)}")


def _quoted(text: str) -> str:
    """A quoted parameter, cut if it is long."""
    return repr(text) if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]!r}... ({len(text)} characters)"


class Query:
    """The parameters of one request by name. All methods raise QueryError for wrong ones."""

    def __init__(self, parameters: Any) -> None:
        """`parameters` is werkzeug's MultiDict."""
        self._given: dict[str, list[str]] = {name: parameters.getlist(name) for name in parameters}

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def only(self, *names: str) -> None:
        """Raises for a parameter with another name, and for one that is given twice."""
        for name, values in self._given.items():
            if name not in names:
                hint = nearest(name[:LONGEST_SHOWN], names) if names else "this route has none"
                raise QueryError(f"unknown parameter {_quoted(name)}: {hint}")
            if len(values) > 1:
                raise QueryError(f"parameter {name!r} is given {len(values)} times")

    def text(self, name: str) -> str:
        if name not in self._given:
            raise QueryError(f"parameter {name!r} is missing")
        return self._given[name][0]

    def one_of(self, name: str, allowed: Iterable[str]) -> str:
        value, known = self.text(name), tuple(allowed)
        if value not in known:
            raise QueryError.unknown(name, value, known)
        return value

    def integer(self, name: str) -> int:
        """The value of an integer parameter, such as a step."""
        value = self.text(name)
        if not _INTEGER.fullmatch(value):
            raise QueryError(f"{name} must be an integer of at most 18 digits, got {_quoted(value)}")
        return int(value)
