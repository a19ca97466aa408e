"""What a run was made with, as a text: versions, devices, the size of the model, what the watch was asked for.

Nothing of the machine's or the user's own is in it: no names, no paths, no variables.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.selection import unwrap
from tbhooks.capture.session import CaptureSession
from tbhooks.data.artifacts import Text
from tbhooks.data.remote import is_remote
from tbhooks.distributed.handshake import own_name

TAG = "tbhooks/environment"


def described(loop: CaptureSession, place: RankContext, model: nn.Module | None) -> Text:
    """As a table in markdown."""
    rows = {**_versions(), **({} if model is None else _of_model(model)), **_options(loop, place)}
    lines = ["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return Text(TAG, "\n".join(lines))


def _versions() -> dict[str, str]:
    import tbhooks  # noqa: PLC0415  the root imports this, in the end

    found = {
        "tbhooks": tbhooks.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    cuda = torch.version.cuda
    return found if cuda is None else {**found, "CUDA": cuda}


def _of_model(model: nn.Module) -> dict[str, str]:
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return {
        "model": name_of(model),
        "parameters": f"{sum(parameter.numel() for parameter in parameters):,}, of which {trainable:,} are trained",
        "devices": _most_first(Counter(_device(parameter.device) for parameter in parameters)),
        "dtypes": _most_first(Counter(str(parameter.dtype).removeprefix("torch.") for parameter in parameters)),
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def _most_first(found: Counter[str]) -> str:
    return ", ".join(name for name, _ in found.most_common())


def _options(loop: CaptureSession, place: RankContext) -> dict[str, str]:
    schedule = loop.schedule
    return {
        "every": str(schedule.every),
        "kinds": ", ".join(sorted(loop.recorder.kinds)),
        "histograms": str(schedule.histograms),
        "step": loop.clock.mode,
        "ranks": "1" if place.team is None else f"{place.team.world}, merged",
    }


def name_of(model: nn.Module) -> str:
    """What its runs are called after."""
    return own_name(unwrap(model))


def run_of(writer: Any, named: str) -> Any:
    """`runs/` becomes `runs/<model>-<time>`, which is nobody else's; every other writer is as it was given."""
    if not isinstance(writer, str) or not is_place(writer):
        return writer
    name = f"{writer}{named}-{now()}"
    return name if is_remote(writer) else _made(name)


def now() -> str:
    """The time as names of runs have it."""
    return time.strftime("%Y%m%d-%H%M%S")


def is_place(directory: str) -> bool:
    """Whether it is one for runs, each below it, and not a run's own."""
    return (
        directory.endswith("/")
        if is_remote(directory)
        else directory.endswith(tuple(filter(None, (os.sep, os.altsep))))
    )


def _made(name: str) -> str:
    """Made at once: another run that starts in the same second gets another name."""
    number = 1
    while True:
        path = Path(name if number == 1 else f"{name}-{number}").expanduser()
        try:
            path.mkdir(parents=True)
            return str(path)
        except FileExistsError:
            number += 1
