"""Descriptions of modules (class, settings, parameters) and tensors (shape, dtype)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

LONGEST = 300


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape; sizes that vary within a nested tensor are -1."""
    if tensor.is_nested and tensor.layout is torch.strided:  # only its first size is known
        return tensor.size(0), *[-1] * (tensor.dim() - 1)
    return tuple(size if isinstance(size, int) else -1 for size in tensor.shape)


def sizes(tensor: Tensor) -> str:
    """`8x16x4`."""
    return "x".join(map(str, shape_of(tensor))) or "one number"


def type_of(tensor: Tensor) -> str:
    """`float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, unlike ModuleList and other containers."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward


def about_module(path: str, module: nn.Module) -> dict[str, str]:
    """The attributes of a module's node."""
    kind = type(module)
    own = [p for p in module.parameters() if not is_lazy(p)]
    attributes = {
        "module": f"{kind.__name__} {path}",
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "settings": _settings(module),
        "parameters": f"{sum(p.numel() for p in own):,}" if own else "",
        "trainable": _trainable(own),
        "weights": ", ".join(f"{name} {sizes(p)}" for name, p in _direct(module)),
    }
    return {name: value[:LONGEST] for name, value in attributes.items() if value}


def _direct(module: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = module._parameters
    return [(name, p) for name, p in parameters.items() if p is not None and not is_lazy(p)]


def _trainable(parameters: list[nn.Parameter]) -> str:
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    return "" if not total else "all" if trained == total else f"{trained:,}" if trained else "none"


def _settings(module: nn.Module) -> str:
    """The module's extra_repr, which is the user's code and may fail before the first forward has ended."""
    try:
        with torch.no_grad():
            return " ".join(module.extra_repr().split())
    except Exception:
        return ""
