"""Tensors of every type, layout and kind of nasty number, and comparisons of what is reduced from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data import stats
from tbhooks.data.frame import KINDS, Reading, Site
from tests.support import reference

Array = NDArray[np.float64]
Rng = np.random.Generator
# Statistics that are read off, not computed: these must be equal to the last bit.
EXACT = ("count", "min", "max", "abs_max", "zero_fraction", "nan_count", "inf_count")
COMPUTED = ("mean", "std", "norm", "rms")
SHAPE = ("skewness", "kurtosis")
SITE = Site("layer", "activation")
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
SEEDS = st.integers(0, 2**32 - 1)


def assert_same_stats(read: Callable[[str], float], data: Array, rel: float = 1e-5, exact_rel: float = 0.0) -> None:
    """Compares with the reference; a mean or std that cancels is judged against the size of the data."""
    expected = reference.stats(data)
    size = 0.0 if math.isnan(expected["abs_max"]) else expected["abs_max"]
    for name in EXACT:
        assert read(name) == pytest.approx(expected[name], rel=exact_rel, abs=0.0, nan_ok=True), name
    for name in COMPUTED:
        assert read(name) == pytest.approx(expected[name], rel=rel, abs=1e-12 * size, nan_ok=True), name
    assert_same_shape(read, expected, rel)


def assert_same_shape(read: Callable[[str], float], expected: dict[str, float], rel: float) -> None:
    """Compares skewness and kurtosis. Both may be unknown where fourth powers exceed the range of float64."""
    std, size = expected["std"], expected["abs_max"]
    if not 1e-70 < std < 1e75 and all(math.isnan(read(name)) for name in SHAPE):
        return
    rounding = 1e-14 * size / std if std > 0 else 0.0  # of the mean, in standard deviations
    if rounding < 1e-3:
        tolerance = (rel + rounding) * max(1.0, np.nan_to_num(expected["kurtosis"]))
        for name in SHAPE:
            assert reference.is_close(read(name), expected[name], 0.0, tolerance), name


def row_of(data: Array) -> Array:
    """The row of an array, by definition."""
    row = np.zeros(stats.WIDTH)
    finite = data[np.isfinite(data)]
    known = reference.stats(data)
    row[stats.COUNT] = data.size
    row[stats.ZEROS] = np.count_nonzero(data == 0)
    row[stats.NANS], row[stats.INFS] = known["nan_count"], known["inf_count"]
    row[stats.MIN], row[stats.MAX] = np.inf, -np.inf
    if finite.size:
        row[stats.MEAN], row[stats.MIN], row[stats.MAX] = known["mean"], known["min"], known["max"]
        row[stats.M2] = known["std"] ** 2 * finite.size
        if known["max"] > known["min"]:
            row[stats.M3] = known["skewness"] * known["std"] ** 3 * finite.size
            row[stats.M4] = known["kurtosis"] * known["std"] ** 4 * finite.size
    return row


def reader(row: Array) -> Callable[[str], float]:
    """Reads the statistics of one row by their names."""
    return lambda name: float(stats.STATS[name](row[None])[0])


def reduced(*tensors: Tensor) -> Reading:
    """The reading of a frame after one site gave these tensors in one step."""
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=True)
    for tensor in tensors:
        assert recorder.record(recorder.number(SITE), tensor) is not None
    return recorder.pack(step=0, rank=0).frames()[-1]["layer", "activation"]


def every_value(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a narrow type, NaN and infinities included."""
    bits = 8 * dtype.itemsize
    integers = torch.arange(2**bits) - 2 ** (bits - 1)
    return integers.to(torch.int8 if bits == 8 else torch.int16).view(dtype)


def _sprinkled(rng: Rng, n: int) -> Any:
    values = rng.normal(size=n)
    values[rng.random(n) < 0.2] = np.nan
    values[rng.random(n) < 0.2] = np.inf
    values[rng.random(n) < 0.2] = -np.inf
    return values


def _outlier(rng: Rng, n: int) -> Any:
    values = rng.normal(size=n)
    values[n // 2 : n // 2 + 1] = 1e20
    return values


DISTRIBUTIONS: dict[str, Callable[[Rng, int], Any]] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "large_mean": lambda rng, n: rng.normal(1e4, 1e-2, n),
    "denormal": lambda rng, n: rng.normal(0, 1e-40, n),
    "half_denormal": lambda rng, n: rng.normal(0, 1e-6, n),
    "equal": lambda rng, n: np.full(n, rng.normal()),
    "outlier": _outlier,
    "sprinkled": _sprinkled,
    "all_nan": lambda rng, n: np.full(n, np.nan),
    "all_infinite": lambda rng, n: np.where(rng.random(n) < 0.5, np.inf, -np.inf),
    "relu": lambda rng, n: np.maximum(rng.normal(size=n), 0),
    "signed_zeros": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "huge": lambda rng, n: rng.normal(0, 1e37, n),
}


def _every_second(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x)], dim=-1).flatten(-2)[..., ::2] if x.dim() else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1) if x.dim() > 1 else x,
    "sliced": _every_second,
    "offset": lambda x: x.reshape(-1)[1:],
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "expanded": lambda x: x.unsqueeze(-1).expand(*x.shape, 3),
    "expanded_in_front": lambda x: x.expand(4, *x.shape),
}


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, distribution: str, layout: str, seed: int) -> Tensor:
    """A tensor of random numbers from one of `DISTRIBUTIONS`, laid out in memory as one of `LAYOUTS`."""
    rng = np.random.default_rng(seed)
    n = int(np.prod(shape, dtype=np.int64))

    def draw() -> Tensor:
        return torch.tensor(DISTRIBUTIONS[distribution](rng, n), dtype=torch.float64).reshape(shape)

    wide = torch.complex(draw(), draw()) if dtype.is_complex else draw()
    return LAYOUTS[layout](wide.to(dtype))
