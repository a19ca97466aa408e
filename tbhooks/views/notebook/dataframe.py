"""Frames as one tidy pandas DataFrame: one row per step and site, one column per statistic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import MORE_STATS, Frame, Sites
from tbhooks.data.stats import STAT_NAMES, WIDTH
from tbhooks.drawing.text import outputs_of

if TYPE_CHECKING:
    import pandas as pd

_INTEGERS = ("count", "nan_count", "inf_count")


def to_dataframe(frames: Sequence[Frame]) -> pd.DataFrame:
    """Returns a table with the columns `step path index kind` and every statistic.

    Frames of `peek` add `type shape dtype`; `dead_fraction entropy max_logit` are there if any site has them. Counts
    are integers and kinds a category. A statistic that a site does not have is NaN, such as the ratio of an activation.
    Raises ArgumentError if pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415  an extra
    except ImportError as missing:
        raise ArgumentError('to_pandas() needs pandas: pip install "tbhooks[pandas]"') from missing

    parts = [pd.DataFrame(_columns(frame)) for frame in frames if frame.sites]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(_columns(_EMPTY))
    return table.astype({**dict.fromkeys(_INTEGERS, "int64"), "step": "int64", "kind": "category"})


def _columns(frame: Frame) -> dict[str, Any]:
    sites = frame.sites
    numbers = {name: frame.stat(name) for name in STAT_NAMES}
    numbers["ratio"] = np.where([site.plain_kind == "update" for site in sites], numbers["ratio"], np.nan)
    columns: dict[str, Any] = {
        "step": np.full(len(sites), frame.step),
        **{part: [getattr(site, part) for site in sites] for part in ("path", "index", "kind")},
    }
    return columns | _output_columns(frame) | numbers | _optional_stats(frame)


def _output_columns(frame: Frame) -> dict[str, list[Any]]:
    outputs = outputs_of(frame)
    if not outputs:
        return {}
    known = [outputs.get(site.name) if site.kind == "activation" else None for site in frame.sites]
    attributes = {"type": "module", "shape": "shape", "dtype": "dtype"}
    return {title: [None if o is None else getattr(o, name) for o in known] for title, name in attributes.items()}


def _optional_stats(frame: Frame) -> dict[str, list[float]]:
    """Statistics that only some sites have; there is no column for one that none has."""
    each = [frame[site.name, site.kind].more for site in frame.sites]
    return {name: [more.get(name, np.nan) for more in each] for name in MORE_STATS if any(name in m for m in each)}


_EMPTY = Frame(0, 0.0, 0, Sites(), np.zeros((0, WIDTH)), np.zeros((0, 0), dtype=np.int64))
