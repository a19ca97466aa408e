"""What `peek` hands back: the frame of one pass, and what a look at a single pass can tell besides.

It is a Frame in every other respect, and needs no torch: only tensors that were asked for are of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tbhooks.data.errors import ArgumentError, nearest
from tbhooks.data.frame import Frame

_MAPPINGS = ("outputs", "kept")


@dataclass(frozen=True, slots=True)
class Output:
    """What one output of a module is, besides its numbers; of the last call, where there were several."""

    module: str
    """The class of the module that returned it: "Conv2d"."""
    shape: tuple[int, ...]
    dtype: str
    """Without `torch.`: "float32"."""


@dataclass(frozen=True, eq=False, repr=False)
class Peeked(Frame):
    """One pass through a model, looked at once; what `tbhooks.peek` returns."""

    outputs: Mapping[str, Output] = field(default_factory=dict)
    """By the name of the activation's site: `frame.outputs["encoder.0"].shape`."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """By the same name: the tensors `keep=` asked for, detached copies on the CPU."""
    notes: tuple[str, ...] = ()
    """What could not be seen, kept or put back, in words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: dict(getattr(self, name)) for name in _MAPPINGS}}

    def __repr__(self) -> str:
        return super().__repr__().replace("Frame", "Peeked", 1)

    def image_grid(self, name: str, **options: Any) -> Any:
        """Feature maps or attention maps of a kept tensor, as a matplotlib figure (`tbhooks[plot]`).

        `options` go to `tbhooks.views.figures.image_grid`, such as `most=64`.
        """
        if name not in self.kept:
            hint = nearest(str(name), self.kept) if self.kept else "nothing was kept: peek(model, x, keep=...) keeps it"
            raise ArgumentError(f"no tensor of {name!r} was kept: {hint}")
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        return display("image_grid", self.kept[name], **options)
