"""All cases."""

from __future__ import annotations

from tests.clinic.affected import AFFECTED
from tests.clinic.holdout import HELD_OUT
from tests.clinic.normal import NORMAL

CASES = (*AFFECTED, *NORMAL, *HELD_OUT)
