"""Statistics and histograms per channel, and per head of attention, for selected layers.

Tensors are reduced at once on their device, without waiting for it. The calls of one step are merged in the background.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from tbhooks.capture import selection, sharded_tensors
from tbhooks.capture.hooks.collectors import guarded
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.recording.packed_step import Attached, Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.collectors import channel_split
from tbhooks.data import stats
from tbhooks.data.artifacts import Artifact, Channels
from tbhooks.data.errors import ArgumentError
from tbhooks.data.self_report import Report
from tbhooks.reduction import torch_rows
from tbhooks.reduction.channel_rows import Sums, add_counts, reduce_channels, rows_of

KINDS = ("activation", "weight")
MOST_CHANNELS = 512
MOST_CALLS = 256
TOO_MANY = f"calls with another number of channels, or more than {MOST_CALLS} parts per step, are not recorded"
HEAD = "head "
_INSIDE = ("softmax", "scaled_dot_product_attention")
HEADS_UNSEEN = (
    "its heads are only available with need_weights=True, average_attn_weights=False, or with the kind "
    '"functional" in watch'
)


_Key = tuple[str, str, str]
"""Kind, name, and what a channel is called."""


class ChannelCollector:
    """Reduces the outputs and weights of selected layers per channel."""

    def __init__(
        self, choice: selection.Matcher, kinds: Iterable[str], draws: bool, recorder: Recorder, report: Report
    ) -> None:
        self._choice, self._kinds, self._draws = choice, frozenset(kinds), draws
        self._recorder, self._report = recorder, report
        self._layers: dict[str, weakref.ref[nn.Module]] = {}
        self._heads: dict[str, int] = {}
        # The output projections of attention modules, with the path of the attention.
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
        """Another module may have this path now."""
        self._layers.pop(path, None)
        self._heads.pop(path, None)
        self._projections = {name: owner for name, owner in self._projections.items() if owner != path}

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return "activation" in self._kinds and path in self._projections

    def begin(self) -> None:
        # Weights belong to the step, outputs to the forward that made them.
        self._by_forward: dict[Pass | None, dict[_Key, Sums]] = {None: {}}
        self._forward: Pass | None = None
        self._have_run: set[str] = set()

    def in_forward(self, forward: Pass) -> None:
        self._forward = forward

    def drop(self, forwards: Set[Pass]) -> None:
        for forward in forwards:
            self._by_forward.pop(forward, None)

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_nested:
            if path in self._layers:
                why = f"channels require floating-point tensors (got {torch_rows.describe(tensor)})"
                self._report.mark_unseen(f"per_channel/{path}{index}", why)
        elif kind == "input":
            if path in self._projections:
                owner = self._projections[path]
                self._add(
                    "activation", owner, channel_split.by_head(tensor, self._heads[owner], concatenated=True), HEAD
                )
        elif kind == "activation" and path in self._layers:
            module = self._layers[path]()
            if module is not None:
                self._add_layer(path, index, module, tensor)
        elif kind == "functional":
            owner, _, operation = path.rpartition(":")
            if owner in self._heads and operation in _INSIDE:
                self._add("activation", path + index, channel_split.operation_by_head(tensor, self._heads[owner]), HEAD)

    def _add_layer(self, path: str, index: str, module: nn.Module, tensor: Tensor) -> None:
        heads = self._heads.get(path)
        self._have_run.add(path)
        if "activation" in self._kinds:
            if heads is None:
                self._add("activation", path + index, channel_split.by_channel(module, tensor))
            else:
                has_projection = f"{path}.{channel_split.projection_of(module)}" in self._projections
                concatenated = (
                    not has_projection and tensor.dim() == 3 and not isinstance(module, nn.MultiheadAttention)
                )
                self._add(
                    "activation", path + index, channel_split.by_head(tensor, heads, concatenated=concatenated), HEAD
                )
        if "weight" in self._kinds:
            self._add_weight(path, module, heads)

    def _add_weight(self, path: str, module: nn.Module, heads: int | None) -> None:
        """Once per step, as it was used: before the optimizer changes it."""
        name, word = (f"{path}.weight", "") if heads is None else (f"{path}.in_proj_weight", HEAD)
        weight = module._parameters.get(name.rpartition(".")[2])
        local = None if weight is None else sharded_tensors.local_tensor(weight)
        if (
            ("weight", name, word) in self._by_forward[None]
            or local is None
            or torch_rows.has_no_data(local)
            or torch_rows.storage_is_freed(local)
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
                f"per_channel/{name}", f"only {MOST_CHANNELS} of {len(by_channel)} channels are recorded"
            )
        owned = self._by_forward.setdefault(None if kind == "weight" else self._forward, {})
        sums = owned.setdefault((kind, name, word), Sums(len(shown)))
        if len(shown) != sums.channels or len(sums.pieces) >= MOST_CALLS:
            self._report.mark_unseen(f"per_channel/{name}", TOO_MANY)
        if shown.numel() == 0 or len(shown) != sums.channels or len(sums.pieces) >= MOST_CALLS:
            return
        with torch.no_grad(), torch.autocast(shown.device.type, enabled=False):
            reduce_channels(shown.reshape(len(shown), -1), sums, self._recorder.with_buckets)

    def end(self, recorder: Recorder) -> None:
        self._report_missing_heads()
        collected = self._merged()
        self.forget()  # first, because a watch may be closed from another thread while modules run
        for kind in KINDS:
            attached_sums = [
                (name, word, sums.channels, *_attached(sums, recorder))
                for (of_kind, name, word), sums in collected.items()
                if of_kind == kind and sums.pieces
            ]
            if attached_sums:
                build = partial(_build, kind, attached_sums, self._draws)
                recorder.artifact(guarded(build, self._report, "numbers of channels"))

    def forget(self) -> None:
        self.begin()

    def _merged(self) -> dict[_Key, Sums]:
        """The sums of all forwards that are part of the step."""
        merged: dict[_Key, Sums] = {}
        for owned in list(self._by_forward.values()):
            for key, new in list(owned.items()):
                sums = merged.setdefault(key, new)
                if sums is new:
                    continue
                if sums.channels == new.channels and len(sums.pieces) + len(new.pieces) <= MOST_CALLS:
                    sums.pieces.extend(new.pieces)
                    add_counts(sums, new.counts)
                else:
                    self._report.mark_unseen(f"per_channel/{key[1]}", TOO_MANY)
        return merged

    def _report_missing_heads(self) -> None:
        names = [key for owned in list(self._by_forward.values()) for key in list(owned)]
        named = {name for kind, name, _ in names if kind == "activation"}
        for path in self._have_run & self._heads.keys() if "activation" in self._kinds else ():
            if not any(name == path or name.startswith((f"{path}[", f"{path}:")) for name in named):
                self._report.mark_unseen(f"per_channel/{path}", HEADS_UNSEEN)


def of_model(
    model: nn.Module, pattern: object, kinds: Iterable[str], draws: bool, recorder: Recorder, report: Report
) -> ChannelCollector:
    """A collector of the layers that match a pattern; raises ArgumentError if none of them has channels or heads."""
    choice = selection.choice("pattern", pattern, model)
    collector = ChannelCollector(choice, kinds, draws, recorder, report)
    if not any(collector.wants(path, module) for path, module in selection.walk(model).by_path.items()):
        raise ArgumentError(
            f"pattern={pattern!r} matches no module with channels or heads (convolutions, linear layers, batch and "
            "group norms, attention)"
        )
    return collector


_Pieces = list[tuple[Attached, int, bool]]
_AttachedSums = tuple[str, str, int, _Pieces, Attached | None]


def _attached(sums: Sums, recorder: Recorder) -> tuple[_Pieces, Attached | None]:
    pieces = [(recorder.attach(piece.numbers), piece.size, piece.finished) for piece in sums.pieces]
    return pieces, None if sums.counts is None else recorder.attach(sums.counts)


def _build(kind: str, attached_sums: Sequence[_AttachedSums], draws: bool, read: Read) -> Iterable[Artifact]:
    """Runs in the background: merges the calls of each layer."""
    names, values, counts = [], [], []
    for name, word, channels, pieces, counted in attached_sums:
        names += [(name, f"[{word}{i}]") for i in range(channels)]
        values.append(_merged(channels, pieces, read))
        width = stats.BUCKETS if counted is not None else 0
        counts.append(np.zeros((channels, 0), dtype=np.int64) if counted is None else read(counted)[:, :width])
    drawn = frozenset(name for name, *_ in attached_sums) if draws else frozenset[str]()
    yield Channels(kind, tuple(names), np.concatenate(values), np.concatenate(counts).astype(np.int64), drawn)


def _merged(channels: int, pieces: _Pieces, read: Read) -> stats.Floats:
    rows = [rows_of(read(attached).astype(np.float64), size, finished) for attached, size, finished in pieces]
    owner = np.tile(np.arange(channels), len(rows))
    return rows[0] if len(rows) == 1 else stats.merge(np.concatenate(rows), owner, channels)
