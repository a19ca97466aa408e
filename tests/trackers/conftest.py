"""Trackers are large: `make test-trackers` installs them in a place of their own and runs what is here."""

from __future__ import annotations

import importlib.util

collect_ignore = [
    f"test_{name}.py" for name in ("mlflow", "aim", "trackio", "swanlab") if importlib.util.find_spec(name) is None
]
