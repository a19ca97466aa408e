"""The rank of this process as torchrun announces it, before there is a process group."""

from __future__ import annotations

import os


def rank_and_world() -> tuple[int, int]:
    """The number of this process and how many there are, as torchrun says before there is a process group."""
    # It sets both; a stray RANK alone means nothing.
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else (0, 1)
