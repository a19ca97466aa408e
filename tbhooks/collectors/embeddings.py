"""Embeddings for the PROJECTOR tab: one vector per sample from a layer's output, with its label and a thumbnail.

The training thread takes a limited number of samples of a batch on the device. The background thread keeps a random
sample of all of them (a reservoir), which is written at certain steps.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tbhooks.capture import selection
from tbhooks.capture.hooks.collectors import guarded
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.recording.packed_step import Attached, Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.artifacts import Artifact, Embedding
from tbhooks.data.errors import ArgumentError, nearest, quoted
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report
from tbhooks.drawing.tensor_grid import thumbnails_of
from tbhooks.reduction.torch_rows import describe

MOST = 1000
# The number of samples per logged step, and the longer side of a thumbnail.
MOST_OF_A_STEP, LONGEST_SIDE = 256, 32

Cut = Callable[[Any, int], Any]


class Source:
    """Where the labels or thumbnails of a batch come from: a function, an argument of the model, or a fixed list."""

    def __init__(self, what: str, given: Any, model: nn.Module) -> None:
        self.what = what
        self._call = given if callable(given) else None
        self._fixed = None if callable(given) or isinstance(given, str) else given
        self._indices: frozenset[str] = frozenset()
        if isinstance(given, str):
            self._indices = _indices_of(what, given, model)
        elif not callable(given) and not isinstance(given, Tensor | np.ndarray | list | tuple):
            raise ArgumentError(
                f"{what} must be a function without arguments that returns those of the current batch, the name of an "
                f"argument of the model's forward, or a tensor or list for a fixed batch, got {quoted(given)}"
            )
        self._argument: Any = None

    @property
    def is_argument(self) -> bool:
        return bool(self._indices)

    def on_input(self, index: str, tensor: Tensor, cut: Cut) -> None:
        """Keeps the argument if it is an input of the model."""
        if index in self._indices:
            self._argument = cut(tensor.detach(), MOST_OF_A_STEP)

    def forget(self) -> None:
        """Drops the argument of the last call."""
        self._argument = None

    def of_batch(self, size: int, taken: int, cut: Cut, report: Report) -> Any:
        """The values of the first samples of the batch; None if there are none, or not one per sample."""
        given = self._argument if self._indices else self._call() if self._call is not None else self._fixed
        if given is None:
            return None
        count = len(given)
        if count != (min(size, MOST_OF_A_STEP) if self._indices else size):
            report.log_once(f"got {count} {self.what} for a batch of {size} samples; they are not shown")
            return None
        return cut(given, taken)


def _indices_of(what: str, name: str, model: nn.Module) -> frozenset[str]:
    """The indices that an argument of the model may have among its inputs."""
    arguments = inspect.signature(type(model).forward).parameters
    positions = {key: i - 1 for i, key in enumerate(arguments) if i}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in arguments.values())
    if name not in positions and not takes_any:
        raise ArgumentError(f"{what}={name!r} is not an argument of the model's forward: {nearest(name, positions)}")
    # A single tensor has no index.
    alone = {""} if positions.get(name) == 0 else set()
    return frozenset({f"[{name}]", *alone, *({f"[{positions[name]}]"} if name in positions else ())})


class Rows(NamedTuple):
    """The vectors, labels and thumbnails of some samples."""

    points: Tensor
    labels: Any
    thumbnails: Any

    def first(self, count: int) -> Rows:
        """The first of these samples."""
        labels, thumbnails = (None if part is None else part[:count] for part in self[1:])
        return Rows(self.points[:count], labels, thumbnails)


class EmbeddingCollector:
    """Collects samples of the outputs of selected layers."""

    def __init__(
        self, choice: selection.Matcher, sources: tuple[Source | None, Source | None], every: int | None, most: int,
        report: Report,
    ) -> None:  # fmt: skip
        self._choice, self._every, self._most, self._report = choice, every, most, report
        self._labels, self._thumbnails = sources
        self._chosen: set[str] = set()
        self._reservoirs: dict[str, Reservoir] = {}
        self._logged = 0
        self._samples_of_a_step = min(most, MOST_OF_A_STEP)
        # Of each layer, by forward: some of them may turn out to be unused by any backward.
        self._collected: dict[str, dict[Pass | None, list[Rows]]] = {}
        self._forward: Pass | None = None
        # Whether a selected layer has run since the model was called.
        self._has_run = False

    def wants(self, path: str, module: nn.Module) -> bool:
        chosen = self._choice(path, module)
        (self._chosen.add if chosen else self._chosen.discard)(path)
        return chosen

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return path == ROOT and any(source is not None and source.is_argument for source in self._sources)

    @property
    def _sources(self) -> tuple[Source | None, Source | None]:
        return self._labels, self._thumbnails

    def begin(self) -> None:
        self._collected, self._forward = {}, None
        self._forget_inputs()

    def in_forward(self, forward: Pass) -> None:
        self._forward = forward

    def drop(self, forwards: Set[Pass]) -> None:
        for by_forward in self._collected.values():
            for forward in forwards & by_forward.keys():
                del by_forward[forward]

    def _forget_inputs(self) -> None:
        self._has_run = False
        for source in filter(None, self._sources):
            source.forget()

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        if kind == "input" and path == ROOT:
            self._add_input(index, tensor)
        elif kind == "activation" and path in self._chosen:
            self._has_run = True
            self._add_output(path + index, tensor)

    def _add_input(self, index: str, tensor: Tensor) -> None:
        if self._has_run:  # another call, possibly with fewer arguments
            self._forget_inputs()
        for source, cut in zip(self._sources, (_first, _small), strict=True):
            if source is not None:
                with self._guarded(source):
                    source.on_input(index, tensor, cut)

    def _add_output(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.dim() or tensor.is_nested:
            self._report.mark_unseen(
                f"embeddings/{name}", f"embeddings require floating-point tensors (got {describe(tensor)})"
            )
            return
        by_forward = self._collected.setdefault(name, {})
        batch = tensor.detach() if tensor.dim() > 1 else tensor.detach()[None]
        used = (rows for forward, rows in by_forward.items() if forward is self._forward or _is_used(forward))
        taken = min(len(batch), self._samples_of_a_step - sum(map(_count, used)))
        if taken > 0 and batch.numel():
            with torch.no_grad(), torch.autocast(batch.device.type, enabled=False):
                more = (
                    self._more(source, cut, len(batch), taken)
                    for source, cut in zip(self._sources, (_first, _small), strict=True)
                )
                by_forward.setdefault(self._forward, []).append(Rows(pooled(batch[:taken]), *more))
            self._limit(by_forward)

    def _limit(self, by_forward: dict[Pass | None, list[Rows]]) -> None:
        """Bounds the memory of forwards that no backward has gone through yet: the first and the latest are kept."""
        waiting = [forward for forward in by_forward if not _is_used(forward)]
        for forward in waiting[1:-1]:
            if sum(_count(by_forward[each]) for each in waiting[1:] if each in by_forward) > self._samples_of_a_step:
                del by_forward[forward]

    def _more(self, source: Source | None, cut: Cut, size: int, taken: int) -> Any:
        if source is not None:
            with self._guarded(source):
                return source.of_batch(size, taken, cut, self._report)
        return None

    @contextlib.contextmanager
    def _guarded(self, source: Source) -> Iterator[None]:
        """Reports problems with the user's labels, so that the vectors are still recorded."""
        try:
            yield
        except Exception as problem:
            self._report.error(f"{source.what} of embeddings", problem)

    def end(self, recorder: Recorder) -> None:
        is_due = self._logged & (self._logged - 1) == 0 if self._every is None else self._logged % self._every == 0
        self._logged += 1
        collected = self._collected
        self.forget()  # first, because a watch may be closed from another thread while modules run
        attached = [
            (name, [_attached(part, recorder) for part in (rows.points, rows.labels, rows.thumbnails)])
            for name, by_forward in collected.items()
            for rows in _samples(by_forward, self._samples_of_a_step)
        ]
        if attached:
            recorder.artifact(guarded(partial(self._keep, attached, is_due), self._report, "embeddings"))

    def forget(self) -> None:
        self.begin()

    def _keep(self, attached: Sequence[tuple[str, list[Any]]], is_due: bool, read: Read) -> Iterable[Artifact]:
        """Runs in the background."""
        for name, parts in attached:
            points, labels, thumbnails = (read(part) if isinstance(part, Attached) else part for part in parts)
            reservoir = self._reservoirs.setdefault(name, Reservoir(self._most))
            reservoir.offer(points, None if labels is None else texts(labels), thumbnails)
            if reservoir.skipped:
                self._report.log_once(
                    f"embeddings of {name}: vectors with NaN or Inf are skipped", once=f"not finite {name}"
                )
        for name in dict.fromkeys(name for name, _ in attached) if is_due else ():
            embedding = self._reservoirs[name].embedding(name)
            self._reservoirs[name].clear()
            if embedding is not None:
                yield embedding


