# mypy: ignore-errors
"""The kernels of triton.py, which imports this only on CUDA. Triton compiles or interprets them.

Moments are merged by the rules of Chan and Pebay, as stats.merge does. Nothing here allocates, waits or decides from
data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tbhooks.data import stats
from tbhooks.data.stats import HALF_OCTAVES as _HALF_OCTAVES
from tbhooks.data.stats import LOWEST_EXPONENT as _LOWEST
from tbhooks.data.stats import MIDDLE as _MIDDLE
from tbhooks.reduction.histogram import SLOTS as _SLOTS

# The columns of a partial row, all float64: `_store_partial` writes them, `merge_rows` reads them.
N, MEAN, M2, LOW, HIGH, ZEROS, NANS, INFS, M3, M4 = (tl.constexpr(i) for i in range(10))
PARTIALS = tl.constexpr(10)
# The columns of a job: the address of the numbers, of numbers to subtract and of a number to divide by (or 0), how many
# there are, where the partial row and the bucket counts go (or 0); and what a slot gets (or 0).
JOB = tl.constexpr(9)
# The columns of a slot: the addresses of a row and of its first partial row, and how many partial rows there are.
SLOT = tl.constexpr(3)
# Loads of 16 bytes need addresses that are multiples of 16.
ALIGNMENT = tl.constexpr(16)
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
# The columns of a row.
ROW_COUNT, ROW_MEAN, ROW_M2 = tl.constexpr(stats.COUNT), tl.constexpr(stats.MEAN), tl.constexpr(stats.M2)
ROW_MIN, ROW_MAX, ROW_ZEROS = tl.constexpr(stats.MIN), tl.constexpr(stats.MAX), tl.constexpr(stats.ZEROS)
ROW_NANS, ROW_INFS, ROW_BASE = tl.constexpr(stats.NANS), tl.constexpr(stats.INFS), tl.constexpr(stats.BASE)
ROW_M3, ROW_M4 = tl.constexpr(stats.M3), tl.constexpr(stats.M4)


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
    """Mean and central moments of a block, in float64, from sums in float32 of numbers below 2."""
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
    square = away * away
    squares = tl.sum(square).to(tl.float64)
    cubes = tl.sum(square * away).to(tl.float64)
    fourths = tl.sum(square * square).to(tl.float64)
    m2 = tl.maximum(squares - some * off * off, 0.0)
    m3 = cubes - off * (3.0 * squares - 2.0 * some * off * off)
    m4 = fourths - off * (4.0 * cubes - off * (6.0 * squares - 3.0 * some * off * off))
    unit = ((exponent + (1023 - 127)).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    area = unit * unit
    return mean * unit, m2 * area, m3 * area * unit, m4 * area * area


@triton.jit
def _merged(n, mean, m2, m3, m4, other_n, other_mean, other_m2, other_m3, other_m4):
    total = n + other_n
    a = n / tl.maximum(total, 1.0)
    b = other_n / tl.maximum(total, 1.0)
    away = other_mean - mean
    square = away * away
    between = square * b * n
    m4 += other_m4 + between * square * (a * a - a * b + b * b)
    m4 += 6.0 * square * (a * a * other_m2 + b * b * m2) + 4.0 * away * (a * other_m3 - b * m3)
    m3 += other_m3 + between * away * (a - b) + 3.0 * away * (a * other_m2 - b * m2)
    return total, mean + away * b, m2 + other_m2 + between, m3, m4


@triton.jit
def _loaded(address, i, size, inside, DTYPE: tl.constexpr, STRETCH: tl.constexpr):  # noqa: N803
    """Stretch number `i`: with loads of 16 bytes if it is whole and aligned, else element by element."""
    place = i * STRETCH + tl.arange(0, STRETCH)
    if ((i + 1) * STRETCH <= size) & (address % ALIGNMENT == 0):
        aligned = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNMENT)
        x = tl.load(aligned + place)
    else:
        x = tl.load(address.to(tl.pointer_type(DTYPE)) + place, mask=inside, other=0)
    return x


INTEGERS = ["table", "address", "minus", "scale", "size", "each", "partial", "counts", "slot", "row"]


@triton.jit(do_not_specialize=INTEGERS)
def reduce_rows(
    table: tl.int64, address: tl.int64, minus: tl.int64, scale: tl.int64, size: tl.int64, each: tl.int64,
    partial: tl.int64, counts: tl.int64, slot: tl.int64, row: tl.int64, DTYPE: tl.constexpr, STRETCH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One partial row for each program.

    With a table, each program has a job of its own. Without, they share the numbers at `address`: each reads `each`
    stretches. Every argument is an integer, so that there is one compiled variant for a type.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    if table != 0:
        job = table.to(tl.pointer_type(tl.int64)) + program * JOB
        address, minus, scale = tl.load(job), tl.load(job + 1), tl.load(job + 2)
        size, partial, counts = tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
        slot, row, programs = tl.load(job + 6), tl.load(job + 7), tl.load(job + 8)
    else:
        start = program * each * STRETCH
        address += start * (DTYPE.primitive_bitwidth // 8)
        minus = tl.where(minus == 0, minus, minus + start * (DTYPE.primitive_bitwidth // 8))
        size = tl.maximum(tl.minimum(size - start, each * STRETCH), 0)
        slot = tl.where(program == 0, slot, 0)
        partial += program * (PARTIALS * 8)
    if slot != 0:
        _fill_slot(slot, row, partial, programs)
    _reduce_share(address, minus, scale, size, partial, counts, DTYPE, STRETCH)


@triton.jit
def _reduce_share(address, minus, scale, size, partial, counts, DTYPE: tl.constexpr, STRETCH: tl.constexpr):  # noqa: N803
    """What one program reduces: `size` numbers, into a partial row and bucket counts."""
    divisor = tl.full((), 1.0, tl.float32)
    if scale != 0:
        divisor = tl.load(scale.to(tl.pointer_type(tl.float32)))
    n = tl.zeros((), tl.float64)
    mean = tl.zeros((), tl.float64)
    m2 = tl.zeros((), tl.float64)
    m3 = tl.zeros((), tl.float64)
    m4 = tl.zeros((), tl.float64)
    low = tl.full((), INFINITY, tl.float32)
    high = tl.full((), -INFINITY, tl.float32)
    zeros = tl.zeros((), tl.int32)
    nans = tl.zeros((), tl.int32)
    infs = tl.zeros((), tl.int32)
    found = tl.zeros((TABLE,), tl.int32)
    for i in range((size + STRETCH - 1) // STRETCH):
        inside = i * STRETCH + tl.arange(0, STRETCH) < size
        x = _widened(_loaded(address, i, size, inside, DTYPE, STRETCH))
        if minus != 0:
            x -= _widened(_loaded(minus, i, size, inside, DTYPE, STRETCH))
        if scale != 0:
            x = tl.div_rn(x, divisor)
        finite = inside & (tl.abs(x) < INFINITY)
        some = tl.sum(finite.to(tl.int32))
        lowest = tl.min(tl.where(finite, x, INFINITY))
        highest = tl.max(tl.where(finite, x, -INFINITY))
        largest = tl.maximum(tl.where(some > 0, tl.maximum(highest, -lowest), 0.0), 0.0)
        mean_here, m2_here, m3_here, m4_here = _moments(x, finite, some, largest)
        n_here = some.to(tl.float64)
        n, mean, m2, m3, m4 = _merged(n, mean, m2, m3, m4, n_here, mean_here, m2_here, m3_here, m4_here)
        low, high = tl.minimum(low, lowest), tl.maximum(high, highest)
        zeros += tl.sum((inside & (x == 0.0)).to(tl.int32))
        nans += tl.sum((inside & ~(tl.abs(x) <= INFINITY)).to(tl.int32))
        infs += tl.sum((inside & (tl.abs(x) == INFINITY)).to(tl.int32))
        if counts != 0:
            # Elements past the end are counted in a slot that is not written.
            bucket = tl.where(inside, _bucket(x.to(tl.int32, bitcast=True)), TABLE - 1)
            found += tl.histogram(bucket, TABLE)
    if counts != 0:
        place = tl.arange(0, TABLE)
        there = counts.to(tl.pointer_type(tl.int32)) + place
        tl.atomic_add(there, found, mask=(place < SLOTS) & (found > 0), sem="relaxed")
    _store_partial(partial.to(tl.pointer_type(tl.float64)), n, mean, m2, m3, m4, low, high, zeros, nans, infs)


@triton.jit
def _store_partial(out, n, mean, m2, m3, m4, low, high, zeros, nans, infs):
    tl.store(out + N, n)
    tl.store(out + MEAN, mean)
    tl.store(out + M2, m2)
    tl.store(out + M3, m3)
    tl.store(out + M4, m4)
    tl.store(out + LOW, low.to(tl.float64))
    tl.store(out + HIGH, high.to(tl.float64))
    tl.store(out + ZEROS, zeros.to(tl.float64))
    tl.store(out + NANS, nans.to(tl.float64))
    tl.store(out + INFS, infs.to(tl.float64))


@triton.jit
def _fill_slot(slot, row, partial, programs):
    entry = slot.to(tl.pointer_type(tl.int64))
    tl.store(entry, row)
    tl.store(entry + 1, partial)
    tl.store(entry + 2, programs)


@triton.jit(do_not_specialize=["slots"])
def merge_rows(slots: tl.int64, PROGRAMS: tl.constexpr):  # noqa: N803
    """The partial rows of each slot into its row; one program for each slot."""
    slot = slots.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * SLOT
    row = tl.load(slot).to(tl.pointer_type(tl.float64))
    partial = tl.load(slot + 1).to(tl.pointer_type(tl.float64))
    i = tl.arange(0, PROGRAMS)
    inside = i < tl.load(slot + 2)
    there = partial + i * PARTIALS
    n = tl.load(there + N, mask=inside, other=0.0)
    mean = tl.load(there + MEAN, mask=inside, other=0.0)
    m2 = tl.load(there + M2, mask=inside, other=0.0)
    m3 = tl.load(there + M3, mask=inside, other=0.0)
    m4 = tl.load(there + M4, mask=inside, other=0.0)
    total = tl.sum(n)
    of_all = tl.sum(mean * (n / tl.maximum(total, 1.0)))
    away = mean - of_all
    square = n * away * away
    nans = tl.sum(tl.load(there + NANS, mask=inside, other=0.0))
    infs = tl.sum(tl.load(there + INFS, mask=inside, other=0.0))
    tl.store(row + ROW_COUNT, total + nans + infs)
    tl.store(row + ROW_MEAN, of_all)
    tl.store(row + ROW_M2, tl.sum(tl.where(n > 0, m2 + square, 0.0)))
    m4 += away * (4.0 * m3 + away * (6.0 * m2 + square))
    m3 += away * (3.0 * m2 + square)
    tl.store(row + ROW_M3, tl.sum(tl.where(n > 0, m3, 0.0)))
    tl.store(row + ROW_M4, tl.sum(tl.where(n > 0, m4, 0.0)))
    tl.store(row + ROW_MIN, tl.min(tl.load(there + LOW, mask=inside, other=INFINITY)))
    tl.store(row + ROW_MAX, tl.max(tl.load(there + HIGH, mask=inside, other=-INFINITY)))
    tl.store(row + ROW_ZEROS, tl.sum(tl.load(there + ZEROS, mask=inside, other=0.0)))
    tl.store(row + ROW_NANS, nans)
    tl.store(row + ROW_INFS, infs)
    tl.store(row + ROW_BASE, 0.0)


WORD_INTEGERS = ["address", "size", "each", "out"]


@triton.jit(do_not_specialize=WORD_INTEGERS)
def sum_words(
    address: tl.int64, size: tl.int64, each: tl.int64, out: tl.int64, WORD: tl.constexpr, STRETCH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Adds integers and their squares to the two sums at `out`, modulo 2**64, so that any order gives the same."""
    first = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros((), tl.int64)
    squares = tl.zeros((), tl.int64)
    for i in range(first, first + each):
        inside = i * STRETCH + tl.arange(0, STRETCH) < size
        word = _loaded(address, i, size, inside, WORD, STRETCH).to(tl.int64)
        total += tl.sum(word)
        squares += tl.sum(word * word)
    sums = out.to(tl.pointer_type(tl.int64))
    tl.atomic_add(sums, total, sem="relaxed")
    tl.atomic_add(sums + 1, squares, sem="relaxed")
