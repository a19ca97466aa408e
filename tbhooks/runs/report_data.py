"""The data of reports: a few statistics of every site over the steps, and one JSON document.

The text report, the HTML report and the comparison all show these grids. Formatting is done elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tbhooks.data import findings, grids, stats
from tbhooks.data.findings import SEVERITIES
from tbhooks.data.frame import EVALUATION, ROOT, SAMPLED, Finding, Frame, Site
from tbhooks.data.grids import Grid
from tbhooks.data.jsonable import to_jsonable
from tbhooks.runs.run import Run
from tbhooks.runs.scalars import Series

__all__ = ["SEVERITIES", "Grid", "as_json", "by_severity", "document", "grids", "own_scalars"]

DOCUMENT_VERSION = 1
RETURNED_LOSS = "loss returned by the model"


def run_grids(run: Run) -> list[Grid]:
    """The main statistics of every kind, in the order in which the kinds were recorded."""
    return grids.grids(run.frames)


def own_scalars(run: Run) -> dict[str, Series]:
    """The scalars that are not statistics of sites, the most important first, and the loss returned by the model."""
    scalars = {**run.scalars, **_returned_losses(run)}
    return {tag: scalars[tag] for tag in grids.own_scalars(scalars) if len(scalars[tag].steps)}


def _returned_losses(run: Run) -> dict[str, Series]:
    training, evaluation = returned_loss(run.training), returned_loss(run.evaluations)
    both = {RETURNED_LOSS: training, f"{RETURNED_LOSS} in evaluation": evaluation}
    return {tag: series for tag, series in both.items() if series is not None}


def returned_loss(frames: Sequence[Frame]) -> Series | None:
    """The output `loss` of the whole model (as in transformers), averaged over the forwards of a step; None if none.

    The frames are all of training, or all of evaluations.
    """
    kind = EVALUATION * bool(frames and frames[0].is_evaluation) + "activation"
    name = Site(ROOT, kind, "[loss]").name
    points = [(frame.step, float(frame[name, kind].mean)) for frame in frames if (name, kind) in frame]
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))


def sampled(run: Run) -> dict[str, float]:
    """The parameters whose last update is an estimate, and the fraction of the elements it was computed from."""
    last = next((frame for frame in reversed(run.training) if any(s.kind == "update" for s in frame.sites)), None)
    names = () if last is None else [site.name for site in last.sites if site.kind == "update"]
    readings = {name: last[name, "update"] for name in names if last is not None}
    return {name: reading.sampled_fraction for name, reading in readings.items() if reading.is_sampled}


def by_severity(run: Run) -> list[Finding]:
    """Sorted by severity, then by step."""
    return findings.by_severity(run.findings)


def document(run: Run) -> dict[str, Any]:
    """The run as a JSON document. Keys:

    - `version`, `run` (the directory), `steps` (`first`, `last`, `logged`; null if there is none), `evaluations`
    - `scalars`: by tag `count`, `first`, `last`, `min`, `max`, `last_step`
    - `sites`: in execution order `path`, `kind`, `index`, `last_step`, and all statistics at that step as `stats`;
      `sampled`, the fraction of elements read, for an update that is an estimate
    - `findings`: the most severe first, each as returned by `Finding.to_dict`
    - `flights`: the dumps of the flight recorder, each as returned by `Flight.to_dict`
    - `problems`: what could not be read, in sentences

    NaN and infinities are the strings "nan", "inf" and "-inf"; a statistic without value is "nan".
    """
    steps = [frame.step for frame in run.training]
    document: dict[str, Any] = to_jsonable({
        "version": DOCUMENT_VERSION,
        "run": str(run.directory),
        "steps": {"first": steps[0], "last": steps[-1], "logged": len(steps)} if steps else None,
        "evaluations": len(run.evaluations),
        "scalars": {tag: _scalar(one) for tag, one in own_scalars(run).items()},
        "sites": _sites(run),
        "findings": [finding.to_dict() for finding in by_severity(run)],
        "flights": [flight.to_dict() for flight in run.flights],
        "problems": list(run.problems),
    })  # fmt: skip
    return document


def as_json(value: Mapping[str, Any]) -> str:
    """Strict JSON: NaN becomes a string."""
    return json.dumps(to_jsonable(value), allow_nan=False, indent=1)


def _scalar(one: Series) -> dict[str, float | int]:
    values = one.values
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    return {
        "count": len(values), "first": float(values[0]), "last": float(values[-1]), "min": low, "max": high,
        "last_step": int(one.steps[-1]),
    }  # fmt: skip


def _sites(run: Run) -> list[dict[str, Any]]:
    newest: dict[Site, tuple[Frame, int]] = {}
    for frame in {id(frame.sites): frame for frame in run.frames}.values():
        for i, site in enumerate(frame.sites):
            if site not in newest or newest[site][0].step < frame.step:
                newest[site] = frame, i
    sites = []
    columns: dict[int, dict[str, list[float]]] = {}
    for site, (frame, i) in newest.items():
        if id(frame) not in columns:
            columns[id(frame)] = {name: function(frame.values).tolist() for name, function in stats.STATS.items()}
        numbers = {name: column[i] for name, column in columns[id(frame)].items()}
        if site.plain_kind != "update":
            del numbers["ratio"]
        fraction = frame.scalars.get(SAMPLED + site.name) if site.kind == "update" else None
        sites.append({
            "path": site.path, "kind": site.kind, "index": site.index, "last_step": frame.step, "stats": numbers,
            **({} if fraction is None else {"sampled": fraction}),
        })  # fmt: skip
    return sites
