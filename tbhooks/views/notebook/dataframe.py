"""Frames as one tidy table of pandas: a row a step and site, a column a statistic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import MORE_STATS, Frame
from tbhooks.data.stats import STAT_NAMES, WIDTH
from tbhooks.drawing.text import outputs_of

if TYPE_CHECKING:
    import pandas as pd

_WHOLE = ("count", "nan_count", "inf_count")


def of_frames(frames: Sequence[Frame]) -> pd.DataFrame:
    """Columns: `step path index kind`, every statistic, `type shape dtype` where a frame knows its outputs, and
    `dead_fraction entropy max_logit` where a frame has them. Counts are whole numbers, kinds a category; a
    statistic a site does not have is NaN, such as the ratio of anything but an update.
    """
    try:
        import pandas as pd  # noqa: PLC0415  an extra
    except ImportError as missing:
        raise ArgumentError('to_pandas() needs pandas: pip install "tbhooks[pandas]"') from missing

    parts = [pd.DataFrame(_columns(frame)) for frame in frames if frame.sites]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(_columns(_NOTHING))
    return table.astype({**dict.fromkeys(_WHOLE, "int64"), "step": "int64", "kind": "category"})


def _columns(frame: Frame) -> dict[str, Any]:
    sites = frame.sites
    numbers = {name: frame.stat(name) for name in STAT_NAMES}
    numbers["ratio"] = np.where([site.plain_kind == "update" for site in sites], numbers["ratio"], np.nan)
    columns: dict[str, Any] = {
        "step": np.full(len(sites), frame.step),
        **{part: [getattr(site, part) for site in sites] for part in ("path", "index", "kind")},
    }
    return columns | _of_outputs(frame) | numbers | _more(frame)


def _of_outputs(frame: Frame) -> dict[str, list[Any]]:
    outputs = outputs_of(frame)
    if not outputs:
        return {}
    known = [outputs.get(site.name) if site.kind == "activation" else None for site in frame.sites]
    of = {"type": "module", "shape": "shape", "dtype": "dtype"}
    return {title: [None if o is None else getattr(o, part) for o in known] for title, part in of.items()}


def _more(frame: Frame) -> dict[str, list[float]]:
    """Statistics only some sites have; no column where none of them does."""
    each = [frame._more(site) for site in frame.sites]
    return {name: [more.get(name, np.nan) for more in each] for name in MORE_STATS if any(name in m for m in each)}


_NOTHING = Frame(0, 0.0, 0, (), np.zeros((0, WIDTH)), np.zeros((0, 0), dtype=np.int64))
