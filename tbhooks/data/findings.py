"""Findings as a list that shows itself in a notebook, and the order they are told in."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tbhooks.data.frame import Finding, Frame, Site

SEVERITIES = ("error", "warning", "info")


class Findings(list[Finding]):
    """What `Watch.findings` returns; a list in every other respect."""

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        bundle: dict[str, str] = display("findings", self, include, exclude)
        return bundle

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython has a text of its own for every list, which goes before that of the bundle."""
        printer.text(self._repr_mimebundle_()["text/plain"])


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, and of those the earliest."""
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.step))


def first_of_each(frames: Iterable[Frame]) -> list[Finding]:
    """A trouble is in every frame that has it; it is told once, from where it began."""
    return once_each(finding for frame in frames for finding in frame.findings)


def once_each(findings: Iterable[Finding]) -> list[Finding]:
    """Each trouble once: as it was found first, or as it was when its severity rose last.

    A trouble is a rule and a place. One of many places may move from one to another; it is known by when it began.
    """
    troubles: dict[tuple[str, Site | None], Finding] = {}
    begun: dict[tuple[str, Any], tuple[str, Site | None]] = {}
    for finding in findings:
        place, since = (finding.rule, finding.site), (finding.rule, _hashable(finding.evidence.get("since")))
        if place not in troubles and finding.evidence.get("times") not in (None, 1):
            place = begun.get(since, place)
        begun.setdefault(since, place)
        known = troubles.setdefault(place, finding)
        if SEVERITIES.index(finding.severity) < SEVERITIES.index(known.severity):
            troubles[place] = finding
    return list(troubles.values())


def _hashable(value: Any) -> Any:
    """A user's rule may have put anything there."""
    return value if isinstance(value, int | float | str) else None
