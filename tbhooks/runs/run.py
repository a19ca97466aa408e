"""A run and where to find it: the run of a directory, and the runs below a directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tbhooks.data.artifacts.flights import Flight
from tbhooks.data.errors import ArgumentError, similar
from tbhooks.data.findings import Issue, first_of_each, issues
from tbhooks.data.frame import Finding, Frame
from tbhooks.data.process.remote import local
from tbhooks.runs.event_records import Progress, records, size_of
from tbhooks.runs.reader import RunReader, starts_with_frame
from tbhooks.runs.scalars import Series
from tbhooks.runs.verdict import Verdict, verdict

EVENT_FILES, FRAME_FILES = "*tfevents*", "*.jsonl"
_PLUGIN_NAME = b"tbhooks"
State = Literal["empty", "running", "finished", "failed", "ended"]
"""A run that is no longer written to is "ended" if its files do not say how: as of a process that was killed."""
# A run is running while its newest step is no older than so many usual intervals between logged steps, or a minute. A
# logged step may take longer than usual, as one after an evaluation does.
MOST_INTERVALS, LEAST_SECONDS = 10.0, 60.0


@dataclass(frozen=True)
class Run:
    """The contents of a run's directory.

    `frames` are sorted by step, an evaluation's after the training step it follows. `findings` has each finding once,
    `scalars` every scalar by its tag, `problems` a sentence for everything that could not be read.
    """

    directory: Path
    frames: list[Frame]
    findings: list[Finding]
    scalars: Mapping[str, Series]
    problems: list[str] = field(default_factory=list)
    channels: list[Frame] = field(default_factory=list)
    """The statistics of `per_channel` by step, with one site per channel: path `conv1`, index `[3]`, kind
    `channel.activation`."""

    flights: list[Flight] = field(default_factory=list)
    """The dumps of the flight recorder, oldest first, of all ranks."""
    flights_left_out: list[str] = field(default_factory=list)
    """Step and reason of the dumps that were not made, because there were too many."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Versions, devices and the model, if `Watch.environment` or `Watch.checksums` was called."""
    outcome: str = ""
    """What the watch wrote when it was closed: "finished" or "failed"; empty if it was not closed."""

    @property
    def training(self) -> list[Frame]:
        """The frames of training steps."""
        return [frame for frame in self.frames if not frame.is_evaluation]

    @property
    def evaluations(self) -> list[Frame]:
        """The frames of evaluation passes."""
        return [frame for frame in self.frames if frame.is_evaluation]

    @property
    def issues(self) -> list[Issue]:
        """The findings of all frames grouped by problem: since when, when worst, when last, and how often."""
        return issues(finding for frame in self.frames for finding in frame.findings)

    @property
    def state(self) -> State:
        """How it ended: "finished", "failed" (by an exception or a signal), or "ended" if its files do not say how;
        "running" while it is written to, and "empty" without a logged step.
        """
        if self.outcome and self.frames:
            return "failed" if self.outcome == "failed" else "finished"
        return state_of([frame.time for frame in self.frames])

    @property
    def verdict(self) -> Verdict:
        """Its issues grouped by cause, and one sentence about the whole run."""
        found = [finding for frame in self.frames for finding in frame.findings]
        return verdict(found, self.scalars, len(self.training))

    @property
    def steps(self) -> list[int]:
        """All steps with a frame or a scalar."""
        return sorted({f.step for f in self.frames}.union(*(s.steps.tolist() for s in self.scalars.values())))

    def __repr__(self) -> str:
        contents = f"{len(self.frames)} logged steps, {len(self.scalars)} scalars, {len(self.findings)} findings"
        return f"Run({str(self.directory)!r}, {contents}, {len(self.problems)} problems)"


def read(directory: str | Path, progress: Progress | None = None) -> Run:
    """Reads the run in a directory, or in one of its files.

    Finished, running and killed runs can be read alike. A damaged file costs only its damaged parts, which
    `Run.problems` lists. Nothing in a file is ever executed.

    Args:
        directory: the directory that was given to `watch`, or one event file or JSON Lines file.
        progress: called repeatedly with the number of bytes read so far and the total.

    Raises:
        ArgumentError: if there is no such directory, or no run in it.

    """
    where = local(directory)
    events, lines = _files(where)
    reader = RunReader()
    sizes = [size_of(path) for path in events]
    for i, path in enumerate(events):
        reader.read_events(path, _shifted(progress, sum(sizes[:i]), sum(sizes)))
    for path in lines:
        reader.read_frames(path)
    frames, scalars, channels = reader.contents()
    flights = reader.flights.with_files(where, reader.report)
    return Run(
        where, frames, first_of_each(frames), scalars, reader.problems, channels, flights, reader.flights.left_out,
        reader.environment, reader.outcome,
    )  # fmt: skip


def check_run(directory: Path) -> None:
    """Raises an ArgumentError if there is no run in this directory."""
    _files(directory)


