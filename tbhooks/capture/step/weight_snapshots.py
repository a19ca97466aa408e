"""Weights as they were before an optimizer's step, to tell afterwards what it changed.

On a CPU they lie in one block that is kept from one logged step to the next: fresh memory costs more to get
than to fill. On devices, whose allocators keep memory anyway, they are clones. Nothing here reads a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tbhooks.reduction.cpu import Address

# Of a cache line, and of the widest vectors there are.
_ALIGNED = 64


class Copies:
    """By the id of the parameter. A place is given out first and filled by whoever reads the parameter."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._room: dict[int, tuple[int, int]] = {}
        self._given: dict[int, tuple[int, torch.dtype, torch.Size]] = {}
        self._places: dict[int, tuple[int, torch.dtype, torch.Size]] = {}
        self._clones: dict[int, Tensor] = {}

    def make_room(self, parameters: Iterable[tuple[int, Tensor]]) -> None:
        """For CPU parameters that may be copied in a step."""
        self.forget()
        used = 0
        for key, parameter in parameters:
            self._room[key] = used, parameter.nbytes
            used += -(-parameter.nbytes // _ALIGNED) * _ALIGNED
        if used == 0:
            self._block = None
        elif self._block is None or len(self._block) < used:
            self._block = None  # first the old one goes
            with torch.inference_mode(False):
                self._block = torch.empty(used, dtype=torch.uint8, device="cpu")

    def place(self, key: int, parameter: Tensor) -> Address | None:
        """Where the copy is to be written; None if there is no room of that size."""
        start, size = self._room.get(key, (0, -1))
        if self._block is None or size != parameter.nbytes:
            return None
        self._given[key] = start, parameter.dtype, parameter.shape
        return self._block.data_ptr() + start

    def written(self) -> None:
        """Every place that was given out since the last time holds its copy now."""
        self._places |= self._given
        self._given = {}

    def clone(self, parameters: Mapping[int, Tensor]) -> None:
        """Copies parameters that cannot be copied while they are read; all of a device together."""
        for key in parameters:
            self._places.pop(key, None)
        originals = {key: parameter.detach() for key, parameter in parameters.items()}
        try:
            clones = {key: torch.empty_like(original) for key, original in originals.items()}
            if clones:
                torch._foreach_copy_(list(clones.values()), list(originals.values()))
        except (RuntimeError, TypeError, NotImplementedError):  # not every type of tensor does that to many
            clones = {key: original.clone() for key, original in originals.items()}
        self._clones |= clones

    def take_place(self, key: int, parameter: Tensor) -> Address | None:
        """Where the copy lies, if it was placed and the parameter is still of its type and shape. Once."""
        if self._block is None or self._places.get(key, ())[1:] != (parameter.dtype, parameter.shape):
            return None
        return self._block.data_ptr() + self._places.pop(key)[0]

    def take(self, key: int) -> Tensor | None:
        """The copy as a tensor. Once."""
        if key not in self._places or self._block is None:
            return self._clones.pop(key, None)
        start, dtype, shape = self._places.pop(key)
        return self._block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def __contains__(self, key: int) -> bool:
        return key in self._places or key in self._clones

    def forget(self) -> None:
        """Lets go of every clone; the block stays."""
        self._room, self._given, self._places, self._clones = {}, {}, {}, {}

    def release(self) -> None:
        """Lets go of the block too."""
        self.forget()
        self._block = None
