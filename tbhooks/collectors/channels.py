"""Rows and histograms channel by channel, and head by head of attention, for chosen layers.

Reduced at once, on the tensor's device and without waiting for it; calls of one step are merged in the background.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from tbhooks.capture import selection, sharded_tensors
from tbhooks.capture.hooks.collectors import guarded
from tbhooks.capture.packed_step import Attached, Read
from tbhooks.capture.recorder import Recorder, storage_is_freed
from tbhooks.collectors import channel_split
from tbhooks.data import stats
from tbhooks.data.artifacts import Artifact, Channels
from tbhooks.data.errors import ArgumentError
from tbhooks.data.self_report import Report
from tbhooks.reduction import batched, cpu, finalize, histogram, torch_rows

KINDS = ("activation", "weight")
MOST_CHANNELS = 512
MOST_CALLS = 256
HEAD = "head "
# Torch operations make temporaries of a few times the tensor's size: larger ones are read in parts of so many elements.
PART = 1 << 22
_INSIDE = ("softmax", "scaled_dot_product_attention")
HEADS_UNSEEN = (
    "its heads are seen in the weights it returns (need_weights=True, average_attn_weights=False), or where the watch "
    'has the kind "functional"'
)


@dataclass(frozen=True)
class Piece:
    """One reduced tensor: rows as they are, or parts of `size` elements a channel that parts.py makes rows of."""

    numbers: Tensor
    size: int
    finished: bool


@dataclass
class Sums:
    """What one layer has shown in a step so far."""

    channels: int
    pieces: list[Piece] = field(default_factory=list)
    counts: Tensor | None = None


class PerChannel:
    """Looks at the outputs and weights of chosen layers."""

    def __init__(
        self, choice: selection.Matcher, kinds: Iterable[str], draws: bool, recorder: Recorder, report: Report
    ) -> None:
        self._choice, self._kinds, self._draws = choice, frozenset(kinds), draws
        self._recorder, self._report = recorder, report
        self._layers: dict[str, weakref.ref[nn.Module]] = {}
        self._heads: dict[str, int] = {}
        # The layers that attentions give their heads to, and whose those are.
        self._projections: dict[str, str] = {}
        self.begin()

    def wants(self, path: str, module: nn.Module) -> bool:
        self._forget_module(path)
        if not self._choice(path, module):
            return False
        heads = channel_split.heads_of(module)
        if not heads and not channel_split.has_channels(module):
            return False
        self._layers[path] = weakref.ref(module)
        if heads:
            self._heads[path] = heads
            projection = channel_split.projection_of(module)
            if projection is not None:
                self._projections[f"{path}.{projection}"] = path
        return True

    def _forget_module(self, path: str) -> None:
        """Another may be there now."""
        self._layers.pop(path, None)
        self._heads.pop(path, None)
        self._projections = {name: owner for name, owner in self._projections.items() if owner != path}

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return "activation" in self._kinds and path in self._projections

    def begin(self) -> None:
        self._sums: dict[tuple[str, str, str], Sums] = {}
        self._have_run: set[str] = set()

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_nested:
            if path in self._layers:
                why = f"{torch_rows.describe(tensor)}: only real numbers are counted"
                self._report.mark_unseen(f"per_channel/{path}{index}", why)
        elif kind == "input":
            if path in self._projections:
                owner = self._projections[path]
                self._add(
                    "activation", owner, channel_split.by_head(tensor, self._heads[owner], side_by_side=True), HEAD
                )
        elif kind == "activation" and path in self._layers:
            module = self._layers[path]()
            if module is not None:
                self._saw_layer(path, index, module, tensor)
        elif kind == "functional":
            owner, _, operation = path.rpartition(":")
            if owner in self._heads and operation in _INSIDE:
                self._add("activation", path + index, channel_split.operation_by_head(tensor, self._heads[owner]), HEAD)

    def _saw_layer(self, path: str, index: str, module: nn.Module, tensor: Tensor) -> None:
        heads = self._heads.get(path)
        self._have_run.add(path)
        if "activation" in self._kinds:
            if heads is None:
                self._add("activation", path + index, channel_split.by_channel(module, tensor))
            else:
                alone = f"{path}.{channel_split.projection_of(module)}" not in self._projections
                side_by_side = alone and tensor.dim() == 3 and not isinstance(module, nn.MultiheadAttention)
                self._add(
                    "activation", path + index, channel_split.by_head(tensor, heads, side_by_side=side_by_side), HEAD
                )
        if "weight" in self._kinds:
            self._saw_weight(path, module, heads)

    def _saw_weight(self, path: str, module: nn.Module, heads: int | None) -> None:
        """Once a step: as it was used, before the optimizer changes it."""
        name, word = (f"{path}.weight", "") if heads is None else (f"{path}.in_proj_weight", HEAD)
        weight = module._parameters.get(name.rpartition(".")[2])
        local = None if weight is None else sharded_tensors.local_tensor(weight)
        if (
            ("weight", name, word) in self._sums
            or local is None
            or torch_rows.has_no_data(local)
            or storage_is_freed(local)
        ):
            return
        if heads is None:
            self._add("weight", name, channel_split.weight_by_channel(module, local))
        else:
            self._add("weight", name, channel_split.projections_by_head(local, heads), HEAD)

    def _add(self, kind: str, name: str, by_channel: Tensor | None, word: str = "") -> None:
        if by_channel is None:
            return
        shown = by_channel.detach()[:MOST_CHANNELS]
        if len(shown) < len(by_channel):
            self._report.mark_unseen(
                f"per_channel/{name}", f"{MOST_CHANNELS} of {len(by_channel)} channels are counted"
            )
        sums = self._sums.setdefault((kind, name, word), Sums(len(shown)))
        if len(shown) != sums.channels or len(sums.pieces) >= MOST_CALLS:
            why = f"calls with other channels than the first, or past {MOST_CALLS} parts of a step, are not counted"
            self._report.mark_unseen(f"per_channel/{name}", why)
        if shown.numel() == 0 or len(shown) != sums.channels or len(sums.pieces) >= MOST_CALLS:
            return
        with torch.no_grad(), torch.autocast(shown.device.type, enabled=False):
            reduce_channels(shown.reshape(len(shown), -1), sums, self._recorder.with_buckets)

    def end(self, recorder: Recorder) -> None:
        self._note_unseen_heads()
        found = self._sums
        self.forget()  # first: a watch may be closed from another thread, while modules run
        for kind in KINDS:
            riding = [
                (name, word, sums.channels, *_attached(sums, recorder))
                for (of_kind, name, word), sums in found.items()
                if of_kind == kind and sums.pieces
            ]
            if riding:
                make = partial(_make, kind, riding, self._draws)
                recorder.artifact(guarded(make, self._report, "numbers of channels"))

    def forget(self) -> None:
        self.begin()

    def _note_unseen_heads(self) -> None:
        named = {name for kind, name, _ in list(self._sums) if kind == "activation"}
        for path in self._have_run & self._heads.keys() if "activation" in self._kinds else ():
            if not any(name == path or name.startswith((f"{path}[", f"{path}:")) for name in named):
                self._report.mark_unseen(f"per_channel/{path}", HEADS_UNSEEN)


def of_model(
    model: nn.Module, pattern: object, kinds: Iterable[str], draws: bool, recorder: Recorder, report: Report
) -> PerChannel:
    """Of the layers that a pattern means; raises if none of those has channels or heads."""
    choice = selection.choice("pattern", pattern, model)
    made = PerChannel(choice, kinds, draws, recorder, report)
    if not any(made.wants(path, module) for path, module in selection.walk(model).by_path.items()):
        raise ArgumentError(
            f"pattern={pattern!r} matches no module with channels or heads: those are convolutions, linear layers, "
            "batch and group norms, and attention"
        )
    return made


def reduce_channels(matrix: Tensor, sums: Sums, with_buckets: bool) -> None:
    """Adds the rows of a matrix, and their bucket counts, to what there is. Numbers of no other row are read."""
    if matrix.dtype not in torch_rows.ORDINARY:
        matrix = matrix.float()
    dense = matrix.contiguous()
    if cpu.can_read(dense):
        numbers = torch.zeros((len(dense), stats.WIDTH), dtype=torch.float64, device="cpu")
        counts = torch.zeros((len(dense), histogram.SLOTS), dtype=torch.int32, device="cpu") if with_buckets else None
        cpu.reduce_rows(dense, numbers, counts)
        sums.pieces.append(Piece(numbers, dense.size(1), finished=True))
        _add_counts(sums, counts)
        return
    row_type = torch.float32 if dense.device.type == "mps" else torch.float64
    for part in torch.split(dense, max(1, PART // len(dense)), 1):
        made = torch.cat([one.reshape(-1) for one in batched.reduce(part, row_type)])
        sums.pieces.append(Piece(made.view(-1, len(dense)), part.size(1), finished=False))
        _add_counts(sums, histogram.of_rows(part) if with_buckets else None)


def _add_counts(sums: Sums, counts: Tensor | None) -> None:
    if counts is not None:
        sums.counts = counts if sums.counts is None else sums.counts + counts


_Pieces = list[tuple[Attached, int, bool]]
_Riding = tuple[str, str, int, _Pieces, Attached | None]


def _attached(sums: Sums, recorder: Recorder) -> tuple[_Pieces, Attached | None]:
    pieces = [(recorder.attach(piece.numbers), piece.size, piece.finished) for piece in sums.pieces]
    return pieces, None if sums.counts is None else recorder.attach(sums.counts)


def _make(kind: str, riding: Sequence[_Riding], draws: bool, read: Read) -> Iterable[Artifact]:
    """In the background: what all calls of each layer saw, merged."""
    names, values, counts = [], [], []
    for name, word, channels, pieces, counted in riding:
        names += [(name, f"[{word}{i}]") for i in range(channels)]
        values.append(_merged(channels, pieces, read))
        width = stats.BUCKETS if counted is not None else 0
        counts.append(np.zeros((channels, 0), dtype=np.int64) if counted is None else read(counted)[:, :width])
    drawn = frozenset(name for name, *_ in riding) if draws else frozenset[str]()
    yield Channels(kind, tuple(names), np.concatenate(values), np.concatenate(counts).astype(np.int64), drawn)


def _merged(channels: int, pieces: _Pieces, read: Read) -> stats.Floats:
    found = [_rows_of(read(attached).astype(np.float64), size, finished) for attached, size, finished in pieces]
    owner = np.tile(np.arange(channels), len(found))
    return found[0] if len(found) == 1 else stats.merge(np.concatenate(found), owner, channels)


def _rows_of(numbers: stats.Floats, size: int, finished: bool) -> stats.Floats:
    if finished:
        return numbers
    sizes = np.full(numbers.shape[1], float(size))
    return finalize.finish(numbers, sizes, sizes)
