"""`tbhooks selftest`: proves or refutes on this machine what tbhooks promises, point by point.

Written for the first person with a GPU: one command, one table, one line to paste into an issue. It runs on a CPU as
well; what only a GPU can show is then "not possible here".

>>> import torch
>>> from tbhooks.cli import selftest
>>> report = selftest.run(torch.device("cpu"), quick=True, only=["environment"])
>>> report.failed
0
"""

from tbhooks.cli.selftest.check import Failed, NotPossible, Setup
from tbhooks.cli.selftest.report import Report, line, text
from tbhooks.cli.selftest.runner import CHECKS, run

__all__ = ["CHECKS", "Failed", "NotPossible", "Report", "Setup", "line", "run", "text"]
