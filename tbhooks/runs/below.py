"""Which runs a command means by a directory: the one in it, or those below it.

Some trainers write their own scalars to a directory and have tbhooks write below it, and `tbhooks run` gives each of
several models a directory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tbhooks.data.errors import ArgumentError
from tbhooks.data.remote import local
from tbhooks.runs import Run, find
from tbhooks.runs.event_records import records

Read = Callable[[Path], Run]
_MARK = b"tbhooks"


def every_run(directory: str | Path, read: Read) -> list[Run]:
    """Every run at or below a directory that has frames of tbhooks; an ArgumentError if there is none."""
    where = local(directory)
    found = [path for path in find(where) if path == where or may_have_frames(path)] if where.is_dir() else [where]
    known = [read(path) for path in found]
    with_frames = [run for run in known if run.frames]
    if not with_frames:
        below = ", nor below it" if where.is_dir() else ""
        raise ArgumentError(f"there is no data of tbhooks in {str(where)!r}{below}{_why(known)}")
    return with_frames


def one_run(directory: str | Path, read: Read) -> Run:
    """The run in a directory. If it has no frames, but a single run below it has, that one with the scalars of both."""
    where = local(directory)
    own = read(where) if not where.is_dir() or where in find(where) else None
    if own is not None and own.frames:
        return own
    below = [path for path in find(where) if path != where and may_have_frames(path)] if where.is_dir() else []
    if len(below) == 1 and (run := read(below[0])).frames:
        return run if own is None else replace(run, scalars={**own.scalars, **run.scalars})
    if own is None:
        own = read(where)  # which says why not
    if not own.scalars:
        raise ArgumentError(f"there is nothing to read in {str(where)!r}{_why([own])}")
    listed = ", ".join(map(str, below[:5])) + (f" and {len(below) - 5} more" if len(below) > 5 else "")
    return (
        own if not below else replace(own, problems=[*own.problems, f"there are runs with frames below it: {listed}"])
    )


def may_have_frames(directory: Path) -> bool:
    """Whether a run has anything of tbhooks; read up to its first frame, or to the end where there is none."""
    files = sorted(path for path in directory.glob("*tfevents*") if not path.is_dir())
    if any(directory.glob("*.jsonl")):
        return True
    return not files or any(_MARK in data for path in files for data in records(path, lambda _problem: None))


def _why(runs: list[Run]) -> str:
    problems = [problem for run in runs for problem in run.problems]
    return f": {'; '.join(problems[:3])}" if problems else ""
