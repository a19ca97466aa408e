"""See what is happening inside a PyTorch model: `tbhooks.watch(model, writer, every=100)`.

Importing this package imports neither torch nor NumPy, so that TensorBoard's tab and the command start at once, and a
script that `tbhooks run` runs can set up what it likes before them; they come with the first use.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tbhooks.errors import ArgumentError, ClosedError, FindingError, TbhooksError, UnknownSiteError

if TYPE_CHECKING:
    from tbhooks.frame import Finding, Frame, Reading, Site
    from tbhooks.history import History
    from tbhooks.peek import peek
    from tbhooks.peeked import Peeked
    from tbhooks.report import Stats
    from tbhooks.rules import Rule
    from tbhooks.sinks import Sink
    from tbhooks.sinks.aim import AimSink
    from tbhooks.sinks.jsonl import JsonlSink
    from tbhooks.sinks.memory import MemorySink
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

# What is loaded when it is used first, and where it is; some of it needs torch, some NumPy.
_HOMES = {
    "AimSink": "sinks.aim", "Finding": "frame", "Frame": "frame", "History": "history", "JsonlSink": "sinks.jsonl",
    "MemorySink": "sinks.memory", "MlflowSink": "sinks.mlflow", "Peeked": "peeked", "Reading": "frame",
    "Rule": "rules", "Sink": "sinks", "Site": "frame", "Stats": "report", "WandbSink": "sinks.wandb",
    "Watch": "watch", "peek": "peek", "unwatch": "watch", "watch": "watch",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"tbhooks.{_HOMES[name]}"), name)
    elif name in _HOMES.values() or name == "integrations":
        value = importlib.import_module(f"tbhooks.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `tbhooks.watch` and `tbhooks.peek` functions: importing a module of that name would take its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
