"""The rules find every illness of the clinic in time and at the right place, and call nobody sick who is not."""

from __future__ import annotations

import pytest

from tests.clinic.cases import CASES
from tests.clinic.report import examine, table
from tests.clinic.ward import Case

# Others of their kind are quicker to train.
LONG = ("60 layers of sigmoid", "60 layers of tanh", "ViT")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in LONG)) for case in CASES]
)
def test_the_rules_are_right(case: Case) -> None:
    outcome = examine(case)
    told = "\n".join(f"{finding.severity} {finding.rule}: {finding.message}" for finding in outcome.telling)
    assert outcome.right, f"{table([outcome])}\n{told}"
