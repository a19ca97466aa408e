"""Reads the tensors that models name with `tbhooks.tap`, as outputs of the module whose forward is running.

In eager mode that module is found on the Python stack, only in logged steps. Inside a graph that is being compiled
there is no such stack: there every module of the model gets hooks that mark where its forward begins and ends
(compile/dynamo.py), as soon as the first tap is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from tbhooks.capture import tensor_tree
from tbhooks.capture.autograd import call_stack
from tbhooks.capture.compile import dynamo
from tbhooks.capture.compile.dynamo import CompileGate, GraphHook, dynamo_skip
from tbhooks.capture.functional.function_mode import MODULE_CALL
from tbhooks.data.process import taps


class TapObserver(Protocol):
    """What a tap calls: the observer of a watch."""

    gate: CompileGate

    def on_tap(self, module: nn.Module, name: str, value: object) -> bool:
        """Reads a tap in the forward of this module. Returns whether the module is part of the watched model."""

    def hook_of(self, module: nn.Module) -> GraphHook | None:
        """The hook of a module; None if it is not part of the watched model."""


_observers: list[TapObserver] = []
"""The observers of all open watches."""


def begin(observer: TapObserver) -> None:
    """From now on taps in the model of this observer are read."""
    if observer not in _observers:
        _observers.append(observer)
    dynamo_skip(taps.tap)
    taps.read = read


def end(observer: TapObserver) -> None:
    """The watch has closed."""
    if observer in _observers:
        _observers.remove(observer)
    if not _observers:
        taps.read = None


@dynamo_skip
def read(name: str, value: object) -> None:
    """Called by every tap of the process while a model is watched."""
    for observer in _observers:
        gate = observer.gate
        if gate.open or gate.evaluation:  # compiled code has one graph for each answer
            (_read_in_graph if torch.compiler.is_compiling() else _read)(name, value)
            return


def _read(name: str, value: object) -> None:
    for module in _running_modules():
        if any([observer.on_tap(module, name, value) for observer in _observers]):  # noqa: C419  all of them
            return


def _running_modules() -> Iterator[nn.Module]:
    """The modules whose forward is running, innermost first; then those whose methods are."""
    frames = list(call_stack())
    for frame in frames:
        if frame.f_code is MODULE_CALL:
            yield frame.f_locals["self"]
    for frame in frames:  # a method that a reentrant checkpoint runs again is not called by a forward
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module


def _read_in_graph(name: str, value: object) -> None:
    """Traced by torch.compile."""
    for observer in _observers:
        gate = observer.gate
        if (gate.open or gate.evaluation) and gate.compiling_tap():
            for index, tensor in tensor_tree.tensors(value):
                dynamo.observe_tap(tensor, name, index, gate.step_id)
            return


def running_hook() -> GraphHook | None:
    """The hook of the innermost watched module whose forward is running. Compiled graphs ask for it."""
    for module in _running_modules():
        for observer in _observers:
            hook = observer.hook_of(module)
            if hook is not None:
                return hook
    return None


dynamo.find_running_hook = running_hook
