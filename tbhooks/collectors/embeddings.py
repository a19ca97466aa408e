"""Points for the PROJECTOR tab: what a layer makes of each sample, with its label and a thumbnail.

In the training thread a bounded number of samples of a batch is taken, one vector each, on the device; a sample of
all of them is kept in the background, and shown at chosen steps.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tbhooks.capture import selection
from tbhooks.capture.hooks.collectors import guarded
from tbhooks.capture.packed_step import Attached, Read
from tbhooks.capture.recorder import Recorder
from tbhooks.data.artifacts import Artifact, Embedding
from tbhooks.data.errors import ArgumentError, nearest, quoted
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report
from tbhooks.drawing.tensor_grid import thumbnails_of
from tbhooks.reduction.torch_rows import describe

MOST = 1000
# Of one logged step; and of a thumbnail, the longer side.
MOST_OF_A_STEP, LONGEST_SIDE = 256, 32

Cut = Callable[[Any, int], Any]


class Source:
    """Where labels or thumbnails of a batch come from: a call, an argument of the model, or what is always the same."""

    def __init__(self, what: str, given: Any, model: nn.Module) -> None:
        self.what = what
        self._call = given if callable(given) else None
        self._fixed = None if callable(given) or isinstance(given, str) else given
        self._indices: frozenset[str] = frozenset()
        if isinstance(given, str):
            self._indices = _indices_of(what, given, model)
        elif not callable(given) and not isinstance(given, Tensor | np.ndarray | list | tuple):
            raise ArgumentError(
                f"{what} is a call without arguments that gives those of the current batch, an argument's name of the "
                f"model's forward, or a tensor or list for a batch that is always the same, not {quoted(given)}"
            )
        self._of_argument: Any = None

    @property
    def is_an_argument(self) -> bool:
        return bool(self._indices)

    def saw_input(self, index: str, tensor: Tensor, cut: Cut) -> None:
        """What the model is being called with."""
        if index in self._indices:
            self._of_argument = cut(tensor.detach(), MOST_OF_A_STEP)

    def forget(self) -> None:
        """What it was called with is of the past."""
        self._of_argument = None

    def of_batch(self, size: int, taken: int, cut: Cut, report: Report) -> Any:
        """Those of the batch's first samples; None if there are none, or not as many as samples."""
        given = self._of_argument if self._indices else self._call() if self._call is not None else self._fixed
        if given is None:
            return None
        many = len(given)
        if many != (min(size, MOST_OF_A_STEP) if self._indices else size):
            report.log_once(f"{self.what} of a batch of {size} samples were {many}; none of them is shown")
            return None
        return cut(given, taken)


def _indices_of(what: str, name: str, model: nn.Module) -> frozenset[str]:
    """The indices under which an argument of the model may be seen."""
    arguments = inspect.signature(type(model).forward).parameters
    places = {key: i - 1 for i, key in enumerate(arguments) if i}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in arguments.values())
    if name not in places and not takes_any:
        raise ArgumentError(f"{what}={name!r} is no argument of the model's forward: {nearest(name, places)}")
    # A model that is given one tensor sees it under no index.
    alone = {""} if places.get(name) == 0 else set()
    return frozenset({f"[{name}]", *alone, *({f"[{places[name]}]"} if name in places else ())})


class Rows(NamedTuple):
    """Of a few samples: a vector each, their labels, their thumbnails."""

    points: Tensor
    labels: Any
    thumbnails: Any


