"""What happens around every frame that torch.compile compiles, while a model is watched.

Hooks that are put on after a frame was compiled are ignored by the compiled code, so they are put on before: for
the time of a compilation every watch has its hooks on its model, in unlogged steps too. And where a compilation
fails or breaks a graph because of our hooks, it is repeated without them: an unknown torch or backend then costs
the numbers of what is compiled, and training goes on as if nothing watched it.
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

from tbhooks.capture import dynamo as compiled
from tbhooks.capture.dynamo import CompileGate
from tbhooks.data.patching import wrapping
from tbhooks.reduction.torch_private import look_up

_OURS = str(Path(__file__).parent)
# Dynamo raises these about the code it reads. Anything else may come from our operators, in a backend for example.
_ABOUT_CODE = ("Unsupported", "UserError", "SkipFrame")
_RESUMED = "torch_dynamo_resume_in_"


class Watching(Protocol):
    """A watch on a model, as far as compilers are concerned."""

    gate: CompileGate
    lost_in: set[CodeType]

    def on_for_compiler(self) -> contextlib.AbstractContextManager[None]: ...

    def off_for_compiler(self) -> contextlib.AbstractContextManager[None]: ...

    def lost_in_compiler(self, code: CodeType, problem: BaseException, had_hooks: bool) -> None: ...

    def knows(self, module: nn.Module) -> bool: ...

    def classes(self) -> frozenset[type[nn.Module]]: ...


_watches: weakref.WeakSet[Watching] = weakref.WeakSet()
_without_hooks: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that was compiled while none of our hooks was in it."""
_with_hooks: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that has graphs with our hooks. They do not count against the user's limit of recompiles, nor after the last
watch has closed."""


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
    else:
        _PATCH.release(_hooked_code)
    _PATCH.release(watching)


def is_patched() -> bool:
    """Whether hooks can become part of what is compiled. Not with a torch whose compiler is not known."""
    return _PATCH.is_installed


def _compile(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands around torch._dynamo.convert_frame._compile."""
    watches = list(_watches)
    frame = _Frame(wrapped, args, kwargs)
    if frame.is_ours:
        return _skip()
    able = [] if frame.is_exported else [watching for watching in watches if frame.code not in watching.lost_in]
    if not able or frame.code is None or not is_patched():
        return _compile_without(frame, watches)
    before = len(compiled.traced)
    reasons = _graph_breaks()
    had_hooks = {watching: watching.gate.was_compiled for watching in watches}
    try:
        with contextlib.ExitStack() as stack:
            for watching in watches:
                stack.enter_context(watching.on_for_compiler() if watching in able else watching.off_for_compiler())
            stack.enter_context(_config(frame, watches))
            stack.enter_context(_hooks_wanted(True))
            result = frame.compile()
        traced = compiled.traced[before:]
        problem = _broken_by_us(reasons) if traced else None
        if problem is None:
            (_with_hooks if traced else _without_hooks).add(frame.code)
            return result
    except Exception as caught:
        traced, problem = compiled.traced[before:], caught
        if not traced or not _may_be_ours(caught):
            raise
    finally:
        del compiled.traced[before:]
    result = _compile_without(frame, watches)  # raises if it is not because of us
    for watching in able:
        watching.lost_in_compiler(frame.code, problem, had_hooks[watching])
    return result


@contextlib.contextmanager
def _hooks_wanted(wanted: bool) -> Iterator[None]:
    before, compiled.hooks_are_wanted = compiled.hooks_are_wanted, wanted
    try:
        yield
    finally:
        compiled.hooks_are_wanted = before


def _skip() -> Any:
    """What dynamo is told to run a frame as it is, and not to ask again."""
    result = getattr(sys.modules.get("torch._dynamo.types"), "ConvertFrameReturn", None)
    return None if result is None else result()  # before torch 2.7 it was None


def _compile_without(frame: _Frame, watches: Iterable[Watching]) -> Any:
    with contextlib.ExitStack() as stack:
        for watching in watches:
            stack.enter_context(watching.off_for_compiler())
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
        with contextlib.suppress(TypeError, ValueError):
            given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
            if isinstance(given.get("code"), CodeType) and isinstance(given.get("locals"), dict):
                self.code, self.locals = given["code"], given["locals"]
            self.is_exported = bool(given.get("export"))

    @property
    def is_ours(self) -> bool:
        """Whether it is code of this package, called by a hook outside of a graph: a fullgraph would fail on it."""
        return self.code is not None and self.code.co_filename.startswith(_OURS)

    def compile(self) -> Any:
        return self._wrapped(*self._args, **self._kwargs)

    def is_of_other_model(self, watches: list[Watching]) -> bool:
        """Whether this is the forward of a module that nobody watches, of a class that is watched elsewhere."""
        module = self.locals.get("self")
        return (
            isinstance(module, nn.Module)
            and any(type(module) in watching.classes() for watching in watches)
            and not any(watching.knows(module) for watching in watches)
        )


def _config(frame: _Frame, watches: list[Watching]) -> contextlib.AbstractContextManager[Any]:
    """How dynamo compiles a frame.

    What is watched has two graphs, three with evaluations, for each that it has otherwise: they do not count against
    the user's limit. And the code of an unwatched model must not serve a watched one of the same class: dynamo looks
    whether a module has hooks only if it is told to.
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


# What was compiled without hooks, and would go on without them.

_reset_code: Callable[[CodeType], None] | None = look_up(
    "torch._C._dynamo.eval_frame.reset_code", None, "a model that ran compiled before watch() is not seen inside"
)


_entries: Callable[[CodeType], list[Any]] = look_up(
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
    lambda _: [None],
    "what is not compiled any more may be called compiled",
)


def forget_unhooked(model: nn.Module | None) -> int:
    """Lets code be compiled anew that has none of our hooks in it: what runs a model of this kind, or all there is.
    Returns how much there was; none where the user does not want anything to be compiled any more.
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
    """Whether it is the forward of a module in it, the rest of one after a graph break, or what torch calls its own
    modules by.
    """
    # A scripted module's class has no forward, and raises if it is asked.
    forwards = {getattr(getattr(type(module), "forward", None), "__code__", None) for module in model.modules()}
    if code.co_name.startswith(_RESUMED):
        return any(forward is not None and forward.co_filename == code.co_filename for forward in forwards)
    is_of_torch = (getattr(getattr(type(model), "forward", None), "__module__", None) or "").startswith("torch.")
    return code in forwards or (is_of_torch and code.co_filename.endswith("external_utils.py"))


def _may_compile_again() -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(getattr(dynamo, "_stance", None), "stance", "unknown")
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
_PATCH = wrapping("torch._dynamo.convert_frame", "_compile", _compile, "torch 2.9 to 2.13", accepts=_note_compiled)
