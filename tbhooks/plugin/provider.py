"""Asking TensorBoard's data provider, and nothing else: the two loaders fail in different ways, and both are met here.

What is wrong with one tag spoils no other, so tags are read one by one. Nothing here knows what the tensors mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray
from tensorboard.data import provider as provider_types
from tensorboard.errors import PublicError
from tensorboard.util import tb_logging

from tbhooks.sinks.tensorboard import PLUGIN

Answer = TypeVar("Answer")

_EVERYTHING = 2**31 - 1
# TensorBoard takes at most 256 MiB from its data server in one piece.
FITS_IN_ONE_ANSWER = 192 << 20
_BESIDE_A_TENSOR = 100
_TOO_LARGE = "RESOURCE_EXHAUSTED"
# TensorBoard's Python loader lists a tag a moment before its values are there, and raises KeyError until then.
_NOT_YET = (KeyError, RuntimeError)
_TRIES, _PAUSE_S = 4, 0.05


class UnavailableError(Exception):
    """TensorBoard's own reader of the log directory does not answer."""


@dataclass(frozen=True, slots=True)
class Written:
    """A value of a tag."""

    step: int
    time: float
    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Series:
    """The values of a tag in the order they were written; thinned if TensorBoard could not hand over all."""

    values: tuple[Written, ...] = ()
    thinned: bool = False


Listing = Mapping[str, Mapping[str, Any]]


def list_tags(provider: Any, context: Any, experiment: str, run: str | None = None) -> Listing:
    """What there is of our tensors, by run and tag: descriptions and newest steps."""
    try:
        return _list_all(provider, context, experiment) if run is None else _list(provider, context, experiment, run)
    except PublicError:
        raise
    except Exception as problem:
        why = _grpc_code(problem) or repr(problem)
        raise UnavailableError(f"TensorBoard cannot list the log directory just now: {why}") from problem


def _list_all(provider: Any, context: Any, experiment: str) -> Listing:
    """Run by run if all of them are too much for one answer."""
    try:
        return _list(provider, context, experiment, None)
    except Exception as problem:
        if _grpc_code(problem) != _TOO_LARGE:
            raise
    runs = [run.run_name for run in provider.list_runs(context, experiment_id=experiment)]
    return {name: tags for run in runs for name, tags in _list(provider, context, experiment, run).items()}


def _list(provider: Any, context: Any, experiment: str, run: str | None) -> Listing:
    wanted = None if run is None else provider_types.RunTagFilter(runs=[run])
    listing: Listing | None = _patiently(
        lambda: provider.list_tensors(context, experiment_id=experiment, plugin_name=PLUGIN, run_tag_filter=wanted)
    )
    return listing or {}


class Reader:
    """Reads tags of one run whole."""

    def __init__(self, provider: Any, context: Any, experiment: str, run: str) -> None:
        self._provider, self._context, self._experiment, self._run = provider, context, experiment, run

    def tag(self, tag: str) -> Series:
        """Every value; nothing of a tag that does not read."""
        try:
            return self._whole_or_thinned(tag)
        except PublicError:
            raise
        except Exception as problem:
            code = _grpc_code(problem)
            if code is not None:
                raise UnavailableError(f"TensorBoard's data server does not answer: {code}") from problem
            tb_logging.get_logger().warning("tbhooks: %r of run %r does not read: %r", tag, self._run, problem)
            return Series()

    def _whole_or_thinned(self, tag: str) -> Series:
        try:
            return Series(_patiently(lambda: self._read(tag, _EVERYTHING)))
        except Exception as problem:
            if _grpc_code(problem) != _TOO_LARGE:
                raise
        return Series(self._as_much_as_fits(tag), thinned=True)

    def _as_much_as_fits(self, tag: str) -> tuple[Written, ...]:
        """A sample of the steps, the last one always among them, as TensorBoard thins any long series."""
        last = self._read(tag, 1)
        most = FITS_IN_ONE_ANSWER // (max(map(_nbytes, last), default=0) + _BESIDE_A_TENSOR)
        while most > 1:
            try:
                return self._read(tag, most)
            except Exception as problem:
                if _grpc_code(problem) != _TOO_LARGE:
                    raise
                most //= 2
        return last

    def _read(self, tag: str, most: int) -> tuple[Written, ...]:
        wanted = provider_types.RunTagFilter(runs=[self._run], tags=[tag])
        answer = self._provider.read_tensors(
            self._context, experiment_id=self._experiment, plugin_name=PLUGIN, downsample=most, run_tag_filter=wanted
        )
        series = answer.get(self._run, {}).get(tag, [])
        return tuple(Written(int(datum.step), float(datum.wall_time), datum.numpy) for datum in series)


def _patiently(ask: Callable[[], Answer]) -> Answer:
    for _ in range(_TRIES - 1):
        try:
            return ask()
        except _NOT_YET:
            time.sleep(_PAUSE_S)
    return ask()


def _grpc_code(problem: Exception) -> str | None:
    """The name of a failed call's status; the library itself is there only with TensorBoard's fast loader."""
    code = getattr(problem, "code", None)
    return getattr(code(), "name", None) if callable(code) else None


def _nbytes(written: Written) -> int:
    if written.array.dtype == object:
        return sum(len(item) for item in written.array.reshape(-1) if isinstance(item, bytes))
    return written.array.nbytes
