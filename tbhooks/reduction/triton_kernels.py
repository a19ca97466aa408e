# mypy: ignore-errors
"""The kernels of triton.py, which imports this only on CUDA. Triton compiles or interprets them.

Moments are merged by Chan's rule, as stats.merge does. Nothing here allocates, waits or decides from data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tbhooks.data.stats import HALF_OCTAVES as _HALF_OCTAVES
from tbhooks.data.stats import LOWEST_EXPONENT as _LOWEST
from tbhooks.data.stats import MIDDLE as _MIDDLE
from tbhooks.reduction.histogram import SLOTS as _SLOTS

PARTIALS = 8
# Of a record: the real buckets, and the one that is left behind.
SLOTS = tl.constexpr(_SLOTS)
TABLE = tl.constexpr(1 << (_SLOTS - 1).bit_length())
HALF_OCTAVES = tl.constexpr(_HALF_OCTAVES)
MIDDLE = tl.constexpr(_MIDDLE)
# Shifted bits of the lowest number that is not in the middle bucket.
LOWEST_BITS = tl.constexpr(2 * (127 + _LOWEST) - 1)
INFINITE_BITS = tl.constexpr(2 * 255)
DOWN = tl.constexpr(2.0**-64)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _bucket(bits):
    """The bucket of a float32, from its bits, as in histogram.py."""
    leading = (bits >> 22) & 511
    above = tl.minimum(tl.maximum(leading - LOWEST_BITS, 0), HALF_OCTAVES)
    bucket = tl.where(bits < 0, MIDDLE - above, MIDDLE + above)
    return tl.where(leading >= INFINITE_BITS, SLOTS - 1, bucket)


@triton.jit
def _widened(x):
    """To float32, exactly."""
    if x.dtype == tl.bfloat16:  # by its bits, which keeps subnormal numbers
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - of the two branches only one is compiled
        return x.to(tl.float32)


@triton.jit
def _exact_sum(x):
    """The sum of at most 4096 numbers below 2, in three sums of float32, of which the first two are exact."""
    coarse = (x + 6144.0) - 6144.0  # to multiples of 2**-11
    rest = x - coarse
    fine = (rest + 1.5) - 1.5  # to multiples of 2**-23
    return tl.sum(coarse).to(tl.float64) + tl.sum(fine).to(tl.float64) + tl.sum(rest - fine).to(tl.float64)


@triton.jit
def _moments(x, finite, n, largest):
    """Mean and sum of squared deviations of a block, in float64, from sums in float32 of numbers below 2."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1)
    # A power of two, so nothing is rounded; in two steps, because its exponent may not fit in one.
    once = tl.where(exponent > 191, DOWN, 1.0)
    exponent_left = tl.where(exponent > 191, exponent - 64, exponent)
    again = ((254 - exponent_left) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(finite, x * once * again, 0.0)
    some = tl.maximum(n, 1).to(tl.float64)
    mean = _exact_sum(scaled) / some
    centre = mean.to(tl.float32)
    away = tl.where(finite, scaled - centre, 0.0)
    off = mean - centre.to(tl.float64)
    m2 = tl.maximum(tl.sum(away * away).to(tl.float64) - some * off * off, 0.0)
    unit = ((exponent + (1023 - 127)).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return mean * unit, m2 * unit * unit


@triton.jit
def _merged(n, mean, m2, other_n, other_mean, other_m2):
    total = n + other_n
    share = other_n / tl.maximum(total, 1.0)
    away = other_mean - mean
    return total, mean + away * share, m2 + other_m2 + away * away * share * n


@triton.jit(do_not_specialize=["size", "each"])
def partial_rows(numbers, size, partial, counts, each, STRETCH: tl.constexpr, WITH_BUCKETS: tl.constexpr):  # noqa: N803
    """One partial row for each program, which reads `each` stretches one after the other."""
    program = tl.program_id(0).to(tl.int64)
    n = tl.zeros((), tl.float64)
    mean = tl.zeros((), tl.float64)
    m2 = tl.zeros((), tl.float64)
    low = tl.full((), INFINITY, tl.float32)
    high = tl.full((), -INFINITY, tl.float32)
    zeros = tl.zeros((), tl.int32)
    nans = tl.zeros((), tl.int32)
    infs = tl.zeros((), tl.int32)
    found = tl.zeros((TABLE,), tl.int32)
    for i in range(each):
        place = (program * each + i) * STRETCH + tl.arange(0, STRETCH)
        inside = place < size
        x = _widened(tl.load(numbers + place, mask=inside, other=0.0))
        finite = inside & (tl.abs(x) < INFINITY)
        some = tl.sum(finite.to(tl.int32))
        lowest = tl.min(tl.where(finite, x, INFINITY))
        highest = tl.max(tl.where(finite, x, -INFINITY))
        largest = tl.max(tl.where(finite, tl.abs(x), 0.0))
        stretch_mean, stretch_m2 = _moments(x, finite, some, largest)
        n, mean, m2 = _merged(n, mean, m2, some.to(tl.float64), stretch_mean, stretch_m2)
        low, high = tl.minimum(low, lowest), tl.maximum(high, highest)
        zeros += tl.sum((inside & (x == 0.0)).to(tl.int32))
        nans += tl.sum((inside & ~(tl.abs(x) <= INFINITY)).to(tl.int32))
        infs += tl.sum((inside & (tl.abs(x) == INFINITY)).to(tl.int32))
        if WITH_BUCKETS:
            # Elements past the end are counted in a slot that is not written.
            bucket = tl.where(inside, _bucket(x.to(tl.int32, bitcast=True)), TABLE - 1)
            found += tl.histogram(bucket, TABLE)
    if WITH_BUCKETS:
        slot = tl.arange(0, TABLE)
        tl.atomic_add(counts + slot, found, mask=(slot < SLOTS) & (found > 0), sem="relaxed")
    out = partial + program * 8
    tl.store(out, n)
    tl.store(out + 1, mean)
    tl.store(out + 2, m2)
    tl.store(out + 3, low.to(tl.float64))
    tl.store(out + 4, high.to(tl.float64))
    tl.store(out + 5, zeros.to(tl.float64))
    tl.store(out + 6, nans.to(tl.float64))
    tl.store(out + 7, infs.to(tl.float64))


@triton.jit(do_not_specialize=["programs"])
def merge_rows(partial, programs, row, PROGRAMS: tl.constexpr):  # noqa: N803
    """All partial rows into the row; one program."""
    i = tl.arange(0, PROGRAMS)
    inside = i < programs
    n = tl.load(partial + i * 8, mask=inside, other=0.0)
    mean = tl.load(partial + i * 8 + 1, mask=inside, other=0.0)
    m2 = tl.load(partial + i * 8 + 2, mask=inside, other=0.0)
    total = tl.sum(n)
    of_all = tl.sum(mean * (n / tl.maximum(total, 1.0)))
    away = mean - of_all
    nans = tl.sum(tl.load(partial + i * 8 + 6, mask=inside, other=0.0))
    infs = tl.sum(tl.load(partial + i * 8 + 7, mask=inside, other=0.0))
    tl.store(row, total + nans + infs)
    tl.store(row + 1, of_all)
    tl.store(row + 2, tl.sum(tl.where(n > 0, m2 + n * away * away, 0.0)))
    tl.store(row + 3, tl.min(tl.load(partial + i * 8 + 3, mask=inside, other=INFINITY)))
    tl.store(row + 4, tl.max(tl.load(partial + i * 8 + 4, mask=inside, other=-INFINITY)))
    tl.store(row + 5, tl.sum(tl.load(partial + i * 8 + 5, mask=inside, other=0.0)))
    tl.store(row + 6, nans)
    tl.store(row + 7, infs)
    tl.store(row + 8, 0.0)
    tl.store(row + 9, float("nan"))  # m3 and m4 are not computed here
    tl.store(row + 10, float("nan"))
