"""What follows a finding, if the user asked for it: a call, an exception in the training thread, a wish to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tbhooks.data.errors import ArgumentError, FindingError
from tbhooks.data.frame import Finding
from tbhooks.data.self_report import Report


class Reactions:
    """Told of findings by the pump's thread; raises in the training thread only."""

    def __init__(self, report: Report) -> None:
        self.should_stop = False
        self._report = report
        self._callbacks: list[Callable[[Finding], Any]] = []
        self._raises = False
        self._stops = False
        self._to_raise: Finding | None = None

    def add(self, reaction: object) -> None:
        if callable(reaction):
            self._callbacks.append(reaction)
        elif reaction == "raise":
            self._raises = True
        elif reaction == "stop":
            self._stops = True
        else:
            raise ArgumentError(f'on_finding takes a callable, "raise" or "stop", not {reaction!r}')

    def told(self, finding: Finding) -> None:
        for callback in self._callbacks:
            try:
                callback(finding)
            except Exception as problem:  # the user's, but in our thread
                self._report.error("on_finding", problem)
        if finding.severity != "info":
            self.should_stop = self.should_stop or self._stops
            if self._raises and self._to_raise is None:
                self._to_raise = finding

    def raise_soon(self, finding: Finding) -> None:
        self._to_raise = finding

    def raise_if_asked(self) -> None:
        """To be called where an exception reaches the user's loop."""
        finding = self._to_raise
        if finding is not None:  # only then is it put back: the pump's thread may be setting it right now
            self._to_raise = None
            raise FindingError(finding)