def find(directory: str | Path) -> list[Path]:
    """Every directory at or below this one that holds a run, sorted by name.

    Raises:
        ArgumentError: if there is no such directory.

    """
    where = local(directory)
    if not where.is_dir():
        raise ArgumentError(_missing(where))
    with_events = {path.parent for path in where.rglob(EVENT_FILES) if path.is_file()}
    return sorted(with_events | {path.parent for path in where.rglob(FRAME_FILES) if starts_with_frame(path)})


# --- The runs that a command means by a directory: the one in it, or those below it ---
# Some trainers write their own scalars to a directory and have tbhooks write below it, and `tbhooks run` gives each of
# several models its own directory.

Read = Callable[[Path], Run]


def every_run(directory: str | Path, read: Read = read) -> list[Run]:
    """Every run at or below a directory that has frames; raises ArgumentError if there is none."""
    where = local(directory)
    paths = [path for path in find(where) if path == where or may_have_frames(path)] if where.is_dir() else [where]
    runs = [read(path) for path in paths]
    with_frames = [run for run in runs if run.frames]
    if not with_frames:
        below = " or below it" if where.is_dir() else ""
        raise ArgumentError(f"no tbhooks data found in {str(where)!r}{below}{_problems_of(runs)}")
    return with_frames


def one_run(directory: str | Path, read: Read = read) -> Run:
    """The run in a directory. If it has no frames and a single run below it has, that run with the scalars of both."""
    where = local(directory)
    own = read(where) if not where.is_dir() or where in find(where) else None
    if own is not None and own.frames:
        return own
    below = [path for path in find(where) if path != where and may_have_frames(path)] if where.is_dir() else []
    if len(below) == 1 and (run := read(below[0])).frames:
        return run if own is None else replace(run, scalars={**own.scalars, **run.scalars})
    if own is None:
        own = read(where)  # raises and says why
    if not own.scalars:
        raise ArgumentError(f"no data found in {str(where)!r}{_problems_of([own])}")
    if not below:
        return own
    return replace(own, problems=[*own.problems, f"there are runs with tbhooks data below it: {_listed(below)}"])


def may_have_frames(directory: Path) -> bool:
    """Whether a run has data of tbhooks; reads up to the first frame, or to the end if there is none."""
    files = sorted(path for path in directory.glob(EVENT_FILES) if not path.is_dir())
    if any(directory.glob(FRAME_FILES)):
        return True
    return not files or any(_PLUGIN_NAME in data for path in files for data in records(path, lambda _problem: None))


def _problems_of(runs: list[Run]) -> str:
    problems = [problem for run in runs for problem in run.problems]
    return f": {'; '.join(problems[:3])}" if problems else ""


# --- Files ---


def _files(where: Path) -> tuple[list[Path], list[Path]]:
    """The event files and the files of frames."""
    if where.is_file():
        return ([], [where]) if where.suffix == ".jsonl" else ([where], [])
    if not where.is_dir():
        raise ArgumentError(_missing(where))
    events = sorted(path for path in where.glob(EVENT_FILES) if not path.is_dir())
    lines = sorted(path for path in where.glob(FRAME_FILES) if path.is_file())
    if not events and not any(map(starts_with_frame, lines)):
        raise ArgumentError(_empty(where))
    return events, lines


def _missing(where: Path) -> str:
    if not where.parent.is_dir():
        return f"there is no directory {str(where)!r}, and no {str(where.parent)!r} either"
    close = similar(where.name, sorted(path.name for path in where.parent.iterdir()))
    hint = f": did you mean {' or '.join(repr(str(where.parent / name)) for name in close)}?" if close else ""
    return f"there is no directory {str(where)!r}{hint}"


def _empty(where: Path) -> str:
    below = find(where)
    if below:
        return f"no run in {str(where)!r} itself, but below it: {_listed(below)}"
    names = sorted(path.name for path in where.iterdir())
    holds = f"it holds {_listed(list(map(repr, names)))}" if names else "it is empty"
    return f"no run in {str(where)!r}: no file named {EVENT_FILES}, no logged steps in a {FRAME_FILES}; {holds}"


def _listed(items: list[Path] | list[str]) -> str:
    return ", ".join(map(str, items[:5])) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _size: progress(before + done, total)


def state_of(times: Sequence[float], now: float | None = None) -> State:
    """The state of a run.

    Args:
        times: when each logged step ended, in seconds since the epoch, in order.
        now: the time to compare with; the current time by default.

    Returns "running" if the newest step is no older than ten usual intervals between logged steps and than a minute,
    "ended" if it is older, and "empty" if no step was logged.

    """
    if not len(times):
        return "empty"
    usual = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    age = (time.time() if now is None else now) - times[-1]
    return "running" if age <= max(MOST_INTERVALS * usual, LEAST_SECONDS) else "ended"
