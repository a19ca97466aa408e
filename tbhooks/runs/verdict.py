"""The verdict on a run: its issues grouped by cause, what led to what, and one sentence about the whole run.

Pure functions over findings and scalars: reports, the command line and the tab all show the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.findings import SEVERITIES, Issue, issues
from tbhooks.data.frame import Finding, Severity
from tbhooks.data.grids import own_scalars
from tbhooks.data.stats import Floats

Points = tuple[NDArray[np.int64], Floats]
"""The steps and values of a scalar, as in `tbhooks.runs.Series`."""
Level = Literal["ok", "info", "warning", "error"]

TITLES: Mapping[str, str] = {
    "evaluation_mode": "trained in evaluation mode",
    "bad_init": "unsuitable initialisation",
    "update_ratio": "unsuitable update-to-weight ratio",
    "low_precision": "values outside the range of the dtype",
    "stale_second_moment": "stale second moment of the optimizer",
    "loss_spike": "loss spike",
    "exploding_gradient": "exploding gradients",
    "attention_collapse": "attention collapse",
    "expert_collapse": "expert collapse",
    "saturated": "saturated activation function",
    "exploding_activation": "exploding activations",
    "dead_units": "dead units",
    "divergence": "divergence",
    "collapsed_variance": "collapsed activation variance",
    "vanishing_gradient": "vanishing gradients",
    "missing_gradient": "missing gradient",
    "unchanged_weight": "unchanged weights",
    "replica_drift": "replicas that drift apart",
    "sick_rank": "deviating rank",
    "non_finite": "NaN or infinity",
}
"""A few words for each rule, in the order in which one leads to another at the same step."""

_TOO_LARGE = ("update_ratio", "bad_init", "stale_second_moment", "loss_spike", "exploding_gradient")
CAUSES: Mapping[str, tuple[str, ...]] = {
    "loss_spike": ("update_ratio", "bad_init", "stale_second_moment"),
    "exploding_gradient": ("update_ratio", "bad_init", "stale_second_moment", "loss_spike"),
    "attention_collapse": _TOO_LARGE,
    "saturated": _TOO_LARGE,
    "exploding_activation": _TOO_LARGE,
    "dead_units": (*_TOO_LARGE, "exploding_activation"),
    "divergence": (*_TOO_LARGE, "evaluation_mode", "attention_collapse", "exploding_activation"),
    "collapsed_variance": (*_TOO_LARGE, "saturated", "exploding_activation", "dead_units", "divergence"),
    "vanishing_gradient": (*_TOO_LARGE, "saturated", "exploding_activation", "dead_units", "divergence"),
    "missing_gradient": ("dead_units", "exploding_activation"),
    "non_finite": (*_TOO_LARGE, "low_precision", "attention_collapse", "exploding_activation", "divergence"),
}
"""Which rules can name the cause of another rule's issue."""

_DRIVEN_BY_LEARNING_RATE = frozenset({*_TOO_LARGE, "divergence", "exploding_activation"}) - {"bad_init"}
"""Rules whose issue may come from the learning rate. A NaN that nothing announced may come from anywhere."""
# An issue that ended in the first half of the time until another began, and many logged steps before it, did not cause
# it.
_LONG_BEFORE, _MANY_LOGGED = 0.5, 20
_LASTING = frozenset({"bad_init"})
"""Rules that check the first logged step only: their issue stays."""
_TREND_SHARE = 0.1
_LEARNING_RATE = "train.lr"


@dataclass(frozen=True, slots=True)
class Link:
    """One link in the chain of a cause: since which step, what, and the issue if it is one."""

    step: int
    what: str
    issue: Issue | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "what": self.what, "rule": None if self.issue is None else self.issue.rule}


@dataclass(frozen=True, slots=True)
class Cause:
    """Issues with one cause: the first one, and what followed from it, in the order of their onset."""

    issues: tuple[Issue, ...]

    @property
    def first(self) -> Issue:
        return self.issues[0]

    @property
    def severity(self) -> Severity:
        return min((issue.severity for issue in self.issues), key=SEVERITIES.index)

    @property
    def onset(self) -> int:
        return self.first.onset

    def chain(self, scalars: Mapping[str, Points]) -> tuple[Link, ...]:
        """What led to what: the learning rate if it matters, then each rule at its first step and module."""
        links = []
        if self.severity != "info" and self.first.rule in _DRIVEN_BY_LEARNING_RATE:
            rate = learning_rate_at(scalars, self.onset)
            links += [] if rate is None else [Link(self.onset, f"learning rate {rate:.3g}")]
        for rule in dict.fromkeys(issue.rule for issue in self.issues):
            of_rule = [issue for issue in self.issues if issue.rule == rule]
            links.append(Link(of_rule[0].onset, _title(of_rule), of_rule[0]))
        return tuple(links)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to know about a run first."""

    level: Level
    """"ok", or the highest severity among the issues."""
    sentence: str
    causes: tuple[Cause, ...]
    """The most severe first, then by onset."""
    chains: tuple[tuple[Link, ...], ...]
    """The chain of each cause."""

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values: `level`, `sentence`, and `causes` with `severity`, `onset`, `chain` and `issues`."""
        return {
            "level": self.level,
            "sentence": self.sentence,
            "causes": [
                {
                    "severity": cause.severity,
                    "onset": cause.onset,
                    "chain": [link.to_dict() for link in chain],
                    "issues": [issue.to_dict() for issue in cause.issues],
                }
                for cause, chain in zip(self.causes, self.chains, strict=True)
            ],
        }


