"""Counts the launches that commit c4a9827 made, before parameters and rows were merged. launches.py runs it.

It imports the modules of that commit. On standard input it gets lists of sizes and types of activations and of
parameters; it prints the launches of a logged step with torch operations, with Triton, and with Triton for the
parameters alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from launch_counter import launched
from torch import Tensor

from tbhooks import buckets, buffer, rows, together  # type: ignore[attr-defined]

BY_TRITON = 2
"""For a tensor: one launch for its parts, and one that merges them."""


def tensor_of(size: int, dtype: str) -> Tensor:
    return torch.empty(size, dtype=getattr(torch, dtype), device="meta")


def alone(tensor: Tensor) -> int:
    part = tensor[: min(tensor.numel(), buffer.PART)]
    counts = torch.empty(buckets.SLOTS, dtype=torch.int32, device="meta")

    def reduce() -> None:
        rows.reduce(part, torch.float64)
        buckets.add_counts(part, counts)

    launched(reduce)  # makes what is made once
    return -(-tensor.numel() // buffer.PART) * launched(reduce)


def in_company(tensors: list[Tensor]) -> int:
    """Small parameters: weights, gradients and updates in blocks."""
    total = 0
    for minus in (False, False, True):
        for group in together.groups([(0, tensor, tensor if minus else None, None) for tensor in tensors]):

            def reduce(group: Any = group) -> None:
                made = together.block(group)
                together.reduce(made, torch.float64)
                together.count(made, [torch.empty(buckets.SLOTS, dtype=torch.int32, device="meta") for _ in group])

            launched(reduce)
            total += launched(reduce)
    return total


def of_parameters(tensors: list[Tensor], reduce: Callable[[Tensor], int]) -> int:
    total = in_company([tensor for tensor in tensors if tensor.numel() <= together.LENGTHS[-1]])
    for tensor in (tensor for tensor in tensors if tensor.numel() > together.LENGTHS[-1]):
        difference = launched(lambda tensor=tensor: rows.difference(tensor, torch.empty_like(tensor)))
        updated = tensor if tensor.itemsize >= 4 else torch.empty(tensor.numel(), device="meta")
        total += 2 * reduce(tensor) + difference + reduce(updated)
    return total


def main() -> None:
    activations, parameters = ([tensor_of(*each) for each in sizes] for sizes in json.load(sys.stdin))
    by_triton = of_parameters(parameters, lambda _: BY_TRITON)
    counts = {
        "torch operations": sum(2 * alone(tensor) for tensor in activations) + of_parameters(parameters, alone),
        "Triton": 2 * len(activations) * BY_TRITON + by_triton,
        "Triton, parameters only": by_triton,
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
