"""TensorBoard scalars: all scalars of a step, encoded as bytes.

Only the values change from one step to the next. The bytes around them are made once for a list of tags, and all
values are copied in together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2

from tbhooks.data.frame import Frame, Site
from tbhooks.data.stats import Floats
from tbhooks.sinks.scalar_selection import ScalarTable, is_summarised, nonfinite_counts, scalar_table, selected
from tbhooks.sinks.scalar_summaries import Summaries
from tbhooks.sinks.tensorboard import protobuf

EXTREMES_TAG = "summary/which layer/text_summary"

__all__ = ["SiteScalars", "Template", "scalar_table"]


class Template:
    """The encoded scalars of a list of tags, with room for their values."""

    def __init__(self, tags: Sequence[str]) -> None:
        scalars = [_scalar(tag) for tag in tags]
        self._sizes = np.array([len(scalar) for scalar in scalars], dtype=np.intp)
        self._value_bytes = (np.cumsum(self._sizes)[:, None] + np.arange(-4, 0)).ravel()
        self._text = np.frombuffer(b"".join(scalars), np.uint8)

    def encode(self, values: Floats, shown: NDArray[np.bool_] | None = None) -> bytes:
        """The scalars with these values; all of them, or those with a flag in `shown`."""
        text = self._text.copy()
        with np.errstate(over="ignore"):
            text[self._value_bytes] = values.astype("<f4").view(np.uint8)
        return (text if shown is None or shown.all() else text[np.repeat(shown, self._sizes)]).tobytes()


def _scalar(tag: str) -> bytes:
    value: bytes = protobuf.tag_field(tag) + summary_pb2.Summary.Value(simple_value=0.0).SerializeToString()
    return protobuf.VALUE + protobuf.varint(len(value)) + value


class SiteScalars:
    """The scalars of a list of sites: the selected statistics, then the counts of NaN and infinity."""

    def __init__(self, sites: Sequence[Site], table: ScalarTable) -> None:
        self._selected, self._nonfinite = selected(sites, table), nonfinite_counts(sites, table)
        self.are_summaries = is_summarised(sites, table)
        """Whether there is no scalar and no histogram of single layers."""
        self._templates = Template(self._selected.tags), Template(self._nonfinite.tags)

    def add_extremes(self, frame: Frame, summary: summary_pb2.Summary) -> None:
        """Adds which layer has the least and the most of each statistic as a text, where there are summaries."""
        if isinstance(self._selected, Summaries):
            text = self._selected.extremes(frame).encode(errors="replace")
            summary.value.add(
                tag=EXTREMES_TAG, tensor=protobuf.strings([text]), metadata=protobuf.plugin_metadata("text")
            )

    def encode(self, frame: Frame) -> bytes:
        values, counts = self._selected.read(frame), self._nonfinite.read(frame)
        encoded = self._templates[0].encode(values, np.isfinite(values))
        return encoded + self._templates[1].encode(counts, counts != 0) if counts.any() else encoded
