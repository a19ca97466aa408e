"""A tensor to half-octave bucket counts, on its own device.

The bucket is read off the float's bits: sign, exponent and the top bit of the mantissa index a small
table. No range has to be known first, so there is no extra pass and no sync, and edges never move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tbhooks.stats import BUCKETS, HALF_OCTAVES, LOWEST_EXPONENT, MIDDLE

# One more than the real buckets: NaN and infinities are counted there and left behind.
SLOTS = BUCKETS + 1
REJECTED = BUCKETS

# (bits to shift away, exponent bits) of the two formats everything is widened to.
_LAYOUT = {torch.float32: (torch.int32, 22, 8), torch.float64: (torch.int64, 51, 11)}


# On each device once, for each of the two formats.
_tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _table(like: Tensor) -> Tensor:
    key = (like.dtype, like.device)
    if key not in _tables:
        with torch.inference_mode(False):
            made = _bucket_of_bits(like.dtype)
            # On a CPU the tensor could be of a class that makes its own kind.
            on_host = like.device.type == "cpu"
            _tables[key] = made if on_host else like.detach().new_empty(made.shape, dtype=made.dtype).copy_(made)
    return _tables[key]


def _bucket_of_bits(dtype: torch.dtype) -> Tensor:
    """Bucket of every (sign, exponent, top mantissa bit), laid out so that the shifted bits index it.

    The shift is arithmetic: negative numbers give negative indices, which count from the table's end.
    """
    _, _, exponent_bits = _LAYOUT[dtype]
    half = 1 << (exponent_bits + 1)
    bias = (1 << (exponent_bits - 1)) - 1
    bits = torch.arange(half, device="cpu")  # whatever the default device is
    above = (bits - 2 * (bias + LOWEST_EXPONENT) + 1).clamp(0, HALF_OCTAVES)
    infinite = bits >= half - 2
    positive = torch.where(infinite, REJECTED, MIDDLE + above)
    negative = torch.where(infinite, REJECTED, MIDDLE - above)
    return torch.cat([positive, negative])


def add_counts(numbers: Tensor, out: Tensor) -> None:
    """Adds the bucket counts of a real, flat tensor to the `SLOTS` integers of `out`."""
    wide = numbers if numbers.dtype in _LAYOUT else numbers.float()
    integer, shift, _ = _LAYOUT[wide.dtype]
    bucket = _table(wide)[wide.contiguous().view(integer) >> shift]
    out.scatter_add_(0, bucket, torch.ones_like(out[:1]).expand(bucket.shape))
