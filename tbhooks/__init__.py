"""See what is happening inside a PyTorch model: `tbhooks.watch(model, writer, every=100)`.

Importing this package imports neither torch nor NumPy. The TensorBoard tab and the command line start quickly, and a
script under `tbhooks run` can configure torch before it is loaded. Each public name is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tbhooks.data.errors import ArgumentError, ClosedError, FindingError, TbhooksError, UnknownSiteError
from tbhooks.data.process.taps import tap

if TYPE_CHECKING:
    from tbhooks import integrations, rules, runs, sinks
    from tbhooks.api.handle import Watch
    from tbhooks.api.peek import peek
    from tbhooks.api.watch import unwatch, watch
    from tbhooks.data import stats
    from tbhooks.data.frame import Finding, Frame, Reading, Site
    from tbhooks.data.history import History
    from tbhooks.data.peek_result import Peeked
    from tbhooks.data.self_report import Stats
    from tbhooks.reduction import metrics
    from tbhooks.rules import Rule
    from tbhooks.sinks import Sink
    from tbhooks.sinks.aim import AimSink
    from tbhooks.sinks.jsonl import JsonlSink
    from tbhooks.sinks.memory import MemorySink
    from tbhooks.sinks.mlflow import MlflowSink
    from tbhooks.sinks.prometheus import PrometheusSink
    from tbhooks.sinks.swanlab import SwanlabSink
    from tbhooks.sinks.trackio import TrackioSink
    from tbhooks.sinks.wandb import WandbSink

__version__ = "0.2.0"

__all__ = [
    "AimSink",
    "ArgumentError",
    "ClosedError",
    "Finding",
    "FindingError",
    "Frame",
    "History",
    "JsonlSink",
    "MemorySink",
    "MlflowSink",
    "Peeked",
    "PrometheusSink",
    "Reading",
    "Rule",
    "Sink",
    "Site",
    "Stats",
    "SwanlabSink",
    "TbhooksError",
    "TrackioSink",
    "UnknownSiteError",
    "WandbSink",
    "Watch",
    "__version__",
    "integrations",
    "metrics",
    "peek",
    "rules",
    "runs",
    "sinks",
    "stats",
    "tap",
    "unwatch",
    "watch",
]

# The module that defines each public name. Some of these modules import torch, some NumPy.
_DEFINED_IN = {
    "AimSink": "sinks.aim",
    "Finding": "data.frame",
    "Frame": "data.frame",
    "History": "data.history",
    "JsonlSink": "sinks.jsonl",
    "MemorySink": "sinks.memory",
    "MlflowSink": "sinks.mlflow",
    "Peeked": "data.peek_result",
    "PrometheusSink": "sinks.prometheus",
    "Reading": "data.frame",
    "Rule": "rules",
    "Sink": "sinks",
    "Site": "data.frame",
    "Stats": "data.self_report",
    "SwanlabSink": "sinks.swanlab",
    "TrackioSink": "sinks.trackio",
    "WandbSink": "sinks.wandb",
    "Watch": "api.handle",
    "peek": "api.peek",
    "unwatch": "api.watch",
    "watch": "api.watch",
}
# Public modules, and where they are.
_MODULES = {
    "integrations": "integrations",
    "metrics": "reduction.metrics",
    "rules": "rules",
    "runs": "runs",
    "sinks": "sinks",
    "stats": "data.stats",
}


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(f"tbhooks.{_DEFINED_IN[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"tbhooks.{_MODULES[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
