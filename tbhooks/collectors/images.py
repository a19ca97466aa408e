"""Images of the input batch, filters, feature maps and attention maps.

The training thread copies a small part of a tensor on its device, up to a limit of bytes per step. The background
thread normalises and draws it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Set
from functools import partial

import torch
from torch import Tensor, nn

from tbhooks.capture import schedule, selection, sharded_tensors
from tbhooks.capture.hooks.collectors import guarded
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.recording.packed_step import Attached, Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.selection import Matcher
from tbhooks.collectors import image_tiles
from tbhooks.collectors.image_tiles import Tiles
from tbhooks.data.artifacts import Artifact, Picture
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report
from tbhooks.drawing import tensor_grid
from tbhooks.reduction.torch_rows import describe, has_no_data, storage_is_freed

# Images of each of the first logged steps, then half as often with every doubling: TensorBoard shows ten per tag.
IN_FULL = 10
MOST_BYTES = 1 << 20
LARGEST_FILTER = 32
# The suffixes of operations that have attention weights as output.
ATTENTION_WEIGHTS = (":softmax", ":scaled_dot_product_attention.weights")
RANGE = (
    "One scale a picture, from the 0.5 to the 99.5 percentile of its numbers; the strip below says which those are. "
    "Red is NaN or Inf."
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Key = tuple[str, str]
"""The kind and the name of a tensor."""


def of_model(
    model: nn.Module, pattern: object, report: Report, every: int | None = None, most_bytes: int = MOST_BYTES
) -> ImageCollector:
    """A collector of the modules that match a pattern; without one, of the input batch and the first convolution."""
    if pattern is not None:
        return ImageCollector(selection.choice("pattern", pattern, model), report, False, every, most_bytes)
    modules = selection.walk(model).by_path
    first = next((path for path, module in modules.items() if isinstance(module, _CONVOLUTIONS)), None)
    return ImageCollector(lambda path, _module: path == first, report, True, every, most_bytes)


class ImageCollector:
    """Copies parts of the outputs and filters of selected modules, and of the model's inputs."""

    def __init__(self, choice: Matcher, report: Report, inputs: bool, every: int | None, most_bytes: int) -> None:
        self._choice, self._report, self._inputs = choice, report, inputs
        self._every, self._most_bytes = every, most_bytes
        # A collector is called with the tensors that any collector wants.
        self._chosen: set[str] = set()
        self._filters: dict[str, weakref.ref[nn.Module]] = {}
        self._logged = 0
        # Of each image, those of the first forward and of the latest one that no backward has gone through yet.
        self._collected: dict[_Key, dict[Pass | None, Tiles]] = {}
        self._forward: Pass | None = None

    def wants(self, path: str, module: nn.Module) -> bool:
        self._chosen.discard(path)  # another module may have this path now
        self._filters.pop(path, None)
        chosen = self._choice(path, module)
        if chosen:
            self._chosen.add(path)
            if isinstance(module, nn.Conv2d):
                self._filters[path] = weakref.ref(module)
        return chosen

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return self._inputs and path == ROOT

    def begin(self) -> None:
        self._collected, self._forward = {}, None

    def in_forward(self, forward: Pass) -> None:
        self._forward = forward

    def drop(self, forwards: Set[Pass]) -> None:
        for by_forward in self._collected.values():
            for forward in forwards & by_forward.keys():
                del by_forward[forward]

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        if not self._is_due:
            return
        if kind == "input":
            if self._inputs and path == ROOT:
                self._take(kind, path + index, tensor, image_tiles.of_input)
        elif kind == "activation":
            if path in self._chosen:
                self._take(kind, path + index, tensor, image_tiles.of_output)
                self._take_filters(path)
        elif path.endswith(ATTENTION_WEIGHTS) and path.rpartition(":")[0] in self._chosen:
            self._take(kind, path + index, tensor, image_tiles.of_weights)

    def end(self, recorder: Recorder) -> None:
        self._logged += 1
        collected = {key: next(iter(kept.values())) for key, kept in self._collected.items() if kept}
        self.forget()  # first, because a watch may be closed from another thread while modules run
        if collected:
            attached = [
                (key, part.natural, part.description, recorder.attach(part.numbers)) for key, part in collected.items()
            ]
            recorder.artifact(guarded(partial(_draw, attached), self._report, "drawing images"))

    def forget(self) -> None:
        self.begin()

    @property
    def _is_due(self) -> bool:
        if self._every is None:
            return schedule.thinned(self._logged, IN_FULL)
        return self._logged % self._every == 0

    def _take_filters(self, path: str) -> None:
        module = self._filters[path]() if path in self._filters else None
        weight = None if module is None else getattr(module, "weight", None)
        local = sharded_tensors.local_tensor(weight) if isinstance(weight, Tensor) else None
        if local is None or has_no_data(local) or storage_is_freed(local) or local.dim() != 4:
            return
        if max(local.shape[2:]) <= LARGEST_FILTER:
            self._take("weight", f"{path}.weight", local, image_tiles.of_filters)

    def _take(self, kind: str, name: str, tensor: Tensor, choose: Callable[[Tensor], Tiles | None]) -> None:
        """Keeps the first tensor of a step; shared modules and micro-batches have several."""
        kept = self._collected.get((kind, name), {})
        if (kind == "weight" and kept) or self._forward in kept or any(one is None or one.reached_by for one in kept):
            return
        if not image_tiles.is_shown(tensor, kind):
            self._report.mark_unseen(
                _tag(kind, name), f"images require floating-point tensors (got {describe(tensor)})"
            )
            return
        part = choose(tensor.detach())
        if part is None:
            if kind != "weight":
                self._report.mark_unseen(
                    _tag(kind, name), f"a tensor of shape {list(tensor.shape)} cannot be shown as an image"
                )
        elif self._has_room(kind, name, part.numbers):
            for forward in list(kept)[1:]:
                del kept[forward]
            with torch.no_grad():
                kept[None if kind == "weight" else self._forward] = part._replace(numbers=part.numbers.clone())
            self._collected[kind, name] = kept

    def _has_room(self, kind: str, name: str, numbers: Tensor) -> bool:
        """Counts each image once: of what is kept of several forwards one is written."""
        others = [kept for key, kept in self._collected.items() if kept and key != (kind, name)]
        taken = sum(_bytes(next(iter(kept.values())).numbers) for kept in others)
        if taken + _bytes(numbers) > self._most_bytes:
            why = f"the images of a step are limited to {self._most_bytes} bytes; increase images(..., most_bytes=)"
            self._report.mark_unseen(_tag(kind, name), why)
            return False
        return True


def _bytes(numbers: Tensor) -> int:
    return numbers.numel() * max(numbers.itemsize, 4 if numbers.dtype is torch.bfloat16 else 1)


def _tag(kind: str, name: str) -> str:
    return f"images.{kind}/{name}"


def _draw(parts: Iterable[tuple[_Key, bool, str, Attached]], read: Read) -> Iterable[Artifact]:
    """Runs in the background."""
    for (kind, name), natural, description, attached in parts:
        numbers = read(attached)
        if natural:  # channels last; one channel is grey
            numbers = numbers.transpose(0, 2, 3, 1)
            numbers = numbers[..., 0] if numbers.shape[-1] == 1 else numbers
        pixels, _ = tensor_grid.painted(numbers, natural=natural)
        code = name.replace("`", "'")
        yield Picture(_tag(kind, name), pixels, f"{kind} of `{code}`: {description}. {RANGE}")
