"""How runs, frames and findings are shown: in notebooks, as figures, live, and as reports.

`display` is the one function that lower layers call, for objects that show themselves in a notebook.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

# What an object may ask for, and the function that makes it.
_VIEWS = {
    "compare": "notebook.compare:compare",
    "dataframe": "notebook.dataframe:of_frames",
    "figure": "figures:frame_figure",
    "findings": "notebook:findings_bundle",
    "frame": "notebook:frame_bundle",
    "frame_text": "notebook.frame_table:as_text",
    "heatmap": "figures:heat_map",
    "history": "notebook:history_bundle",
    "image_grid": "figures:image_grid",
    "live": "live:Live.start",
    "ridgeline": "figures.ridgeline:ridgeline",
    "summary": "notebook:summary_bundle",
    "watch": "notebook:watch_bundle",
}


def display(view: str, *arguments: Any, **options: Any) -> Any:
    """Imports the named view and returns what its function returns for these arguments."""
    module, _, function = _VIEWS[view].partition(":")
    make = operator.attrgetter(function)(importlib.import_module(f"tbhooks.views.{module}"))
    return make(*arguments, **options)
