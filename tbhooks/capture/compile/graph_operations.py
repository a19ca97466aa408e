"""Observes attention while a graph is traced for compilation, so that its numbers become part of the graph.

AOTAutograd runs the graph of torch._dynamo once as Python. A `TorchFunctionMode` is active there between the marks of
modules (dynamo.enter_module), and adds what attention.py computes, and operators that pass it on, to the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tbhooks.capture.compile import dynamo
from tbhooks.capture.functional import attention
from tbhooks.capture.functional.function_mode import MOST_CALLS, OPERATIONS, OwnMode

OPERATION, HEADS = "functional:", "heads:"
"""The prefixes of the kinds by which operators name what they pass on."""

_ATTENTION = {**attention.INSIDE, attention.FLEX: attention.inside_flex_attention}


class GraphOperations(OwnMode):
    """Active while modules that read operations are traced, in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: list[dict[str, int]] = []

    def enter(self, depth: int) -> None:
        """A module was entered; it is the `depth`-th of those that run."""
        del self._counts[depth - 1 :]
        self._counts += [{} for _ in range(depth - len(self._counts))]
        self.set_active(True)

    def leave(self, depth: int) -> None:
        """A module was left; so many still run."""
        del self._counts[depth:]
        if not depth:
            self.set_active(False)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._operations_running += 1
        try:
            result = func(*args, **kwargs)
            name = OPERATIONS.get(func) or getattr(func, "__name__", "")
            if name in _ATTENTION and self._counts:
                with dynamo.collect_failures("attention in compiled code"):
                    self._observe(name, args, kwargs, result[0] if isinstance(result, tuple) else result)
            return result
        finally:
            self._operations_running -= 1

    def _observe(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        earlier = self._counts[-1].get(name, 0)
        self._counts[-1][name] = earlier + 1
        index = f"[{min(earlier, MOST_CALLS - 1)}]" if earlier else ""
        with torch.no_grad():
            inside = list(_ATTENTION[name](args, kwargs, result.detach(), None))
        # With gradients as in the model: a backend that does not trace reads here, and tells passes apart by it.
        dynamo.observe_operation(result, OPERATION + name, index)
        for part, numbers, by_head in inside:
            dynamo.observe_operation(numbers, f"{OPERATION}{name}.{part}", index)
            if by_head is not None:
                dynamo.observe_operation(by_head, f"{HEADS}{name}.{part}", index)


dynamo.make_mode = GraphOperations
