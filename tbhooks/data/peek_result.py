"""`Peeked`, the result of `peek()`: the frame of one pass, with the outputs of the modules. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tbhooks.data.display import display
from tbhooks.data.errors import ArgumentError, nearest
from tbhooks.data.frame import Frame

_MAPPINGS = ("outputs", "kept")


@dataclass(frozen=True, slots=True)
class Output:
    """The shape and dtype of one output of a module, of its last call."""

    module: str
    """The class of the module, such as "Conv2d"."""
    shape: tuple[int, ...]
    dtype: str
    """The dtype without `torch.`, such as "float32"."""


@dataclass(frozen=True, eq=False, repr=False)
class Peeked(Frame):
    """The frame of one pass through a model, returned by `tbhooks.peek`. Shows itself as a table in notebooks.

    Examples:
        >>> frame = tbhooks.peek(model, x, keep="conv1")  # doctest: +SKIP
        >>> frame["conv1", "activation"].std, frame.outputs["conv1"].shape, frame.kept["conv1"]  # doctest: +SKIP

    """

    outputs: Mapping[str, Output] = field(default_factory=dict)
    """The outputs by the name of their site: `frame.outputs["encoder.0"].shape`."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The tensors that `keep=` selected, by the same names: detached copies on the CPU."""
    notes: tuple[str, ...] = ()
    """What was not captured, not kept or not restored, and why."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: dict(getattr(self, name)) for name in _MAPPINGS}}

    def __repr__(self) -> str:
        return super().__repr__().replace("Frame", "Peeked", 1)

    def image_grid(self, name: str, **options: Any) -> Any:
        """Returns a matplotlib figure of the feature maps or attention maps of a kept tensor. Needs `tbhooks[plot]`.

        `name` is a key of `kept`. `options` are those of `tbhooks.views.figures.image_grid`, such as `most=64`. Raises
        an `ArgumentError` if the tensor was not kept.
        """
        if name not in self.kept:
            hint = nearest(str(name), self.kept) if self.kept else "nothing was kept; use peek(model, x, keep=...)"
            raise ArgumentError(f"{name!r} was not kept: {hint}")
        return display("image_grid", self.kept[name], **options)
