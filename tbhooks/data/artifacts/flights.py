"""`Flight`: what the flight recorder held when it was dumped, with one row for each of the last steps.

Immutable, in host memory, without torch and I/O. `encode` and `decode` make bytes of it and read them back.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.jsonable import parse_number, to_jsonable
from tbhooks.data.stats import Floats

FLIGHT = "flight"
"""The kind of the map of parameters by steps."""
LOSS_TAG, NORM_TAG = "flight.loss", "flight.grad_norm"
DIRECTORY, SUFFIX = "tbhooks-flights", ".flight"
"""Where ranks that end alone write their dumps, in the directory of the run."""
SampleId = int | str
Named = tuple[int, str]
"""A step, and the path of a parameter."""
# Rows before a step that its numbers are compared with, at least.
FEWEST_BEFORE = 8
# So many spreads from the median before it, a number is what to look at: the first such step.
FAR = 10.0
# What a file may expand to: no ring is larger.
LARGEST = 1 << 30
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class Flight:
    """One dump of the flight recorder: numbers of the last steps, logged or not.

    `suspect_step`, `suspect_parameter` and `suspect_sample` say where to look first; `str(flight)` says it in words.
    """

    step: int
    """The step that was running, or had just ended, when the ring was copied."""
    time: float
    rank: int
    reason: str
    """Why it was dumped."""
    steps: NDArray[np.int64]
    """The steps of the rows, oldest first."""
    scalars: Mapping[str, Floats]
    """What was logged in each step, by tag: `train/loss`, `train.lr/0`, `train.scale`, ...; NaN also where nothing was
    logged (`is_logged` tells these apart)."""
    parameters: tuple[str, ...]
    """The paths of the parameters, in the order of the model; none with `detail="global"`."""
    norms: Floats
    """[row, parameter] The L2 norm of each gradient as the optimizer used it: infinite if the gradient has a NaN or an
    infinity, NaN if there was no gradient."""
    grad_norm: Floats
    """[row] The norm of all gradients together: infinite if one is not finite, NaN if there was none."""
    is_logged: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """For each scalar the rows in which it was logged."""
    samples: tuple[tuple[tuple[SampleId, float], ...], ...] = ()
    """For each row the samples with the largest values, as id and value, the largest first (`Watch.samples`)."""
    new_after: int = -1
    """Rows up to this step are in an earlier dump of the run, too."""
    note: str = ""
    """What is missing in it, in a sentence."""
    named: Named | None = None
    """The step and the parameter named by the finding that started the dump, if it is about a weight: norms of
    gradients do not show what is wrong with a weight."""

    @property
    def loss(self) -> Floats:
        """[row] The loss: the scalar `train/loss`, or else the first one with "loss" in its name. NaN if unknown."""
        tag = self._loss_tag
        return np.full(len(self.steps), np.nan) if tag is None else self.scalars[tag]

    @property
    def loss_logged(self) -> NDArray[np.bool_] | None:
        """[row] Whether the loss was logged; None if there is no loss."""
        tag = self._loss_tag
        return None if tag is None else self.is_logged.get(tag, ~np.isnan(self.scalars[tag]))

    @property
    def _loss_tag(self) -> str | None:
        tags = sorted(self.scalars, key=lambda tag: tag != "train/loss")
        return next((tag for tag in tags if "loss" in tag.lower()), None)

    @property
    def nonfinite(self) -> NDArray[np.int64]:
        """[row] The number of parameters whose gradient is not finite."""
        count: NDArray[np.int64] = np.isinf(self.norms).sum(axis=1)
        return count

    @cached_property
    def _suspect(self) -> int | None:
        """The row to look at: the first that is not finite, or the one that a finding names, or else the one farthest
        from the rows before it.
        """
        if not len(self.steps):
            return None
        bad = np.isinf(self.grad_norm)
        if self.loss_logged is not None:
            bad |= self.loss_logged & ~np.isfinite(self.loss)
        if bad.any():
            return int(np.flatnonzero(bad)[0])
        if self.named is not None and self.named[0] in self.steps:
            return int(np.flatnonzero(self.steps == self.named[0])[0])
        scores = np.maximum(_distances(self.loss, None), _distances(self.grad_norm, np.log))
        far = np.flatnonzero(scores > FAR)
        if len(far):
            return int(far[0])
        return int(np.argmax(scores)) if np.isfinite(scores).any() else len(self.steps) - 1

    @property
    def suspect_step(self) -> int | None:
        """The first step with a loss or gradient that is not finite; else the step of the finding, if it is about a
        weight; else the first one that is far above those before it, or the one that differs most. None if the ring was
        empty.
        """
        return None if self._suspect is None else int(self.steps[self._suspect])

    @property
    def suspect_parameter(self) -> str | None:
        """The parameter whose gradient differs most from its own median before that step. Of gradients that are not
        finite, the last one in the order of the model: in a backward pass it is the first.
        """
        at = self._suspect
        if at is None:
            return None
        if self.named is not None and self.named[0] == self.steps[at]:
            return self.named[1]
        if not self.norms.size:
            return None
        bad = np.isinf(self.norms[at])
        if bad.any() and not bad.all():
            return self.parameters[int(np.flatnonzero(bad)[-1])]
        at = at - 1 if bad.all() and at else at  # nothing stands out where all are not finite
        growth = self._growth(at)
        return self.parameters[int(np.nanargmax(growth))] if np.isfinite(growth).any() else None

    def _growth(self, at: int) -> Floats:
        """How many times its own median before this row the gradient of each parameter is."""
        before = np.where(np.isinf(self.norms[:at]), np.nan, self.norms[:at])
        usual = np.full(len(self.parameters), np.nan)
        known = (before > 0).sum(axis=0) > 0
        if known.any():
            usual[known] = np.nanmedian(before[:, known], axis=0)
        now = np.where(np.isinf(self.norms[at]), np.nan, self.norms[at])
        with np.errstate(all="ignore"):
            growth: Floats = np.where(usual > 0, now / usual, np.nan)
        return growth if np.isfinite(growth).any() else now

    @property
    def suspect_sample(self) -> SampleId | None:
        """The id of the sample with the largest value in that step; None without `Watch.samples`."""
        at = self._suspect
        if at is None or at >= len(self.samples) or not self.samples[at]:
            return None
        return self.samples[at][0][0]

    def __str__(self) -> str:
        span = f"steps {self.steps[0]} to {self.steps[-1]}" if len(self.steps) else "no steps"
        where = "" if self.suspect_step is None else f"; look at step {self.suspect_step}"
        parts = [] if self._suspect is None else list(self._words(self._suspect))
        rank = f" (rank {self.rank})" if self.rank else ""
        note = f" {self.note}" if self.note else ""
        return f"step {self.step}{rank}: {self.reason}: {span}{where}{': ' if parts else ''}{', '.join(parts)}.{note}"

    def _words(self, at: int) -> Any:
        if not np.isnan(self.loss[at]):
            yield f"loss {self.loss[at]:.4g}"
        if not np.isnan(self.grad_norm[at]):
            earlier = self.grad_norm[:at][np.isfinite(self.grad_norm[:at])]
            usual = f" (median before: {np.median(earlier):.4g})" if len(earlier) else ""
            count = self.nonfinite[at]
            bad = f", {count} of {len(self.parameters)} gradients not finite" if count else ""
            yield f"gradient norm {self.grad_norm[at]:.4g}{usual}{bad}"
        if self.suspect_parameter is not None:
            yield f"parameter {self.suspect_parameter}"
        if self.suspect_sample is not None:
            yield f"sample {self.suspect_sample}"

    def __repr__(self) -> str:
        return f"Flight({self})"

    def to_dict(self) -> dict[str, Any]:
        """A summary in plain Python values: what it is about, not the rows."""
        return {
            "step": self.step, "time": self.time, "rank": self.rank, "reason": self.reason,
            "first": int(self.steps[0]) if len(self.steps) else None,
            "last": int(self.steps[-1]) if len(self.steps) else None,
            "suspect_step": self.suspect_step, "suspect_parameter": self.suspect_parameter,
            "suspect_sample": self.suspect_sample, "text": str(self),
        }  # fmt: skip


def _distances(values: Floats, scale: Any) -> Floats:
    """For each value the distance above the median of those before it, in units of their spread; -inf if unknown."""
    with np.errstate(all="ignore"):
        values = values if scale is None else scale(values)
    scores = np.full(len(values), -np.inf)
    for i in range(FEWEST_BEFORE, len(values)):
        earlier = values[:i][np.isfinite(values[:i])]
        if len(earlier) >= FEWEST_BEFORE and np.isfinite(values[i]):
            median = np.median(earlier)
            spread = 1.4826 * np.median(np.abs(earlier - median))
            scores[i] = (values[i] - median) / max(spread, 1e-3 * abs(median), 1e-12)
    return scores


# --- As bytes ---


def encode(flight: Flight) -> bytes:
    """A flight as compressed bytes: a JSON header, then the arrays."""
    tags = list(flight.scalars)
    header = {
        "version": 1, "step": flight.step, "time": flight.time, "rank": flight.rank, "reason": flight.reason,
        "rows": len(flight.steps), "tags": tags, "parameters": list(flight.parameters), "new_after": flight.new_after,
        "note": flight.note, "named": flight.named,
        "samples": [[[sample, to_jsonable(value)] for sample, value in row] for row in flight.samples],
    }  # fmt: skip
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    logged = [flight.is_logged.get(tag, ~np.isnan(flight.scalars[tag])) for tag in tags]
    with np.errstate(over="ignore"):
        arrays = [
            flight.steps.astype("<i8"), flight.grad_norm.astype("<f8"), flight.norms.astype("<f4"),
            *(flight.scalars[tag].astype("<f8") for tag in tags), *(rows.astype("u1") for rows in logged),
        ]  # fmt: skip
    return zlib.compress(_LENGTH.pack(len(text)) + text + b"".join(array.tobytes() for array in arrays), 6)


def decode(content: bytes) -> Flight:
    """The flight that `encode` wrote. Raises ValueError for anything else."""
    try:
        expander = zlib.decompressobj()
        raw = expander.decompress(content, LARGEST)
        (length,) = _LENGTH.unpack_from(raw)
        header = json.loads(raw[_LENGTH.size : _LENGTH.size + length])
        if header["version"] != 1:
            raise ValueError(f"format version {header['version']!r} is unknown to this version of tbhooks")
        return _flight(header, _Arrays(raw, _LENGTH.size + length))
    except (zlib.error, struct.error, LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"not a dump of the flight recorder: {problem!r}") from problem


class _Arrays:
    """Takes one array after the other from bytes; raises ValueError if there are too few."""

    def __init__(self, raw: bytes, start: int) -> None:
        self._raw, self._at = raw, start

    def take(self, kind: str, *shape: int) -> NDArray[Any]:
        size = int(np.prod(shape, dtype=object))
        array = np.frombuffer(self._raw, kind, size, self._at)
        self._at += array.nbytes
        return array.reshape(shape)


def _flight(header: Any, arrays: _Arrays) -> Flight:
    rows, names, tags = int(header["rows"]), tuple(map(str, header["parameters"])), [str(tag) for tag in header["tags"]]
    steps, grad_norm = arrays.take("<i8", rows), arrays.take("<f8", rows)
    norms = arrays.take("<f4", rows, len(names)).astype(np.float64)
    scalars = {tag: arrays.take("<f8", rows) for tag in tags}
    logged = {tag: arrays.take("u1", rows).astype(bool) for tag in tags}
    samples = tuple(tuple((_id(one[0]), float(parse_number(one[1]))) for one in row) for row in header["samples"])
    return Flight(
        int(header["step"]), float(header["time"]), int(header["rank"]), str(header["reason"]), steps, scalars, names,
        norms, grad_norm, logged, samples, int(header["new_after"]), str(header["note"]), as_named(header.get("named")),
    )  # fmt: skip


def as_named(value: Any) -> Named | None:
    """The step and the parameter of a list that was JSON."""
    return None if value is None else (int(value[0]), str(value[1]))


def _id(value: object) -> SampleId:
    if not isinstance(value, int | str):
        raise TypeError(f"{value!r} is no id")
    return value
