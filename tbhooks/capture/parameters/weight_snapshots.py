"""Copies of weights from before the optimizer's step; the update is the difference to the weights after it.

Copies of CPU weights are in one block of memory that is reused by the next logged step: allocating memory takes longer
than filling it. Copies on devices are clones, because device allocators reuse memory themselves; of a large weight only
a sample may be copied (weight_sample.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from tbhooks.capture.parameters import weight_sample
from tbhooks.capture.parameters.weight_sample import NO_ROOM
from tbhooks.reduction.cpu import Address

# The size of a cache line, and of the widest vector registers.
_ALIGNMENT = 64

_Slot = tuple[int, torch.dtype, torch.Size]  # the offset in the block, and what is stored there


@dataclass(frozen=True, slots=True)
class _Layout:
    """What is reserved for many parameters, to be reserved again in the next step."""

    keys: list[int]
    shapes: list[torch.Size]
    sizes: NDArray[np.int64]
    """The size and the type of each, as the kernel gets them."""
    starts: NDArray[np.int64]
    reserved: dict[int, tuple[int, int]]
    slots: dict[int, _Slot]

    def is_of(self, keys: Sequence[int], described: NDArray[np.int64]) -> bool:
        return keys == self.keys and np.array_equal(described[:, 1:], self.sizes)


class WeightSnapshots:
    """One copy per parameter, by the id of the parameter.

    The caller asks for the address of a `slot`, writes the copy there while it reads the parameter, and calls `commit`.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._reserved: dict[int, tuple[int, int]] = {}
        self._uncommitted: dict[int, _Slot] = {}
        self._slots: dict[int, _Slot] = {}
        self._clones: dict[int, Tensor] = {}
        self._layout: _Layout | None = None
        self._sample_sizes: dict[int, int] = {}
        # By the keys of the weights that share the memory of a device: the most elements that were copied of one.
        self._smallest: dict[frozenset[int], int] = {}

    def reserve(self, parameters: Iterable[tuple[int, Tensor]]) -> None:
        """Reserves memory for the CPU parameters that may be copied in this step."""
        self.clear()
        self._layout = None
        used = 0
        for key, parameter in parameters:
            self._reserved[key] = used, parameter.nbytes
            used += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        if used == 0:
            self._block = None
        elif self._block is None or len(self._block) < used:
            self._block = None  # frees the old block before the new one is allocated
            with torch.inference_mode(False):
                self._block = torch.empty(used, dtype=torch.uint8, device="cpu")

    def reserve_described(self, parameters: Mapping[int, Tensor], described: NDArray[np.int64]) -> None:
        """As `reserve`, for parameters with their address, size and type (eager_hooks.describe_all)."""
        keys, shapes = list(parameters), [parameter.shape for parameter in parameters.values()]
        layout = self._layout
        if layout is None or self._block is None or not layout.is_of(keys, described) or layout.shapes != shapes:
            self.reserve(parameters.items())
            slots = {key: (self._reserved[key][0], p.dtype, p.shape) for key, p in parameters.items()}
            starts = np.array([start for start, _, _ in slots.values()], np.int64)
            layout = self._layout = _Layout(keys, shapes, described[:, 1:].copy(), starts, self._reserved, slots)
        self.clear()
        self._reserved = layout.reserved

    def reserved(
        self, keys: Sequence[int], parameters: Sequence[Tensor], described: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Returns the addresses of the slots of many parameters; None if one has none of its size. As `slot`."""
        if self._block is None:
            return None
        if self._layout is not None and self._layout.is_of(keys, described):
            self._uncommitted = dict(self._layout.slots)
            return self._block.data_ptr() + self._layout.starts
        slots = [self._reserved.get(key, (0, -1)) for key in keys]
        if [size for _, size in slots] != [parameter.nbytes for parameter in parameters]:
            return None
        self._uncommitted |= {
            key: (start, parameter.dtype, parameter.shape)
            for key, (start, _), parameter in zip(keys, slots, parameters, strict=True)
        }
        return self._block.data_ptr() + np.array([start for start, _ in slots], np.int64)

    def committed(
        self, keys: Sequence[int], parameters: Sequence[Tensor], described: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Returns the addresses of many committed copies; None if there is one missing of this dtype and shape."""
        if self._block is None:
            return None
        if self._layout is not None and self._slots == self._layout.slots and self._layout.is_of(keys, described):
            return self._block.data_ptr() + self._layout.starts
        slots = [self._slots.get(key, (0, None, None)) for key in keys]
        alike = [slot[1] == p.dtype and slot[2] == p.shape for slot, p in zip(slots, parameters, strict=True)]
        return self._block.data_ptr() + np.array([slot[0] for slot in slots], np.int64) if all(alike) else None

    def drop(self, keys: Iterable[int]) -> None:
        """Drops committed copies that were used."""
        used = set(keys)
        self._slots = {key: slot for key, slot in self._slots.items() if key not in used}

    def slot(self, key: int, parameter: Tensor) -> Address | None:
        """Returns where the copy is to be written, or None if no memory of this size is reserved."""
        start, size = self._reserved.get(key, (0, -1))
        if self._block is None or size != parameter.nbytes:
            return None
        self._uncommitted[key] = start, parameter.dtype, parameter.shape
        return self._block.data_ptr() + start

    def commit(self) -> None:
        """To be called when every slot that was returned since the last call has been written."""
        self._slots |= self._uncommitted
        self._uncommitted = {}

    def clone(self, parameters: Mapping[int, Tensor], most: int | None = None) -> None:
        """Clones parameters that have no slot, in one call per device: of each at most `most` elements.

        Raises `torch.OutOfMemoryError` if the device is full, and has cloned nothing then.
        """
        for key in parameters:
            self._slots.pop(key, None)
        parts = {key: _part(parameter, most) for key, parameter in parameters.items()}
        originals = {key: part.detach() for key, part in parts.items() if part is not None}
        try:
            clones = {key: torch.empty_like(original) for key, original in originals.items()}
            if clones:
                torch._foreach_copy_(list(clones.values()), list(originals.values()))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, NotImplementedError):  # some tensor subclasses have no foreach operations
            clones = {key: original.clone() for key, original in originals.items()}
        self._clones |= clones
        if most is not None:
            self._sample_sizes |= {key: most for key in clones if parameters[key].numel() > most}

    def clone_what_fits(
        self, parameters: Mapping[int, Tensor], optimizer: Optimizer, model: nn.Module | None
    ) -> Iterator[int]:
        """Clones parameters, on a device as much of them as fits into the free memory. Yields the keys of those that
        do not fit.
        """
        for device in {parameter.device for parameter in parameters.values()}:
            here = {key: parameter for key, parameter in parameters.items() if parameter.device == device}
            if device.type == "cpu":
                self.clone(here)
                continue
            expected = weight_sample.expected_state(optimizer, here.values())
            limit = weight_sample.budget(device, expected)
            never_sampled = frozenset() if model is None else weight_sample.updated_in_few_rows(model)
            whole = {key: parameter for key, parameter in here.items() if key in never_sampled}
            if _nbytes(whole) <= limit:
                self.clone(whole)
                limit -= _nbytes(whole)
            others = {key: parameter for key, parameter in here.items() if key not in whole}
            most = self._sample_size(others, limit, is_first=expected > 0)
            if most != NO_ROOM:
                self.clone(others, most)
            yield from (key for key in here if key not in self)

    def _sample_size(self, parameters: Mapping[int, Tensor], limit: int, is_first: bool) -> int:
        """The most elements of one parameter that are copied. It never grows, so that charts have few breaks."""
        most = weight_sample.sample_size(list(parameters.values()), limit)
        if most == NO_ROOM or is_first:  # in its first step an optimizer allocates more than in others
            return most
        key = frozenset(parameters)
        self._smallest[key] = min(most, self._smallest.get(key, most))
        return self._smallest[key]

    def part_of(self, key: int, parameter: Tensor) -> Tensor:
        """The part of a parameter that was cloned: the parameter itself, or its sample."""
        part = _part(parameter, self._sample_sizes.get(key))
        return parameter if part is None else part

    def take_slot(self, key: int, parameter: Tensor) -> Address | None:
        """Returns the address of a committed copy, once; None if there is none of this dtype and shape."""
        if self._block is None or self._slots.get(key, ())[1:] != (parameter.dtype, parameter.shape):
            return None
        return self._block.data_ptr() + self._slots.pop(key)[0]

    def take(self, key: int) -> Tensor | None:
        """Returns the copy as a tensor, once; None if there is none."""
        if key not in self._slots or self._block is None:
            return self._clones.pop(key, None)
        return self._view(self._block, self._slots.pop(key))

    def whole(self, key: int, parameter: Tensor) -> Tensor | None:
        """Returns the copy as a tensor and keeps it; None if there is none of the whole parameter."""
        if key in self._sample_sizes:
            return None
        if key not in self._slots or self._block is None:
            return self._clones.get(key)
        return self._view(self._block, self._slots[key])

    @staticmethod
    def _view(block: Tensor, slot: _Slot) -> Tensor:
        start, dtype, shape = slot
        return block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def __contains__(self, key: int) -> bool:
        return key in self._slots or key in self._clones

    def clear(self) -> None:
        """Drops all copies. The block is kept for the next step."""
        self._reserved, self._uncommitted, self._slots, self._clones, self._sample_sizes = {}, {}, {}, {}, {}

    def release(self) -> None:
        """Drops all copies and frees the block."""
        self.clear()
        self._block = None


def _part(parameter: Tensor, most: int | None) -> Tensor | None:
    """The parameter, or a sample if it is larger; None if it is larger and cannot be sampled."""
    return parameter if most is None or parameter.numel() <= most else weight_sample.sample(parameter, most)


def _nbytes(parameters: Mapping[int, Tensor]) -> int:
    return sum(parameter.nbytes for parameter in parameters.values())
