"""Dead units: those of a ReLU's output that were zero for every sample of a step.

Kept as one vector a site on the device, over all calls of the step, and summed up in one number that rides
in the step's copy. No sync; which shapes are counted is decided from sizes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tbhooks.capture.recorder import Recorder
from tbhooks.reduction import cpu

# Their outputs are never negative, so that the largest value tells whether there was any.
RECTIFIERS = (nn.ReLU, nn.ReLU6)
# The same operations as the functional kind names them.
RECTIFIED = (":relu", ":relu6")
# A healthy unit is silent for half of the samples: with this many, silence has a reason.
FEWEST_SAMPLES = 32
DEAD_FRACTION = "dead_fraction"


@dataclass
class _Peaks:
    """The largest output of each unit so far, and of how many samples."""

    largest: Tensor
    samples: int


class Units:
    """The rectified outputs of one step."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, _Peaks]] = {}

    def see(self, name: str, output: Tensor) -> None:
        """`name` is the site's: `activation` or `functional`, and the path."""
        if not output.is_floating_point() or output.layout is not torch.strided or output.numel() == 0:
            return
        known = self._seen.setdefault(name, {})
        by_kernel = cpu.can_read(output)
        for dim in _unit_dimensions(output):
            before = known.get(dim)
            if before is not None and not _goes_on(before.largest, output, dim):
                before = None
            largest = (_alive if by_kernel else _largest)(output.detach(), dim, before.largest if before else None)
            samples = output.numel() // output.size(dim)
            known[dim] = _Peaks(largest, samples + (before.samples if before else 0))

    def log(self, recorder: Recorder) -> None:
        """The share of dead units of each site, and forgets them."""
        alike: dict[tuple[int, torch.device], list[tuple[str, Tensor]]] = {}
        for name, by_dimension in self._seen.items():
            kind, _, path = name.partition("/")
            tag = f"{kind}.{DEAD_FRACTION}/{path}"
            peaks = [peaks.largest for peaks in by_dimension.values() if peaks.samples >= FEWEST_SAMPLES]
            if len(peaks) == 1:
                alike.setdefault((len(peaks[0]), peaks[0].device), []).append((tag, peaks[0]))
            elif peaks:
                recorder.scalar(tag, torch.stack([_dead_share(largest) for largest in peaks]).amax())
        for sites in alike.values():  # layers of one width together: a few operations for all of them
            recorder.scalars([tag for tag, _ in sites], _dead_share(torch.stack([largest for _, largest in sites])))
        self.forget()

    def forget(self) -> None:
        self._seen = {}


def _dead_share(largest: Tensor) -> Tensor:
    return (largest == 0).to(torch.float32).mean(-1)


def _unit_dimensions(output: Tensor) -> tuple[int, ...]:
    """Where the units are: after the batch for images, last for vectors; sequences come either way."""
    return {0: (), 1: (0,), 2: (1,), 3: (1, 2)}.get(output.dim(), (1,))


def _goes_on(known: Tensor, output: Tensor, dim: int) -> bool:
    """Whether they are the units of one output: a shared ReLU may be called on others, and on other devices."""
    return len(known) == output.size(dim) and known.device == output.device


def _largest(output: Tensor, dim: int, before: Tensor | None) -> Tensor:
    """Over everything but the units; the innermost dimensions first, which lie together in memory."""
    inner = tuple(range(dim + 1, output.dim()))
    if inner:
        output = output.amax(inner)
    if dim:
        output = output.amax(tuple(range(dim)))
    return output if before is None else torch.maximum(before, output)


def _alive(output: Tensor, dim: int, before: Tensor | None) -> Tensor:
    """1 for a unit with anything but zeros, which takes no more than a glance at most of them."""
    alive = torch.zeros(output.size(dim), dtype=torch.float32, device="cpu") if before is None else before.float()
    cpu.find_alive(output, dim, alive)
    return alive
