"""Dead units: units of a ReLU's output that were zero for every sample of a step.

One vector per site and forward stays on the device until the step ends: only then is it known which forwards belong to
the step. Its share of dead units is copied to the host with the step. No sync; which dimensions hold units is decided
from shapes alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tbhooks.capture.recording.recorder import Recorder
from tbhooks.reduction import cpu

# Their outputs are never negative: a unit is dead if its largest output is 0.
RECTIFIERS = (nn.ReLU, nn.ReLU6)
# The same operations as the functional kind names them.
RECTIFIED = (":relu", ":relu6")
# A normal unit is zero for about half of the samples: for this many it is not zero by chance.
FEWEST_SAMPLES = 32
DEAD_FRACTION = "dead_fraction"

# Room for so many units in the first step; 64 KiB.
FIRST_ROOM = 1 << 14


@dataclass
class _Peaks:
    """The largest output of each unit, and the number of samples so far."""

    largest: Tensor
    samples: int


class DeadUnits:
    """Counts the dead units of all ReLU outputs of one step."""

    def __init__(self) -> None:
        self._peaks: dict[object, dict[tuple[str, int], _Peaks]] = {}
        # What hooks in C have added (eager_hooks.c): the forward, the site, where its units begin in the block, how
        # many they are, and the number of samples. A unit is 1 if it is alive.
        self._entries: list[tuple[object, str, int, int, int]] = []
        self._block = torch.zeros(FIRST_ROOM, dtype=torch.float32, device="cpu")
        self._used_before = self._wanted = 0

    @property
    def _used(self) -> int:
        """How much of the block is used, by entries that were dropped as well."""
        return max(self._used_before, sum(self._entries[-1][2:4]) if self._entries else 0)

    def place(self) -> tuple[object, ...]:
        """Where hooks in C add units: the list of entries, the address of the block, its length and what is used."""
        return self._entries, self._block.data_ptr(), len(self._block), self._used

    def add(self, name: str, output: Tensor, forward: object) -> None:
        """Adds one call's output. `name` is that of the site: `activation/<path>` or `functional/<path>`."""
        by_kernel = cpu.can_read(output)
        is_readable = by_kernel or (output.is_floating_point() and output.layout is torch.strided)
        if not is_readable or output.numel() == 0:
            return
        known = self._peaks.setdefault(forward, {})
        for dim in _unit_dimensions(output):
            before = known.get((name, dim))
            if before is not None and not _has_same_units(before.largest, output.size(dim), output.device):
                before = None
            earlier = before.largest if before else None
            largest = _alive(output, dim, earlier) if by_kernel else _largest(output.detach(), dim, earlier)
            samples = output.numel() // output.size(dim)
            self._wanted += output.size(dim)
            known[name, dim] = _Peaks(largest, samples + (before.samples if before else 0))

    def drop(self, forwards: Set[object]) -> None:
        """Removes what was added in these forwards."""
        if forwards:
            self._peaks = {forward: peaks for forward, peaks in self._peaks.items() if forward not in forwards}
            self._used_before = self._used
            # In place: hooks in C know the list.
            self._entries[:] = [entry for entry in self._entries if entry[0] not in forwards]

    def _merged(self) -> dict[str, list[_Peaks]]:
        """The peaks of all forwards, by site and then by dimension."""
        merged: dict[tuple[str, int], _Peaks] = {}
        of_entries = (
            {(name, 1): _Peaks(self._block[start : start + width], samples)}
            for _, name, start, width, samples in self._entries
        )
        for peaks in itertools.chain(self._peaks.values(), of_entries):
            for key, new in peaks.items():
                before = merged.get(key)
                if before is not None and _has_same_units(before.largest, len(new.largest), new.largest.device):
                    largest = torch.maximum(before.largest, new.largest)
                    merged[key] = _Peaks(largest, before.samples + new.samples)
                else:
                    merged[key] = new
        by_site: dict[str, list[_Peaks]] = {}
        for (name, _), one in merged.items():
            by_site.setdefault(name, []).append(one)
        return by_site

    def log(self, recorder: Recorder) -> None:
        """Records the share of dead units of each site, and forgets them."""
        if self._log_entries(recorder):
            self.forget()
            return
        alike: dict[tuple[int, torch.device], list[tuple[str, Tensor]]] = {}
        for name, by_dimension in self._merged().items():
            tag = _tag(name)
            peaks = [peaks.largest for peaks in by_dimension if peaks.samples >= FEWEST_SAMPLES]
            if len(peaks) == 1:
                alike.setdefault((len(peaks[0]), peaks[0].device), []).append((tag, peaks[0]))
            elif peaks:
                recorder.scalar(tag, torch.stack([_dead_share(largest) for largest in peaks]).amax())
        for sites in alike.values():  # layers of one width together: a few operations for all of them
            recorder.scalars([tag for tag, _ in sites], _dead_share(torch.stack([largest for _, largest in sites])))
        self.forget()

    def _log_entries(self, recorder: Recorder) -> bool:
        """The same for what hooks in C have added, if that is all there is, and each site was called once."""
        if self._peaks or len({name for _, name, *_ in self._entries}) < len(self._entries):
            return False
        counted = [entry[1:4] for entry in self._entries if entry[4] >= FEWEST_SAMPLES]
        if counted:
            names, starts, widths = zip(*counted, strict=True)
            for name, share in zip(names, cpu.dead_shares(self._block, starts, widths), strict=True):
                recorder.scalar(_tag(name), share)
        return True

    def forget(self) -> None:
        """Forgets everything, and makes room for as many units."""
        used = self._used
        self._peaks, self._entries, wanted = {}, [], self._wanted + used
        self._used_before = self._wanted = 0
        with torch.inference_mode(False):
            if wanted > len(self._block):
                self._block = torch.zeros(wanted, dtype=torch.float32, device="cpu")
            elif used:
                self._block[:used].zero_()


@functools.cache
def _tag(name: str) -> str:
    kind, _, path = name.partition("/")
    return f"{kind}.{DEAD_FRACTION}/{path}"


def _dead_share(largest: Tensor) -> Tensor:
    return (largest == 0).to(torch.float32).mean(-1)


_DIMENSIONS: dict[int, tuple[int, ...]] = {0: (), 1: (0,), 2: (1,), 3: (1, 2)}


def _unit_dimensions(output: Tensor) -> tuple[int, ...]:
    """The dimensions that may hold units: after the batch for images, last for vectors, both for sequences."""
    return _DIMENSIONS.get(output.dim(), (1,))


def _has_same_units(known: Tensor, width: int, device: torch.device) -> bool:
    """A shared ReLU may be called on outputs of other widths, and on other devices."""
    return len(known) == width and known.device == device


def _largest(output: Tensor, dim: int, before: Tensor | None) -> Tensor:
    """The largest output of each unit. Innermost dimensions first, which lie together in memory."""
    inner = tuple(range(dim + 1, output.dim()))
    if inner:
        output = output.amax(inner)
    if dim:
        output = output.amax(tuple(range(dim)))
    return output if before is None else torch.maximum(before, output)


def _alive(output: Tensor, dim: int, before: Tensor | None) -> Tensor:
    """1 for each unit with an output that is not 0; the kernel stops reading a unit at its first."""
    alive = torch.zeros(output.size(dim), dtype=torch.float32, device="cpu") if before is None else before.float()
    cpu.find_alive(output, dim, alive)
    return alive
