"""`python -m tests.clinic [seed ...]`: trains every case and prints the confusion table."""

from __future__ import annotations

import logging
import os
import sys

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from tests.clinic.cases import CASES
from tests.clinic.report import run, table


def main() -> int:
    torch.set_num_threads(1)
    logging.getLogger("tbhooks").propagate = False  # what it says is in the table
    wrong = 0
    for seed in [int(argument) for argument in sys.argv[1:]] or [0]:
        outcomes = run(CASES, seed)
        sys.stdout.write(table(outcomes) + "\n")
        wrong += sum(not outcome.right for outcome in outcomes)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
