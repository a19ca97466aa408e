"""Compiles functions with hooks in them, while a model is watched.

Compiled code ignores hooks that are attached later. So dynamo's compiler is wrapped (data/process/patching.py): while
it runs, every watch has its hooks attached to its model, in unlogged steps too. Where a compilation fails or breaks a
graph because of our hooks, it is repeated without them: an unknown torch or backend then costs the statistics of what
is compiled, and training goes on as if unwatched. What the hooks add to a graph is in dynamo.py.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from torch import nn

from tbhooks.capture.compile import dynamo
from tbhooks.capture.compile.dynamo import CompileGate
from tbhooks.data.process.patching import wrapping
from tbhooks.reduction.torch_private import look_up

_OURS = str(Path(__file__).parents[2])  # the package
# Dynamo raises these about the code it reads. Anything else may come from our operators, in a backend for example.
_ABOUT_CODE = ("Unsupported", "UserError", "SkipFrame")
_RESUMED = "torch_dynamo_resume_in_"


class Watching(Protocol):
    """What the compiler needs of a watch: the hook manager implements it."""

    gate: CompileGate
    lost_in: set[CodeType]

    def attached(self) -> contextlib.AbstractContextManager[None]: ...

    def detached(self) -> contextlib.AbstractContextManager[None]: ...

    def mark_calls(self) -> None: ...

    def keep_to_python(self) -> None: ...

    def on_lost_code(self, code: CodeType, problem: BaseException, had_hooks: bool) -> None: ...

    def knows(self, module: nn.Module) -> bool: ...

    def classes(self) -> frozenset[type[nn.Module]]: ...


_watches: weakref.WeakSet[Watching] = weakref.WeakSet()
_without_hooks: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that was compiled while none of our hooks was in it."""
_with_hooks: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that has graphs with our hooks."""


def begin(watching: Watching) -> None:
    """From now on what is compiled is compiled with the hooks of this watch."""
    _watches.add(watching)
    _PATCH.acquire(watching)


def end(watching: Watching) -> None:
    """Nothing more is compiled with its hooks.

    The patch outlives the last watch where there is compiled code with hooks: its graphs would count against the
    user's limit of recompiles.
    """
    _watches.discard(watching)
    if any(_entries(code) for code in list(_with_hooks)):
        _PATCH.acquire(_hooked_code)
    else:  # or torch.compiler.reset() has removed it
        _with_hooks.clear()
        _PATCH.release(_hooked_code)
    _PATCH.release(watching)


def is_patched() -> bool:
    """Whether hooks can become part of what is compiled. Not with a torch whose compiler is not known."""
    return _PATCH.is_installed


def is_unknown() -> bool:
    """Whether something may be compiled without this module being asked."""
    return "torch._dynamo" in sys.modules and not is_patched()


def is_unpatched_for(watching: Watching) -> bool:
    """Whether a watch has begun, and what dynamo compiles has no hooks all the same."""
    return watching in _watches and is_unknown()


def _compile(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps torch._dynamo.convert_frame._compile. Only what the compiler itself raises reaches the user."""
    frame: _Frame | None = None
    try:
        frame = _Frame(wrapped, args, kwargs)
        return _compile_frame(frame)
    except Exception as problem:
        if frame is not None and problem is frame.raised:
            raise
        dynamo.note_failure("compiling with hooks", problem)
    for watching in list(_watches):
        watching.keep_to_python()
    return wrapped(*args, **kwargs)


