"""What a tap costs where nothing is read: `python benchmarks/taps.py`.

Prints nanoseconds per call, the least of several rounds: of a function that returns its argument, of `tbhooks.tap` in a
process that watches nothing, and of `tbhooks.tap` in a watched model between logged steps.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch
from torch import Tensor, nn

import tbhooks

CALLS, ROUNDS = 20_000, 7


def nanoseconds(function: Callable[[str, Tensor], Tensor]) -> float:
    """The least time of a call over all rounds."""
    tensor = torch.ones(4)
    return min(timeit.repeat(lambda: function("scores", tensor), number=CALLS, repeat=ROUNDS)) / CALLS * 1e9


def identity(_name: str, tensor: Tensor) -> Tensor:
    return tensor


def main() -> None:
    rows = {
        "a function that returns its argument": nanoseconds(identity),
        "tap, nothing watched": nanoseconds(tbhooks.tap),
    }
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1000):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        rows["tap, between logged steps of a watch"] = nanoseconds(tbhooks.tap)
    for name, time in rows.items():
        print(f"{name:40}{time:8.0f} ns per call")


if __name__ == "__main__":
    main()
