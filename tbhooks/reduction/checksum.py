"""The sums of which data/checksums.py makes the checksum of a tensor: in C, with torch operations, and with Triton.

All three give the same bits. Nothing here waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tbhooks.data.checksums import dtype_number
from tbhooks.reduction import cpu, torch_rows, triton

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Torch operations make temporaries of 16 bytes for each element.
_LONGEST = 1 << 22


def bits_of(tensor: Tensor) -> Tensor | None:
    """The elements of a tensor as integers in one dimension; None for tensors that have no row, and for sparse ones."""
    if tensor.is_complex() and not tensor.is_nested and tensor.layout is torch.strided:
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    numbers = torch_rows.readable(tensor)
    return None if numbers is None else numbers.view(_WORDS[numbers.itemsize])


def dtype_of(tensor: Tensor) -> int:
    """The number of its type in `data.checksums.DTYPES`."""
    return dtype_number(str(tensor.dtype).removeprefix("torch."))


def sums(words: Tensor) -> Tensor:
    """The sum of the words and of their squares, both modulo 2**64, on the device of the words."""
    if cpu.can_sum(words):
        return cpu.sum_words(words)
    if triton.takes_words(words):
        return triton.sum_words(words)
    return _sums_by_torch(words)


def _sums_by_torch(words: Tensor) -> Tensor:
    """Five launches for each four million words."""
    made = []
    for part in torch.split(words, _LONGEST) if words.numel() else (words,):
        wide = part.to(torch.int64)
        made.append(torch.stack([wide.sum(), wide.square().sum()]))
    return made[0] if len(made) == 1 else torch.stack(made).sum(0)
