"""Runs read back from disk: every frame, finding and scalar of a directory, and what was wrong with its files.

Finished runs, running ones and ones that were killed read alike. A damaged file costs what is damaged and
is told in `Run.problems`; nothing in a file is ever executed, and nothing here needs torch or the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2

from tbhooks.data.errors import ArgumentError, TbhooksError, nearest
from tbhooks.data.findings import first_of_each
from tbhooks.data.frame import CHANNEL, EVALUATION, Finding, Frame, Site
from tbhooks.data.remote import local
from tbhooks.data.stats import WIDTH, Floats
from tbhooks.runs.event_records import event_of_bytes, records
from tbhooks.runs.restarts import Newest, Span, hides
from tbhooks.runs.scalars import ScalarLog, Series
from tbhooks.runs.stored_frames import (
    LONGEST_NAME,
    Layout,
    LazyCounts,
    PackedCounts,
    StoredFrame,
    is_described,
    is_for_another_tab,
    rows_of,
    seen_in,
)
from tbhooks.sinks import jsonl
from tbhooks.sinks.tensorboard import findings as finding_codec

__all__ = ["Run", "Series", "find", "read"]

Progress = Callable[[int, int], None]
EVENT_FILES, FRAME_FILES = "*tfevents*", "*.jsonl"
_FRAME_FILE_STARTS = b'{"step":'
# Histograms are unpacked once to see that they are sound, as long as that takes no more than a moment.
_CHECKED_AT_ONCE = 128 << 20
_MOST_PROBLEMS = 50
# What `Watch.log` and the watch itself call their scalars, unless the user chose a group.
_OF_FRAMES = ("train/", "train.")


@dataclass(frozen=True)
class Run:
    """What a run's directory holds. `frames` are by step, an evaluation's after the training step it follows."""

    directory: Path
    frames: list[Frame]
    findings: list[Finding]
    scalars: Mapping[str, Series]
    problems: list[str] = field(default_factory=list)
    channels: list[Frame] = field(default_factory=list)
    """What `per_channel` saw, by step: a site a channel, such as `conv1` with index `[3]` and kind
    `channel.activation`."""

    @property
    def training(self) -> list[Frame]:
        return [frame for frame in self.frames if not frame.is_evaluation]

    @property
    def evaluations(self) -> list[Frame]:
        return [frame for frame in self.frames if frame.is_evaluation]

    @property
    def steps(self) -> list[int]:
        """Every step anything was logged at."""
        return sorted({f.step for f in self.frames}.union(*(s.steps.tolist() for s in self.scalars.values())))

    def __repr__(self) -> str:
        told = f"{len(self.frames)} frames, {len(self.scalars)} scalars, {len(self.findings)} findings"
        return f"Run({str(self.directory)!r}, {told}, {len(self.problems)} problems)"


def read(directory: str | Path, progress: Progress | None = None) -> Run:
    """The run in a directory, or in one file of it; `progress` is called with bytes read and bytes in all."""
    where = local(directory)
    events, lines = _files(where)
    reader = _Reader()
    sizes = [_size(path) for path in events]
    for i, path in enumerate(events):
        reader.read_events(path, _shifted(progress, sum(sizes[:i]), sum(sizes)))
    for path in lines:
        reader.read_frames(path)
    return reader.run(where)


def find(directory: str | Path) -> list[Path]:
    """Every directory at or below this one that holds a run, sorted by name."""
    where = local(directory)
    if not where.is_dir():
        raise ArgumentError(_missing(where))
    below = {path.parent for path in where.rglob(EVENT_FILES) if path.is_file()}
    return sorted(below | {path.parent for path in where.rglob(FRAME_FILES) if _starts_like_frames(path)})


def _files(where: Path) -> tuple[list[Path], list[Path]]:
    if where.is_file():
        return ([], [where]) if where.suffix == ".jsonl" else ([where], [])
    if not where.is_dir():
        raise ArgumentError(_missing(where))
    events = sorted(path for path in where.glob(EVENT_FILES) if not path.is_dir())
    lines = sorted(path for path in where.glob(FRAME_FILES) if path.is_file())
    if not events and not any(map(_starts_like_frames, lines)):
        raise ArgumentError(_empty(where))
    return events, lines


def _missing(where: Path) -> str:
    beside = sorted(path.name for path in where.parent.iterdir()) if where.parent.is_dir() else []
    hint = f"in {where.parent}, {nearest(where.name, beside)}" if beside else f"{where.parent} is empty or missing too"
    return f"there is no directory {str(where)!r}: {hint}"


def _empty(where: Path) -> str:
    below = [str(path) for path in find(where)]
    if below:
        listed = ", ".join(below[:5]) + (f" and {len(below) - 5} more" if len(below) > 5 else "")
        return f"no run in {str(where)!r} itself, but below it: {listed}"
    names = sorted(path.name for path in where.iterdir())
    holds = f"it holds {', '.join(map(repr, names[:5]))}" if names else "it is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"no run in {str(where)!r}: no file named {EVENT_FILES}, no frames in a {FRAME_FILES}; {holds}{more}"


def _starts_like_frames(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_FRAME_FILE_STARTS)) == _FRAME_FILE_STARTS
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _size: progress(before + done, total)


class _Step:
    """What is known so far of one frame."""

    def __init__(self, time: float = 0.0, file: str = "") -> None:
        self.time, self.file = time, file
        self.rows: dict[str, tuple[Layout, Floats]] = {}
        self.counts: dict[str, PackedCounts] = {}
        self.findings: tuple[Finding, ...] = ()
        self.scalars: dict[str, float] = {}


class _Reader:
    """Collects the values of all files of a run, and makes the run of them."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._scalars = ScalarLog()
        self._steps: dict[tuple[int, bool], _Step] = {}
        self._given: dict[tuple[int, bool], Frame] = {}
        self._frame_tags: set[str] = set()
        self._sites: dict[tuple[tuple[int, bytes], ...], tuple[Site, ...]] = {}
        self._same_sites: dict[tuple[Site, ...], tuple[Site, ...]] = {}
        self._layouts_of_file: dict[str, Layout] = {}
        self._unchecked = _CHECKED_AT_ONCE
        # Training frames say where a run begins; those of evaluations where there are no others.
        self._newest = {evaluation: Newest() for evaluation in (False, True)}
        self._newest_given = Newest()
        self._spans: list[Span] = []
        self._has_frames = False
        """Whether the file that is being read has any."""
        self._since = 0
        """How many entries of the scalars' log are older than the newest run."""

    def tell(self, problem: str) -> None:
        """Each problem once; a file of nothing but problems does not fill the memory with them."""
        if problem not in self.problems and len(self.problems) <= _MOST_PROBLEMS:
            self.problems.append(problem if len(self.problems) < _MOST_PROBLEMS else "more problems are not listed")

    # --- Event files ---

    def read_events(self, path: Path, progress: Progress | None) -> None:
        self._layouts_of_file = {}
        event_class = event_of_bytes()
        begin, last, self._has_frames = self._scalars.entries, 0.0, False
        for data in records(path, self.tell, progress):
            try:
                event = event_class.FromString(data)
                last = event.wall_time
                self._take(event.step, last, event.summary, path, begin)
            except (DecodeError, ValueError) as problem:
                self.tell(f"{path.name}: a record that is no event, skipped ({_short(problem)})")
        self._spans.append(Span(begin, self._scalars.entries, last, self._has_frames))

    def _take(self, step: int, time: float, summary: bytes, path: Path, begin: int) -> None:
        before = self._scalars.entries
        scalars, others = self._scalars.take(step, summary)
        tensors = [value for data in others if (value := self._parsed(data, path)) is not None]
        kinds: list[str] = []
        frame = _Step(time, path.name)
        for value in tensors:
            try:
                kinds += self._take_tensor(frame, value)
            except ValueError as problem:
                self.tell(f"{path.name}: step {step}, {_short(value.tag)}: {_short(problem)}, skipped")
        if kinds:
            self._frame_tags.update(scalars)
            told_by = [*frame.rows, *frame.counts] or kinds  # a finding may speak of another frame's site
            evaluation = any(kind.startswith(EVALUATION) for kind in told_by)
            self._has_frames = True
            if frame.rows and self._begins(step, evaluation, frame):
                in_new_file = self._newest[evaluation].in_new_file
                self._since = begin if in_new_file else before
                self._steps = {k: known for k, known in self._steps.items() if in_new_file and known.file == path.name}
            self._steps[step, evaluation] = frame  # one that was logged again is what it was the last time
            frame.scalars.update(scalars)
        else:
            self._join(step, scalars)

    def _join(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars that came late belong to the frame of their step, if they are not the user's own."""
        frame = self._steps.get((step, False))
        if frame is not None:
            ours = (tag for tag in scalars if tag.startswith(_OF_FRAMES) or tag in self._frame_tags)
            frame.scalars.update((tag, scalars[tag]) for tag in ours)

    def _parsed(self, data: bytes, path: Path) -> summary_pb2.Summary.Value | None:
        """A value that may be one of ours; scalars that are not written like most end here, too."""
        try:
            value = summary_pb2.Summary.Value.FromString(data)
        except DecodeError:
            self.tell(f"{path.name}: a value that does not parse, skipped")
            return None
        if len(value.tag) > LONGEST_NAME:
            self.tell(f"{path.name}: a tag of {len(value.tag)} characters ({_short(value.tag)}), skipped")
            return None
        return value if value.HasField("tensor") else None

    def _take_tensor(self, frame: _Step, value: summary_pb2.Summary.Value) -> list[str]:
        """Puts a tensor of ours where it belongs; returns the kinds of frame it speaks of."""
        if value.tag == finding_codec.DATA_TAG:
            frame.findings = finding_codec.decode(b"".join(value.tensor.string_val[:1]))
            return [finding.site.kind for finding in frame.findings if finding.site is not None] or [""]
        if is_described(value):
            self._layouts_of_file[value.tag] = Layout.read(value.metadata)
        layout = self._layouts_of_file.get(value.tag)
        if layout is None:
            if value.tag.startswith("tbhooks/") and not is_for_another_tab(value):
                raise ValueError("nothing before it says what it is")
            return []
        if layout.buckets:
            frame.counts[layout.kind] = self._checked(PackedCounts.of(value, layout))
        else:
            frame.rows[layout.kind] = layout, rows_of(value, layout)
        return [layout.kind]

    def _checked(self, packed: PackedCounts) -> PackedCounts:
        self._unchecked -= packed.unpacked_size
        if self._unchecked > 0:
            packed.unpack()
        return packed

    def _begins(self, step: int, evaluation: bool, frame: _Step) -> bool:
        """Whether a run begins with this frame, and it is not the first one."""
        begins = self._newest[evaluation].begins(step, frame.time, frame.file)
        return begins and (not evaluation or not self._newest[False].count)

    # --- Files of frames ---

    def read_frames(self, path: Path) -> None:
        if not _starts_like_frames(path):
            self.tell(f"{path.name}: not a file of frames, left out")
            return
        try:
            for frame in jsonl.read(path):
                _check(frame)
                frame = replace(frame, sites=self._same_sites.setdefault(frame.sites, frame.sites))  # noqa: PLW2901
                is_training = bool(frame.sites) and not frame.is_evaluation
                if is_training and self._newest_given.begins(frame.step, frame.time, path.name):
                    self._given = {}
                self._given[frame.step, frame.is_evaluation] = _with_earlier(frame, self._given)
            if not _ends_with_newline(path):
                self.tell(f"{path.name}: cut short in its last line, the last step may be missing")
        except (TbhooksError, OSError, RecursionError, ValueError, TypeError, AttributeError) as problem:
            self.tell(f"{path.name}: skipped from here on: {_short(problem)}")

    # --- The run ---

    def run(self, where: Path) -> Run:
        spans = self._forget_older_runs()
        frames = {key: self._frame(key[0], step) for key, step in self._steps.items()} | self._given
        ordered = [frames[key] for key in sorted(frames)]
        scalars = self._scalars.series(spans)
        for frame in self._given.values():
            for tag in frame.scalars.keys() - scalars.keys():
                scalars[tag] = _series_of(tag, ordered)
        channels = [self._frame(key[0], step, of_channels=True) for key, step in sorted(self._steps.items())]
        seen = [frame for frame in channels if frame.sites]
        return Run(where, ordered, first_of_each(ordered), scalars, self.problems, seen)

    def _forget_older_runs(self) -> list[tuple[int, int]] | None:
        """Says so if there are any; returns which entries of the scalars' log are those of the newest, None for all."""
        events, given = self._newest[not self._newest[False].count], self._newest_given
        newest, hidden = (given, events) if hides(given, events) else (events, given)
        count = max(events.count, given.count)
        if hides(newest, hidden):
            count += hidden.count
            self._steps, self._given = (self._steps, {}) if newest is events else ({}, self._given)
        if count < 2:
            return None
        which = f"this is the newest, which begins in {newest.file}"
        another = "To read another, name its file instead of the directory"
        self.problems.insert(0, f"{count} runs were written here, one after the other: {which}. {another}")
        since = self._since if newest is events else self._scalars.entries
        beside = [(s.begin, s.end) for s in self._spans if s.end <= since and s.is_beside(newest)]
        return [*beside, (since, self._scalars.entries)]

    def _frame(self, number: int, step: _Step, *, of_channels: bool = False) -> Frame:
        chosen = {
            kind: (layout, seen_in(rows))
            for kind, (layout, rows) in step.rows.items()
            if kind.startswith(CHANNEL) is of_channels
        }
        values = [step.rows[kind][1][seen] for kind, (_, seen) in chosen.items()]
        frame = StoredFrame(
            number, step.time, 0, self._sites_of(list(chosen.values())),
            np.concatenate(values) if values else np.zeros((0, WIDTH)),
            np.zeros((sum(map(len, values)), 0), dtype=np.int64), step.findings, step.scalars,
        )  # fmt: skip
        counts = {kind: packed for kind, packed in step.counts.items() if kind in chosen}
        fitting = {kind: packed for kind, packed in counts.items() if packed.sites == len(chosen[kind][0].sites)}
        if fitting:
            parts = tuple((fitting.get(kind), seen) for kind, (_, seen) in chosen.items())
            frame.keep(LazyCounts(parts, self.tell))
        return frame

    def _sites_of(self, chosen: list[tuple[Layout, NDArray[np.intp]]]) -> tuple[Site, ...]:
        """One tuple for all steps that saw the same sites: a long run has few."""
        key = tuple((id(layout), seen.tobytes()) for layout, seen in chosen)
        if key not in self._sites:
            self._sites[key] = tuple(layout.sites[i] for layout, seen in chosen for i in seen)
        return self._sites[key]


def _short(text: object) -> str:
    told = " ".join(str(text).split())
    return told if len(told) <= 120 else f"{told[:100]}... ({len(told)} characters)"


def _check(frame: Frame) -> None:
    """Raises unless the fields have the types they are used as; JSON may hold anything."""
    names = (name for site in frame.sites for name in (site.path, site.kind, site.index))
    numbers = (*frame.scalars.values(), frame.time, frame.step)
    if not isinstance(frame.step, int) or not all(isinstance(name, str) for name in (*names, *frame.scalars)):
        raise ValueError("a field of the wrong type")
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("a number that is none")
    if len(seen_in(frame.values)) < sum(frame.values[:, 0] != 0):
        raise ValueError("a count that is none")
    finding_codec.decode(finding_codec.encode(frame.findings))


def _with_earlier(frame: Frame, known: Mapping[tuple[int, bool], Frame]) -> Frame:
    """Scalars that came late are a frame of their own in the file; they belong to that of their step."""
    earlier = known.get((frame.step, frame.is_evaluation))
    if earlier is None or frame.sites:
        return frame
    return replace(earlier, scalars={**earlier.scalars, **frame.scalars})


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, _size(path) - 1))
        return file.read(1) in (b"\n", b"")


def _series_of(tag: str, frames: list[Frame]) -> Series:
    seen = [frame for frame in frames if tag in frame.scalars]
    return Series(
        np.array([f.step for f in seen], dtype=np.int64), np.array([f.scalars[tag] for f in seen], dtype=float)
    )
