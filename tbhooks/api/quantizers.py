"""Which number formats the quantizers of a model use: those of torch.ao, torchao and bitsandbytes are known by name.

What they cast is inside a module, or is cast back at once, so that no recorded tensor has the dtype. No package is
imported: the name of a class is enough.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_INT8_RANGE = (127, 255)
"""How far the integers of 8 bits reach: from -127 or -128, or from 0."""


def formats_in_use(model: nn.Module) -> tuple[str, ...]:
    """The formats of the quantizers in a model, and float8 if parameters have it; empty for most models."""
    found: dict[str, None] = {}
    with contextlib.suppress(Exception):  # attributes of other people's classes
        for module in model.modules():
            found |= dict.fromkeys(_formats_of(module))
        for parameter in model.parameters():
            found |= dict.fromkeys(name for name in _FLOAT8 if str(parameter.dtype) == f"torch.{name}")
    return tuple(found)


def _formats_of(module: nn.Module) -> tuple[str, ...]:
    name = type(module).__name__
    if "FakeQuantize" in name:
        return _fake_quantized(module)
    if "Float8" in name:  # torchao casts gradients to e5m2, everything else to e4m3
        return _FLOAT8
    return ("int8",) if name == "Linear8bitLt" else ()


def _fake_quantized(module: Any) -> tuple[str, ...]:
    """The format of a module that rounds as if its output were quantized; none if it is neither float8 nor int8."""
    dtype = str(getattr(getattr(module, "config", module), "dtype", "")).lower()
    for name in _FLOAT8:
        if name in dtype:
            return (name,)
    low, high = getattr(module, "quant_min", None), getattr(module, "quant_max", None)
    if isinstance(low, int) and isinstance(high, int):
        return ("int8",) if _INT8_RANGE[0] <= high - low <= _INT8_RANGE[1] else ()
    return ("int8",) if "int8" in dtype else ()
