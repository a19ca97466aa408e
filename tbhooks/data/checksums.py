"""Checksums of the bits of tensors: how they are put together, merged and encoded.

An element is read as a signed integer `w` of its own width. With `n` elements, a checksum is
`SQUARES * sum(w * w) + WORDS * sum(w) + COUNT * n`, modulo 2**64. It does not depend on the order of the elements, so
chunks, threads and calls of a module add up. SQUARES is even and WORDS is odd: a change of one element, by one bit or
by many, always changes it. Elements that swap places do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Checksums = NDArray[np.uint64]
"""[sites, 2]: the checksum, and the number of its type in `DTYPES`."""

SQUARES, WORDS, COUNT = 0x9E3779B97F4A7C16, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
_MODULUS = 1 << 64
DTYPES = (
    "", "float32", "float64", "bfloat16", "float16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "other",
)  # fmt: skip
"""The types of tensors. The first stands for a site without a checksum."""


def empty(sites: int) -> Checksums:
    """No checksums."""
    return np.zeros((sites, 2), np.uint64)


def of_rows(rows: Sequence[tuple[int, int]]) -> Checksums:
    """From pairs of a checksum and the number of its type. Raises ValueError for anything else."""
    try:
        return np.array(rows, np.uint64).reshape(-1, 2)
    except OverflowError as problem:
        raise ValueError(f"a checksum that is not one: {problem}") from problem


def dtype_number(name: str) -> int:
    """The number of a type, as torch names it without `torch.`."""
    return DTYPES.index(name) if name in DTYPES else len(DTYPES) - 1


def combine(words: int, squares: int, count: int) -> int:
    """The checksum of a tensor from the sum of its words, the sum of their squares and the number of its elements."""
    return (SQUARES * squares + WORDS * words + COUNT * count) % _MODULUS


def merge(checksums: Checksums, owner: NDArray[np.intp], n: int) -> Checksums:
    """Adds up the checksums of the same owner. Of several types, the one with the highest number is kept."""
    merged = empty(n)
    np.add.at(merged[:, 0], owner, checksums[:, 0])
    np.maximum.at(merged[:, 1], owner, checksums[:, 1])
    return merged


def encode(checksums: Checksums) -> bytes:
    """Eight bytes for each checksum, followed by one byte for each type."""
    return checksums[:, 0].astype("<u8").tobytes() + checksums[:, 1].astype("u1").tobytes()


def decode(content: bytes, sites: int) -> Checksums:
    """Raises ValueError if there are not as many as sites."""
    if len(content) != 9 * sites:
        raise ValueError(f"checksums of {len(content)} bytes, expected {9 * sites}")
    sums, types = np.frombuffer(content, "<u8", sites), np.frombuffer(content, "u1", sites, 8 * sites)
    return np.stack([sums, np.minimum(types, len(DTYPES) - 1)], axis=1).astype(np.uint64)