def verdict(findings: Sequence[Finding], scalars: Mapping[str, Points], logged: int) -> Verdict:
    """The verdict on a run.

    Args:
        findings: all findings of the run in the order of the steps, repetitions included.
        scalars: the scalars of the run by tag; losses and learning rates are used.
        logged: the number of logged steps.

    """
    last = max(
        [finding.step for finding in findings] + [int(steps[-1]) for steps, _ in scalars.values() if len(steps)] + [0]
    )
    found = causes(issues(findings), last / max(logged - 1, 1))
    level: Level = found[0].severity if found else "ok"
    chains = tuple(cause.chain(scalars) for cause in found)
    urgent = [chain for cause, chain in zip(found, chains, strict=True) if cause.severity != "info"]
    if urgent:
        named = [_arrow(chain) for chain in urgent[:2]]
        more = len(urgent) - len(named)
        sentence = "; ".join(named) + (f"; and {more} more" if more else "")
        sentence = f"{'Problem' if level == 'error' else 'Warning'}: {sentence}."
    else:
        notes = len(found)
        sentence = f"No issues found in {logged} logged step{'s' * (logged != 1)}"
        sentence += f" ({notes} note{'s' * (notes != 1)})." if notes else "."
    trend = loss_trend(scalars)
    return Verdict(level, f"{sentence} {trend}".rstrip(), found, chains)


def causes(found: Sequence[Issue], interval: float = 1.0) -> tuple[Cause, ...]:
    """Groups issues by cause: an issue belongs to the earliest one that may have led to it, or to its own rule's.

    Args:
        found: the issues of a run.
        interval: how many steps lie between two logged ones.

    """
    order = list(TITLES)

    def position(issue: Issue) -> tuple[int, int]:
        return issue.onset, order.index(issue.rule) if issue.rule in order else len(order)

    groups: list[list[Issue]] = []
    for issue in sorted(found, key=position):
        parent = next((group for group in groups if _belongs(issue, group, interval)), None)
        if parent is None:
            groups.append([issue])
        else:
            parent.append(issue)
    made = [Cause(tuple(group)) for group in groups]
    return tuple(sorted(made, key=lambda cause: (SEVERITIES.index(cause.severity), cause.onset)))


def _belongs(issue: Issue, group: Sequence[Issue], interval: float) -> bool:
    """Whether an issue is of a rule in the group, or one that an issue in the group can lead to. Notes stay apart."""
    if (issue.severity == "info") != (group[0].severity == "info"):
        return False
    if any(issue.rule == earlier.rule for earlier in group):
        return True
    allowed = CAUSES.get(issue.rule, ()) if issue.severity != "info" else ()
    longest = max(_LONG_BEFORE * issue.onset, _MANY_LOGGED * interval)
    return any(
        earlier.rule in allowed and (earlier.rule in _LASTING or issue.onset - earlier.last.step <= longest)
        for earlier in group
    )


def _title(of_rule: Sequence[Issue]) -> str:
    """A few words, the module, and the number of other places: `dead units in features.3 and 2 more`."""
    first = of_rule[0]
    words = TITLES.get(first.rule, first.rule.replace("_", " "))
    if first.site is None:
        return words
    others = first.peak.evidence.get("others")
    more = len({issue.site for issue in of_rule}) - 1 + (others if isinstance(others, int) else 0)
    return f"{words} in {first.site.name}" + (f" and {more} more" if more else "")


def _arrow(chain: Sequence[Link]) -> str:
    parts = []
    for i, link in enumerate(chain):
        step = f" (step {link.step})" if i == len(chain) - 1 or link.step != chain[i + 1].step else ""
        parts.append(link.what + step)
    return " → ".join(parts)


def learning_rate_at(scalars: Mapping[str, Points], step: int) -> float | None:
    """The largest learning rate of all parameter groups at a step, or at the last one before it; None if unknown."""
    rates = []
    for tag, (steps, values) in scalars.items():
        if tag.startswith(_LEARNING_RATE) and len(steps):
            at = max(int(np.searchsorted(steps, step, side="right")) - 1, 0)
            rates.append(float(values[at]))
    return max(rates, default=None)


def loss_trend(scalars: Mapping[str, Points]) -> str:
    """A sentence about the first loss: how its median over the last tenth of the run compares with the first's."""
    tag = next((tag for tag in own_scalars(scalars) if "loss" in tag.lower()), None)
    if tag is None:
        return ""
    values = scalars[tag][1]
    part = max(round(_TREND_SHARE * len(values)), 1)
    if len(values) < 2:
        return ""
    start, end = values[:part], values[-part:]
    if not np.isfinite(end).all():
        return f"{tag} is not finite."
    if not np.isfinite(start).any():
        return ""
    first, last = float(np.nanmedian(start)), float(np.nanmedian(end))
    change = last - first
    word = "stayed at" if abs(change) <= 0.01 * max(abs(first), abs(last)) else "rose" if change > 0 else "fell"
    return f"{tag} {word} {last:.3g}." if word == "stayed at" else f"{tag} {word} from {first:.3g} to {last:.3g}."
