"""Hooks in C (eager_hooks.c) for what is nearly always read on a CPU: plain tensors of a training forward or backward.

They do what the hooks in Python do, in a fraction of the time, and record the same. Python decides: `EagerLane` is
opened after an output or a gradient was read in Python, if what follows in the same forward or backward will be read
the same way, and closed by anything that may change that. A tensor that is not plain is passed to the hook in Python.

The extension is optional. Without it, without the C kernel, or with a torch that does not describe its tensors to C
(DLPack), hooks in Python do all of it.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import autograd
from tbhooks.capture.compile.dynamo import dynamo_skip
from tbhooks.capture.hooks.unpicklable import UnpicklableHook
from tbhooks.data.self_report import Report
from tbhooks.reduction import cpu

if TYPE_CHECKING:
    from tbhooks.capture.hooks._eager_hooks import ABI as _BUILT
    from tbhooks.capture.hooks._eager_hooks import EagerForwardHook, EagerGradientHook, Lane
    from tbhooks.capture.hooks.passes import Backward, Pass
    from tbhooks.capture.recording.recorder import Recorder
else:
    try:
        from tbhooks.capture.hooks._eager_hooks import ABI as _BUILT
        from tbhooks.capture.hooks._eager_hooks import EagerForwardHook, EagerGradientHook, Lane
    except ImportError:  # built without a compiler or for another Python
        _BUILT = 0

        class EagerForwardHook:
            """In place of the one in C."""

            __slots__ = ()

        class EagerGradientHook:
            """In place of the one in C."""

        Lane = None

__all__ = ["UNREADABLE", "EagerGradientHook", "EagerHook", "EagerLane", "describe_all"]

# Incremented when eager_hooks.c and this file change together: an extension left over from another version is not used.
ABI = 3
UNREADABLE = -1
_EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)

EagerGradientHook.__torch_unserializable__ = True  # type: ignore[attr-defined]


class EagerHook(UnpicklableHook, EagerForwardHook):
    """What torch calls instead of a `ForwardHook`. It calls that hook if it cannot read the output itself."""

    __slots__ = ()

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # In Python, because torch.export traces hooks, and dynamo cannot trace what is written in C.
        if is_compiling():
            self.hook(module, args, output)
        else:
            self.read(module, args, output)


def _make_lane() -> Lane | None:
    """A lane that is ready for use; None if hooks in C cannot be used here."""
    if Lane is None or ABI != _BUILT or cpu.library is None or _EXCHANGE is None:
        return None
    lane = Lane()
    try:
        lane.use(_EXCHANGE, *(_address(name) for name in ("tbhooks_reduce", "tbhooks_find_alive")))
    except (ValueError, TypeError):
        return None
    lane.tensor_type, lane.parameter_type, lane.new_hooks = Tensor, nn.Parameter, OrderedDict
    lane.can_read = cpu.can_read
    lane.running_backward, lane.tracing_state = autograd.running_backward, autograd.tracing_state
    lane.count_modes, lane.threads = autograd.count_dispatch_modes, torch.get_num_threads
    lane.is_neg, lane.storage_offset, lane.is_view = Tensor.is_neg, Tensor.storage_offset, Tensor._is_view
    # Negative: torch never gives out such a key.
    lane.key = -1 - RemovableHandle(OrderedDict()).id
    return lane


def _address(name: str) -> int:
    return ctypes.cast(getattr(cpu.library, name), ctypes.c_void_p).value or 0


_shared = functools.cache(_make_lane)


def describe_all(tensors: list[Tensor]) -> NDArray[np.int64] | None:
    """Address, size and type of each tensor, as a job of the kernel has them; the type is UNREADABLE where the kernel
    cannot read it. None without the extension.
    """
    lane = _shared() if cpu.library is not None else None
    if lane is None:
        return None
    table = np.empty((len(tensors), 3), np.int64)
    lane.describe(tensors, table.ctypes.data)
    return table


class OpenStep(Protocol):
    """What hooks in C add to: a `StepContext`."""

    called: set[str]
    recent: dict[int, Any]
    gradient_hooks: list[Any]


class EagerLane:
    """The hooks in C of one watch, and what is decided for them. Without the extension it does nothing."""

    def __init__(self, model: weakref.ref[nn.Module], recorder: Recorder, report: Report) -> None:
        self.lane = _make_lane()
        self._model, self._recorder, self._report = model, recorder, report

    def connect(
        self, gradient_reader: object, read_gradient: Callable[..., None], on_units: Callable[..., None],
        on_failure: Callable[..., None],
    ) -> None:  # fmt: skip
        """Sets what the hooks call in Python. Before that there are none."""
        if self.lane is not None:
            self.lane.report, self.lane.unseen = self._report, self._report.unseen
            self.lane.gradient_reader, self.lane.read_gradient = gradient_reader, read_gradient
            self.lane.on_units, self.lane.on_failure = on_units, on_failure

    def leave_to_python(self) -> None:
        """From now on hooks in Python read everything. Called before the first hook is made."""
        self.lane = None

    def hook(self, hook: Any) -> EagerHook | None:
        """The hook in C for a hook in Python; None if there is none."""
        return None if self.lane is None else EagerHook(self.lane, hook, hook.path)

    def open_forward(self, forward: Pass, context: OpenStep, units: tuple[object, ...]) -> None:
        """What follows in this forward will be read into this step, as long as the model is in training mode."""
        place = self._place()
        if self.lane is not None and place is not None:
            self.lane.open_forward(
                place, units, self._model, forward, context, context.called, context.recent, context.gradient_hooks
            )

    def open_backward(self, context: OpenStep, running: Backward, reached: Pass) -> None:
        """What follows in this backward will be read into this step, as long as it goes through the same forward."""
        place = self._place()
        if self.lane is not None and place is not None:
            self.lane.open_backward(place, context, running, reached)

    def _place(self) -> tuple[object, ...] | None:
        """Where hooks in C record. None if they cannot; under a profiler hooks in Python put labels into its trace."""
        return None if self.lane is None or autograd.is_profiled() else self._recorder.cpu_place()

    def close(self) -> None:
        """What follows is read in Python, which decides anew."""
        if self.lane is not None and self.lane.is_open:
            fired, seconds = self.lane.close()
            self._report.hooks_fired += fired
            self._report.seconds_training += seconds
