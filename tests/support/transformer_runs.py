"""Runs of a small transformer that nobody trained: statistics, scalars and findings of whole models, made with NumPy.

`baseline` is normal; `vanishing` has gradients that fade from layer 5 down; `diverged` ends in NaN; `outlier` has one
layer of twelve with a far larger output since step 200.
"""

from __future__ import annotations

import math
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.data.stats import BASE, COUNT, M2, MAX, MEAN, MIN, NANS, WIDTH
from tbhooks.sinks.tensorboard import TensorBoardSink
from tests.support import reference

LAYERS = 12
STEPS = tuple(range(0, 600, 10))
PARTS = ("norm1", "q_proj", "k_proj", "v_proj", "o_proj", "norm2", "up", "act", "down")
WITH_WEIGHTS = tuple(part for part in PARTS if part != "act")
OUTLIER = Site("layers.7.up", "activation")
VANISHED = Site("layers.0.q_proj", "gradient")
RUNS = ("baseline", "vanishing", "diverged", "outlier")
NAN_SINCE = 420
ODD = 437  # the module of the wide run that differs: blocks.54.part5
COUNTED = 4096


@cache
def paths(weights: bool) -> tuple[str, ...]:
    inner = [f"layers.{i}.{part}" for i in range(LAYERS) for part in (WITH_WEIGHTS if weights else PARTS)]
    return ("embed", *inner, "norm", "head")


@cache
def sites(kind: str) -> tuple[Site, ...]:
    if kind in ("activation", "gradient"):
        return tuple(Site(path, kind) for path in paths(False))
    return tuple(Site(f"{path}.weight", kind) for path in paths(True))


KINDS = ("activation", "gradient", "weight", "weight_gradient", "update")
TYPICAL = {"activation": 1.0, "gradient": 1e-3, "weight": 0.05, "weight_gradient": 2e-3, "update": 5e-5}


def depth_of(site: Site) -> int:
    parts = site.path.split(".")
    return int(parts[1]) if parts[0] == "layers" else (0 if parts[0] == "embed" else LAYERS)


def size(run: str, site: Site, step: int) -> float:
    """The standard deviation of a tensor."""
    noise = np.random.default_rng(zlib.crc32(f"{run} {site} {step}".encode())).normal() * 0.06
    part = site.path.split(".")[2] if site.path.startswith("layers.") else site.path
    own = 1 + 0.35 * math.sin(3.1 * sum(map(ord, part)))
    growth = 1 + 0.5 * math.log1p(step / 80) * (site.kind in ("activation", "weight"))
    fade = 1 / (1 + step / 150) if "gradient" in site.kind or site.kind == "update" else 1.0
    base = TYPICAL[site.kind] * own * growth * fade * (1 + 0.02 * depth_of(site)) * math.exp(noise)
    if run == "vanishing" and "gradient" in site.kind and depth_of(site) < 6 and step >= 40:
        base *= 10.0 ** (-0.9 * (6 - depth_of(site)))
    if run == "diverged":
        base *= math.exp(max(0, step - 250) / 40) if site.kind != "weight" else math.exp(max(0, step - 250) / 120)
    if run == "outlier" and site.path == OUTLIER.path and step >= 200:
        base *= 40 if site.kind == "activation" else 1
    return base


@cache
def unit_counts(halvings: int) -> NDArray[np.int64]:
    """The bucket counts of normal numbers with a standard deviation of two to a half power."""
    return reference.bucket_counts(np.random.default_rng(5).normal(size=COUNTED) * 2.0 ** (halvings / 2))


def frame(run: str, step: int, histograms: bool = True) -> Frame:
    all_sites = tuple(site for kind in KINDS for site in sites(kind))
    values = np.zeros((len(all_sites), WIDTH))
    spread = np.array([size(run, site, step) for site in all_sites])
    values[:, COUNT] = COUNTED
    values[:, MEAN] = 0.02 * spread
    values[:, M2] = COUNTED * spread**2
    values[:, MIN], values[:, MAX] = -3.6 * spread, 3.7 * spread
    for i, site in enumerate(all_sites):
        if site.kind == "update":
            weight = size(run, Site(site.path, "weight"), step)
            zero_before = site.path.endswith("down.weight") and step == 0
            values[i, BASE] = 0.0 if zero_before else COUNTED * weight**2
        if run == "diverged" and step >= NAN_SINCE and site.kind in ("activation", "gradient") and depth_of(site) >= 3:
            values[i, NANS] = COUNTED / 2
    counts = [unit_counts(round(2 * math.log2(s))) for s in spread] if histograms else []
    buckets = np.array(counts, dtype=np.int64).reshape(len(all_sites), reference.BUCKETS if histograms else 0)
    return Frame(step, 1.7e9 + step, 0, all_sites, values, buckets, tuple(findings(run, step)), scalars(run, step))


