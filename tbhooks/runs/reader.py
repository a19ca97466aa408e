"""Collects the values of all files of a run and builds its frames and scalars.

When several runs were written into one directory, only the newest is kept. A resumed run continues at a later step. A
restarted run begins at its first step again, in its own file or further down in the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2

from tbhooks.data import checksums
from tbhooks.data.artifacts import ENVIRONMENT
from tbhooks.data.artifacts.flights import FLIGHT
from tbhooks.data.artifacts.samples import NO_SAMPLES, Samples
from tbhooks.data.artifacts.vectors import EXPERTS, HEADS, finished
from tbhooks.data.checksums import Checksums
from tbhooks.data.errors import TbhooksError
from tbhooks.data.frame import CHANNEL, EVALUATION, METRIC, SAMPLED, Finding, Frame, Sites
from tbhooks.data.stats import WIDTH, Floats
from tbhooks.runs.event_records import Progress, event_of_bytes, records, size_of
from tbhooks.runs.scalars import ScalarLog, Series
from tbhooks.runs.stored_flights import StoredFlights
from tbhooks.runs.stored_frames import (
    LONGEST_NAME,
    Layout,
    LazyCounts,
    PackedCounts,
    StoredFrame,
    belongs_to_other_plugin,
    checksums_of,
    has_layout,
    metrics_of,
    recorded_sites,
    rows_of,
)
from tbhooks.sinks import jsonl
from tbhooks.sinks.tensorboard import OUTCOME_TAG
from tbhooks.sinks.tensorboard import findings as finding_codec
from tbhooks.sinks.tensorboard import flights as flight_codec
from tbhooks.sinks.tensorboard import samples as sample_codec

_FRAME_FILE_START = b'{"step":'
# Histograms up to this total size are unpacked once while reading, to report damaged ones.
_CHECKED_BYTES = 128 << 20
_MAX_PROBLEMS = 50
# The groups of scalars that belong to a frame, unless the user chose another group in `Watch.log`.
_FRAME_GROUPS = ("train/", "train.", f"{EXPERTS}.")

_ENVIRONMENT_TAG = f"{ENVIRONMENT}/text_summary"

FrameKey = tuple[int, bool]
"""The step, and whether the frame is an evaluation."""
OUTCOMES = (b"finished", b"failed")


@dataclass
class _Step:
    """The values of one frame that have been read so far."""

    time: float = 0.0
    file: str = ""
    rows: dict[str, tuple[Layout, Floats]] = field(default_factory=dict)
    counts: dict[str, PackedCounts] = field(default_factory=dict)
    checksums: dict[str, Checksums] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    scalars: dict[str, float] = field(default_factory=dict)
    samples: Samples = NO_SAMPLES
    metrics: dict[str, str] = field(default_factory=dict)


@dataclass
class _NewestRun:
    """Finds the newest run in frames that come in the order they were written."""

    count: int = 0
    """The number of runs so far."""
    first: int = 0
    """The first step of the newest run."""
    start: float = 0.0
    """The time of that step."""
    file: str = ""
    """The file in which the newest run starts."""
    in_new_file: bool = True
    """Whether it starts with that file, and not further down in the file of the previous run."""
    _last_step: int = 0
    _last_file: str = ""

    def begins(self, step: int, time: float, file: str) -> bool:
        """Takes the next frame; returns whether it starts another run than the frame before it."""
        in_new_file = file != self._last_file
        is_first = self.count == 0 or (step <= self.first and (in_new_file or step < self._last_step))
        self._last_step, self._last_file = step, file
        if is_first:
            self.in_new_file = in_new_file
            self.count, self.first, self.start, self.file = self.count + 1, step, time, file
        return is_first and self.count > 1

    def replaces(self, older: _NewestRun) -> bool:
        """Whether this run started after the other and does not continue it."""
        return bool(self.count and older.count) and self.start > older.start and self.first <= older.first


@dataclass(frozen=True)
class _FileScalars:
    """The entries that one event file added to the scalar log, and when it was last written to."""

    begin: int
    end: int
    last_time: float
    has_frames: bool

    def belongs_to(self, newest: _NewestRun) -> bool:
        """Whether it is a file of scalars only that was still written to during this run."""
        return not self.has_frames and self.last_time >= newest.start


class RunReader:
    """Reads the files of a run one after the other; `contents` returns what they hold."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.environment: dict[str, str] = {}
        """What `Watch.environment` wrote."""
        self.outcome = ""
        """How the run has ended, "finished" or "failed"; empty if nothing says so."""
        self._scalars = ScalarLog()
        self._steps: dict[FrameKey, _Step] = {}
        self._json_frames: dict[FrameKey, Frame] = {}
        self._frame_tags: set[str] = set()
        self._sites: dict[tuple[tuple[int, bytes], ...], Sites] = {}
        self._same_sites: dict[Sites, Sites] = {}
        self._layouts: dict[str, Layout] = {}
        """The layouts of the current file, by tag."""
        self._bytes_to_check = _CHECKED_BYTES
        # Training frames determine where a run starts; evaluations only if there are no training frames.
        self._newest = {evaluation: _NewestRun() for evaluation in (False, True)}
        self._newest_json = _NewestRun()
        self._files: list[_FileScalars] = []
        self._flights = StoredFlights()
        self._has_frames = False
        """Whether the current file has frames."""
        self._since = 0
        """The number of entries in the scalar log that are older than the newest run."""

    def report(self, problem: str) -> None:
        """Adds a problem once, up to a limit: a file may consist of nothing else."""
        if problem not in self.problems and len(self.problems) <= _MAX_PROBLEMS:
            self.problems.append(problem if len(self.problems) < _MAX_PROBLEMS else "more problems are not listed")

    # --- Event files ---

    def read_events(self, path: Path, progress: Progress | None) -> None:
        self._layouts = {}
        event_class = event_of_bytes()
        begin, last, self._has_frames = self._scalars.entries, 0.0, False
        for data in records(path, self.report, progress):
            try:
                event = event_class.FromString(data)
                last = event.wall_time
                self._add_summary(event.step, last, event.summary, path, begin)
            except (DecodeError, ValueError) as problem:
                self.report(f"{path.name}: a record that is not an event, skipped ({_short(problem)})")
        self._files.append(_FileScalars(begin, self._scalars.entries, last, self._has_frames))

    def _add_summary(self, step: int, time: float, summary: bytes, path: Path, begin: int) -> None:
        before = self._scalars.entries
        scalars, others = self._scalars.add(step, summary)
        tensors = [value for data in others if (value := self._parse(data, path)) is not None]
        kinds: list[str] = []
        frame = _Step(time, path.name)
        for value in tensors:
            try:
                kinds += self._add_tensor(frame, value)
            except ValueError as problem:
                self.report(f"{path.name}: step {step}, {_short(value.tag)}: {_short(problem)}, skipped")
        if not kinds:
            self._add_late(step, scalars, frame.samples)
            return
        self._frame_tags.update(scalars)
        frame_kinds = [*frame.rows, *frame.counts] or kinds  # a finding may be about a site of another frame
        evaluation = any(kind.startswith(EVALUATION) for kind in frame_kinds)
        self._has_frames = True
        self.outcome = ""  # training has gone on
        if frame.rows and self._begins(step, evaluation, frame):
            in_new_file = self._newest[evaluation].in_new_file
            self._since = begin if in_new_file else before
            self._flights.clear()
            self._steps = {key: known for key, known in self._steps.items() if in_new_file and known.file == path.name}
        self._steps[step, evaluation] = frame  # the last one counts if a step was logged again
        frame.scalars.update(scalars)

    def _add_late(self, step: int, scalars: Mapping[str, float], samples: Samples) -> None:
        """Adds samples and scalars that were written after their frame, but not the user's own."""
        frame = self._steps.get((step, False))
        if frame is not None:
            frame.samples = samples or frame.samples
            tags = (tag for tag in scalars if tag.startswith(_FRAME_GROUPS) or tag in self._frame_tags)
            frame.scalars.update((tag, scalars[tag]) for tag in tags)

    def _parse(self, data: bytes, path: Path) -> summary_pb2.Summary.Value | None:
        """The value if it is a tensor, and may be ours."""
        try:
            value = summary_pb2.Summary.Value.FromString(data)
        except DecodeError:
            self.report(f"{path.name}: a value that cannot be parsed, skipped")
            return None
        if len(value.tag) > LONGEST_NAME:
            self.report(f"{path.name}: a tag of {len(value.tag)} characters ({_short(value.tag)}), skipped")
            return None
        return value if value.HasField("tensor") else None

    def _add_tensor(self, frame: _Step, value: summary_pb2.Summary.Value) -> list[str]:
        """Adds a tensor of tbhooks to its frame; returns the kinds it is about, none for other tensors."""
        if value.tag == finding_codec.DATA_TAG:
            frame.findings = finding_codec.decode(b"".join(value.tensor.string_val[:1]))
            return [finding.site.kind for finding in frame.findings if finding.site is not None] or [""]
        if self._add_document(frame, value):
            return []
        return self._add_part(frame, value)

    def _add_part(self, frame: _Step, value: summary_pb2.Summary.Value) -> list[str]:
        """Adds the rows, bucket counts or checksums of one kind."""
        if has_layout(value):
            self._layouts[value.tag] = Layout.read(value.metadata)
        layout = self._layouts.get(value.tag)
        if layout is not None and layout.kind.startswith((FLIGHT, METRIC)):  # its numbers are in dumps, or are scalars
            frame.metrics |= metrics_of(layout)
            return []
        if layout is None:
            if value.tag.startswith("tbhooks/") and not belongs_to_other_plugin(value):
                raise ValueError("unknown tag (no metadata)")
            return []
        if layout.checksums:
            frame.checksums[layout.kind] = checksums_of(value, layout)
        elif layout.buckets:
            counts = PackedCounts.of(value, layout)
            self._bytes_to_check -= counts.unpacked_size
            if self._bytes_to_check > 0:
                counts.unpack()  # raises if they are damaged
            frame.counts[layout.kind] = counts
        else:
            frame.rows[layout.kind] = layout, rows_of(value, layout)
            frame.scalars |= {SAMPLED + name: fraction for name, fraction in layout.sampled.items()}
        return [layout.kind]

    def _add_document(self, frame: _Step, value: summary_pb2.Summary.Value) -> bool:
        """Adds samples, dumps of the flight recorder, the environment and the outcome. Returns whether it is one."""
        content = b"".join(value.tensor.string_val[:1])
        if value.tag == sample_codec.DATA_TAG:
            frame.samples = sample_codec.decode(content)
        elif value.tag == _ENVIRONMENT_TAG:
            self.environment = _table_of(content)
        elif value.tag == OUTCOME_TAG:
            self.outcome = content.decode() if content in OUTCOMES else ""
        elif value.tag in (flight_codec.DATA_TAG, flight_codec.LEFT_OUT_TAG):
            self._flights.add(value.tag, content)
        else:
            return False
        return True

    def _begins(self, step: int, evaluation: bool, frame: _Step) -> bool:
        """Whether this frame starts another run."""
        begins = self._newest[evaluation].begins(step, frame.time, frame.file)
        return begins and (not evaluation or not self._newest[False].count)

    @property
    def flights(self) -> StoredFlights:
        """The dumps of the flight recorder."""
        return self._flights

    # --- JSON Lines files ---

    def read_frames(self, path: Path) -> None:
        if not starts_with_frame(path):
            self.report(f"{path.name}: not a file of logged steps, skipped")
            return
        try:
            for frame in jsonl.read(path):
                _check_types(frame)
                frame = replace(frame, sites=self._same_sites.setdefault(frame.sites, frame.sites))  # noqa: PLW2901
                is_training = bool(frame.sites) and not frame.is_evaluation
                if is_training and self._newest_json.begins(frame.step, frame.time, path.name):
                    self._json_frames = {}
                key = frame.step, frame.is_evaluation
                earlier = self._json_frames.get(key)
                if earlier is not None and not frame.sites:  # scalars that were written after their frame
                    samples = frame.samples or earlier.samples
                    frame = replace(earlier, scalars={**earlier.scalars, **frame.scalars}, samples=samples)  # noqa: PLW2901
                self._json_frames[key] = frame
            if not _ends_with_newline(path):
                self.report(f"{path.name}: cut short in its last line, the last step may be missing")
        except (TbhooksError, OSError, RecursionError, ValueError, TypeError, AttributeError) as problem:
            self.report(f"{path.name}: the rest was skipped: {_short(problem)}")

    # --- The run ---

    def contents(self) -> tuple[list[Frame], dict[str, Series], list[Frame]]:
        """The frames, the scalars and the frames of `per_channel`, of the newest run alone."""
        entries = self._drop_older_runs()
        frames = {key: self._frame(key[0], step) for key, step in self._steps.items()} | self._json_frames
        ordered = [frames[key] for key in sorted(frames)]
        scalars = self._scalars.series(entries)
        for frame in self._json_frames.values():
            for tag in frame.scalars.keys() - scalars.keys():
                scalars[tag] = _series_of(tag, ordered)
        channels = [self._frame(key[0], step, of_channels=True) for key, step in sorted(self._steps.items())]
        return ordered, scalars, [frame for frame in channels if frame.sites]

    def _drop_older_runs(self) -> list[tuple[int, int]] | None:
        """Keeps the newest run, and reports older ones; returns its entries of the scalar log, None for all."""
        events, lines = self._newest[not self._newest[False].count], self._newest_json
        newest, older = (lines, events) if lines.replaces(events) else (events, lines)
        count = max(events.count, lines.count)
        if newest.replaces(older):
            count += older.count
            self._steps, self._json_frames = (self._steps, {}) if newest is events else ({}, self._json_frames)
        if count < 2:
            return None
        which = f"this is the newest, which starts in {newest.file}"
        another = "To read another one, pass its file instead of the directory"
        self.problems.insert(0, f"{count} runs were written here, one after the other: {which}. {another}")
        since = self._since if newest is events else self._scalars.entries
        beside = [(file.begin, file.end) for file in self._files if file.end <= since and file.belongs_to(newest)]
        return [*beside, (since, self._scalars.entries)]

    def _frame(self, number: int, step: _Step, *, of_channels: bool = False) -> Frame:
        chosen = {
            kind: (layout, recorded_sites(rows))
            for kind, (layout, rows) in step.rows.items()
            if kind.startswith(CHANNEL) is of_channels
        }
        values = [step.rows[kind][1][recorded] for kind, (_, recorded) in chosen.items()]
        frame = StoredFrame(
            number, step.time, 0, self._sites_of(list(chosen.values())),
            np.concatenate(values) if values else np.zeros((0, WIDTH)),
            np.zeros((sum(map(len, values)), 0), dtype=np.int64), step.findings, step.scalars,
            samples=step.samples, checksums=_checksums(step, chosen),
            vectors={} if of_channels else _vectors_of(step), metrics={} if of_channels else step.metrics,
        )  # fmt: skip
        counts = {kind: packed for kind, packed in step.counts.items() if kind in chosen}
        fitting = {kind: packed for kind, packed in counts.items() if packed.sites == len(chosen[kind][0].sites)}
        if fitting:
            parts = tuple((fitting.get(kind), recorded) for kind, (_, recorded) in chosen.items())
            frame.keep(LazyCounts(parts, self.report))
        return frame

    def _sites_of(self, chosen: list[tuple[Layout, NDArray[np.intp]]]) -> Sites:
        """One shared object for all steps with the same sites."""
        key = tuple((id(layout), recorded.tobytes()) for layout, recorded in chosen)
        if key not in self._sites:
            self._sites[key] = Sites(layout.sites[i] for layout, recorded in chosen for i in recorded)
        return self._sites[key]


