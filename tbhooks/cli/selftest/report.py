"""The result of a self-test: as a table, as one line, and as JSON values."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "not possible here"]


@dataclass(frozen=True)
class Result:
    """What one check has found."""

    name: str
    status: Status
    detail: str
    seconds: float
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What all checks have found."""

    device: str
    quick: bool
    machine: str
    """The versions and the device, in one line."""
    results: Sequence[Result]

    def count(self, status: Status) -> int:
        return sum(result.status == status for result in self.results)

    @property
    def failed(self) -> int:
        return self.count("fail")

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**dataclasses.asdict(self), "failed": self.failed, "line": line(self)}


def text(report: Report, width: int) -> str:
    """A table with one row per check: its name, its result, and what it found."""
    first = max(len(result.name) for result in report.results)
    second = max(len(result.status) for result in report.results)
    indent = " " * (first + second + 4)
    rows = []
    for result in report.results:
        head = f"{result.name:{first}}  {result.status:{second}}  "
        rows.append(
            textwrap.fill(result.detail, max(width, len(indent) + 30), initial_indent=head, subsequent_indent=indent)
        )
    return "\n".join(rows) + "\n"


def line(report: Report) -> str:
    """The result in one line, to paste into an issue."""
    passed, impossible = report.count("pass"), report.count("not possible here")
    failed = ", ".join(result.name for result in report.results if result.status == "fail")
    quick = ", quick" if report.quick else ""
    counts = f"{passed} passed, {report.failed} failed{f' ({failed})' if failed else ''}, {impossible} not possible"
    return f"tbhooks selftest on {report.device}{quick}: {counts} | {report.machine}"
