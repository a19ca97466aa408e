"""What is wrong with a model, judged from its frames alone.

A rule is a plain function from history to findings about the newest frame; `RULES` is the table of
those that run by default. Nothing here knows torch, and nothing here can slow training down.
"""

from __future__ import annotations

from collections.abc import Iterable

from tbhooks.data.errors import ArgumentError, check_names
from tbhooks.rules.activations import (
    attention_collapse,
    bad_init,
    collapsed_variance,
    dead_units,
    exploding_activation,
    saturated,
)
from tbhooks.rules.engine import Judge
from tbhooks.rules.gradients import exploding_gradient, update_ratio, vanishing_gradient
from tbhooks.rules.modes import evaluation_mode
from tbhooks.rules.numerics import loss_spike, low_precision, non_finite
from tbhooks.rules.ranks import sick_rank
from tbhooks.rules.rule import Rule, ShippedRule
from tbhooks.rules.untrained import missing_gradient, unchanged_weight

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
    evaluation_mode,
)
RULES: dict[str, Rule] = {rule.name: rule for rule in SHIPPED}
"""What `rules="default"` runs."""


def choose(rules: object) -> tuple[Rule, ...]:
    """The rules a user asked for: "default", none, or a list of functions and names.

    A shipped rule with thresholds of its own takes the place of the one in "default".
    """
    if isinstance(rules, str):
        if rules == "default":
            return tuple(RULES.values())
        rules = (rules,)
    if not isinstance(rules, Iterable):
        raise ArgumentError(f'rules is "default", (), or a list of rules, not {rules!r}')
    asked = tuple(rules)
    check_names("rule", (rule for rule in asked if not callable(rule)), ("default", *RULES))
    chosen: dict[object, Rule] = {}
    for rule in asked:
        for each in RULES.values() if rule == "default" else [rule if callable(rule) else RULES[rule]]:
            chosen[each.name if isinstance(each, ShippedRule) else each] = each
    return tuple(chosen.values())


__all__ = [
    "RULES", "SHIPPED", "Judge", "Rule", "attention_collapse", "bad_init", "choose", "collapsed_variance",
    "dead_units", "evaluation_mode", "exploding_activation", "exploding_gradient", "loss_spike", "low_precision",
    "missing_gradient", "non_finite", "saturated", "sick_rank", "unchanged_weight", "update_ratio",
    "vanishing_gradient",
]  # fmt: skip