def _table_of(content: bytes) -> dict[str, str]:
    """The rows of a markdown table with two columns, without its header."""
    rows = [line.strip("| ").split(" | ") for line in content.decode(errors="replace").splitlines()[2:]]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def _checksums(step: _Step, chosen: dict[str, tuple[Layout, NDArray[np.intp]]]) -> Checksums:
    """Those of the sites of a frame; none if there are none at all."""
    if not step.checksums:
        return checksums.empty(0)
    parts = []
    for kind, (layout, recorded) in chosen.items():
        known = step.checksums.get(kind, checksums.empty(0))
        parts.append(known[recorded] if len(known) == len(layout.sites) else checksums.empty(len(recorded)))
    return np.concatenate([checksums.empty(0), *parts])


def starts_with_frame(path: Path) -> bool:
    """Whether a file starts like the JSON Lines that `JsonlSink` writes."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_FRAME_FILE_START)) == _FRAME_FILE_START
    except OSError:
        return False


def _short(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= 120 else f"{line[:100]}... ({len(line)} characters)"


def _vectors_of(step: _Step) -> Mapping[str, Floats]:
    """Numbers of each expert and head, from the rows of their maps."""
    vectors: dict[str, Floats] = {}
    for kind in (CHANNEL + EXPERTS, CHANNEL + HEADS):
        if kind in step.rows:
            layout, rows = step.rows[kind]
            recorded = recorded_sites(rows)
            vectors |= finished([layout.sites[i] for i in recorded], rows[recorded]).vectors
    return vectors


def _check_types(frame: Frame) -> None:
    """Raises unless the fields have the right types: JSON may hold anything."""
    names = (name for site in frame.sites for name in (site.path, site.kind, site.index))
    numbers = (*frame.scalars.values(), frame.time, frame.step)
    if not isinstance(frame.step, int) or not all(isinstance(name, str) for name in (*names, *frame.scalars)):
        raise ValueError("a field of the wrong type")
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("a value that is not a number")
    if len(recorded_sites(frame.values)) < sum(frame.values[:, 0] != 0):
        raise ValueError("an invalid count")
    finding_codec.decode(finding_codec.encode(frame.findings))


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, size_of(path) - 1))
        return file.read(1) in (b"\n", b"")


def _series_of(tag: str, frames: list[Frame]) -> Series:
    logged = [frame for frame in frames if tag in frame.scalars]
    steps, values = [frame.step for frame in logged], [frame.scalars[tag] for frame in logged]
    return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=float))
