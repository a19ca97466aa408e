"""Which hooks are on which modules and tensors. Only here are they put on modules, and taken off again."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import CodeType

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import compilation, dynamo, selection
from tbhooks.capture.hooks.collectors import Collectors
from tbhooks.capture.hooks.function_mode import Functional
from tbhooks.capture.hooks.hook_types import (  # fmt: skip
    BeginHook,
    CallHook,
    EndHook,
    EnterHook,
    Follows,
    ForwardHook,
    InputHook,
    LeaveHook,
    ReturnHook,
    Told,
)
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report
from tbhooks.reduction import torch_private

_OF_MODULES = ("activation", "gradient", "input")
NOT_IN_COMPILED = "what runs in compiled code is not read, as it could not be compiled with hooks"
COMPILED_BEFORE = (
    "the modules in it were not seen running. What was compiled without hooks, before watch() for example, is compiled "
    "anew at its next call, with hooks: the next logged step is read if that was the reason"
)
BLIND = (
    "the modules in it were not seen running. Code that was compiled without hooks goes on without them until "
    "torch.compiler.reset(). Evaluation passes are read if w.evaluation() asks for them"
)


class HookManager:
    """The hooks of one watch on the modules of its model."""

    def __init__(
        self, told: Told, model: weakref.ref[nn.Module], selector: selection.Selector, wanted: frozenset[str],
        functional: Functional | None, collectors: Collectors, report: Report,
    ) -> None:  # fmt: skip
        self.hooks: dict[str, ForwardHook] = {}
        """By path; kept when they are taken off."""
        self.aliases: dict[str, str] = {}
        """Further names of shared modules."""
        self._told = told
        self._model = model
        self._selector = selector
        self._wanted = wanted
        self._functional = functional
        self._collectors = collectors
        self._report = report
        self._are_on = False
        self._subscription_version = 0
        self._handles: list[RemovableHandle] = []
        # One for all modules: a handle for each would be half of what putting them on costs. Negative, because a model
        # that was loaded with its hooks may hold any number that torch will yet give out.
        self._key = -1 - RemovableHandle(OrderedDict()).id
        self._lock = threading.RLock()  # a compilation may run in another thread
        self._was_blind = False
        self._failures_told = len(dynamo.failures)
        self.lost_in: set[CodeType] = set()
        """What could not be compiled with hooks."""
        self.gate = told.gate
        told.gate.get_ready = self._give_tickets
        if functional is not None:
            functional.show = collectors.saw

    def forked(self) -> None:
        """In a forked child, whoever held the lock does not exist."""
        self._lock = threading.RLock()

    def _give_tickets(self) -> None:
        for hook in self.hooks.values():
            hook.take_ticket()

    def start(self) -> None:
        """From now on what is compiled has hooks in it; what was compiled before is compiled anew."""
        model = self._model()
        compilation.begin(self)
        with self._report.guarded("looking for compiled code"):
            if model is not None and compilation.forget_unhooked(model):
                message = "the model ran compiled before watch(): it is compiled anew, with hooks"
                self._report.log_once(message, logging.INFO)

    def stop(self) -> None:
        compilation.end(self)

    def attach(self) -> None:
        """Hooks on every watched module there is now: added and replaced ones are found here."""
        with self._lock:
            self._put_on()

    def _put_on(self) -> None:
        model = self._model()
        if model is None:
            return
        modules = selection.walk(model)
        self.aliases = modules.aliases
        wanted = self._modules_to_hook(modules.by_path)
        # Compiled code would be compiled anew; what nobody wants any more is then shown to nobody.
        as_wished = self._subscription_version == self._collectors.subscription_version or self._told.gate.was_compiled
        if self._are_on and as_wished and all(self._has(path, module) for path, module in wanted.items()):
            self._collectors.attach(modules.by_path)
            return
        self.detach()
        if not all(path in wanted and self._has(path, wanted[path]) for path in self.hooks):
            self.sweep()
        chosen = self._selector.choose(wanted)
        hooks = {}
        for path, module in wanted.items():
            known = self._has(path, module)
            hooks[path] = (
                self.hooks[path] if known else ForwardHook(self._told, path, module, self._wanted, path in chosen)
            )
            if self._collectors:
                hooks[path].shows_outputs = self._collectors.wants(path, module)
                hooks[path].shows_inputs = self._collectors.wants_inputs(path, module)
            self._handles += self._register(hooks[path], module)
        self.hooks = hooks
        self._are_on = bool(hooks)
        if self._told.gate.was_compiled:
            self._give_tickets()
        if self._functional is not None:
            self._functional.listens = True
        self._subscription_version = self._collectors.subscription_version
        self._collectors.attach(modules.by_path)

    def reattach(self) -> None:
        """Somebody has begun to look on; where a step is open, hooks are on even if there were none to put on."""
        if self._are_on or self._told.gate.open:
            self.detach()
            self.attach()

    def detach(self) -> None:
        """Leaves no hook on any module."""
        with self._lock:
            self._take_off()

    def _take_off(self) -> None:
        for hook in self.hooks.values() if self._are_on else ():
            module = hook.module()
            if module is not None:
                module._forward_hooks.pop(self._key, None)
        for handle in self._handles:
            handle.remove()
        self._handles, self._are_on = [], False
        self._collectors.detach()
        if self._functional is not None:
            self._functional.listens = False
            self._functional.abandon()

    # What compilers ask for.

    @contextlib.contextmanager
    def on_for_compiler(self) -> Iterator[None]:
        """Hooks are on, in an unlogged step too, and stay on if any of them is compiled."""
        was_on = self._are_on
        if not was_on:
            with self._report.guarded("putting hooks on for a compiler"):
                self.attach()
        try:
            yield
        finally:
            if not was_on and not self.gate.was_compiled:
                with self._report.guarded("taking hooks off after a compiler"):
                    self.detach()

    @contextlib.contextmanager
    def off_for_compiler(self) -> Iterator[None]:
        """No hooks are on, and those that were are put back."""
        was_on = self._are_on
        with self._report.guarded("taking hooks off for a compiler"):
            self.detach()
        try:
            yield
        finally:
            if was_on:
                with self._report.guarded("putting hooks on after a compiler"):
                    self.attach()

    def lost_in_compiler(self, code: CodeType, problem: BaseException, had_hooks: bool) -> None:
        """It could be compiled without hooks only."""
        self.lost_in.add(code)
        self._report.error(f"compiling {code.co_qualname} with hooks failed, and without them it worked", problem)
        self.gate.was_compiled = had_hooks
        if not had_hooks and not self.gate.open:
            self.detach()

    def knows(self, module: nn.Module) -> bool:
        """Whether it is part of the watched model."""
        model = self._model()
        return model is not None and any(own is module for own in model.modules())

    def classes(self) -> frozenset[type[nn.Module]]:
        model = self._model()
        return frozenset(() if model is None else map(type, model.modules()))

    def report_lost(self, called: set[str]) -> None:
        """Says what could not be read because of the torch that is installed, and why."""
        for name, why in torch_private.missing.items():
            self._report.mark_unseen(name, why)
        for where, problem in dynamo.failures[self._failures_told :]:
            self._report.error(where, problem)
        self._failures_told = len(dynamo.failures)
        is_unknown = "torch._dynamo" in sys.modules and not dynamo.hooks_are_guarded
        why = NOT_IN_COMPILED if self.lost_in else dynamo.NOT_GUARDED if is_unknown else ""
        for path in (path for path, hook in self.hooks.items() if why and hook.reads and path not in called):
            self._report.mark_unseen(path, why)

    def why_blind(self) -> str:
        """Why nothing in the model was seen running, and what is done about it."""
        if self.lost_in or (not dynamo.hooks_are_guarded and "torch._dynamo" in sys.modules):
            return NOT_IN_COMPILED if self.lost_in else dynamo.NOT_GUARDED
        if not self._was_blind:
            self._was_blind = True
            if compilation.forget_unhooked(None):
                return COMPILED_BEFORE
        return BLIND

    def come_last(self, asking: ForwardHook) -> None:
        """Behind the hooks of others that were put on since, and may replace an output."""
        module = asking.module()
        if module is None or next(reversed(module._forward_hooks), self._key) == self._key:
            return
        for hook in self.hooks.values():
            module = hook.module()
            if module is not None and self._key in module._forward_hooks:
                module._forward_hooks[self._key] = module._forward_hooks.pop(self._key)

    def sweep(self) -> None:
        """Takes off hooks that others have moved to modules of their own, as quantisation does."""
        model = self._model()
        for module in () if model is None else model.modules():
            for hooks in filter(None, (module._forward_hooks, module._forward_pre_hooks)):
                for key in [key for key, hook in hooks.items() if self._is_mine(hook)]:
                    del hooks[key]

    def _is_mine(self, hook: object) -> bool:
        if isinstance(hook, EnterHook | LeaveHook):
            return hook.functional is self._functional
        return isinstance(hook, ForwardHook | InputHook | BeginHook | EndHook) and hook.told is self._told

    def _has(self, path: str, module: nn.Module) -> bool:
        return path in self.hooks and self.hooks[path].module() is module

    def _modules_to_hook(self, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
        if "functional" in self._wanted:
            chosen = modules
        else:
            chosen = {} if self._wanted.isdisjoint(_OF_MODULES) else self._selector.choose(modules)
            # The end of the model's backward is when weight gradients are read, and tells which forwards are trained.
            if chosen or "weight_gradient" in self._wanted:
                chosen = {ROOT: modules[ROOT], **chosen}
            if self._collectors:
                chosen |= {path: module for path, module in modules.items() if self._is_shown(path, module)}
        return {path: module for path, module in chosen.items() if self._can_be_hooked(path, module)}

    def _is_shown(self, path: str, module: nn.Module) -> bool:
        return self._collectors.wants(path, module) or self._collectors.wants_inputs(path, module)

    def _can_be_hooked(self, path: str, module: nn.Module) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            self._report.mark_unseen(path, "a scripted or traced module takes no hooks")
            return False
        return type(module).forward is not nn.Module.forward  # ModuleList and its like are never called

    def _register(self, hook: ForwardHook, module: nn.Module) -> Iterator[RemovableHandle]:
        if hook.path == ROOT:
            yield module.register_forward_pre_hook(BeginHook(self._told))
        if hook.reads_inputs or hook.shows_inputs:
            yield _hook_begin(module, InputHook(hook))
        if self._functional is not None:
            yield module.register_forward_pre_hook(EnterHook(self._functional, hook))
        dynamo.stays_uncompiled(type(module).forward)
        if hook.reads or hook.ends_backward or hook.shows_outputs:
            # What register_forward_hook does, without a handle.
            module._forward_hooks[self._key] = hook
        if self._functional is not None:
            yield _hook_end(module, LeaveHook(self._functional, hook.path))
        if hook.path == ROOT:
            yield _hook_end(module, EndHook(self._told))


def hook_root(model: nn.Module, told: Callable[..., None]) -> RemovableHandle:
    """Calls `told` whenever a forward of the model begins."""
    return _hook_begin(model, told)


def _hook_begin(module: nn.Module, told: Callable[..., None]) -> RemovableHandle:
    handle = module.register_forward_pre_hook(told, with_kwargs=True)
    # Torch asks only if the number is there. With the hook as its value, copies of the module leave it out, too.
    module._forward_pre_hooks_with_kwargs[handle.id] = told  # type: ignore[assignment]
    return handle


def _hook_end(module: nn.Module, told: Callable[..., None]) -> RemovableHandle:
    """Calls `told` whenever a forward of the module ends, also by an exception."""
    handle = module.register_forward_hook(told, always_call=True)
    module._forward_hooks_always_called[handle.id] = told  # type: ignore[assignment]
    return handle


def hook_output(model: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Calls the hook with what the model returns."""
    return model.register_forward_hook(hook)


def hook_forward(model: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[RemovableHandle]:
    """Calls `before` with what a model is given, and `after` with what it returns."""
    return [_hook_begin(model, before), model.register_forward_hook(after)]


def hook_calls(modules: Mapping[str, nn.Module], follows: Follows) -> list[RemovableHandle]:
    """Tells somebody of every call of these modules, however it ends."""
    handles = []
    for path, module in modules.items():
        if not isinstance(module, torch.jit.ScriptModule):
            dynamo.stays_uncompiled(type(module).forward)
            handles += [_hook_begin(module, CallHook(follows, path)), _hook_end(module, ReturnHook(follows, path))]
    return handles


def hook_tensor(tensor: Tensor, told: Callable[[Tensor], None]) -> RemovableHandle:
    """Calls `told` with the tensor's gradient."""
    handle: RemovableHandle = tensor.register_hook(told)  # type: ignore[no-untyped-call]
    return handle
