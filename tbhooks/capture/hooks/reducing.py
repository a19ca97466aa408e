"""A tensor into a recorder, if it has numbers; what has none is noted, and training does not hear of it."""

from __future__ import annotations

from torch import Tensor

from tbhooks.capture.packed_step import Span
from tbhooks.capture.recorder import NO_SITE, Recorder
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_rows import describe, has_no_data, is_ordinary


def reduced(recorder: Recorder, site: int, tensor: Tensor, owner: object) -> Span | None:
    """Where its record is; None if it holds no real numbers."""
    try:
        return recorder.record(site, tensor, None, owner)
    except (RuntimeError, TypeError, NotImplementedError):
        if is_ordinary(tensor):
            raise
        return None  # a type that does not do what tensors do


def reduce_and_note(recorder: Recorder, site: int, tensor: Tensor, report: Report, owner: object) -> None:
    """Does nothing where nobody asked for the site, or the tensor only stands for one."""
    if site != NO_SITE and not has_no_data(tensor):
        note_readable(report, str(recorder.sites[site]), tensor, reduced(recorder, site, tensor, owner) is not None)


def note_readable(report: Report, name: str, tensor: Tensor, readable: bool) -> None:
    """Remembers that a name cannot be seen, or that now it can."""
    if not readable:
        report.mark_unseen(name, f"{describe(tensor)}: only real numbers have statistics")
    elif report.unseen:
        report.mark_seen(name)
