"""Reduces many small tensors of a device together: hundreds of biases and norms cost a handful of launches.

They are copied into the rows of one block, each padded with NaN; finalize.py subtracts the padding again. Larger
tensors are left to torch_rows.reduce. No sync; shapes depend on sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tbhooks.reduction import histogram, torch_rows

# The lengths of rows: a tensor takes the shortest that holds it, so that little padding is read.
LENGTHS = (64, 512, 4096, 32768)
# Elements of one block, padding included.
LARGEST = 1 << 20

Wanted = tuple[int, Tensor, Tensor | None, Tensor | None]
"""A site, a tensor, a tensor to subtract from it, and a scale to divide it by."""


def fits(tensor: Tensor) -> bool:
    """Whether a tensor is reduced faster with others: small, dense, of an ordinary type, and on a device."""
    return (
        not tensor.is_cpu
        and 0 < tensor.numel() <= LENGTHS[-1]
        and tensor.layout is torch.strided
        and tensor.dtype in torch_rows.ORDINARY
        and not tensor.is_nested
        and not tensor.is_neg()
        and not hasattr(tensor, "to_local")  # a DTensor
    )


def groups(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """The tensors that share a block."""
    alike: dict[tuple[object, ...], list[Wanted]] = {}
    for want in wanted:
        _, tensor, before, scale = want
        key = _length(tensor), tensor.dtype, tensor.device, before is None, id(scale)
        alike.setdefault(key, []).append(want)
    for members in alike.values():
        most = LARGEST // _length(members[0][1])
        yield from (members[start : start + most] for start in range(0, len(members), most))


def _length(tensor: Tensor) -> int:
    return next(length for length in LENGTHS if tensor.numel() <= length)


def block(group: Sequence[Wanted]) -> Tensor:
    """A block with one row for each tensor. Half precision becomes float32 if something is subtracted or divided."""
    _, first, minus, scale = group[0]
    made = _copied([tensor for _, tensor, _, _ in group])
    if (minus is not None or scale is not None) and made.dtype.itemsize < 4:
        made = made.float()
    if minus is not None:
        made.sub_(_copied([before for _, _, before, _ in group if before is not None]))
    return made if scale is None else made.div_(scale.to(first.device))


def _copied(tensors: Sequence[Tensor]) -> Tensor:
    """Copies tensors into rows padded with NaN. Two launches, and one more for about every 64 tensors."""
    flat = [torch_rows.flat(tensor.detach()) for tensor in tensors]
    made = flat[0].new_full((len(flat), _length(flat[0])), torch.nan)
    torch._foreach_copy_([row[: len(one)] for row, one in zip(made.unbind(), flat, strict=True)], flat)
    return made


def reduce(made: Tensor, row_type: torch.dtype, is_padded: bool = True) -> list[Tensor]:
    """The partial results of which finalize.py makes rows, as torch_rows.reduce does, with moments about the first
    element of each row: about zero, padding would cost the precision of numbers far from it.

    Rows that are not padded have moments about their mean. The mean is then a sum of two numbers, which is what keeps
    small deviations from a large mean where there is no float64: the mean has a relative error of about 1e-7, and the
    standard deviation one of about 1e-5 (of 2**24 numbers).

    Seventeen launches for any number of rows.
    """
    largest, others = torch_rows.limits(made, row_type)
    inside = torch.le(made.abs(), largest)
    masked = torch.where(inside, made, others)
    shift = masked[2, :, :1].clone() if is_padded else masked[2].mean(-1, keepdim=True)
    centred = torch.where(inside[2], made - shift, 0.0)
    counts = torch.linalg.vector_norm(masked[1:], 0, -1)
    return [counts, *torch.aminmax(masked[:2], dim=-1), *torch_rows.moments(centred, inside[2]), shift]


def count(made: Tensor, counts: Sequence[Tensor]) -> None:
    """Adds the bucket counts of each row to those of its record. Eight launches."""
    torch._foreach_add_(list(counts), list(histogram.of_rows(made).unbind()))
