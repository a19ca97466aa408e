"""`tbhooks bench`: measures the overhead of monitoring on this machine, with a given model.

>>> from torch import nn
>>> import torch
>>> from tbhooks.cli import bench
>>> workload = bench.make_workload((nn.Linear(8, 8), torch.randn(4, 8)), torch.device("cpu"))
>>> result = bench.measure(workload, every=100, steps=5)
>>> sorted(result.timings)
['bare', 'logged, histograms', 'logged, scalars', 'watched, not logged']
"""

from tbhooks.cli.bench.report import advice, text
from tbhooks.cli.bench.runner import BARE, HISTOGRAMS, SCALARS, UNLOGGED, Result, measure
from tbhooks.cli.bench.workload import Workload, device_named, load, make_workload

__all__ = [
    "BARE",
    "HISTOGRAMS",
    "SCALARS",
    "UNLOGGED",
    "Result",
    "Workload",
    "advice",
    "device_named",
    "load",
    "make_workload",
    "measure",
    "text",
]