def of_model(
    model: nn.Module, pattern: object, given: tuple[Any, Any], every: int | None, most: int, report: Report
) -> EmbeddingCollector:
    """A collector of the layers that match a pattern; `given` are the labels and the thumbnails."""
    labels, thumbnails = (
        None if each is None else Source(what, each, model)
        for what, each in zip(("labels", "thumbnails"), given, strict=True)
    )
    return EmbeddingCollector(selection.choice("pattern", pattern, model), (labels, thumbnails), every, most, report)


def _is_used(forward: Pass | None) -> bool:
    return forward is None or bool(forward.reached_by)


def _count(several: Iterable[Rows]) -> int:
    return sum(len(rows.points) for rows in several)


def _samples(by_forward: Mapping[Pass | None, Iterable[Rows]], most: int) -> Iterator[Rows]:
    """The first samples of all forwards."""
    for rows in (rows for several in by_forward.values() for rows in several):
        if most > 0:
            yield rows.first(most)
        most -= len(rows.points)


def pooled(batch: Tensor) -> Tensor:
    """One vector per sample: the mean over the positions of [samples, positions, width], or over all dimensions
    after the channels of [samples, channels, ...].
    """
    values = batch.float()
    if values.dim() == 3:
        return values.mean(1)
    return values.flatten(2).mean(-1) if values.dim() > 3 else values.clone()


