"""Attaches hooks to the modules of a watched model and removes them. Only this file registers hooks with torch."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import CodeType

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import selection, structure
from tbhooks.capture.compile import compilation, dynamo
from tbhooks.capture.functional import taps
from tbhooks.capture.functional.function_mode import FunctionalObserver
from tbhooks.capture.hooks.collectors import Collectors
from tbhooks.capture.hooks.eager_hooks import EagerHook, EagerLane
from tbhooks.capture.hooks.hook_types import (  # fmt: skip
    BeginHook,
    CallHook,
    CallObserver,
    EndHook,
    EnterHook,
    ForwardHook,
    HookObserver,
    InputHook,
    LeaveHook,
    MarkHook,
    ReturnHook,
)
from tbhooks.capture.hooks.unpicklable import COPIES_WITHOUT_HOOKS
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report
from tbhooks.reduction import torch_private

_OF_MODULES = ("activation", "gradient", "input")
NOT_IN_COMPILED = "it runs in compiled code, which could not be compiled with hooks"
UNKNOWN_COMPILER = "no call of it was seen, and compiled code is not read: the compiler of this torch is not known"
COMPILED_BEFORE = (
    "no module in it was seen running. Code that was compiled without hooks, for example before watch(), is compiled "
    "again at its next call, with hooks: the next logged step is read if that was the reason"
)
BLIND = (
    "no module in it was seen running. Code that was compiled without hooks runs without them until "
    "torch.compiler.reset(). Evaluation passes are read only after w.evaluation()"
)


class HookManager:
    """The hooks of one watch on the modules of its model."""

    def __init__(
        self, observer: HookObserver, model: weakref.ref[nn.Module], selector: selection.Selector,
        wanted: frozenset[str], functional: FunctionalObserver | None, collectors: Collectors, eager: EagerLane,
        report: Report,
    ) -> None:  # fmt: skip
        self.hooks: dict[str, ForwardHook] = {}
        """By path; they are kept while they are detached."""
        self.reading: tuple[str, ...] = ()  # the paths of those that read outputs or gradients
        self._taps: dict[str, ForwardHook] = {}
        self._paths: dict[int, tuple[str, weakref.ref[nn.Module]]] | None = None
        self.aliases: dict[str, str] = {}
        """Further names of shared modules."""
        self.is_attached = False
        self.gate = observer.gate
        self.lost_in: set[CodeType] = set()
        """Code that could not be compiled with hooks."""
        self._observer, self._model = observer, model
        self._selector = selector
        self._wanted = wanted
        self._functional = functional
        self._collectors = collectors
        self._eager, self._is_compiling = eager, False
        self._report = report
        self._subscription_version = 0
        self._structure_version: int | None = None
        self._handles: list[RemovableHandle] = []
        # The same key on all modules: a handle for each would be half of what attaching costs. Negative, because a
        # model that was loaded with its hooks may hold any key that torch will yet give out.
        self._key = -1 - RemovableHandle(OrderedDict()).id
        self._lock = threading.RLock()  # a compilation may run in another thread
        self._was_blind = False
        self._failures_reported = len(dynamo.failures)

    def forked(self) -> None:
        """In a forked child, the thread that held the lock does not exist."""
        self._lock = threading.RLock()

    def assign_hook_ids(self) -> None:
        """Compiled graphs identify hooks by their ids."""
        for hook in self.hooks.values():
            hook.assign_hook_id()

    def start(self) -> None:
        """From now on what is compiled has hooks in it; what was compiled before is compiled again."""
        model = self._model()
        COPIES_WITHOUT_HOOKS.acquire(self)
        compilation.begin(self)
        taps.begin(self._observer)
        with self._report.guarded("looking for compiled code"):
            if model is not None and compilation.forget_unhooked(model):
                message = "the model ran compiled before watch(): it is compiled again, with hooks"
                self._report.log_once(message, logging.INFO)

    def stop(self) -> None:
        compilation.end(self)
        taps.end(self._observer)
        COPIES_WITHOUT_HOOKS.release(self)

    def attach(self) -> None:
        """Attaches hooks to every watched module there is now, also to added and replaced ones."""
        with self._lock:
            self._attach()

    def _attach(self) -> None:
        model = self._model()
        if model is None:
            return
        # Changed hooks would cause a recompile, so compiled ones stay as they are.
        is_current = self._subscription_version == self._collectors.subscription_version or self.gate.was_compiled
        version = structure.of(model).version() if self._is_repeatable else None
        if version is not None and version == self._structure_version and is_current:
            if not self.is_attached:
                self._register_all()
            return
        self._structure_version = version
        modules = structure.of(model).modules()
        self.aliases, self._paths = modules.aliases, None
        wanted = self._modules_to_hook(modules.by_path)
        if self.is_attached and is_current and all(self._has(path, module) for path, module in wanted.items()):
            self._collectors.attach(modules.by_path)
            return
        self.detach()
        if not all(path in wanted and self._has(path, wanted[path]) for path in self.hooks):
            self.sweep()
        chosen, known = self._selector.choose(wanted), self.hooks
        self.hooks = {
            path: known[path]
            if self._has(path, module)
            else ForwardHook(self._observer, path, module, self._wanted, path in chosen, self._eager)
            for path, module in wanted.items()
        }
        self.reading = tuple(path for path, hook in self.hooks.items() if hook.reads)
        if self._collectors:
            for path, module in wanted.items():
                self._set_collected(self.hooks[path], module)
        self._register_all()
        self._subscription_version = self._collectors.subscription_version
        self._collectors.attach(modules.by_path)

    def _register_all(self) -> None:
        """Attaches the hooks to their modules."""
        taps.begin(self._observer)
        COPIES_WITHOUT_HOOKS.acquire(self)
        for hook in self.hooks.values():
            module = hook.module()
            if module is not None:
                self._handles += self._register(hook, module)
        self.is_attached = bool(self.hooks)
        if self.gate.was_compiled:
            self.assign_hook_ids()
        if self._functional is not None:
            self._functional.is_enabled = True

    @property
    def _is_repeatable(self) -> bool:
        """Whether the same modules are watched as before if the structure of the model is the same."""
        return not self._collectors and self._functional is None and not self.gate.has_taps and self._selector.is_static

    # Taps.

    def hook_of(self, module: nn.Module) -> ForwardHook | None:
        """The hook of a module; None if the module is not part of the model, or is not watched."""
        return self.hooks.get(self.path_of(module) or "")

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module; None if it is not part of the model."""
        if self._paths is None:
            model = self._model()
            by_path = {} if model is None else selection.walk(model).by_path
            self._paths = {id(own): (path, weakref.ref(own)) for path, own in by_path.items()}
        path, own = self._paths.get(id(module), (None, None))
        return path if own is not None and own() is module else None

    def tap_hook(self, path: str, name: str) -> ForwardHook | None:
        """The hook of a tap, which is registered nowhere; None if its module is not watched."""
        owner, tapped = self.hooks.get(path), f"{path}:{name}"
        module = None if owner is None else owner.module()
        if owner is None or module is None or not owner.reads:
            return None
        if tapped not in self._taps:
            hook = self._taps[tapped] = ForwardHook(self._observer, tapped, module, self._wanted, chosen=True)
            hook.has_units = False
        return self._taps[tapped]

    def mark_calls(self) -> None:
        """A tap was compiled: from now on hooks mark in graphs which module is running."""
        with self._report.guarded("attaching hooks for taps"):
            was_attached = self.is_attached
            self.detach()
            if was_attached:
                self.attach()

    def reattach(self) -> None:
        """To be called when collectors want other modules than before."""
        if self.gate.was_compiled and self.is_attached:
            for hook in self.hooks.values():
                self._set_collected(hook, hook.module())
            self.attach()  # changes only what has no hook yet, because changed hooks would cause a recompile
        elif self.is_attached or self.gate.open:
            self.detach()
            self.attach()

    def _set_collected(self, hook: ForwardHook, module: nn.Module | None) -> None:
        """Sets on a hook whether a collector wants what it reads."""
        if module is not None:
            hook.collects_outputs = self._collectors.wants(hook.path, module)
            hook.collects_inputs = self._collectors.wants_inputs(hook.path, module)
            hook.reads_pairs = self._collectors.wants_pairs(hook.path)
            hook.update_eager()

    def detach(self) -> None:
        """Leaves no hook on any module."""
        with self._lock:
            self._detach()

    def _detach(self) -> None:
        for hook in self.hooks.values() if self.is_attached else ():
            module = hook.module()
            if module is not None:
                module._forward_hooks.pop(self._key, None)
        for handle in self._handles:
            handle.remove()
        self._handles, self.is_attached = [], False
        self._collectors.detach()
        if self._functional is not None:
            self._functional.is_enabled = False
            self._functional.abandon()

    # What compilation.py calls.

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks are attached, in an unlogged step too, and stay attached if any of them is compiled."""
        was_attached, was_compiling, self._is_compiling = self.is_attached, self._is_compiling, True
        with self._report.guarded("attaching hooks before compiling"):
            if not was_attached:
                self.attach()
            self._exchange()
        try:
            yield
        finally:
            self._is_compiling = was_compiling
            with self._report.guarded("exchanging hooks after compiling"):
                self._exchange()
            if not was_attached and not self.gate.was_compiled:
                with self._report.guarded("removing hooks after compiling"):
                    self.detach()

    def _called(self, hook: ForwardHook) -> ForwardHook | EagerHook:
        return hook.called_by_torch(self._is_compiling or compilation.is_unknown())

    def keep_to_python(self) -> None:
        """The compiler may meet hooks at any time: dynamo cannot trace those in C."""
        self._is_compiling = True
        with self._report.guarded("exchanging hooks"):
            self._exchange()

    def _exchange(self) -> None:
        """Exchanges the hooks that torch calls for those it is to call now."""
        with self._lock:
            for hook in self.hooks.values() if self.is_attached else ():
                module = hook.module()
                if module is not None and self._key in module._forward_hooks:
                    module._forward_hooks[self._key] = hook.called_by_torch(
                        self._is_compiling or compilation.is_unknown()
                    )

    @contextlib.contextmanager
    def detached(self) -> Iterator[None]:
        """No hooks are attached inside; those that were are attached again afterwards."""
        was_attached = self.is_attached
        with self._report.guarded("removing hooks before compiling"):
            self.detach()
        try:
            yield
        finally:
            if was_attached:
                with self._report.guarded("attaching hooks after compiling"):
                    self.attach()

    def on_lost_code(self, code: CodeType, problem: BaseException, had_hooks: bool) -> None:
        """The code could be compiled without hooks only."""
        self.lost_in.add(code)
        self._report.error(f"compiling {code.co_qualname} with hooks failed, and without them it worked", problem)
        self.gate.was_compiled = had_hooks
        if not had_hooks and not self.gate.open:
            self.detach()

    def knows(self, module: nn.Module) -> bool:
        """Whether the module is part of the watched model."""
        model = self._model()
        return model is not None and any(own is module for own in model.modules())

    def classes(self) -> frozenset[type[nn.Module]]:
        model = self._model()
        return frozenset(() if model is None else map(type, model.modules()))

    def report_lost(self, called: set[str]) -> None:
        """Reports what could not be read because of the torch that is installed."""
        for name, why in torch_private.missing.items():
            self._report.mark_unseen(name, why)
        for where, problem in dynamo.failures[self._failures_reported :]:
            self._report.error(where, problem)
        self._failures_reported = len(dynamo.failures)
        why = self._why_not_compiled()
        for path in (path for path, hook in self.hooks.items() if why and hook.reads and path not in called):
            self._report.mark_unseen(path, why)

    def _why_not_compiled(self) -> str:
        """Why hooks are not part of what was compiled; nothing if they are."""
        if self.lost_in:
            return NOT_IN_COMPILED
        return UNKNOWN_COMPILER if compilation.is_unpatched_for(self) else ""

    def why_blind(self) -> str:
        """Why no module of the model was seen running, and what is done about it."""
        if why := self._why_not_compiled():
            return why
        if not self._was_blind:
            self._was_blind = True
            if compilation.forget_unhooked(None):
                return COMPILED_BEFORE
        return BLIND

    def come_last(self, asking: ForwardHook) -> None:
        """Moves our hooks behind those that others have registered since, which may replace an output."""
        module = asking.module()
        if module is None or next(reversed(module._forward_hooks), self._key) == self._key:
            return
        for hook in self.hooks.values():
            module = hook.module()
            if module is not None and self._key in module._forward_hooks:
                module._forward_hooks[self._key] = module._forward_hooks.pop(self._key)

    def sweep(self) -> None:
        """Removes hooks of ours that others have moved to modules of their own, as quantisation does."""
        model = self._model()
        for module in () if model is None else model.modules():
            for hooks in filter(None, (module._forward_hooks, module._forward_pre_hooks)):
                for key in [key for key, hook in hooks.items() if self._is_mine(hook)]:
                    del hooks[key]

    def _is_mine(self, hook: object) -> bool:
        if isinstance(hook, EnterHook | LeaveHook):
            return hook.functional is self._functional
        hook = hook.hook if isinstance(hook, EagerHook) else hook
        own = ForwardHook | InputHook | MarkHook | BeginHook | EndHook
        return isinstance(hook, own) and hook.observer is self._observer

    def _has(self, path: str, module: nn.Module) -> bool:
        return path in self.hooks and self.hooks[path].module() is module

    def _modules_to_hook(self, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
        if "functional" in self._wanted or self.gate.has_taps:
            chosen = modules
        else:
            chosen = {} if self._wanted.isdisjoint(_OF_MODULES) else self._selector.choose(modules)
            # Weight gradients are read when the model's backward ends, and forwards without a backward are left out.
            if chosen or "weight_gradient" in self._wanted:
                chosen = {ROOT: modules[ROOT], **chosen}
            if self._collectors:
                chosen |= {path: module for path, module in modules.items() if self._is_collected(path, module)}
        return {path: module for path, module in chosen.items() if self._can_be_hooked(path, module)}

    def _is_collected(self, path: str, module: nn.Module) -> bool:
        return self._collectors.wants(path, module) or self._collectors.wants_inputs(path, module)

    def _can_be_hooked(self, path: str, module: nn.Module) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            self._report.mark_unseen(path, "a scripted or traced module takes no hooks")
            return False
        return type(module).forward is not nn.Module.forward  # ModuleList and its like are never called

    def _register(self, hook: ForwardHook, module: nn.Module) -> Iterator[RemovableHandle]:
        if hook.path == ROOT:
            yield module.register_forward_pre_hook(BeginHook(self._observer))
        if hook.reads_inputs or hook.collects_inputs:
            yield hook_begin(module, InputHook(hook))
        if self.gate.has_taps:
            yield module.register_forward_pre_hook(MarkHook(hook, begins=True))
        if self._functional is not None:
            yield module.register_forward_pre_hook(EnterHook(self._functional, hook))
        dynamo.stays_uncompiled(type(module).forward)
        if hook.reads or hook.ends_backward or hook.collects_outputs:
            # What register_forward_hook does, without a handle.
            module._forward_hooks[self._key] = self._called(hook)
        if self.gate.has_taps:
            yield module.register_forward_hook(MarkHook(hook, begins=False))
        if self._functional is not None:
            yield _hook_end(module, LeaveHook(self._functional, hook))
        if hook.path == ROOT:
            yield _hook_end(module, EndHook(self._observer))


def hook_begin(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Calls the hook whenever a forward of the module begins."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    # Torch only asks whether the key is there. With the hook as its value, copies of the module leave it out, too.
    module._forward_pre_hooks_with_kwargs[handle.id] = hook  # type: ignore[assignment]
    return handle


def _hook_end(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Calls the hook whenever a forward of the module ends, also by an exception."""
    handle = module.register_forward_hook(hook, always_call=True)
    module._forward_hooks_always_called[handle.id] = hook  # type: ignore[assignment]
    return handle


def hook_output(model: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Calls the hook with what the model returns."""
    return model.register_forward_hook(hook)


def hook_forward(model: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[RemovableHandle]:
    """Calls `before` with what a model is given, and `after` with what it returns."""
    return [hook_begin(model, before), model.register_forward_hook(after)]


def hook_calls(modules: Mapping[str, nn.Module], observer: CallObserver) -> list[RemovableHandle]:
    """Calls the observer before and after every call of these modules, however it ends."""
    handles = []
    for path, module in modules.items():
        if not isinstance(module, torch.jit.ScriptModule):
            dynamo.stays_uncompiled(type(module).forward)
            handles += [hook_begin(module, CallHook(observer, path)), _hook_end(module, ReturnHook(observer, path))]
    return handles


def hook_tensor(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Calls the hook with the tensor's gradient."""
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle
