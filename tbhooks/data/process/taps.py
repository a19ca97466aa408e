"""`tap`: names a tensor inside a forward, so that it is watched like the output of a module.

Models call it, watched or not, so it imports nothing. While a model is watched, capture/functional/taps.py sets `read`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

read: Callable[[str, object], None] | None = None
"""Reads a tapped value; None while no model of the process is watched."""


def tap(name: str, tensor: Value) -> Value:
    """Watches a tensor inside a forward: its statistics, and those of its gradient, as of a module's output.

    The site is `<path of the module whose forward is running>:<name>`, such as `blocks.3.attn:scores`. A name that is
    used several times in a forward is one site. Outside of logged steps, and in models that are not watched, it does
    nothing. It works inside `torch.compile`, without a graph break.

    Args:
        name: the name of the tensor, unique in its module.
        tensor: a tensor, or a tuple, list or dict of tensors.

    Returns:
        `tensor` itself, unchanged.

    Examples:
        >>> scores = tbhooks.tap("scores", q @ k.transpose(-2, -1))  # doctest: +SKIP

    """
    if read is not None:
        read(name, tensor)
    return tensor
