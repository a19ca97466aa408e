"""Writes frames to TensorBoard: one Event per step, through the user's own SummaryWriter.

A second event file in the same run would hide the user's scalars from TensorBoard's Python loader, so none is opened.
An Event has a few scalars and histograms for TensorBoard's own tabs, and all numbers of the frame in one tensor per
kind for the plugin and `tbhooks.runs`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from tensorboard.compat.proto import summary_pb2
from tensorboard.summary.writer import record_writer

from tbhooks.data.frame import Frame, Site
from tbhooks.data.self_report import logger
from tbhooks.sinks.flush_hooks import call_before
from tbhooks.sinks.scalar_selection import indices_of, shown_scalars
from tbhooks.sinks.scalar_summaries import MOST_TAGS
from tbhooks.sinks.tensorboard import artifacts, protobuf, samples
from tbhooks.sinks.tensorboard.event_files import event_file, fast_crc, sender
from tbhooks.sinks.tensorboard.findings import FindingWriter
from tbhooks.sinks.tensorboard.frame_tensors import (
    CHECKSUMS,
    COLUMNS_OF_VERSION,
    PLUGIN,
    STORED_COLUMNS,
    VERSION,
    Layout,
    add_metrics,
    decode_counts,
    decode_values,
    encode_counts,
    encode_values,
)
from tbhooks.sinks.tensorboard.histograms import SiteHistograms
from tbhooks.sinks.tensorboard.scalars import SiteScalars, Template, scalar_table

__all__ = [
    "CHECKSUMS", "COLUMNS_OF_VERSION", "PLUGIN", "STORED_COLUMNS", "VERSION", "TensorBoardSink", "decode_counts",
    "decode_values", "encode_counts", "encode_values", "record_writer", "scalar_table",
]  # fmt: skip

OUTCOME_TAG = "tbhooks/outcome"
"""The tag of the last event of a run that has ended: "finished" or "failed"."""
# A loop alternates between a few lists of sites: training, evaluation, with and without some branch.
MAX_PLANS = 8

Key = TypeVar("Key")
Made = TypeVar("Made")


class TensorBoardSink:
    """Writes to a SummaryWriter of torch or tensorboardX.

    Args:
        writer: the SummaryWriter, which stays open; or a directory, for which one is opened and closed with the sink.
        scalars: the statistics that become TensorBoard scalars, as in `watch`.

    """

    def __init__(self, writer: Any, scalars: object = "core") -> None:
        self._scalars = scalar_table(scalars)
        self._owned = isinstance(writer, str | Path)
        self._writer = _open(writer) if self._owned else writer
        self._events = self._writer._get_file_writer().event_writer  # noqa: SLF001  the only way to its file
        self._send = sender(self._writer)
        self._crc = fast_crc(self._writer)
        self._crc.acquire(self)
        self._file = event_file(self._writer, self.destination)
        self._layouts: dict[str, Layout] = {}
        self._plans = _Recent(self._plan)
        self._templates = _Recent(Template)
        self._findings = FindingWriter()
        self._unhook: Callable[[], None] | None = None
        self._has_said_summaries = False
        self._last_step = 0
        self.outcome = ""
        """How the run has ended, "finished" or "failed": written by `close`, if it is set."""

    @property
    def destination(self) -> str:
        """The run's directory."""
        return str(getattr(self._writer, "log_dir", None) or self._writer.logdir)

    def flush_before_close(self, flush: Callable[[], None]) -> None:
        """Calls `flush` before the user flushes or closes the writer, so that all logged steps get there."""
        if not self._owned:
            self._unhook = call_before(self._writer, ("flush", "close"), flush)

    def last_step(self) -> int | None:
        """The newest step in the directory, as after a restart; None if there is none."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # noqa: PLC0415
        from tensorboard.compat import tf  # noqa: PLC0415  only after a restart

        files = tf.io.gfile.glob(f"{self.destination}/*tfevents*")
        events = (event for file in files for event in EventFileLoader(file).Load())
        ours = (
            event.step for event in events if any(value.tag.startswith("tbhooks/") for value in event.summary.value)
        )
        return max(ours, default=None)

    def write(self, frame: Frame) -> None:
        """Writes a frame and flushes it to the operating system. A frame that fails is dropped."""
        written = self._findings.written
        try:
            self._file.repair()
            summary = self._encode(frame)
            if not summary:
                return
            if self.is_closed:
                raise OSError("the SummaryWriter was closed before the watch")
            self._send(protobuf.event(frame.time, frame.step, summary))
            self._file.flush()
            self._last_step = frame.step
        except Exception:
            self._file.mark_failed()
            self._findings.written = written
            for layout in self._layouts.values():  # the lost event may have had the metadata of a tag
                layout.describe_again()
            raise

    def flush(self) -> None:
        if not self.is_closed:
            self._events.flush()

    def close(self) -> None:
        if self._unhook is not None:
            self._unhook()
        with contextlib.suppress(Exception):  # the logged steps are written; the file may be gone by now
            self._write_outcome()
        if self._owned:
            self._writer.close()
        else:
            self.flush()
        self._crc.release(self)

    def _write_outcome(self) -> None:
        is_there = "://" in self.destination or Path(self.destination).is_dir()
        if not (self.outcome and self._layouts and is_there) or self.is_closed:
            return
        summary = summary_pb2.Summary()
        data, metadata = protobuf.strings([self.outcome.encode()]), protobuf.plugin_metadata(PLUGIN)
        summary.value.add(tag=OUTCOME_TAG, tensor=data, metadata=metadata)
        self._send(protobuf.event(time.time(), self._last_step, summary.SerializeToString()))
        self._file.flush()

    @property
    def is_closed(self) -> bool:
        """Whether the user has closed the writer."""
        inner = getattr(self._events, "_async_writer", self._events)
        return bool(getattr(inner, "_closed", False))

    def _encode(self, frame: Frame) -> bytes:
        """The frame's summary: scalars and histograms encoded as bytes, the rest by protobuf."""
        plan, rest = self._plans[frame.sites], summary_pb2.Summary()
        plan.add_tensors(frame, rest)
        plan.scalars.add_extremes(frame, rest)
        self._findings.add(frame.findings, rest)
        add_metrics(frame, self._layouts, rest)
        samples.add(frame.samples, rest)
        if frame.artifacts:
            run = artifacts.Run(self.destination, frame.time, frame.step, self._send, self.flush, self._layouts)
            artifacts.write(frame.artifacts, rest, run)
        shown = shown_scalars(frame)
        logged = self._templates[tuple(shown)].encode(np.array(list(shown.values()), dtype=np.float64))
        parts = (logged, plan.scalars.encode(frame), plan.histograms.encode(frame), rest.SerializeToString())
        return b"".join(parts)

    def _plan(self, sites: tuple[Site, ...]) -> _Plan:
        plan = _Plan(sites, SiteScalars(sites, self._scalars), self._layouts)
        if plan.scalars.are_summaries and not self._has_said_summaries:
            self._has_said_summaries = True
            logger.info(
                "more than %d scalars of single layers: TensorBoard gets summaries by kind and by role instead; the "
                'TBHOOKS tab has every layer. scalars="core" writes them all', MOST_TAGS,
            )  # fmt: skip
        return plan


