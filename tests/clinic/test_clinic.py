"""The rules find each issue in time and at the right module, and report nothing in normal trainings."""

from __future__ import annotations

import pytest

from tests.clinic.cases import CASES
from tests.clinic.report import check, table
from tests.clinic.training import Case

# Others of their kind are quicker to train.
LONG = ("60 layers of sigmoid", "60 layers of tanh", "ViT")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in LONG)) for case in CASES]
)
def test_the_rules_are_right(case: Case) -> None:
    outcome = check(case)
    messages = "\n".join(f"{finding.severity} {finding.rule}: {finding.message}" for finding in outcome.decisive)
    assert outcome.right, f"{table([outcome])}\n{messages}"
