"""See what is happening inside a PyTorch model: `tbhooks.watch(model, writer, every=100)`."""

from tbhooks.errors import ArgumentError, ClosedError, FindingError, TbhooksError, UnknownSiteError
from tbhooks.frame import Finding, Frame, Reading, Site
from tbhooks.history import History
from tbhooks.report import Stats
from tbhooks.rules import Rule
from tbhooks.sinks import Sink
from tbhooks.sinks.jsonl import JsonlSink
from tbhooks.sinks.memory import MemorySink
from tbhooks.watch import Watch, unwatch, watch

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ClosedError",
    "Finding",
    "FindingError",
    "Frame",
    "History",
    "JsonlSink",
    "MemorySink",
    "Reading",
    "Rule",
    "Sink",
    "Site",
    "Stats",
    "TbhooksError",
    "UnknownSiteError",
    "Watch",
    "__version__",
    "unwatch",
    "watch",
]