def loss(run: str, step: int) -> float:
    smooth = 1.2 + 2.7 * math.exp(-step / 130) + 0.04 * math.sin(step / 7)
    if run == "vanishing":
        return 3.2 + 0.7 * math.exp(-step / 300) + 0.03 * math.sin(step / 7)
    if run == "diverged":
        return smooth + 3 * (math.exp(max(0, step - 250) / 70) - 1) if step < NAN_SINCE else math.nan
    return smooth


def scalars(run: str, step: int) -> dict[str, float]:
    rate = 3e-4 * min(1, (step + 10) / 100) * (40 if run == "diverged" else 1)
    norm = 0.9 / (1 + step / 150) * (math.exp(max(0, step - 250) / 40) if run == "diverged" else 1)
    return {
        "train/loss": loss(run, step),
        "train.lr/0": rate,
        "train.grad_norm": norm,
        "accuracy": 1 - loss(run, step) / 5,
    }


def findings(run: str, step: int) -> list[Finding]:
    """As the rules report them: again and again while they last, with the step since which they do."""
    found = []
    if run == "vanishing" and step >= 90:
        times, excess = (step - 90) // 10 + 1, 1e5 if step == 410 else 1e4
        text = "Vanishing gradients: RMS falls from 1.0e-03 near the loss to 4.0e-09 at layers.0.q_proj"
        found.append(
            Finding(
                step, VANISHED, "vanishing_gradient", "warning", text, {"since": 90, "times": times, "excess": excess}
            )
        )
    if run == "diverged" and 260 <= step < NAN_SINCE:
        update = Site("layers.3.up.weight", "update")
        text = "Update-to-weight ratio too high: median 0.12 (typical 1e-3). Reduce the learning rate by at least 10x"
        found.append(Finding(step, update, "update_ratio", "warning", text, {"since": 260}))
    if run == "diverged" and 310 <= step < NAN_SINCE:
        gradient = Site("layers.3.up", "gradient")
        text = "Exploding gradient: norm of layers.3.up is 1,390x its reference value (0.0332)"
        found.append(Finding(step, gradient, "exploding_gradient", "error", text, {"since": 310, "excess": step}))
    if run == "diverged" and step >= NAN_SINCE:
        text = "NaN in 2,048 of 4,096 values of the layers.3.norm1 output"
        found.append(
            Finding(step, Site("layers.3.norm1", "activation"), "non_finite", "error", text, {"since": NAN_SINCE})
        )
    if step == 0:
        text = "3 tensors would underflow in float16 (in use elsewhere in this model)"
        found.append(Finding(step, None, "low_precision", "info", text, {}))
    return found


def write_transformers(directory: Path, runs: tuple[str, ...] = RUNS) -> None:
    for run in runs:
        sink = TensorBoardSink(directory / run, scalars=())
        for step in STEPS:
            sink.write(frame(run, step, histograms=step % 50 == 0))
        sink.close()


def write_wide(directory: Path, modules: int, steps: int, odd: int, since: int) -> Path:
    """A run of many modules with one stat each: module `odd` has a hundredfold of the others from step `since` on."""
    names = tuple(Site(f"blocks.{i // 8}.part{i % 8}", "activation") for i in range(modules))
    rng = np.random.default_rng(11)
    sink = TensorBoardSink(directory, scalars=())
    for step in range(steps):
        spread = np.exp(rng.normal(size=modules) * 0.05)
        spread[odd] *= 100.0 if step >= since else 1.0
        values = np.zeros((modules, WIDTH))
        values[:, COUNT], values[:, M2], values[:, MIN], values[:, MAX] = 64, 64 * spread**2, -spread, spread
        empty = np.zeros((modules, 0), dtype=np.int64)
        sink.write(Frame(step, 1.7e9 + step, 0, names, values, empty, (), {"loss": 2.0 / (1 + step)}))
    sink.close()
    return directory
