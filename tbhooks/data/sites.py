"""`Site`, where a statistic was taken, and `Sites`, those of one frame with everything that follows from them alone.

Most logged steps record the same tensors in the same order. Their frames share one `Sites`, so that names, positions
and other properties of sites are computed once, and not in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

EVALUATION = "eval."
"""The prefix of the kind of everything captured in an evaluation pass."""
# What is captured inside attention besides its output, at sites of their own such as `attention:softmax.entropy`. Each
# is summarized by one of its statistics, which is also a statistic of the attention itself.
INSIDE_ATTENTION = {
    "entropy": ("entropy", "mean"), "max_logit": ("logits", "max"), "first_token": ("first_token", "mean"),
}  # fmt: skip

Result = TypeVar("Result")
Positions = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Site:
    """Where a statistic was taken: one tensor of a module or parameter."""

    path: str
    """The path of the module or parameter, as in `named_modules()` and `named_parameters()`; the root is `(root)`."""
    kind: str
    """"activation", "gradient", "weight", "weight_gradient", "update", ...; `eval.` before it in evaluation passes."""
    index: str = ""
    """Which of several outputs, such as `[0]` or `[key]`; empty if there is one."""

    @property
    def name(self) -> str:
        """Path and index."""
        return self.path + self.index

    @property
    def plain_kind(self) -> str:
        """The kind without the prefix of evaluation passes."""
        return self.kind.removeprefix(EVALUATION)

    @property
    def attention_stat(self) -> tuple[str, str, Site] | None:
        """For a site inside attention: the statistic of the attention it gives, by which of its own, and that site."""
        if self.plain_kind == "functional":
            for name, (part, stat) in INSIDE_ATTENTION.items():
                if self.path.endswith(f".{part}"):
                    return name, stat, Site(self.path.removesuffix(f".{part}"), self.kind, self.index)
        return None

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class Sites(tuple[Site, ...]):
    """The sites of a frame: a tuple that remembers what was computed from it."""

    @cached_property
    def position_of(self) -> Mapping[tuple[str, str], int]:
        """The position of a site by its name and kind."""
        return {(site.name, site.kind): i for i, site in enumerate(self)}

    @cached_property
    def positions(self) -> Mapping[str, Positions]:
        """The positions of the sites of each kind, in the order of the kinds' first sites."""
        positions: dict[str, list[int]] = {}
        for i, site in enumerate(self):
            positions.setdefault(site.kind, []).append(i)
        return {kind: np.array(indices, dtype=np.intp) for kind, indices in positions.items()}

    @cached_property
    def are_of_evaluation(self) -> bool:
        """Whether they were captured in evaluation passes."""
        return bool(self) and self[0].kind.startswith(EVALUATION)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self)

    @cached_property
    def name_set(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def path_set(self) -> frozenset[str]:
        return frozenset(site.path for site in self)

    def of_kind(self, kind: str) -> Sites:
        """The sites of one kind, in the same order."""
        if kind not in self._by_kind:
            self._by_kind[kind] = Sites(self[i] for i in self.positions.get(kind, ()))
        return self._by_kind[kind]

    def derived(self, function: Callable[..., Result], *more: Hashable) -> Result:
        """What a function returns for these sites; it is called once, and must not depend on anything else."""
        key = (function, *more)
        if key not in self._derived:
            self._derived[key] = function(self, *more)
        result: Result = self._derived[key]
        return result

    @cached_property
    def _by_kind(self) -> dict[str, Sites]:
        return {}

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}

    def __reduce__(self) -> tuple[type[Sites], tuple[tuple[Site, ...]]]:
        return Sites, (tuple(self),)
