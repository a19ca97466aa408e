"""A bounded sample of points that come batch by batch, each as likely to stay as any other.

On the host, in the background; its random numbers are its own, and the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.exhibits import Embedding
from tbhooks.painting import thumbnails_of

# What one entry of the PROJECTOR tab holds: it is a text file that a browser loads.
MOST_NUMBERS = 1 << 20
LONGEST_LABEL = 200
UNLABELLED = "(none)"

Array = NDArray[Any]


class Reservoir:
    """Points of one layer."""

    def __init__(self, most: int) -> None:
        self.left_out = 0
        """How many points were not finite."""
        self._most = most
        self._random = np.random.Generator(np.random.PCG64(0))
        self.clear()

    def clear(self) -> None:
        self._seen = 0
        self._kept: list[tuple[Array, str, Array | None]] = []

    def offer(self, points: Array, labels: Sequence[str] | None, thumbnails: Array | None) -> None:
        """A batch, in which labels and thumbnails are those of the points in their order."""
        if self._kept and self._kept[0][0].shape != points.shape[1:]:
            self.clear()  # another width: they are points of another space
        most = max(1, min(self._most, MOST_NUMBERS // max(points.shape[1], 1)))
        for i, point in enumerate(points):
            if not np.isfinite(point).all():
                self.left_out += 1
                continue
            one = point, UNLABELLED if labels is None else labels[i], None if thumbnails is None else thumbnails[i]
            if len(self._kept) < most:
                self._kept.append(one)
            else:
                place = int(self._random.integers(self._seen + 1))
                if place < most:
                    self._kept[place] = one
            self._seen += 1

    def embedding(self, tag: str) -> Embedding | None:
        """What is there now; None if that is nothing. Thumbnails are shown if all points have one of one size."""
        if not self._kept:
            return None
        points, labels, pictures = zip(*self._kept, strict=True)
        sizes = {None if picture is None else picture.shape for picture in pictures}
        drawn = thumbnails_of(np.stack(pictures)) if len(sizes) == 1 and None not in sizes else None
        has_labels = any(label != UNLABELLED for label in labels)
        return Embedding(tag, np.stack(points).astype(np.float64), labels if has_labels else (), drawn)


def texts(labels: Iterable[Any]) -> list[str]:
    """Labels as a line each of a table: what would end a line or a column there becomes a blank."""
    return [_line(label) for label in labels]


def _line(label: Any) -> str:
    if isinstance(label, np.generic | np.ndarray) and np.ndim(label) == 0:
        label = label.item()
    text = f"{label:.6g}" if isinstance(label, float) else str(label)
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST_LABEL]).strip()
    return shown or UNLABELLED
