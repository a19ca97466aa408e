"""All cases."""

from __future__ import annotations

from tests.clinic.affected import AFFECTED
from tests.clinic.holdout import HELD_OUT
from tests.clinic.kinds_affected import KINDS_AFFECTED
from tests.clinic.kinds_normal import KINDS_NORMAL
from tests.clinic.normal import NORMAL

CASES = (*AFFECTED, *NORMAL, *HELD_OUT, *KINDS_AFFECTED, *KINDS_NORMAL)
