"""The numbers a watch should report: every tensor of a training run, kept whole in float64 NumPy.

Plain hooks that copy everything, as slow and simple as can be. Shares the naming of outputs with the
package, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tbhooks.capture.tensor_tree import tensors
from tbhooks.data.frame import ROOT, Frame
from tests.support import reference, zoo
from tests.support.tensors import assert_same_shape

Key = tuple[str, str]
Step = dict[Key, NDArray[np.float64]]
STATS = ("count", "mean", "std", "norm", "rms", "min", "max", "abs_max", "zero_fraction", "nan_count", "inf_count")


class Float64Recorder:
    """Records the steps of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.steps: list[Step] = []
        self._parts: dict[Key, list[NDArray[np.float64]]] = defaultdict(list)
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._before: dict[str, NDArray[np.float64]] = {}
        for path, module in model.named_modules():
            module.register_forward_hook(self.record_output(path or ROOT))
        self._handles = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def record_output(self, path: str) -> Callable[..., None]:
        """A forward hook that keeps the outputs of the module at `path`, and their gradients."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            recomputing = torch._C._current_graph_task_id() != -1
            for index, tensor in tensors(output):
                if tensor.is_floating_point() or tensor.is_complex():
                    if not recomputing:
                        self._keep((path + index, "activation"), tensor)
                    if tensor.requires_grad:
                        tensor.grad_fn
                        tensor.register_hook(self._gradient(path + index, len(self.steps)))

        return hook

    def _gradient(self, name: str, step: int) -> Callable[[Tensor | None], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is not None and step == len(self.steps):
                self._keep((name, "gradient"), gradient)

        return hook

    def _keep(self, key: Key, tensor: Tensor) -> None:
        self._parts[key].append(reference.to_numpy(tensor).ravel().copy())

    def _step_begins(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for name, parameter in self._parameters.values():
            self._keep((name, "weight"), parameter)
            self._before[name] = reference.to_numpy(parameter).copy()
            if parameter.grad is not None:
                self._keep((name, "weight_gradient"), parameter.grad)

    def _step_ends(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name, _ = self._parameters[id(parameter)]
                self._parts[name, "update"].append((reference.to_numpy(parameter) - self._before[name]).ravel())
        self.steps.append({key: np.concatenate(parts) for key, parts in self._parts.items()})
        self._parts.clear()


def observe(case: zoo.Case, steps: int = 3) -> list[Step]:
    """The steps of an unwatched run of the case."""
    seen: list[Float64Recorder] = []

    def before(model: nn.Module) -> Float64Recorder:
        seen.append(Float64Recorder(model))
        return seen[0]

    zoo.train(case, steps, before=before)
    seen[0].close()
    return seen[0].steps


def assert_frame_equals(frame: Frame, step: Step) -> None:
    """Every number of the frame equals the float64 reference, and nothing is missing."""
    assert {(site.name, site.kind) for site in frame.sites} == set(step)
    for (name, kind), array in step.items():
        reading = frame[name, kind]
        expected = reference.stats(array)
        for stat in STATS:
            tolerance = _tolerance(stat, kind, expected)
            ok = reference.is_close(getattr(reading, stat), expected[stat], 1e-5, tolerance)
            assert ok, f"{kind} of {name}: {stat} is {getattr(reading, stat)}, should be {expected[stat]}"
        assert_same_shape(lambda name, reading=reading: getattr(reading, name), expected, rel=1e-4)  # type: ignore[misc]
        assert reading.counts.sum() == np.isfinite(array).sum()
        assert np.array_equal(reading.counts, reference.bucket_counts(array)) or kind == "update"
        if kind == "update":
            weight = reference.stats(step[name, "weight"])["norm"]
            ratio = expected["norm"] / weight if weight > 0 else np.nan
            assert reference.is_close(reading.ratio, ratio, 1e-5, 1e-8)


def _tolerance(stat: str, kind: str, expected: dict[str, float]) -> float:
    """A mean near zero, or the spread of equal numbers, is only as exact as the numbers are large.

    An update is a difference in the parameter's own type: one rounding of float32 is in it.
    """
    exact = stat in ("count", "nan_count", "inf_count", "zero_fraction", "min", "max", "abs_max")
    share = 2.0**-24 if kind == "update" else 1e-9
    return 0.0 if exact or np.isnan(expected["abs_max"]) else share * expected["abs_max"]
