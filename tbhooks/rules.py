"""What is wrong with a model, judged from its frames alone.

A rule is a plain function from history to findings about the newest frame; `RULES` is the table of
those that run by default. Nothing here knows torch, and nothing here can slow training down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tbhooks.errors import ArgumentError, check_names
from tbhooks.frame import SKIPPED, Finding, Frame
from tbhooks.history import History
from tbhooks.stats import INFS, NANS

Rule = Callable[[History], Sequence[Finding]]


def non_finite(history: History) -> list[Finding]:
    """NaN or infinity in an activation, gradient, weight or update; names the first site in execution order."""
    frame = history[-1]
    skipped = _skipped_by_scaler(history)
    for site, row in zip(frame.sites, frame.values, strict=True):
        if skipped and site.kind in ("gradient", "weight_gradient"):
            continue  # a loss scale that was too large: the scaler has noticed, and lowers it
        if site.attention_stat is not None:
            continue  # a mask is minus infinity, and what it hides altogether has no distribution
        nans, infs = int(row[NANS]), int(row[INFS])
        if nans or infs:
            what = " and ".join(f"{n} {word}" for n, word in ((nans, "NaN"), (infs, "infinite")) if n)
            message = (
                f"{what} of {int(row[0])} values in the {site.kind} of {site.name} at step {frame.step}: the first "
                "place it is seen in this step. Try a lower learning rate, gradient clipping, or a look at its inputs"
            )
            evidence = {"nan_count": nans, "inf_count": infs, "count": int(row[0])}
            return [Finding(frame.step, site, "non_finite", "error", message, evidence)]
    return []


def _skipped_by_scaler(history: History) -> bool:
    """Whether a GradScaler has skipped the newest step, or one since the last frame."""
    counts = [frame.scalars[SKIPPED] for frame in history[-2:] if SKIPPED in frame.scalars]
    return bool(counts) and counts[-1] > (counts[0] if len(counts) > 1 else 0)


RULES: dict[str, Rule] = {"non_finite": non_finite}


def choose(rules: object) -> tuple[Rule, ...]:
    """The rules a user asked for: "default", none, or a list of functions and names."""
    if isinstance(rules, str):
        if rules == "default":
            return tuple(RULES.values())
        rules = (rules,)
    if not isinstance(rules, Iterable):
        raise ArgumentError(f'rules is "default", (), or a list of rules, not {rules!r}')
    asked = tuple(rules)
    check_names("rule", (rule for rule in asked if not callable(rule)), ("default", *RULES))
    chosen: list[Rule] = []
    for rule in asked:
        chosen += RULES.values() if rule == "default" else [rule if callable(rule) else RULES[rule]]
    return tuple(dict.fromkeys(chosen))


class Judge:
    """Runs the rules over a growing history and keeps what they found, once a rule and site."""

    def __init__(self, rules: tuple[Rule, ...], history: History) -> None:
        self._rules = rules
        self._history = history
        self._known: set[tuple[str, object]] = set()
        self.findings: list[Finding] = []

    def __call__(self, frame: Frame) -> Frame:
        self._history.append(frame)
        if not frame.sites:
            return frame
        found = [finding for rule in self._rules for finding in rule(self._history)]
        new = [finding for finding in found if (finding.rule, finding.site) not in self._known]
        self._known.update((finding.rule, finding.site) for finding in new)
        self.findings += new
        if found:
            frame = replace(frame, findings=tuple(found))
            self._history.judged(frame)
        return frame
