"""Reads tensors from TensorBoard's data provider, and handles the errors of its two loaders.

Tags are read one by one, so that a broken one does not affect the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tensorboard.data import provider as provider_types
from tensorboard.errors import PublicError
from tensorboard.util import tb_logging

from tbhooks.data.grids import own_scalars
from tbhooks.sinks.tensorboard import PLUGIN

Result = TypeVar("Result")

_EVERYTHING = 2**31 - 1
_SCALARS = "scalars"
MOST_SCALARS = 100
MOST_POINTS = 2000
# TensorBoard accepts at most 256 MiB from its data server in one message.
LARGEST_MESSAGE = 192 << 20
_OVERHEAD_PER_TENSOR = 100
_TOO_LARGE = "RESOURCE_EXHAUSTED"
# TensorBoard's Python loader lists a tag shortly before its values, and raises KeyError in between.
_NOT_YET = (KeyError, RuntimeError)
_TRIES, _PAUSE_S = 4, 0.05


class UnavailableError(Exception):
    """TensorBoard's own reader of the log directory failed."""


@dataclass(frozen=True, slots=True)
class TagValue:
    """One value of a tag."""

    step: int
    time: float
    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Series:
    """The values of a tag in the order of writing; `thinned` if TensorBoard returned only a sample."""

    values: tuple[TagValue, ...] = ()
    thinned: bool = False


Listing = Mapping[str, Mapping[str, Any]]


def list_tags(provider: Any, context: Any, experiment: str, run: str | None = None) -> Listing:
    """Our tags by run, with their metadata and newest steps. Raises UnavailableError if TensorBoard fails."""
    try:
        return _list_all(provider, context, experiment) if run is None else _list(provider, context, experiment, run)
    except PublicError:
        raise
    except Exception as problem:
        why = _grpc_code(problem) or repr(problem)
        raise UnavailableError(f"TensorBoard cannot list the log directory at the moment: {why}") from problem


def _list_all(provider: Any, context: Any, experiment: str) -> Listing:
    """Lists run by run if the whole list is too large for one message."""
    try:
        return _list(provider, context, experiment, None)
    except Exception as problem:
        if _grpc_code(problem) != _TOO_LARGE:
            raise
    runs = [run.run_name for run in provider.list_runs(context, experiment_id=experiment)]
    return {name: tags for run in runs for name, tags in _list(provider, context, experiment, run).items()}


def _list(provider: Any, context: Any, experiment: str, run: str | None) -> Listing:
    return _listed(provider.list_tensors, context, experiment, PLUGIN, run)


def _listed(list_tags_of: Callable[..., Any], context: Any, experiment: str, plugin: str, run: str | None) -> Listing:
    """What a method of the provider lists for a plugin: tags by run, of all runs or of one."""
    only = None if run is None else provider_types.RunTagFilter(runs=[run])
    listing: Listing | None = _with_retries(
        lambda: list_tags_of(context, experiment_id=experiment, plugin_name=plugin, run_tag_filter=only)
    )
    return listing or {}


class Reader:
    """Reads the tags of one run, and the scalars that are no statistics of modules."""

    def __init__(self, provider: Any, context: Any, experiment: str, run: str) -> None:
        self._provider, self._context, self._experiment, self._run = provider, context, experiment, run

    def tag(self, tag: str) -> Series:
        """All values of a tag; empty if it cannot be read. Raises UnavailableError if the data server fails."""
        try:
            return self._whole_or_thinned(tag)
        except PublicError:
            raise
        except Exception as problem:
            code = _grpc_code(problem)
            if code is not None:
                raise UnavailableError(f"TensorBoard's data server does not respond: {code}") from problem
            tb_logging.get_logger().warning("tbhooks: cannot read %r of run %r: %r", tag, self._run, problem)
            return Series()

    def scalars(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Steps and values by tag, losses first; at most some of the points of each. Empty if they cannot be read."""
        try:
            tags = own_scalars(self._scalar_tags())[:MOST_SCALARS]
            return self._read_scalars(tags) if tags else {}
        except PublicError:
            return {}
        except Exception as problem:
            tb_logging.get_logger().warning("tbhooks: cannot read the scalars of run %r: %r", self._run, problem)
            return {}

    def _scalar_tags(self) -> list[str]:
        listed = _listed(self._provider.list_scalars, self._context, self._experiment, _SCALARS, self._run)
        return list(listed.get(self._run, {}))

    def _read_scalars(self, tags: list[str]) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        series = self._of_run(self._provider.read_scalars, _SCALARS, tags, MOST_POINTS)
        by_step = {tag: {int(datum.step): float(datum.value) for datum in series.get(tag, ())} for tag in tags}
        return {
            tag: (np.array(sorted(points), dtype=np.int64), np.array([points[step] for step in sorted(points)]))
            for tag, points in by_step.items()
            if points
        }

    def _whole_or_thinned(self, tag: str) -> Series:
        try:
            return Series(_with_retries(lambda: self._read(tag, _EVERYTHING)))
        except Exception as problem:
            if _grpc_code(problem) != _TOO_LARGE:
                raise
        return Series(self._read_sample(tag), thinned=True)

    def _read_sample(self, tag: str) -> tuple[TagValue, ...]:
        """As large a sample of the steps as fits, always with the last one."""
        last = self._read(tag, 1)
        most = LARGEST_MESSAGE // (max(map(_nbytes, last), default=0) + _OVERHEAD_PER_TENSOR)
        while most > 1:
            try:
                return self._read(tag, most)
            except Exception as problem:
                if _grpc_code(problem) != _TOO_LARGE:
                    raise
                most //= 2
        return last

    def _read(self, tag: str, most: int) -> tuple[TagValue, ...]:
        series = self._of_run(self._provider.read_tensors, PLUGIN, [tag], most).get(tag, [])
        return tuple(TagValue(int(datum.step), float(datum.wall_time), datum.numpy) for datum in series)

    def _of_run(self, read: Callable[..., Any], plugin: str, tags: list[str], most: int) -> dict[str, Any]:
        """What a method of the provider returns for these tags of the run, with at most so many values for each."""
        answer = read(
            self._context, experiment_id=self._experiment, plugin_name=plugin, downsample=most,
            run_tag_filter=provider_types.RunTagFilter(runs=[self._run], tags=tags),
        )  # fmt: skip
        of_run: dict[str, Any] = (answer or {}).get(self._run, {})
        return of_run


def _with_retries(read: Callable[[], Result]) -> Result:
    for _ in range(_TRIES - 1):
        try:
            return read()
        except _NOT_YET:
            time.sleep(_PAUSE_S)
    return read()


def _grpc_code(problem: Exception) -> str | None:
    """The status name of a failed gRPC call, else None; grpc is installed only with TensorBoard's fast loader."""
    code = getattr(problem, "code", None)
    return getattr(code(), "name", None) if callable(code) else None


def _nbytes(written: TagValue) -> int:
    if written.array.dtype == object:
        return sum(len(item) for item in written.array.reshape(-1) if isinstance(item, bytes))
    return written.array.nbytes
