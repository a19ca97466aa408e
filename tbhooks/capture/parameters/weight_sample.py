"""How much of each weight is copied before the optimizer's step: all of it, or a sample if memory is short.

The copies on a device may take `BUDGET` bytes, and no more than half of what the training has left free. Within that
every weight is copied whole. Beyond it, weights up to a certain size are copied whole and of larger ones that many
elements, in runs spread evenly over the weight; the update is then an estimate. `benchmarks/sampled_updates.py`
compares the estimates with exact updates: embeddings, and layers with an output for each row of an embedding, are
never sampled, because a step changes few of their rows much.
No tensor is allocated here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# The most bytes that the copies of weights take on one device.
BUDGET = 1 << 30
# With smaller samples the error of an update's norm would not be small.
SMALLEST_SAMPLE = 1 << 18
# The elements of a run are contiguous: two cache lines of a GPU in float32, one in half precision.
RUN = 64
NO_ROOM = 0
"""The size of samples if not even the smallest fit."""
# The fraction by which successive runs move along the rows of a matrix: it covers the columns evenly for any number.
_GOLDEN = 0.6180339887498949
_STRIDES_TRIED = 64
# What an optimizer may allocate in its first step, in multiples of its weights: two states, and temporaries.
_FIRST_STEP = 4


def headroom(device: torch.device, expected: int = 0) -> int | None:
    """The bytes of a device that training has never used and is not about to use; None if the device does not say.

    `expected` is what training will allocate in addition to now. The process can have what is free and what its
    allocator holds. Training needs as much as it has needed at its peak.
    """
    with contextlib.suppress(Exception):  # not every device module has these, and some raise
        module = torch.get_device_module(device)
        free, _total = module.mem_get_info(device)
        needed = max(module.max_memory_allocated(device), module.memory_allocated(device) + expected)
        return int(free + module.memory_reserved(device) - needed)
    return None


def budget(device: torch.device, expected: int = 0) -> int:
    """The bytes that copies may take on a device."""
    left = headroom(device, expected)
    return BUDGET if left is None else min(BUDGET, max(left, 0) // 2)


def expected_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> int:
    """The bytes that an optimizer may be about to allocate: in its first step it makes its state."""
    return 0 if optimizer.state else _FIRST_STEP * sum(parameter.nbytes for parameter in parameters)


def sample_size(weights: Sequence[Tensor], limit: int) -> int:
    """The most elements of one weight that are copied, so that the copies of all take at most `limit` bytes; NO_ROOM if
    not even the smallest samples fit. A power of two, so that it changes rarely.
    """
    largest = max((weight.numel() for weight in weights), default=1)
    size = 1 << largest.bit_length()
    while size >= min(SMALLEST_SAMPLE, largest):
        if sum(min(weight.numel(), size) * weight.itemsize for weight in weights) <= limit:
            return size
        size //= 2
    return NO_ROOM


def updated_in_few_rows(model: nn.Module) -> frozenset[int]:
    """The ids of weights whose updates cannot be estimated from a sample: a few rows may have all of the update.

    These are embeddings, and linear layers with as many outputs as an embedding of the model has rows: of those hardly
    any row changes but those of the words in the batch.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    rows = {table.num_embeddings for table in tables}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in rows]
    return frozenset(id(module.weight) for module in [*tables, *heads])


def sample(weight: Tensor, most: int) -> Tensor | None:
    """A view of at most that many elements, in runs: `[runs, RUN]`. None if the weight has no dense memory."""
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    dense = weight.detach().permute(order)
    if not dense.is_contiguous():
        return None
    width = weight.numel() // max(dense.size(0), 1)
    return dense.view(-1).unfold(0, RUN, _stride(weight.numel(), most // RUN, width))


def _stride(length: int, runs: int, width: int) -> int:
    """The distance between runs. If it divided the width of a matrix, all runs would lie in the same columns."""
    least = -(-length // runs)
    tried = {least + least * i * 5 // (8 * _STRIDES_TRIED) for i in range(_STRIDES_TRIED)}
    return min(sorted(tried), key=lambda stride: _unevenness(stride, width))


def _unevenness(stride: int, width: int) -> float:
    ratio = stride / width if stride >= width else width / stride
    return abs(ratio % 1.0 - _GOLDEN)