class _Plan:
    """What is the same in every step with a certain list of sites."""

    def __init__(self, sites: tuple[Site, ...], scalars: SiteScalars, layouts: dict[str, Layout]) -> None:
        self.scalars = scalars
        self.histograms = SiteHistograms(() if scalars.are_summaries else sites)
        self._kinds = []
        for kind in dict.fromkeys(site.kind for site in sites):
            rows = [i for i, site in enumerate(sites) if site.kind == kind]
            layout = layouts.setdefault(kind, Layout(kind))
            self._kinds.append((layout, indices_of(rows), layout.positions([sites[i] for i in rows])))

    def add_tensors(self, frame: Frame, summary: summary_pb2.Summary) -> None:
        for layout, rows, positions in self._kinds:
            layout.add(frame, rows, positions, summary)


class _Recent(Generic[Key, Made]):
    """A cache of the last few keys. Keys are compared, not hashed: most equal the last one, site by site."""

    def __init__(self, make: Callable[[Key], Made]) -> None:
        self._make = make
        self._kept: list[tuple[Key, Made]] = []

    def __getitem__(self, key: Key) -> Made:
        found = next((i for i, (known, _) in enumerate(self._kept) if known == key), None)
        made = (key, self._make(key)) if found is None else self._kept.pop(found)
        self._kept.insert(0, made)
        del self._kept[MAX_PLANS:]
        return made[1]


def _open(directory: str | Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  slow to import, and only needed here

    where = str(directory)
    # Absolute, because the file is reopened for each record and the working directory may change.
    return SummaryWriter(where if "://" in where else str(Path(where).expanduser().absolute()))
