"""See what is happening inside a PyTorch model: `tbhooks.watch(model, writer, every=100)`.

Importing this package does not import torch, so that TensorBoard's tab and the command start at once;
torch comes with the first use of `watch`.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tbhooks.errors import ArgumentError, ClosedError, FindingError, TbhooksError, UnknownSiteError
from tbhooks.frame import Finding, Frame, Reading, Site
from tbhooks.history import History
from tbhooks.peeked import Peeked
from tbhooks.report import Stats
from tbhooks.rules import Rule
from tbhooks.sinks import Sink
from tbhooks.sinks.jsonl import JsonlSink
from tbhooks.sinks.memory import MemorySink

if TYPE_CHECKING:
    from tbhooks.peek import peek
    from tbhooks.sinks.aim import AimSink
    from tbhooks.sinks.mlflow import MlflowSink
    from tbhooks.sinks.wandb import WandbSink
    from tbhooks.watch import Watch, unwatch, watch

__version__ = "0.1.0"

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
    "Reading",
    "Rule",
    "Sink",
    "Site",
    "Stats",
    "TbhooksError",
    "UnknownSiteError",
    "WandbSink",
    "Watch",
    "__version__",
    "peek",
    "unwatch",
    "watch",
]

_NEED_TORCH = {"Watch": "watch", "peek": "peek", "unwatch": "watch", "watch": "watch"}
_LATER = {**_NEED_TORCH, "AimSink": "sinks.aim", "MlflowSink": "sinks.mlflow", "WandbSink": "sinks.wandb"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tbhooks.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `tbhooks.watch` and `tbhooks.peek` functions: importing a module of that name would take its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _NEED_TORCH and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
