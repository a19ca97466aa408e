"""The only file that puts hooks on modules and tensors, and reads parameters around an optimizer's step.

A hook reduces what it sees at once, detached, into the recorder, and keeps nothing: no tensor, no graph.
Whatever goes wrong in here is counted and told once; training never sees it, and results never change.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tbhooks import outputs, select
from tbhooks.buffer import NO_SITE, Recorder
from tbhooks.frame import Site
from tbhooks.pending import Span
from tbhooks.report import Report
from tbhooks.rows import describe, has_no_data

NEVER_CALLED = "never called as a module; its parameters are watched all the same"
# Outputs passed on unchanged are recognised among this many recent tensors.
MOST_RECENT = 256


NO_BACKWARD = -1
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: NO_BACKWARD)


def backward_pass() -> int:
    """The number of the backward pass autograd is running here, or NO_BACKWARD."""
    return int(_graph_task())


def in_backward() -> bool:
    """Whether autograd is running backward here: a forward seen now is a checkpoint being recomputed."""
    return backward_pass() != NO_BACKWARD


class _Unkept:
    """A hook that copies and pickles to nothing: a copy of the model does not log, and loads without tbhooks."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # The standard library's own callable that takes a hook's three arguments and does nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ForwardHook(_Unkept):
    """Placed on a module for a logged step."""

    __slots__ = ("broken", "module", "path", "probe", "sites")

    def __init__(self, probe: Probe, path: str, module: nn.Module) -> None:
        self.probe, self.path, self.module = probe, path, weakref.ref(module)
        self.sites: dict[str, tuple[int, int]] = {}
        self.broken = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.broken:
            self.probe.saw_output(self, output)

    def site_numbers(self, index: str) -> tuple[int, int]:
        """The numbers of this output's activation and gradient."""
        if index not in self.sites:
            number = self.probe.number
            self.sites[index] = (
                number(Site(self.path, "activation", index)),
                number(Site(self.path, "gradient", index)),
            )
        return self.sites[index]


class GradientHook:
    """Placed on an output; serves every site whose output is that very tensor. Holds no tensor itself."""

    __slots__ = ("fired", "is_view", "probe", "sites", "token")

    def __init__(self, probe: Probe, token: object, is_view: bool) -> None:
        self.probe, self.token, self.is_view = probe, token, is_view
        self.sites: list[int] = []
        self.fired = False

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None and self.token is self.probe.token:
            self.probe.saw_gradient(self, gradient)


class RootHook(_Unkept):
    """Tells that the model's forward begins, for clocks that count forwards."""

    __slots__ = ("told",)

    def __init__(self, told: Callable[[], None]) -> None:
        self.told = told

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.told()


@dataclass
class _Recent:
    """A tensor seen a moment ago, to recognise it when the next module returns it unchanged."""

    tensor: weakref.ref[Tensor]
    version: int
    span: Span | None
    hook: GradientHook | None


