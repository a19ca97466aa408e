"""Counts the elements of a tensor in half-octave buckets, on its own device.

The bucket follows from the bits of the float: sign, exponent and the top bit of the mantissa are counted, and a small
table maps each combination to its bucket. The range need not be known, so there is no extra pass and no sync, and
the edges are fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tbhooks.data.stats import BUCKETS, HALF_OCTAVES, LOWEST_EXPONENT, MIDDLE
from tbhooks.reduction import streams

# One more than the real buckets, for NaN and infinities, which is not copied to the host.
SLOTS = BUCKETS + 1
REJECTED = BUCKETS

# (integer of the same size, bits to shift away, exponent bits). float16 is converted to float32 first, as all other
# types are: the exponent of its subnormal numbers says too little.
_LAYOUT = {
    torch.float32: (torch.int32, 22, 8),
    torch.float64: (torch.int64, 51, 11),
    torch.bfloat16: (torch.int16, 6, 8),
}
# Counts of more elements than this would not be exact in float32, and are made in float64.
MOST = 1 << 24


# One for each type, device and stream: another stream would have to wait for the one that fills it.
_tables: dict[tuple[object, ...], Tensor] = {}


def _table(like: Tensor) -> Tensor:
    key = (like.dtype, like.device, streams.current(like.device))
    if key not in _tables:
        with torch.inference_mode(False):
            # On a CPU the tensor could be of a subclass that makes tensors of its own type.
            is_on_host = like.device.type == "cpu"
            some = torch.empty(0, dtype=like.dtype, device="cpu") if is_on_host else like.detach()
            _tables[key] = _bucket_of_bits(some)
    return _tables[key]


def _bucket_of_bits(like: Tensor) -> Tensor:
    """Bucket of every (sign, exponent, top mantissa bit), in the order of the shifted bits.

    The shift is arithmetic: those of negative numbers are negative, and come first. The table is computed on the device
    of `like`: a copy from the host would wait for everything the device still has to do.
    """
    _, _, exponent_bits = _LAYOUT[like.dtype]
    half = 1 << (exponent_bits + 1)
    bias = (1 << (exponent_bits - 1)) - 1
    bits = torch.arange(half, out=like.new_empty(half, dtype=torch.int64))
    above = (bits - 2 * (bias + LOWEST_EXPONENT) + 1).clamp(0, HALF_OCTAVES)
    infinite = bits >= half - 2
    positive = torch.where(infinite, REJECTED, MIDDLE + above)
    negative = torch.where(infinite, REJECTED, MIDDLE - above)
    return torch.cat([negative, positive])


def add_counts(numbers: Tensor, out: Tensor) -> None:
    """Adds the bucket counts of a real, flat tensor to the `SLOTS` integers of `out`, in five launches.

    One more for types that are converted first. Temporaries: 4 bytes for each element beside the type's own size, and 8
    if there are more than `MOST`.
    """
    wide = numbers if numbers.dtype in _LAYOUT else numbers.float()
    table = _table(wide)
    out.index_add_(0, table, _counts_of_bits(wide, len(table)).to(out.dtype))


def _counts_of_bits(numbers: Tensor, kinds: int) -> Tensor:
    """How often each value of the leading bits occurs."""
    integer, shift, _ = _LAYOUT[numbers.dtype]
    bits = numbers.contiguous().view(integer)
    if torch.are_deterministic_algorithms_enabled():  # which histc is not, as far as torch knows
        index = torch.bitwise_right_shift(bits, shift, out=torch.empty_like(bits, dtype=torch.int64)).add_(kinds // 2)
        return torch.zeros_like(index[:1]).expand(kinds).clone().index_add_(0, index, torch.ones_like(index))
    # In two operations: CUDA has no shift that writes floats.
    leading = torch.bitwise_right_shift(bits, shift).to(torch.float32 if len(bits) <= MOST else torch.float64)
    return torch.histc(leading, kinds, -(kinds // 2), kinds // 2)


def of_rows(numbers: Tensor) -> Tensor:
    """The bucket counts of each row of a real matrix, as `SLOTS` 32-bit integers."""
    wide = numbers if numbers.dtype in _LAYOUT else numbers.float()
    integer, shift, _ = _LAYOUT[wide.dtype]
    bits, table = wide.contiguous().view(integer), _table(wide)
    kinds = len(table)
    index = torch.bitwise_right_shift(bits, shift, out=torch.empty_like(bits, dtype=torch.int64)).add_(kinds // 2)
    raw = wide.new_zeros((len(wide), kinds), dtype=torch.int32)
    raw.scatter_add_(1, index, torch.ones_like(raw[:1, :1]).expand(index.shape))
    return raw.new_zeros((len(wide), SLOTS)).index_add_(1, table, raw)
