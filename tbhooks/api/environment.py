"""A description of the run as text: versions, devices, the size of the model, the options of the watch.

It contains nothing about the user or the machine: no host or user names, no paths, no environment variables.
"""

from __future__ import annotations

import platform
from collections import Counter

import torch
from torch import nn

from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.selection import unwrap
from tbhooks.capture.session import CaptureSession
from tbhooks.data.artifacts import ENVIRONMENT, Text
from tbhooks.distributed.handshake import class_name


def describe_run(session: CaptureSession, context: RankContext, model: nn.Module | None) -> Text:
    """Returns the description as a markdown table."""
    rows = {**_versions(), **({} if model is None else _model(model)), **_options(session, context)}
    lines = ["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return Text(ENVIRONMENT, "\n".join(lines))


def model_name(model: nn.Module) -> str:
    """The name of the model's class, without wrappers such as DDP and FSDP."""
    return class_name(unwrap(model))


def _versions() -> dict[str, str]:
    import tbhooks  # noqa: PLC0415  the package imports this module lazily

    versions = {
        "tbhooks": tbhooks.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    cuda = torch.version.cuda
    return versions if cuda is None else {**versions, "CUDA": cuda}


def _model(model: nn.Module) -> dict[str, str]:
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return {
        "model": model_name(model),
        "parameters": f"{sum(parameter.numel() for parameter in parameters):,}, of which {trainable:,} are trained",
        "devices": _most_common(Counter(_device(parameter.device) for parameter in parameters)),
        "dtypes": _most_common(Counter(str(parameter.dtype).removeprefix("torch.") for parameter in parameters)),
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def _most_common(names: Counter[str]) -> str:
    return ", ".join(name for name, _ in names.most_common())


def _options(session: CaptureSession, context: RankContext) -> dict[str, str]:
    schedule = session.schedule
    return {
        "every": str(schedule.every),
        "kinds": ", ".join(sorted(session.recorder.kinds)),
        "histograms": str(schedule.histograms),
        "step": session.clock.mode,
        "ranks": "1" if context.rank_group is None else f"{context.rank_group.world}, merged",
    }
