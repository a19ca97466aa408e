"""What a shipped rule is: a function over a patient with named thresholds, and how its words become findings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from tbhooks.data.errors import ArgumentError, check_names
from tbhooks.data.frame import Finding, Severity, Site
from tbhooks.data.history import History
from tbhooks.rules.run_view import view_of

Rule = Callable[[History], Sequence[Finding]]
"""What judges: a plain function from history to findings about the newest frame."""


@dataclass(frozen=True)
class RuleHit:
    """What a rule saw: `what` and `remedy` are for people; `excess` in the evidence is by how much it is too much."""

    site: Site | None
    what: str
    remedy: str
    severity: Severity = "warning"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    since: int | None = None
    others: int = 0
    """How many other places the same cause makes sick."""

    def finding(self, rule: str, step: int) -> Finding:
        evidence = dict(self.evidence)
        if "excess" in evidence:
            evidence["excess"] = min(float(evidence["excess"]), MOST_EXCESS)
        details = [f"step {step}"]
        if self.since is not None and self.since < step:
            details.append(f"since step {self.since}")
            evidence["since"] = self.since
        if self.others:
            details.append(f"and {self.others} more place{'s' * (self.others > 1)} like it")
            evidence["others"] = self.others
        message = f"{self.what} ({', '.join(details)}). Try {self.remedy}"
        return Finding(step, self.site, rule, self.severity, message, evidence)


MOST_EXCESS = 1e9
"""Beyond this, worse is no worse: what is divided by may be zero."""

Look = Callable[..., Iterable[RuleHit]]


class ShippedRule:
    """A rule of this package: `rule(history)` judges, `rule(threshold=value)` is a copy with other thresholds."""

    def __init__(self, look: Look, thresholds: Mapping[str, Any], evaluations: bool = False) -> None:
        self._look = look
        self._evaluations = evaluations
        self.thresholds = dict(thresholds)
        functools.update_wrapper(self, look)

    @property
    def name(self) -> str:
        return self._look.__name__

    @overload
    def __call__(self, history: History, /) -> list[Finding]: ...

    @overload
    def __call__(self, **thresholds: Any) -> ShippedRule: ...

    def __call__(self, *history: Any, **thresholds: Any) -> Any:
        if not history:
            return self._with(thresholds)
        if thresholds or len(history) > 1 or not isinstance(history[0], History):
            raise ArgumentError(f"{self.name} takes a history, or thresholds by their names; not both")
        return self._judge(history[0])

    def _judge(self, history: History) -> list[Finding]:
        view = view_of(history, self._evaluations)
        if view is None:
            return []
        return [seen.finding(self.name, view.frame.step) for seen in self._look(view, **self.thresholds)]

    def _with(self, thresholds: Mapping[str, Any]) -> ShippedRule:
        check_names(f"threshold of {self.name}", thresholds, self.thresholds)
        for name, value in thresholds.items():
            if not _is_like(value, self.thresholds[name]):
                raise ArgumentError(f"{name} of {self.name} is like {self.thresholds[name]!r}, not {value!r}")
        return type(self)(self._look, {**self.thresholds, **thresholds}, self._evaluations)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.thresholds.items())})"


def _is_like(value: object, default: object) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple | list)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return False
    return not isinstance(default, int) or isinstance(value, int)


def rule(look: Look) -> ShippedRule:
    """Makes a rule of a function over a patient; its keyword-only arguments are the thresholds."""
    parameters = inspect.signature(look).parameters.values()
    return ShippedRule(look, {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY})


def rule_of_every_frame(look: Look) -> ShippedRule:
    """The same for a rule that judges evaluation passes too."""
    made = rule(look)
    return ShippedRule(look, made.thresholds, evaluations=True)
