"""The rank of this process as torchrun announces it, before there is a process group.

Imports nothing: `tbhooks run` calls it before the script has loaded NumPy or torch.
"""

from __future__ import annotations

import os


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of processes, from the environment variables that torchrun sets."""
    # torchrun sets both: RANK alone means nothing.
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else (0, 1)
