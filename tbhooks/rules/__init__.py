"""Rules that detect training issues from the recorded statistics alone.

A rule is a plain function from a `History` to the findings about its newest frame. `RULES` holds the rules that run by
default, by name. Rules run on the background thread and never touch tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tbhooks.data.errors import ArgumentError, check_names
from tbhooks.rules.activations import (
    attention_collapse,
    bad_init,
    collapsed_variance,
    dead_units,
    exploding_activation,
    saturated,
)
from tbhooks.rules.engine import RuleEngine
from tbhooks.rules.experts import expert_collapse
from tbhooks.rules.gradients import exploding_gradient, stale_second_moment, update_ratio, vanishing_gradient
from tbhooks.rules.losses import divergence, loss_spike
from tbhooks.rules.numerics import ASKED_FORMATS, low_precision, non_finite
from tbhooks.rules.ranks import replica_drift, sick_rank
from tbhooks.rules.rule import Rule, ShippedRule
from tbhooks.rules.training import evaluation_mode, missing_gradient, unchanged_weight

SHIPPED = (
    non_finite,
    exploding_gradient,
    vanishing_gradient,
    exploding_activation,
    dead_units,
    saturated,
    update_ratio,
    unchanged_weight,
    missing_gradient,
    low_precision,
    loss_spike,
    collapsed_variance,
    attention_collapse,
    bad_init,
    sick_rank,
    replica_drift,
    evaluation_mode,
    divergence,
    stale_second_moment,
    expert_collapse,
)
WITHOUT = "-"
"""Before the name of a rule that is to be left out."""
RULES: dict[str, Rule] = {rule.name: rule for rule in SHIPPED}
"""The rules of `rules="default"`, by name."""
_ASKED: dict[str, Rule] = {low_precision.name: low_precision(formats=ASKED_FORMATS)}
"""What a rule becomes when it is asked for by name: it then also reports what is no issue yet."""


def choose(rules: object) -> tuple[Rule, ...]:
    """The rules that the `rules` argument of `watch` selects.

    Args:
        rules: "default", the name of a rule, or a list of names and functions, which may contain "default". A name
            after a minus leaves that rule out: `["default", "-low_precision"]`. A built-in
            rule with other thresholds replaces the one in "default". "low_precision" by name also reports formats
            that are not in use.

    Raises:
        ArgumentError: for an unknown name, or anything that is neither a name nor callable.

    """
    if isinstance(rules, str):
        if rules == "default":
            return tuple(RULES.values())
        rules = (rules,)
    if not isinstance(rules, Iterable):
        raise ArgumentError(f'rules must be "default", () or a list of rules, got {rules!r}')
    given = tuple(rules)
    names = [str(rule).removeprefix(WITHOUT) for rule in given if not callable(rule)]
    check_names("rule", names, ("default", *RULES))
    left_out = {rule.removeprefix(WITHOUT) for rule in given if isinstance(rule, str) and rule.startswith(WITHOUT)}
    chosen: dict[object, Rule] = {}
    for rule in given:
        if isinstance(rule, str) and rule.startswith(WITHOUT):
            continue
        for each in RULES.values() if rule == "default" else [_asked(rule)]:
            chosen[each.name if isinstance(each, ShippedRule) else each] = each
    return tuple(rule for name, rule in chosen.items() if name not in left_out)


def _asked(rule: Any) -> Rule:
    """The rule that an entry of the list means: a function, or a built-in rule by its name or as it is."""
    name = rule if isinstance(rule, str) else rule.name if rule in SHIPPED else None
    return rule if name is None else _ASKED.get(name, RULES[name])


__all__ = [
    "RULES", "SHIPPED", "Rule", "RuleEngine", "attention_collapse", "bad_init", "choose", "collapsed_variance",
    "dead_units", "divergence", "evaluation_mode", "expert_collapse", "exploding_activation", "exploding_gradient",
    "loss_spike", "low_precision", "missing_gradient", "non_finite", "replica_drift", "saturated", "sick_rank",
    "stale_second_moment", "unchanged_weight", "update_ratio", "vanishing_gradient",
]  # fmt: skip