class Embeddings:
    """Looks at the outputs of chosen layers."""

    def __init__(
        self, choice: selection.Matcher, sources: tuple[Source | None, Source | None], every: int | None, most: int,
        report: Report,
    ) -> None:  # fmt: skip
        self._choice, self._every, self._most, self._report = choice, every, most, report
        self._labels, self._thumbnails = sources
        self._chosen: set[str] = set()
        self._reservoirs: dict[str, Reservoir] = {}
        self._logged = 0
        self._seen: dict[str, list[Rows]] = {}
        # Whether layers have run since the model was called.
        self._has_run = False

    def wants(self, path: str, module: nn.Module) -> bool:
        chosen = self._choice(path, module)
        (self._chosen.add if chosen else self._chosen.discard)(path)
        return chosen

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return path == ROOT and any(source is not None and source.is_an_argument for source in self._sources)

    @property
    def _sources(self) -> tuple[Source | None, Source | None]:
        return self._labels, self._thumbnails

    def begin(self) -> None:
        self._seen = {}
        self._forget_inputs()

    def _forget_inputs(self) -> None:
        self._has_run = False
        for source in filter(None, self._sources):
            source.forget()

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        if kind == "input" and path == ROOT:
            self._saw_input(index, tensor)
        elif kind == "activation" and path in self._chosen:
            self._has_run = True
            self._saw_output(path + index, tensor)

    def _saw_input(self, index: str, tensor: Tensor) -> None:
        if self._has_run:  # another call, which may be given less
            self._forget_inputs()
        for source, cut in zip(self._sources, (_first, _small), strict=True):
            if source is not None:
                with self._kept_apart(source):
                    source.saw_input(index, tensor, cut)

    def _saw_output(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.dim() or tensor.is_nested:
            self._report.mark_unseen(f"embeddings/{name}", f"{describe(tensor)}: a point has real numbers")
            return
        earlier = self._seen.setdefault(name, [])
        batch = tensor.detach() if tensor.dim() > 1 else tensor.detach()[None]
        taken = min(len(batch), min(self._most, MOST_OF_A_STEP) - sum(len(rows.points) for rows in earlier))
        if taken > 0 and batch.numel():
            with torch.no_grad(), torch.autocast(batch.device.type, enabled=False):
                more = (
                    self._more(source, cut, len(batch), taken)
                    for source, cut in zip(self._sources, (_first, _small), strict=True)
                )
                earlier.append(Rows(pooled(batch[:taken]), *more))

    def _more(self, source: Source | None, cut: Cut, size: int, taken: int) -> Any:
        if source is not None:
            with self._kept_apart(source):
                return source.of_batch(size, taken, cut, self._report)
        return None

    @contextlib.contextmanager
    def _kept_apart(self, source: Source) -> Iterator[None]:
        """What is wrong with the user's labels, or the call that gives them, does not cost the points."""
        try:
            yield
        except Exception as problem:
            self._report.error(f"{source.what} of embeddings", problem)

    def end(self, recorder: Recorder) -> None:
        shows = self._logged & (self._logged - 1) == 0 if self._every is None else self._logged % self._every == 0
        self._logged += 1
        seen = self._seen
        self.forget()  # first: a watch may be closed from another thread, while modules run
        riding = [
            (name, [_attached(part, recorder) for part in (rows.points, rows.labels, rows.thumbnails)])
            for name, several in seen.items()
            for rows in several
        ]
        if riding:
            recorder.artifact(guarded(partial(self._keep, riding, shows), self._report, "embeddings"))

    def forget(self) -> None:
        self.begin()

    def _keep(self, riding: Sequence[tuple[str, list[Any]]], shows: bool, read: Read) -> Iterable[Artifact]:
        """In the background."""
        for name, parts in riding:
            points, labels, thumbnails = (read(part) if isinstance(part, Attached) else part for part in parts)
            reservoir = self._reservoirs.setdefault(name, Reservoir(self._most))
            reservoir.offer(points, None if labels is None else texts(labels), thumbnails)
            if reservoir.left_out:
                self._report.log_once(
                    f"embeddings of {name}: points with NaN or Inf are left out", once=f"not finite {name}"
                )
        for name in dict.fromkeys(name for name, _ in riding) if shows else ():
            made = self._reservoirs[name].embedding(name)
            self._reservoirs[name].clear()
            if made is not None:
                yield made


def of_model(
    model: nn.Module, pattern: object, given: tuple[Any, Any], every: int | None, most: int, report: Report
) -> Embeddings:
    """Of the layers that a pattern means; `given` are labels and thumbnails."""
    labels, thumbnails = (
        None if each is None else Source(what, each, model)
        for what, each in zip(("labels", "thumbnails"), given, strict=True)
    )
    return Embeddings(selection.choice("pattern", pattern, model), (labels, thumbnails), every, most, report)


def pooled(batch: Tensor) -> Tensor:
    """One vector a sample: the mean over positions of [samples, positions, width], of [samples, channels, ...] over
    all that comes behind the channels.
    """
    numbers = batch.float()
    if numbers.dim() == 3:
        return numbers.mean(1)
    return numbers.flatten(2).mean(-1) if numbers.dim() > 3 else numbers.clone()


def _first(given: Any, many: int) -> Any:
    """Labels: one each."""
    part = given[:many]
    if isinstance(part, Tensor):
        return part.detach().reshape(len(part), part[:1].numel() or 1)[:, 0].clone()
    return part.copy() if isinstance(part, np.ndarray) else part


def _small(given: Any, many: int) -> Any:
    """Thumbnails: every so many pixels of a picture, in grey or colours."""
    if isinstance(given, list | tuple):
        given = torch.stack(given[:many]) if isinstance(given[0], Tensor) else np.stack(given[:many])
    if given.ndim not in (3, 4) or (given.ndim == 4 and given.shape[1] not in (1, 3)):
        raise ArgumentError(
            f"thumbnails are [samples, height, width] or [samples, 1 or 3, height, width], not {list(given.shape)}"
        )
    down = -(-max(given.shape[-2:]) // LONGEST_SIDE)
    part = given[:many, ..., ::down, ::down]
    return part.detach().clone() if isinstance(part, Tensor) else part.copy()


def _attached(part: Any, recorder: Recorder) -> Any:
    return recorder.attach(part) if isinstance(part, Tensor) else part


# What one entry of the PROJECTOR tab holds: it is a text file that a browser loads.
MOST_NUMBERS = 1 << 20
LONGEST_LABEL = 200
UNLABELLED = "(none)"

Array = NDArray[Any]


class Reservoir:
    """Points of one layer."""

    def __init__(self, most: int) -> None:
        self.left_out = 0
        """How many points were not finite."""
        self._most = most
        self._random = np.random.Generator(np.random.PCG64(0))
        self.clear()

    def clear(self) -> None:
        self._seen = 0
        self._kept: list[tuple[Array, str, Array | None]] = []

    def offer(self, points: Array, labels: Sequence[str] | None, thumbnails: Array | None) -> None:
        """A batch, in which labels and thumbnails are those of the points in their order."""
        if self._kept and self._kept[0][0].shape != points.shape[1:]:
            self.clear()  # another width: they are points of another space
        most = max(1, min(self._most, MOST_NUMBERS // max(points.shape[1], 1)))
        for i, point in enumerate(points):
            if not np.isfinite(point).all():
                self.left_out += 1
                continue
            one = point, UNLABELLED if labels is None else labels[i], None if thumbnails is None else thumbnails[i]
            if len(self._kept) < most:
                self._kept.append(one)
            else:
                place = int(self._random.integers(self._seen + 1))
                if place < most:
                    self._kept[place] = one
            self._seen += 1

    def embedding(self, tag: str) -> Embedding | None:
        """What is there now; None if that is nothing. Thumbnails are shown if all points have one of one size."""
        if not self._kept:
            return None
        points, labels, pictures = zip(*self._kept, strict=True)
        sizes = {None if picture is None else picture.shape for picture in pictures}
        drawn = thumbnails_of(np.stack(pictures)) if len(sizes) == 1 and None not in sizes else None
        has_labels = any(label != UNLABELLED for label in labels)
        return Embedding(tag, np.stack(points).astype(np.float64), labels if has_labels else (), drawn)


def texts(labels: Iterable[Any]) -> list[str]:
    """Labels as a line each of a table: what would end a line or a column there becomes a blank."""
    return [_line(label) for label in labels]


def _line(label: Any) -> str:
    if isinstance(label, np.generic | np.ndarray) and np.ndim(label) == 0:
        label = label.item()
    text = f"{label:.6g}" if isinstance(label, float) else str(label)
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST_LABEL]).strip()
    return shown or UNLABELLED