def _first(given: Any, count: int) -> Any:
    """Labels, one per sample."""
    part = given[:count]
    if isinstance(part, Tensor):
        return part.detach().reshape(len(part), part[:1].numel() or 1)[:, 0].clone()
    return part.copy() if isinstance(part, np.ndarray) else part


def _small(given: Any, count: int) -> Any:
    """Thumbnails: subsampled images, in grey or colours."""
    if isinstance(given, list | tuple):
        given = torch.stack(given[:count]) if isinstance(given[0], Tensor) else np.stack(given[:count])
    if given.ndim not in (3, 4) or (given.ndim == 4 and given.shape[1] not in (1, 3)):
        raise ArgumentError(
            f"thumbnails must be [samples, height, width] or [samples, 1 or 3, height, width], got {list(given.shape)}"
        )
    down = -(-max(given.shape[-2:]) // LONGEST_SIDE)
    part = given[:count, ..., ::down, ::down]
    return part.detach().clone() if isinstance(part, Tensor) else part.copy()


def _attached(part: Any, recorder: Recorder) -> Any:
    return recorder.attach(part) if isinstance(part, Tensor) else part


# The values in one entry of the PROJECTOR tab, a text file that a browser loads.
MOST_NUMBERS = 1 << 20
LONGEST_LABEL = 200
UNLABELLED = "(none)"

Array = NDArray[Any]


class Reservoir:
    """A uniform random sample of the vectors of one layer."""

    def __init__(self, most: int) -> None:
        self.skipped = 0
        """The number of vectors that were not finite."""
        self._most = most
        self._random = np.random.Generator(np.random.PCG64(0))
        self.clear()

    def clear(self) -> None:
        self._offered = 0
        self._kept: list[tuple[Array, str, Array | None]] = []

    def offer(self, points: Array, labels: Sequence[str] | None, thumbnails: Array | None) -> None:
        """Adds a batch of vectors with their labels and thumbnails."""
        if self._kept and self._kept[0][0].shape != points.shape[1:]:
            self.clear()  # vectors of another width are not comparable
        most = max(1, min(self._most, MOST_NUMBERS // max(points.shape[1], 1)))
        for i, point in enumerate(points):
            if not np.isfinite(point).all():
                self.skipped += 1
                continue
            one = point, UNLABELLED if labels is None else labels[i], None if thumbnails is None else thumbnails[i]
            if len(self._kept) < most:
                self._kept.append(one)
            else:
                position = int(self._random.integers(self._offered + 1))
                if position < most:
                    self._kept[position] = one
            self._offered += 1

    def embedding(self, tag: str) -> Embedding | None:
        """The current sample, None if it is empty. It has thumbnails if all vectors have one of the same size."""
        if not self._kept:
            return None
        points, labels, pictures = zip(*self._kept, strict=True)
        sizes = {None if picture is None else picture.shape for picture in pictures}
        drawn = thumbnails_of(np.stack(pictures)) if len(sizes) == 1 and None not in sizes else None
        has_labels = any(label != UNLABELLED for label in labels)
        return Embedding(tag, np.stack(points).astype(np.float64), labels if has_labels else (), drawn)


def texts(labels: Iterable[Any]) -> list[str]:
    """Labels as lines of a table, with blanks for characters that would end a line or a column."""
    return [_line(label) for label in labels]


def _line(label: Any) -> str:
    if isinstance(label, np.generic | np.ndarray) and np.ndim(label) == 0:
        label = label.item()
    text = f"{label:.6g}" if isinstance(label, float) else str(label)
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST_LABEL]).strip()
    return shown or UNLABELLED
