"""What a built-in rule is: a function over a `RunView` with named thresholds that yields rule hits."""

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
"""A plain function from the history of a run to findings about its newest frame."""

DOC = "docs/rules.md"
"""Has one section per rule, with its formula, thresholds and an example."""
MAX_EXCESS = 1e9
"""Cap of `excess`, whose divisor may be close to zero."""


@dataclass(frozen=True)
class RuleHit:
    """A detected issue. `excess` in the evidence is the measured value relative to the threshold."""

    site: Site | None
    what: str
    remedy: str
    """What to do about it, as a sentence."""
    severity: Severity = "warning"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    since: int | None = None
    others: int = 0
    """Number of other tensors affected by the same issue."""

    def finding(self, rule: str, step: int) -> Finding:
        evidence = dict(self.evidence)
        if "excess" in evidence:
            evidence["excess"] = min(float(evidence["excess"]), MAX_EXCESS)
        message = f"{self.what} at step {step}"
        if self.since is not None and self.since < step:
            message += f" (since step {self.since})"
            evidence["since"] = self.since
        if self.others:
            message += f"; {self.others} other tensor{'s' * (self.others > 1)} affected"
            evidence["others"] = self.others
        return Finding(step, self.site, rule, self.severity, f"{message}. {self.remedy}", evidence, f"{DOC}#{rule}")


_TENSORS = {
    "activation": "the {} output",
    "functional": "the {} output",
    "input": "the {} input",
    "gradient": "the gradient of the {} output",
    "weight_gradient": "the gradient of {}",
    "update": "the update of {}",
    "first_moment": "the first moment of {}",
    "second_moment": "the second moment of {}",
    "normalized_gradient": "the normalized gradient of {}",
    "proposed_update": "the proposed update of {}",
}


def describe(site: Site) -> str:
    """The tensor of a site for a message: "the encoder.0 output", "the gradient of fc.weight"."""
    text = _TENSORS.get(site.plain_kind, "{}").format(site.name)
    return text if site.kind == site.plain_kind else f"{text} in evaluation"


def times(ratio: float) -> str:
    """A ratio for a message: "1,390x"."""
    rounded = float(f"{ratio:.3g}")
    return f"{rounded:,.0f}x" if 100 <= rounded < 1e6 else f"{rounded:.3g}x"


Check = Callable[..., Iterable[RuleHit]]


class ShippedRule:
    """A built-in rule: `rule(history)` returns findings, `rule(threshold=value)` a copy with other thresholds.

    Example: `tbhooks.watch(model, rules=["default", tbhooks.rules.dead_units(share=0.5)])`.
    """

    def __init__(self, check: Check, thresholds: Mapping[str, Any], evaluations: bool = False) -> None:
        self._check = check
        self._evaluations = evaluations
        self.thresholds = dict(thresholds)
        functools.update_wrapper(self, check)

    @property
    def name(self) -> str:
        return self._check.__name__

    @overload
    def __call__(self, history: History, /) -> list[Finding]: ...

    @overload
    def __call__(self, **thresholds: Any) -> ShippedRule: ...

    def __call__(self, *history: Any, **thresholds: Any) -> Any:
        if not history:
            return self._with(thresholds)
        if thresholds or len(history) > 1 or not isinstance(history[0], History):
            raise ArgumentError(f"{self.name} takes a history, or thresholds by name; not both")
        view = view_of(history[0], self._evaluations)
        if view is None:
            return []
        return [hit.finding(self.name, view.frame.step) for hit in self._check(view, **self.thresholds)]

    def _with(self, thresholds: Mapping[str, Any]) -> ShippedRule:
        check_names(f"threshold of {self.name}", thresholds, self.thresholds)
        for name, value in thresholds.items():
            default = self.thresholds[name]
            if not _is_valid(value, default):
                kind = "a list" if isinstance(default, tuple) else f"a positive {type(default).__name__}"
                raise ArgumentError(f"{name} of {self.name} must be {kind} (default {default!r}), got {value!r}")
        return type(self)(self._check, {**self.thresholds, **thresholds}, self._evaluations)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.thresholds.items())})"


def _is_valid(value: object, default: object) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple | list)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return False
    return not isinstance(default, int) or isinstance(value, int)


def rule(check: Check, *, evaluations: bool = False) -> ShippedRule:
    """Makes a rule of a function over a `RunView`; its keyword-only arguments are the thresholds."""
    parameters = inspect.signature(check).parameters.values()
    return ShippedRule(check, {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}, evaluations)


def rule_of_every_frame(check: Check) -> ShippedRule:
    """Like `rule`, for a function that also checks evaluation passes."""
    return rule(check, evaluations=True)
