"""Stock scalars of TensorBoard: all of a step's as bytes.

From one step to the next only the numbers change. So the bytes around them are made once for a list of
sites, and the numbers are put into their places all together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2

from tbhooks.data.frame import Frame, Site
from tbhooks.data.stats import Floats
from tbhooks.sinks.scalar_selection import ScalarTable, alarms, asked_for, scalar_table
from tbhooks.sinks.tensorboard import protobuf

__all__ = ["SiteScalars", "Template", "scalar_table"]


class Template:
    """The bytes of scalars with these tags, one after the other, with room for their numbers."""

    def __init__(self, tags: Sequence[str]) -> None:
        scalars = [_scalar(tag) for tag in tags]
        self._sizes = np.array([len(scalar) for scalar in scalars], dtype=np.intp)
        self._places = (np.cumsum(self._sizes)[:, None] + np.arange(-4, 0)).ravel()
        self._text = np.frombuffer(b"".join(scalars), np.uint8)

    def filled(self, numbers: Floats, shown: NDArray[np.bool_] | None = None) -> bytes:
        """With these numbers; only the scalars to be shown, all if nothing is said."""
        text = self._text.copy()
        with np.errstate(over="ignore"):
            text[self._places] = numbers.astype("<f4").view(np.uint8)
        return (text if shown is None or shown.all() else text[np.repeat(shown, self._sizes)]).tobytes()


def _scalar(tag: str) -> bytes:
    value: bytes = protobuf.tag_field(tag) + summary_pb2.Summary.Value(simple_value=0.0).SerializeToString()
    return protobuf.VALUE + protobuf.varint(len(value)) + value


class SiteScalars:
    """The scalars of a list of sites: those asked for, then the alarms."""

    def __init__(self, sites: Sequence[Site], table: ScalarTable) -> None:
        self._asked, self._alarms = asked_for(sites, table), alarms(sites, table)
        self._asked_template, self._alarm_template = Template(self._asked.tags), Template(self._alarms.tags)

    def encoded(self, frame: Frame) -> bytes:
        asked = self._asked.read(frame)
        alarming = self._alarms.read(frame)
        text = self._asked_template.filled(asked, np.isfinite(asked))
        return text + self._alarm_template.filled(alarming, alarming != 0) if alarming.any() else text
