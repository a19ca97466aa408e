"""A run in at most 32 KB of JSON: its verdict, the issues ranked, and for each the next experiment to run.

For scripts and language models that read a run without its numbers. `docs/brief.schema.json` is the schema; a key is
never removed or changed without a new `version`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tbhooks.data.findings import SEVERITIES, Issue
from tbhooks.data.jsonable import to_jsonable
from tbhooks.runs.report_data import own_scalars
from tbhooks.runs.run import Run

VERSION = 1
MOST_BYTES = 32 << 10
_MOST_ISSUES, _MOST_SCALARS, _LONGEST = 50, 20, 600

NEXT: Mapping[str, str] = {
    "non_finite": 'Run again with w.on_nonfinite("replay"), which names the module where the first NaN appears.',
    "exploding_gradient": "Run the same seed with gradient clipping, or a tenth of the learning rate, and compare.",
    "vanishing_gradient": "Run with normalisation or a residual connection here, and compare gradient norms.",
    "exploding_activation": "Run with a tenth of the learning rate, then with normalisation before this module.",
    "dead_units": "Run with a smaller learning rate or LeakyReLU here, and compare activation.dead_fraction.",
    "saturated": "Run with smaller initial weights before this module, and compare the share of saturated values.",
    "update_ratio": "Run with the learning rate divided (or multiplied) by ten, and compare update.ratio.",
    "unchanged_weight": "Check that the parameter is in an optimizer and requires a gradient; run ten steps.",
    "missing_gradient": "Check that the loss depends on the parameter: run one step and read its .grad.",
    "low_precision": "Run with a larger loss scale or in bfloat16, and compare the fraction that underflows.",
    "loss_spike": "Run again with w.flight_recorder() and w.samples(losses, ids): the dump names the batch.",
    "collapsed_variance": "Compare inputs of two samples before and after this module; run with normalisation.",
    "attention_collapse": 'Run with "functional" in kinds, and compare entropy and max_logit of each head.',
    "bad_init": "Run with the initialisation that the finding names, and compare the first logged step.",
    "sick_rank": "Run that rank's data on another device; if the deviation moves with the data, it is the data.",
    "expert_collapse": "Add a load-balancing loss for the router, or raise its coefficient.",
    "stale_second_moment": "Clip gradients, or set beta2 of the optimizer to 0.95.",
    "replica_drift": "Run again from the last checkpoint with w.checksums(), every=1 and another device.",
    "evaluation_mode": "Call model.train() after evaluation, and compare the loss.",
    "divergence": "Run with half of the learning rate from the step before, and compare the loss.",
}  # fmt: skip
"""The experiment that separates causes, by rule."""
_OF_OTHERS = (
    "Log this module at every step around the first finding (w.burst), and compare with a run without the change."
)


def brief(run: Run) -> dict[str, Any]:
    """The document; issues and scalars that do not fit are left out, and counted in `left_out`."""
    verdict = run.verdict
    ranked = sorted(run.issues, key=lambda issue: (SEVERITIES.index(issue.severity), issue.onset))
    document: dict[str, Any] = {
        "version": VERSION,
        "run": str(run.directory)[-_LONGEST:],
        "state": run.state,
        "logged_steps": len(run.training),
        "last_step": run.training[-1].step if run.training else None,
        "level": verdict.level,
        "verdict": verdict.sentence[:_LONGEST],
        "scalars": {
            tag: {"first": float(series.values[0]), "last": float(series.values[-1])}
            for tag, series in list(own_scalars(run).items())[:_MOST_SCALARS]
        },
        "issues": [_issue(rank, issue) for rank, issue in enumerate(ranked[:_MOST_ISSUES], start=1)],
        "left_out": max(len(ranked) - _MOST_ISSUES, 0),
    }  # fmt: skip
    while len(as_text(document).encode()) > MOST_BYTES and document["issues"]:
        document["issues"].pop()
        document["left_out"] += 1
    while len(as_text(document).encode()) > MOST_BYTES:  # names may be long
        document["scalars"].popitem()
    return document


def as_text(document: Mapping[str, Any]) -> str:
    """Strict JSON: NaN and infinities become strings."""
    return json.dumps(to_jsonable(document), allow_nan=False, indent=1)


def _issue(rank: int, issue: Issue) -> dict[str, Any]:
    worst = issue.first_at_worst
    numbers = {name: value for name, value in worst.evidence.items() if isinstance(value, int | float | str)}
    return {
        "rank": rank, "rule": issue.rule, "severity": issue.severity,
        "site": None if issue.site is None else str(issue.site)[:_LONGEST],
        "first_step": issue.onset, "last_step": issue.last.step, "times": issue.count,
        "message": worst.message[:_LONGEST], "evidence": dict(list(numbers.items())[:12]),
        "next": NEXT.get(issue.rule, _OF_OTHERS), "doc": worst.doc,
    }  # fmt: skip
