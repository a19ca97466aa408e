"""Every case of the clinic."""

from __future__ import annotations

from tests.clinic.healthy import HEALTHY
from tests.clinic.holdout import HELD_OUT
from tests.clinic.sick import SICK

CASES = (*SICK, *HEALTHY, *HELD_OUT)