def _compile_frame(frame: _Frame) -> Any:
    """With the hooks of all watches, or without those that the code cannot be compiled with."""
    watches = list(_watches)
    if frame.is_ours:
        return _skip()
    able = [] if frame.is_exported else [watching for watching in watches if frame.code not in watching.lost_in]
    if not able or frame.code is None or not is_patched():
        return _compile_without(frame, watches)
    before, running = len(dynamo.traced), list(dynamo.running_calls.stack)
    without_taps = [watching for watching in able if not watching.gate.has_taps]
    reasons = _graph_breaks()
    had_hooks = {watching: watching.gate.was_compiled for watching in watches}
    try:
        with contextlib.ExitStack() as stack:
            for watching in watches:
                stack.enter_context(watching.attached() if watching in able else watching.detached())
            stack.enter_context(_config(frame, watches))
            stack.enter_context(_hooks_wanted(True))
            result = frame.compile()
        traced = dynamo.traced[before:]
        problem = _broken_by_us(reasons) if traced else None
        if problem is None:
            (_with_hooks if traced else _without_hooks).add(frame.code)
            return result
    except Exception as caught:
        found = [watching for watching in without_taps if watching.gate.has_taps]
        for watching in found:
            watching.mark_calls()
        if found:
            return _compile_frame(frame)
        traced, problem = dynamo.traced[before:], caught
        if not traced or not _may_be_ours(caught):
            raise
    finally:
        del dynamo.traced[before:]
        dynamo.restore_calls(running)
    result = _compile_without(frame, watches)  # raises if it is not because of us
    for watching in able:
        watching.on_lost_code(frame.code, problem, had_hooks[watching])
    return result


@contextlib.contextmanager
def _hooks_wanted(wanted: bool) -> Iterator[None]:
    before, dynamo.hooks_are_wanted = dynamo.hooks_are_wanted, wanted
    try:
        yield
    finally:
        dynamo.hooks_are_wanted = before


def _skip() -> Any:
    """The result that makes dynamo run a frame uncompiled from now on."""
    return sys.modules["torch._dynamo.types"].ConvertFrameReturn()


def _compile_without(frame: _Frame, watches: Iterable[Watching]) -> Any:
    with contextlib.ExitStack() as stack:
        for watching in watches:
            stack.enter_context(watching.detached())
        if frame.code is not None and frame.code in _with_hooks:
            stack.enter_context(_config(frame, []))
        stack.enter_context(_hooks_wanted(False))
        result = frame.compile()
    if frame.code is not None and not frame.is_exported:
        _without_hooks.add(frame.code)
    return result


