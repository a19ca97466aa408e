"""How runs, frames and findings are shown: in notebooks, as figures, live, and as reports.

Objects of lower layers that show themselves, such as a `Frame` in a notebook, call `display`. It is the only function
of this package that they call, and it imports a view when it is first shown.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

# View: the module below `tbhooks.views` and the function in it.
_VIEWS = {
    # MIME bundles for `_repr_mimebundle_`
    "findings": "notebook:findings_bundle",
    "frame": "notebook:frame_bundle",
    "history": "notebook:history_bundle",
    "summary": "notebook:summary_bundle",
    "watch": "notebook:watch_bundle",
    # matplotlib figures
    "figure": "figures:frame_figure",
    "heatmap": "figures:heat_map",
    "image_grid": "figures:image_grid",
    "ridgeline": "figures.ridgeline:ridgeline",
    # other objects
    "compare": "notebook.compare:compare",
    "dataframe": "notebook.dataframe:to_dataframe",
    "frame_text": "notebook.frame_table:as_text",
    "live": "live:Live.start",
}


def display(view: str, *arguments: Any, **options: Any) -> Any:
    """Imports the named view, calls its function with these arguments, and returns the result."""
    module, _, function = _VIEWS[view].partition(":")
    render = operator.attrgetter(function)(importlib.import_module(f"tbhooks.views.{module}"))
    return render(*arguments, **options)
