"""Gradients of single samples with respect to the parameters of normalisation layers, for `Watch.noise_scale`.

Gray et al. 2024, "Normalization layer per-example gradients are sufficient to predict gradient noise scale in
transformers". The gradient of a weight of a normalisation layer is the sum, over the batch, of the normalised input
times the gradient of the output. So the part of each sample costs little more than one product.

The normalised input is computed from what the layer itself has saved for its backward: nothing else is kept alive. What
is saved under hooks, as in checkpoints and with `save_on_cpu`, can be read only once, so layers in them are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tbhooks.capture.autograd import without_dispatch_modes
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_private import look_up

_saving_hooks: Callable[[bool], object] = look_up(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    lambda _: "unknown",
    "the noise scale is not estimated from normalisation layers",
)
"""The hooks on tensors that are saved for backward at the moment; None if there are none."""

Sums = Callable[[Tensor], Tensor]
"""Sums a tensor of the output's shape over all dimensions but that of samples and those of the parameter."""
_PARAMETER = "torch::autograd::AccumulateGrad"
_PRODUCT = "MulBackward0"


class NormGradients:
    """A collector that sums the gradients of each sample over the calls of a normalisation layer."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._sums: dict[str, Tensor] = {}

    def wants(self, path: str, module: nn.Module) -> bool:
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        name = type(module).__name__.lower()
        return bool(own) and "norm" in name and "batchnorm" not in name

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return False

    def begin(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._sums = {}

    def end(self, recorder: object) -> None:
        """Nothing: `NoiseScale` reads the gradients before the step is closed."""

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        """Has the gradient of this output read when it is there."""
        node: Any = tensor.grad_fn
        if node is None or node.name() not in _NORMALIZED or tensor.dim() < 2 or _saving_hooks(True) is not None:
            return
        sums, number = self._sums, tensor.output_nr  # of this step: a later backward does not change the next one

        def before(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[number]
            if gradient is not None and sums is self._sums:
                with self._report.guarded("noise scale"), torch.no_grad(), without_dispatch_modes():
                    for name, part in _per_sample(node, gradient):
                        key = f"{path} {name}"
                        sums[key] = part if key not in sums else sums[key] + part

        node.register_prehook(before)  # it lives as long as the node

    def squares(self, samples: int) -> tuple[Tensor, Tensor] | None:
        """The mean over samples of the squared norm of their gradients, and the squared norm of their mean.

        None if no layer was read whose first dimension is that of the samples.
        """
        found = [part for part in self._sums.values() if len(part) == samples]
        if samples < 2 or not found:
            return None
        device = found[0].device
        each = torch.stack([part.square().sum().to(device) for part in found]).sum() / samples
        mean = torch.stack([part.mean(0).square().sum().to(device) for part in found]).sum()
        return each, mean


def _per_sample(node: Any, gradient: Tensor) -> list[tuple[str, Tensor]]:
    """The gradients of the weight and the bias of a layer, one row for each sample."""
    exact = torch.promote_types(gradient.dtype, torch.float32)
    normalized, sums = _NORMALIZED[node.name()](node)
    if normalized is None:
        return []
    gradient = gradient.to(exact)
    # The inputs of these nodes are the tensor, the weight and the bias; one without a function has no gradient.
    has_gradient = [function is not None for function, _ in node.next_functions]
    parts = []
    if has_gradient[1] or node.name() == _PRODUCT:
        parts.append(("weight", sums(gradient * normalized.to(exact))))
    if len(has_gradient) > 2 and has_gradient[2]:
        parts.append(("bias", sums(gradient)))
    return parts


def _of_layer_norm(node: Any) -> tuple[Tensor | None, Sums]:
    mean, deviation = node._saved_result1, node._saved_result2
    return (node._saved_input - mean) * deviation, _keeps_last(len(node._saved_normalized_shape))


def _of_fused_rms_norm(node: Any) -> tuple[Tensor | None, Sums]:
    return node._saved_input * node._saved_result1, _keeps_last(len(node._saved_normalized_shape))


def _of_group_norm(node: Any) -> tuple[Tensor | None, Sums]:
    given, groups = node._saved_input, node._saved_group
    parts = given.reshape(len(given), groups, -1)
    normalized = (parts - node._saved_result1.unsqueeze(-1)) * node._saved_result2.unsqueeze(-1)
    return normalized.reshape(given.shape), lambda values: values.reshape(*values.shape[:2], -1).sum(-1)


def _of_product(node: Any) -> tuple[Tensor | None, Sums]:
    """Of a normalised input times a parameter, as RMSNorm is written in Python."""
    is_parameter = [function is not None and function.name() == _PARAMETER for function, _ in node.next_functions]
    if sum(is_parameter) != 1:
        return None, _keeps_last(1)
    weight, other = (node._saved_self, node._saved_other)[:: 1 if is_parameter[0] else -1]
    is_weight = weight is not None and other is not None and weight.dim() < other.dim()
    return (other, _keeps_last(weight.dim())) if is_weight else (None, _keeps_last(1))


def _keeps_last(dimensions: int) -> Sums:
    def sums(values: Tensor) -> Tensor:
        between = tuple(range(1, values.dim() - dimensions))
        return values.sum(between) if between else values

    return sums


_NORMALIZED: dict[str, Callable[[Any], tuple[Tensor | None, Sums]]] = {
    "NativeLayerNormBackward0": _of_layer_norm,
    "FusedRmsNormBackward0": _of_fused_rms_norm,  # on devices
    "NativeGroupNormBackward0": _of_group_norm,
    _PRODUCT: _of_product,
}
"""By the name of an autograd node: the normalised input, and how it is summed for each sample."""
