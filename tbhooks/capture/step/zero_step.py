"""The step of a DeepSpeed ZeRO optimizer, which makes several steps of the optimizer that it wraps.

ZeRO steps the wrapped optimizer once for each group of partitions, and its own step has no hook. So that the training
step ends after the last of them, `step` is wrapped while a watch is open. The wrapper changes neither arguments nor
results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tbhooks.data.process.patching import wrapping


class _Running(threading.local):
    depth = 0
    steps = 0
    """How many steps the wrapped optimizer has made."""


_running = _Running()
_listeners: dict[int, Callable[[], None]] = {}


def is_running() -> bool:
    """Whether a ZeRO optimizer is making its step in this thread."""
    return _running.depth > 0


def count_step() -> int:
    """Counts a step of the wrapped optimizer; returns how many were made before in the same step of ZeRO."""
    _running.steps += 1
    return _running.steps - 1


def _around_step(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    if _running.depth == 0:
        _running.steps = 0
    _running.depth += 1
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _running.depth -= 1
    if _running.depth == 0:
        for ended in list(_listeners.values()):
            ended()
    return result


_PATCHES = [
    wrapping(f"deepspeed.runtime.{module}", f"{name}.step", _around_step, "DeepSpeed 0.19.8, on a CPU only")
    for module, name in (
        ("zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
        ("zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
        ("bf16_optimizer", "BF16_Optimizer"),
    )
]


def listen(holder: object, ended: Callable[[], None]) -> None:
    """Calls `ended` after every step of a ZeRO optimizer, until `forget`."""
    _listeners[id(holder)] = ended
    for patch in _PATCHES:
        patch.acquire(holder)


def forget(holder: object) -> None:
    """Removes the wrapper if no other watch needs it."""
    _listeners.pop(id(holder), None)
    for patch in _PATCHES:
        patch.release(holder)
