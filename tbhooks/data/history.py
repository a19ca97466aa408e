"""The last frames of a run, which rules check and notebooks plot. Its length is limited."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import numpy as np

from tbhooks.data import ranks
from tbhooks.data.display import display, mimebundle
from tbhooks.data.errors import ArgumentError, UnknownSiteError, nearest
from tbhooks.data.frame import Frame
from tbhooks.data.stats import STAT_NAMES, Floats

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MOST_FRAMES = 1000
# The histograms of a frame take forty times the memory of its rows: only the newest frames keep theirs.
MOST_WITH_BUCKETS = 50
# Kept for good: rules compare with them however long the run is.
MOST_EARLY = 15


class History:
    """The last frames of a run, oldest first. Returned by `Watch.history`; thread-safe.

    It is a sequence: `history[-1]`, `len(history)`, `for frame in history`. It keeps up to 1000 frames, and the
    histograms of the newest 50. `early` has the first 15 frames of training for good, without histograms.

    Examples:
        >>> steps, values = w.history.series("fc", "gradient", "norm")  # doctest: +SKIP
        >>> steps, losses = w.history.scalar("train/loss")  # doctest: +SKIP

    """

    def __init__(self, most_frames: int = MOST_FRAMES, formats: tuple[str, ...] = ()) -> None:
        self.formats = formats
        """The number formats that quantizers of the model use."""
        self._frames: deque[Frame] = deque(maxlen=most_frames)
        # Scalars of steps that were not logged otherwise. No rule counts them as frames.
        self._scalars_only: deque[Frame] = deque(maxlen=most_frames)
        self._early: list[Frame] = []
        self._lock = threading.RLock()

    def append(self, frame: Frame) -> None:
        """Adds a frame. Scalars that were logged after their step join the frame of that step."""
        with self._lock:
            if not frame.sites and (not (frame.scalars or frame.samples) or self._join(frame)):
                return
            if not frame.sites:
                self._scalars_only.append(_without_artifacts(frame))
                return
            self._frames.append(_without_artifacts(frame))
            if len(self._early) < MOST_EARLY and not frame.is_evaluation:
                self._early.append(_without_buckets(_without_artifacts(frame)))
            if len(self._frames) > MOST_WITH_BUCKETS:
                self._frames[-MOST_WITH_BUCKETS - 1] = _without_buckets(self._frames[-MOST_WITH_BUCKETS - 1])

    def replace_newest(self, frame: Frame) -> None:
        """Replaces the newest frame, by the same one with findings."""
        with self._lock:
            if self._early and self._early[-1].step == frame.step and not frame.is_evaluation:
                self._early[-1] = replace(self._early[-1], findings=frame.findings)
            self._frames[-1] = _without_artifacts(frame)

    @property
    def early(self) -> list[Frame]:
        """The first frames of training, which are kept however long the run is; without histograms."""
        with self._lock:
            return list(self._early)

    @property
    def latest(self) -> Frame | None:
        """The newest frame of a training step, or of an evaluation if there is no other; None if it is empty."""
        frames = self[:]
        training = [frame for frame in frames if not frame.is_evaluation]
        return training[-1] if training else frames[-1] if frames else None

    def _join(self, late: Frame) -> bool:
        for i, early in enumerate(self._early):
            if early.step == late.step:
                self._early[i] = replace(early, scalars={**early.scalars, **late.scalars})
        for i in range(len(self._frames) - 1, -1, -1):
            if self._frames[i].step == late.step and not self._frames[i].is_evaluation:
                known = self._frames[i]
                self._frames[i] = replace(
                    known, scalars={**known.scalars, **late.scalars}, samples=late.samples or known.samples
                )
                return True
        return False

    def __len__(self) -> int:
        return len(self._frames)

    @overload
    def __getitem__(self, index: int) -> Frame: ...

    @overload
    def __getitem__(self, index: slice) -> list[Frame]: ...

    def __getitem__(self, index: int | slice) -> Frame | list[Frame]:
        with self._lock:
            return list(self._frames)[index]

    def __iter__(self) -> Iterator[Frame]:
        with self._lock:
            return iter(list(self._frames))

    def series(self, path: str, kind: str, stat: str) -> tuple[list[int], Floats]:
        """Returns the steps and values of one statistic at one site. Steps without the site are left out.

        Raises an `ArgumentError` for an unknown statistic and an `UnknownSiteError` for an unknown site.
        """
        if stat not in STAT_NAMES:
            raise ArgumentError(f"unknown stat {stat!r}: {nearest(stat, STAT_NAMES)}")
        frames = [frame for frame in self if (path, kind) in frame]
        if not frames and len(self):
            names = [site.name for frame in self for site in frame.sites if site.kind == kind]
            raise UnknownSiteError(f"no logged step has the {kind} of {path!r}: {nearest(path, names)}")
        return [frame.step for frame in frames], np.array([getattr(frame[path, kind], stat) for frame in frames])

    def scalar(self, tag: str) -> tuple[list[int], Floats]:
        """Returns the steps and values of a scalar such as `train/loss`, including steps that only `log_every` wrote.

        Raises an `UnknownSiteError` for an unknown tag.
        """
        with self._lock:
            frames = sorted([*self._scalars_only, *self._frames], key=lambda frame: frame.step)
        having = [frame for frame in frames if tag in frame.scalars]
        if not having and frames:
            tags = [name for frame in frames for name in frame.scalars]
            raise UnknownSiteError(f"no logged step has the scalar {tag!r}: {nearest(tag, tags)}")
        return [frame.step for frame in having], np.array([frame.scalars[tag] for frame in having])

    def figure(self, stat: str = "std", kind: str = "gradient", width: float = 7.0) -> Figure:
        """Returns a matplotlib heat map of one statistic, layers by steps. Needs `tbhooks[plot]`."""
        figure: Figure = display("heatmap", self, stat, kind, width)
        return figure

    def to_pandas(self) -> pd.DataFrame:
        """Returns a DataFrame with one row per step and site, and the columns of `Frame.to_pandas`.

        Evaluations have kinds such as `eval.activation`. Frames without histograms have no quantiles.
        """
        return display("dataframe", self[:])

    _repr_mimebundle_ = mimebundle("history")

    def __repr__(self) -> str:
        steps = f", steps {self._frames[0].step} to {self._frames[-1].step}" if self._frames else ""
        return f"History({len(self)} logged steps{steps})"


def _without_buckets(frame: Frame) -> Frame:
    n = len(frame.sites)
    return replace(frame, buckets=np.zeros((n, 0), np.int64), spreads=ranks.empty(n))


def _without_artifacts(frame: Frame) -> Frame:
    """The frame without artifacts, which take more memory than everything else."""
    return replace(frame, artifacts=()) if frame.artifacts else frame
