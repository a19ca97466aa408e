"""The rules find every illness of the clinic in time and at the right place, and call nobody sick who is not."""

from __future__ import annotations

import pytest

from tests.clinic.cases import CASES
from tests.clinic.report import examine, table
from tests.clinic.ward import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rules_are_right(case: Case) -> None:
    outcome = examine(case)
    told = "\n".join(f"{finding.severity} {finding.rule}: {finding.message}" for finding in outcome.telling)
    assert outcome.right, f"{table([outcome])}\n{told}"
