"""Which node produced a tensor. Tensors are identified by id and version, and none is kept alive."""
# ruff: noqa: SLF001  a tensor's version and base have no public names

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor

from tbhooks.collectors.graph.builder import Origin


@dataclass(slots=True)
class _Known:
    tensor: weakref.ref[Tensor]
    version: int
    origin: Origin | str


def version(tensor: Tensor) -> int:
    """The number of in-place changes; 0 for inference tensors, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


class Origins:
    """The origins of the tensors of one forward: a node and its output, or the name of a parameter."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, tensor: Tensor) -> Origin | str | None:
        """The origin of a tensor; if it was changed through another view, that change is its origin."""
        known = self._find(tensor)
        if known is not None and known.version == version(tensor):
            return known.origin
        base = None if tensor._base is None else self._find(tensor._base)
        if base is not None and (known is None or base.version == version(tensor)):
            return base.origin
        return None if known is None else known.origin

    def set(self, tensor: Tensor, origin: Origin | str) -> None:
        self._known[id(tensor)] = _Known(weakref.ref(tensor), version(tensor), origin)

    def changed(self, tensor: Tensor, origin: Origin) -> None:
        """Records an in-place change of a tensor and of its base."""
        self.set(tensor, origin)
        if tensor._base is not None:
            self.set(tensor._base, origin)

    def _find(self, tensor: Tensor) -> _Known | None:
        known = self._known.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None
