"""The last frames of a run, bounded: what rules judge by and notebooks plot."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import numpy as np

from tbhooks.data import rank_spread
from tbhooks.data.errors import ArgumentError, UnknownSiteError, nearest
from tbhooks.data.frame import Frame
from tbhooks.data.stats import STAT_NAMES, Floats

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MOST_FRAMES = 1000
# A frame's buckets weigh forty times its rows, so only the newest frames keep theirs.
MOST_WITH_BUCKETS = 50


class History:
    """Frames oldest first: `history[-1]`, `len(history)`, `for frame in history`."""

    def __init__(self, most_frames: int = MOST_FRAMES) -> None:
        self._frames: deque[Frame] = deque(maxlen=most_frames)
        # Scalars of steps that nothing else is known of: they take no frame's place, and no rule counts them.
        self._between: deque[Frame] = deque(maxlen=most_frames)
        self._lock = threading.RLock()

    def append(self, frame: Frame) -> None:
        """Adds a frame; scalars that came late join the frame of their step."""
        with self._lock:
            if not frame.sites and (not frame.scalars or self._join(frame)):
                return
            if not frame.sites:
                self._between.append(_numbers_of(frame))
                return
            self._frames.append(_numbers_of(frame))
            if len(self._frames) > MOST_WITH_BUCKETS:
                old = self._frames[-MOST_WITH_BUCKETS - 1]
                self._frames[-MOST_WITH_BUCKETS - 1] = replace(
                    old, buckets=np.zeros((len(old.sites), 0), np.int64), spreads=rank_spread.empty(len(old.sites))
                )

    def judged(self, frame: Frame) -> None:
        """The newest frame, with what the rules found in it."""
        with self._lock:
            self._frames[-1] = _numbers_of(frame)

    @property
    def latest(self) -> Frame | None:
        """The newest frame of a training step; of an evaluation, if there is nothing else."""
        frames = self[:]
        training = [frame for frame in frames if not frame.is_evaluation]
        return training[-1] if training else frames[-1] if frames else None

    def _join(self, late: Frame) -> bool:
        for i in range(len(self._frames) - 1, -1, -1):
            if self._frames[i].step == late.step and not self._frames[i].is_evaluation:
                self._frames[i] = replace(self._frames[i], scalars={**self._frames[i].scalars, **late.scalars})
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
        """Steps and values of one statistic at one site; steps that did not see the site are left out."""
        if stat not in STAT_NAMES:
            raise ArgumentError(f"unknown stat {stat!r}: {nearest(stat, STAT_NAMES)}")
        seen = [frame for frame in self if (path, kind) in frame]
        if not seen and len(self):
            places = [site.name for frame in self for site in frame.sites if site.kind == kind]
            raise UnknownSiteError(f"no frame has the {kind} of {path!r}: {nearest(path, places)}")
        return [frame.step for frame in seen], np.array([getattr(frame[path, kind], stat) for frame in seen])

    def scalar(self, tag: str) -> tuple[list[int], Floats]:
        """Steps and values of a scalar such as `train/loss`; of steps too that only `log_every` has written."""
        with self._lock:
            frames = sorted([*self._between, *self._frames], key=lambda frame: frame.step)
        seen = [frame for frame in frames if tag in frame.scalars]
        if not seen and frames:
            tags = [name for frame in frames for name in frame.scalars]
            raise UnknownSiteError(f"no frame has the scalar {tag!r}: {nearest(tag, tags)}")
        return [frame.step for frame in seen], np.array([frame.scalars[tag] for frame in seen])

    def figure(self, stat: str = "std", kind: str = "gradient", width: float = 7.0) -> Figure:
        """A heat map of one statistic, layers by steps. Needs `tbhooks[plot]`."""
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        figure: Figure = display("heatmap", self, stat, kind, width)
        return figure

    def to_pandas(self) -> pd.DataFrame:
        """A row a step and site, with the columns `Frame.to_pandas` has; evaluations under kinds such as
        `eval.activation`. Quantiles are there for frames that still have their buckets.
        """
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        return display("dataframe", self[:])

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        bundle: dict[str, str] = display("history", self, include, exclude)
        return bundle

    def __repr__(self) -> str:
        steps = f", steps {self._frames[0].step} to {self._frames[-1].step}" if self._frames else ""
        return f"History({len(self)} frames{steps})"


def _numbers_of(frame: Frame) -> Frame:
    """Without pictures and their like, which weigh more than everything else together."""
    return replace(frame, artifacts=()) if frame.artifacts else frame
