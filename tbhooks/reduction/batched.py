"""Many small tensors of a device reduced together: a model's hundreds of biases and norms cost a handful of launches.

They are copied into the rows of one block, each padded with NaN, which count for nothing; parts.py takes the
padding off again. What is too large to gain from it is left to rows.reduce. No sync; shapes follow from sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tbhooks.reduction import histogram, torch_rows

# A tensor takes a row of the smallest of these that holds it, so that not many times its size is read.
LENGTHS = (64, 512, 4096, 32768)
# Elements of one block, padding included.
LARGEST = 1 << 20

Wanted = tuple[int, Tensor, Tensor | None, Tensor | None]
"""For a site: a tensor, what is subtracted from it, and what it is divided by."""


def fits(tensor: Tensor) -> bool:
    """Whether it gains from company: small, dense, of an ordinary number format, and on a device."""
    return (
        not tensor.is_cpu
        and 0 < tensor.numel() <= LENGTHS[-1]
        and tensor.layout is torch.strided
        and tensor.dtype in torch_rows.ORDINARY
        and not tensor.is_nested
        and not tensor.is_neg()
        and not hasattr(tensor, "to_local")  # the parts of other ranks are not here
    )


def groups(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Those that share a block."""
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
    """One row for each of a group. Halves become float32 where their difference or quotient would be rounded."""
    _, first, minus, scale = group[0]
    made = _copied([tensor for _, tensor, _, _ in group])
    if (minus is not None or scale is not None) and made.dtype.itemsize < 4:
        made = made.float()
    if minus is not None:
        made.sub_(_copied([before for _, _, before, _ in group if before is not None]))
    return made if scale is None else made.div_(scale.to(first.device))


def _copied(tensors: Sequence[Tensor]) -> Tensor:
    """NaN behind each. Two launches, and one more for every 64 or so tensors."""
    flat = [torch_rows.flat(tensor.detach()) for tensor in tensors]
    made = flat[0].new_full((len(flat), _length(flat[0])), torch.nan)
    torch._foreach_copy_([row[: len(one)] for row, one in zip(made.unbind(), flat, strict=True)], flat)
    return made


def reduce(made: Tensor, row_type: torch.dtype) -> list[Tensor]:
    """What parts.py makes rows of, as rows.reduce does, with moments about each row's first element.

    Padding would else swamp the spread of numbers far from zero. Eleven launches however many rows there are.
    """
    largest, others = torch_rows.limits(made, row_type)
    inside = torch.le(made.abs(), largest)
    masked = torch.where(inside, made, others)
    shift = masked[2, :, :1].clone()
    centred = torch.where(inside[2], made - shift, 0.0)
    variance, mean = torch.var_mean(centred, -1, correction=0)
    counts = torch.linalg.vector_norm(masked[1:], 0, -1)
    return [counts, *torch.aminmax(masked[:2], dim=-1), variance, mean, shift]


def count(made: Tensor, counts: Sequence[Tensor]) -> None:
    """Adds the bucket counts of each row to the integers of its record. Eight launches."""
    torch._foreach_add_(list(counts), list(histogram.of_rows(made).unbind()))