class _Frame:
    """One call of dynamo's compiler."""

    def __init__(self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._wrapped, self._args, self._kwargs = wrapped, args, kwargs
        self.code: CodeType | None = None
        self.locals: dict[str, Any] = {}
        self.is_exported = False
        self.raised: BaseException | None = None
        """What the compiler raised at its last call."""
        with contextlib.suppress(TypeError, ValueError):
            given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
            if isinstance(given.get("code"), CodeType) and isinstance(given.get("locals"), dict):
                self.code, self.locals = given["code"], given["locals"]
            self.is_exported = bool(given.get("export"))

    @property
    def is_ours(self) -> bool:
        """Whether it is code of this package, called by a hook outside of a graph: fullgraph=True would fail on it."""
        return self.code is not None and self.code.co_filename.startswith(_OURS)

    def compile(self) -> Any:
        self.raised = None
        try:
            return self._wrapped(*self._args, **self._kwargs)
        except BaseException as problem:
            self.raised = problem
            raise

    def is_of_other_model(self, watches: list[Watching]) -> bool:
        """Whether it is the forward of an unwatched module whose class also occurs in a watched model."""
        module = self.locals.get("self")
        return (
            isinstance(module, nn.Module)
            and any(type(module) in watching.classes() for watching in watches)
            and not any(watching.knows(module) for watching in watches)
        )


def _config(frame: _Frame, watches: list[Watching]) -> contextlib.AbstractContextManager[Any]:
    """Dynamo's configuration while it compiles a frame.

    A watched model has two graphs, three with evaluations, for each one that it has unwatched: the limits of recompiles
    are raised accordingly. And the graph of an unwatched model must not be used for a watched one of the same class:
    dynamo guards on hooks only if it is configured to.
    """
    config = sys.modules["torch._dynamo"].config
    changes: dict[str, Any] = {}
    if frame.is_of_other_model(watches):
        changes["skip_nnmodule_hook_guards"] = False
    else:
        limits = ("recompile_limit", "accumulated_recompile_limit")
        changes = {name: 3 * getattr(config, name) for name in limits if hasattr(config, name)}
    with contextlib.suppress(Exception):
        patch: contextlib.AbstractContextManager[Any] = config.patch(**changes)
        return patch
    return contextlib.nullcontext()


def _may_be_ours(problem: BaseException) -> bool:
    stack = getattr(problem, "real_stack", None)
    is_about_code = any(base.__name__ in _ABOUT_CODE for base in type(problem).__mro__)
    return not is_about_code or not stack or _is_in_ours(stack)


def _is_in_ours(stack: Iterable[Any]) -> bool:
    return any(str(getattr(entry, "filename", "")).startswith(_OURS) for entry in stack)


def _graph_breaks() -> list[Any]:
    """Why graphs broke so far."""
    return list(getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_reasons", ()))


def _broken_by_us(before: list[Any]) -> BaseException | None:
    for reason in _graph_breaks()[len(before) :]:
        if _is_in_ours(getattr(reason, "user_stack", ())):
            return RuntimeError(f"the graph broke: {getattr(reason, 'reason', '')}")
    return None


# Code that was compiled without hooks.

_reset_code: Callable[[CodeType], None] | None = look_up(
    "torch._C._dynamo.eval_frame.reset_code", None, "modules in a model that ran compiled before watch() are not read"
)


_entries: Callable[[CodeType], list[Any]] = look_up(
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
    lambda _: [None],
    "dynamo's compiler may stay wrapped after the last watch has closed",
)


def forget_unhooked(model: nn.Module | None) -> int:
    """Makes dynamo compile code again that has none of our hooks in it: the code that runs this model, or all code.
    Returns how many functions there were; 0 if the user has forbidden further compilation.
    """
    if _reset_code is None or not _without_hooks or not _may_compile_again():
        return 0
    found = [code for code in list(_without_hooks) if model is None or _runs(code, model)]
    for code in found:
        _without_hooks.discard(code)
    with getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", contextlib.nullcontext()):
        found = [code for code in found if _entries(code)]
        for code in found:
            _reset_code(code)
    return len(found)


def _runs(code: CodeType, model: nn.Module) -> bool:
    """Whether it is the forward of a module of the model, the rest of one after a graph break, or the function by which
    dynamo calls torch's own modules.
    """
    # The class of a scripted module has no forward, and raises when it is read.
    forwards = {getattr(getattr(type(module), "forward", None), "__code__", None) for module in model.modules()}
    if code.co_name.startswith(_RESUMED):
        return any(forward is not None and forward.co_filename == code.co_filename for forward in forwards)
    is_of_torch = (getattr(getattr(type(model), "forward", None), "__module__", None) or "").startswith("torch.")
    return code in forwards or (is_of_torch and code.co_filename.endswith("external_utils.py"))


def _may_compile_again() -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "unknown")
    return stance == "default" and not getattr(sys.modules["torch._dynamo"].config, "error_on_recompile", False)


def _note_compiled(_original: object) -> bool:
    """Called before dynamo's compiler is wrapped: what was compiled until then has no hooks in it."""
    input_codes = getattr(sys.modules["torch._dynamo.convert_frame"], "input_codes", None)
    for reference in list(getattr(input_codes, "seen", ())):
        if (code := reference()) is not None and code not in _with_hooks:
            _without_hooks.add(code)
    return look_up("torch._dynamo.convert_frame._compile", None, "modules in compiled code are not read") is not None


class _HookedCode:
    """Holds the patch for compiled code that outlives the watch it was compiled with."""


_hooked_code = _HookedCode()
_PATCH = wrapping("torch._dynamo.convert_frame", "_compile", _compile, "torch 2.10 to 2.15", accepts=_note_compiled)
