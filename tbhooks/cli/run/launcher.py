"""Runs a script, a module, a directory or an archive in this process, just as `python` would.

The script is `__main__`: worker processes find what it defines, its exit code is that of the process, and its
tracebacks show no frame of tbhooks.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from tbhooks.cli.run.options import Target

# The exit code of `python` if it cannot open the script.
NO_SUCH_FILE = 2


def launch(target: Target) -> None:
    """Runs the script. What it raises is not caught, but shown without our frames."""
    try:
        _execute(target)
    except SystemExit:
        raise
    except BaseException:
        _hide_our_frames()
        raise


def _execute(target: Target) -> None:
    _set_main(ModuleType("__main__"))
    if target.module is not None:
        sys.argv = ["-m", *target.arguments]
        _set_first_path(os.getcwd())
        _run_module(target.module, alter_argv=True)
        return
    assert target.path is not None
    path = os.path.join(os.getcwd(), target.path)  # not normalized, as in python
    sys.argv = [target.path, *target.arguments]
    if pkgutil.get_importer(path) is not None:  # a directory or an archive with a __main__ in it
        sys.path.insert(0, path) if sys.flags.safe_path else _set_first_path(path)
        _run_module("__main__", alter_argv=False)
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    code = _code(path, sys.modules["__main__"])
    exec(code, vars(sys.modules["__main__"]))  # noqa: S102  running the user's script is the point


def _set_main(main: ModuleType) -> None:
    vars(main).update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main


def _set_first_path(directory: str) -> None:
    """Replaces the entry of `sys.path` that was made for the `tbhooks` command."""
    if not sys.flags.safe_path:
        sys.path[0] = directory


def _run_module(module: str, alter_argv: bool) -> None:
    """Runs a module by the function that `python -m` calls."""
    run: Any = getattr(runpy, "_run_module_as_main")  # noqa: B009  private, but it is what python itself runs
    run(module, alter_argv)


def _code(path: str, main: ModuleType) -> CodeType | Any:
    compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    try:
        data = Path(path).read_bytes()
    except OSError as problem:
        where = f"can't open file {path!r}: [Errno {problem.errno}] {problem.strerror}"
        sys.stderr.write(f"{sys.orig_argv[0]}: {where}\n")
        raise SystemExit(NO_SUCH_FILE) from None
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    return loader.get_code("__main__") if compiled else compile(data, path, "exec", dont_inherit=True)


# --- Tracebacks ------------------------------------------------------------------------------------------


def _hide_our_frames() -> None:
    """Replaces `sys.excepthook`, by which the interpreter will show the exception."""
    show = sys.excepthook

    def cleaned(kind: type[BaseException], problem: BaseException, _: TracebackType | None) -> None:
        clean(problem)
        show(kind, problem, problem.__traceback__)

    sys.excepthook = cleaned


def clean(problem: BaseException) -> None:
    """Removes our frames from the traceback of an exception, and of its causes."""
    pending, seen = [problem], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_our_frames(one.__traceback__)
        others = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
        pending += [other for other in others if isinstance(other, BaseException)]


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    frames = list(_entries(trace))
    launched = [i for i, entry in enumerate(frames) if entry.tb_frame.f_code is _execute.__code__]
    first = launched[-1] + 1 if launched else 0
    kept = [entry for entry in frames[first:] if not _is_ours(entry)]
    if len(kept) == len(frames):
        return trace
    result: TracebackType | None = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(entry: TracebackType) -> bool:
    name = entry.tb_frame.f_globals.get("__name__")
    return isinstance(name, str) and name.startswith("tbhooks.cli.run.")