class Probe:
    """The hooks of one watch. `begin` opens a logged step, `end` closes it."""

    def __init__(self, model: nn.Module, selector: select.Selector, recorder: Recorder, report: Report) -> None:
        self.token: object = None
        """What the open step is told by; None between logged steps."""
        self.next_forward: Callable[[], None] | None = None
        """Called once, before a training forward is read: the step before it is over."""
        self.aliases: dict[str, str] = {}
        self._model = weakref.ref(select.unwrap(model))
        self._selector = selector
        self._recorder = recorder
        self.number = recorder.number
        self._report = report
        self._hooks: dict[str, ForwardHook] = {}
        self._handles: list[RemovableHandle] = []
        self._leaf_handles: list[RemovableHandle] = []
        self._placed: list[GradientHook] = []
        self._recent: dict[int, _Recent] = {}
        self._called: set[str] = set()
        self._trained = False
        self._read_evaluation = False

    @property
    def gradients_seen(self) -> bool:
        """Whether a backward pass has reached the open step."""
        return any(hook.fired for hook in self._placed)

    @property
    def called(self) -> bool:
        """Whether any watched module was called in the open step."""
        return bool(self._called)

    def begin(self, attach: bool) -> None:
        """Opens a logged step and puts the hooks on."""
        self._drop_step()
        self.token = object()
        if attach:
            self.attach()

    def end(self, keep_hooks: bool) -> None:
        """Closes a step that ran to its end, and reports what it should have shown and did not."""
        self._report_unseen()
        self._drop_step()
        if not keep_hooks:
            self.detach()

    def abandon(self) -> None:
        """Closes a step that was cut short, and leaves no hook behind."""
        self.next_forward = None
        self._drop_step()
        self.detach()

    def attach(self) -> None:
        """Hooks on every watched module there is now: added and replaced ones are found here."""
        model = self._model()
        if model is None:
            return
        modules = select.walk(model)
        self.aliases = modules.aliases
        wanted = self._selector.choose(modules.by_path) if self._recorder.wants("activation", "gradient") else {}
        called = {path: module for path, module in wanted.items() if self._can_be_hooked(path, module)}
        if self._handles and all(
            path in self._hooks and self._hooks[path].module() is module for path, module in called.items()
        ):
            return
        self.detach()
        for path, module in called.items():
            hook = self._hooks.get(path)
            if hook is None or hook.module() is not module:
                hook = self._hooks[path] = ForwardHook(self, path, module)
            self._handles.append(module.register_forward_hook(hook))
        self._hooks = {path: self._hooks[path] for path in called}

    def _can_be_hooked(self, path: str, module: nn.Module) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            self._report.cannot_see(path, "a scripted or traced module takes no hooks")
            return False
        return type(module).forward is not nn.Module.forward  # ModuleList and its like are never called

    def detach(self) -> None:
        """Leaves no hook on any module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def watch_root(self, told: Callable[[], None]) -> RemovableHandle | None:
        """Calls `told` whenever a forward of the whole model begins."""
        model = self._model()
        return None if model is None else model.register_forward_pre_hook(RootHook(told))

    def _drop_step(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self.token = None
        self._leaf_handles, self._placed, self._recent, self._called = [], [], {}, set()

    def saw_output(self, hook: ForwardHook, output: object) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        report = self._report
        started = report.enter()
        try:
            if not self._is_read() or self._recorder.overflowed:
                return
            report.hooks_fired += 1
            self._called.add(hook.path)
            found = outputs.tensors(output)
            if not found:
                report.cannot_see(hook.path, f"its output, a {type(output).__name__}, shows no tensor")
            for index, tensor in found:
                self._saw_tensor(hook, index, tensor)
        except Exception as problem:
            hook.broken = True
            report.error(f"hook on {hook.path}", problem)
        finally:
            report.leave(started)

    def saw_gradient(self, hook: GradientHook, gradient: Tensor) -> None:
        report = self._report
        started = report.enter()
        try:
            hook.fired = True
            report.hooks_fired += 1
            first, *others = hook.sites
            span = self._recorder.record(first, gradient)
            if span is not None:
                for site in others:
                    self._recorder.share(site, span)
        except Exception as problem:
            report.error("gradient hook", problem)
        finally:
            report.leave(started)

    def admits(self, model: nn.Module) -> bool:
        """Evaluation passes are not read, unless the model has never been seen training."""
        self._trained = self._trained or model.training
        return model.training or not self._trained

    def _is_read(self) -> bool:
        model = self._model()
        if model is None or not self.admits(model):
            return False
        if self.next_forward is not None and not in_backward():
            ended, self.next_forward = self.next_forward, None
            ended()
        if self.token is None:
            return False
        if model.training and self._read_evaluation:
            self._forget_evaluation()
        self._read_evaluation = not model.training
        return True

    def _forget_evaluation(self) -> None:
        """What was read before the first training pass is not of its step."""
        self._drop_step()
        self.token = object()
        self._recorder.restart()

    def _saw_tensor(self, hook: ForwardHook, index: str, tensor: Tensor) -> None:
        activation, gradient = hook.site_numbers(index)
        if has_no_data(tensor):
            self._report.cannot_see(hook.path + index, "it holds no data: a tracing or torch.func stand-in")
            return
        recent = self._recall(tensor)
        span = recent.span if recent else None
        if activation != NO_SITE and not in_backward():
            if span is not None:
                self._recorder.share(activation, span)
            else:
                span = self._recorder.record(activation, tensor)
                if span is None:
                    self._report.cannot_see(hook.path + index, f"{describe(tensor)}: only real numbers have statistics")
                elif self._report.unseen:
                    self._report.sees(hook.path + index)
        placed = recent.hook if recent else None
        if gradient != NO_SITE and tensor.requires_grad:
            if placed is None:
                placed = self._place(tensor)
            placed.sites.append(gradient)
        self._remember(tensor, span, placed)

    def _place(self, tensor: Tensor) -> GradientHook:
        hook = GradientHook(self, self.token, tensor._is_view())
        handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if tensor.is_leaf:  # it outlives the step, and so would the hook
            self._leaf_handles.append(handle)
        self._placed.append(hook)
        return hook

    def _recall(self, tensor: Tensor) -> _Recent | None:
        recent = self._recent.get(id(tensor))
        if recent is None or recent.tensor() is not tensor or recent.version != tensor._version:
            return None
        return recent

    def _remember(self, tensor: Tensor, span: Span | None, hook: GradientHook | None) -> None:
        if tensor.is_inference():  # has no version: an in-place change could not be told
            return
        if len(self._recent) > MOST_RECENT:
            self._recent.clear()
        self._recent[id(tensor)] = _Recent(weakref.ref(tensor), tensor._version, span, hook)

    def _report_unseen(self) -> None:
        if self._called:
            for path in self._hooks:
                if path not in self._called:
                    self._report.cannot_see(path, NEVER_CALLED)
                elif self._report.unseen.get(path) == NEVER_CALLED:
                    self._report.sees(path)
        reached = {site for hook in self._placed if hook.fired for site in hook.sites}
        if reached:
            self._report_unreached(reached)
        self._report.tell_unseen()

    def _report_unreached(self, reached: set[int]) -> None:
        for hook in self._placed:
            for site in hook.sites:
                name = str(self._recorder.sites[site])
                if site in reached:
                    self._report.sees(name)
                elif hook.is_view:
                    self._report.cannot_see(name, "no gradient reached this view: unused, or modified in place later")
                else:
                    self._report.cannot_see(name, "no gradient reached it: the loss does not depend on it")
