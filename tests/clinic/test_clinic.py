"""The rules find each issue in time and at the right module, and report nothing in normal trainings."""

from __future__ import annotations

import pytest

from tests.clinic.cases import CASES
from tests.clinic.report import check, table
from tests.clinic.training import Case
from tests.support.slow import cases

# For every rule the quickest training that it must report, and normal trainings of different kinds.
ALWAYS = {
    "learning rate x1000, MLP", "head not in the optimizer", "cross entropy over one class", "branch detached",
    "loss summed by mistake", "initial weights x20", "ReLU biases at -10", "tanh fed x100", "NaN in one layer",
    "near the end of float16", "attention logits blown up", "representation collapse", "corrupt batch",
    "diverges slowly", "Switch, router collapsed", "rounded without straight-through",
    "LoRA", "graph, mean of neighbours",
    "CNN", "MLP, AdamW", "LSTM", "GAN", "fine-tuning, frozen below", "bfloat16 autocast", "evaluation only",
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    cases(
        {case.name: case for case in CASES},
        always=ALWAYS,
        reason="trains for seconds; the rule, or another normal training, is in make test already",
    ),
)
def test_the_rules_are_right(case: Case) -> None:
    outcome = check(case)
    messages = "\n".join(f"{finding.severity} {finding.rule}: {finding.message}" for finding in outcome.decisive)
    assert outcome.right, f"{table([outcome])}\n{messages}"
