"""Findings of one watch, and the actions the user asked for: a call, an exception in training, a stop flag."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tbhooks.capture.schedule import Bursts
from tbhooks.capture.step.nan_replay import Replay
from tbhooks.data.errors import ArgumentError, FindingError, check_names
from tbhooks.data.findings import Findings, once_each
from tbhooks.data.frame import Finding, Frame
from tbhooks.data.history import History
from tbhooks.data.self_report import Report
from tbhooks.rules import Rule, RuleEngine

# How many steps are logged after a finding with `on_finding("burst")`, and how many times in a run.
BURST_STEPS = 20
MOST_BURSTS = 16


class FindingActions:
    """Applies the rules in the background thread. Raises in the training thread only."""

    def __init__(self, rules: tuple[Rule, ...], history: History, report: Report, bursts: Bursts | None = None) -> None:
        self.should_stop = False
        self._engine = RuleEngine(rules, history)
        self._history = history
        self._bursts = bursts if bursts is not None else Bursts()
        self._bursts_left = MOST_BURSTS
        self._report = report
        self._callbacks: list[Callable[[Finding], Any]] = []
        self._on_finding: set[str] = set()
        self._on_nonfinite: set[str] = set()
        self._to_raise: Finding | None = None
        self._nonfinite: list[Finding] = []
        self._unwritten: list[Finding] = []

    @property
    def findings(self) -> Findings:
        """All findings so far, oldest first, one for each rule and site."""
        findings = [*self._nonfinite, *self._engine.findings]
        return Findings(once_each(sorted(findings, key=lambda finding: finding.step)))

    def on_finding(self, action: object) -> None:
        if callable(action):
            self._callbacks.append(action)
        elif action in ("raise", "stop", "burst"):
            self._on_finding.add(str(action))
        else:
            raise ArgumentError(f'on_finding takes a callable, "burst", "raise" or "stop", got {action!r}')

    def on_nonfinite(self, action: str) -> None:
        check_names("action", (action,), ("replay", "raise"))
        self._on_nonfinite.add(action)

    def judge(self, frame: Frame) -> Frame:
        """Returns the frame with the findings of the rules and of `nonfinite`. Called in the background thread."""
        known = len(self._engine.findings)
        frame = self._engine(frame)
        for finding in self._engine.findings[known:]:
            self._act_on(finding)
        unwritten = [finding for finding in self._unwritten if finding.step <= frame.step] if frame.sites else []
        for finding in unwritten:  # one by one: the training thread may be adding another
            self._unwritten.remove(finding)
        if unwritten:
            frame = replace(frame, findings=(*unwritten, *frame.findings))
            self._history.replace_newest(frame)
        return frame

    def nonfinite(self, step: int, replay: Replay) -> None:
        """Gradients are not finite. Called in the training thread, before the optimizer changes a weight."""
        finding = replay.finding(step, run_again="replay" in self._on_nonfinite)
        self._nonfinite.append(finding)
        self._unwritten.append(finding)
        self._report.log_once(finding.message, level=logging.ERROR)
        self._act_on(finding)
        if "raise" in self._on_nonfinite:
            self._to_raise = finding

    def raise_if_asked(self) -> None:
        """Raises a FindingError if one is due. Called where an exception reaches the user's training loop."""
        finding = self._to_raise
        if finding is not None:  # reset only then: the background thread may be setting it right now
            self._to_raise = None
            raise FindingError(finding)

    def _act_on(self, finding: Finding) -> None:
        for callback in self._callbacks:
            try:
                callback(finding)
            except Exception as problem:  # the user's function, in a thread of tbhooks
                self._report.error("on_finding", problem)
        if finding.severity != "info":
            self.should_stop = self.should_stop or "stop" in self._on_finding
            if "raise" in self._on_finding and self._to_raise is None:
                self._to_raise = finding
            if "burst" in self._on_finding:
                self._begin_burst()

    def _begin_burst(self) -> None:
        if self._bursts_left:
            self._bursts_left -= 1
            self._bursts.ask(BURST_STEPS)
        else:
            self._report.log_once(f'on_finding("burst"): there were {MOST_BURSTS} bursts, and there will be no more')
