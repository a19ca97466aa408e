"""Fixtures of the tests with DeepSpeed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.process_pool import ProcessPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """One process that forks the ranks of every test."""
    with contextlib.closing(ProcessPool()) as pool:
        yield pool
