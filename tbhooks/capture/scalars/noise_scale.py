"""The gradient noise scale of `Watch.noise_scale`, from the gradients of micro-batches, of ranks, or of samples.

McCandlish et al. 2018, "An empirical model of large-batch training", appendix A: the squared norms of a small and of a
large batch's gradient give unbiased estimates of the trace of the gradients' covariance and of the squared norm of the
true gradient. Both are averaged over logged steps, and the noise scale is the ratio of the averages. All of it stays on
the device until the copy of the step. The hooks on parameters see a gradient before it is accumulated, and before DDP
averages it. A step with one batch on one rank has no such gradients: there those of single samples with respect to
normalisation layers are used (norm_gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tbhooks.capture import sharded_tensors
from tbhooks.capture.autograd import accumulation_node, without_dispatch_modes
from tbhooks.capture.hooks.forward_event import ForwardEvent, Sizes
from tbhooks.capture.parameters.grad_norm import total_norm
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.scalars.norm_gradients import NormGradients
from tbhooks.data.frame import CRITICAL_BATCH, NOISE_PARTS, NOISE_SCALE
from tbhooks.data.self_report import Report

DECAY = 0.95
"""How much of the running means stays from one logged step to the next."""
TOO_FEW = (
    "needs the gradients of several batches in a step: accumulate gradients over micro-batches, or train with "
    "DistributedDataParallel; or normalisation layers (not BatchNorm) outside of compiled graphs and checkpoints whose "
    "inputs have the samples as their first dimension"
)
GATHERED = "FSDP reduces gradients while backward runs: those of a single rank or micro-batch are not seen"
NO_SIZES = "the model was called without a tensor, so that the number of samples in a batch is not known"
NO_GRADIENTS = 'needs "weight_gradient" in kinds of watch()'


@dataclass(frozen=True)
class _Squares:
    """Squared norms of gradients of one step: the mean of those of its batches, and that of their mean."""

    each: Tensor
    mean: Tensor
    batches: int
    samples: float
    """In each batch."""


class NoiseScale:
    """Measures the gradients of one model on logged steps."""

    def __init__(
        self, recorder: Recorder, forwards: ForwardEvent, parameters: Callable[[], Mapping[int, nn.Parameter]],
        is_logging: Callable[[], bool], norms: NormGradients, report: Report,
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._norm_gradients = norms
        self._parameters = parameters
        self._is_logging = is_logging
        self._report = report
        self._means: Tensor | None = None
        self._handles: list[Any] = []
        self.forget()
        forwards.subscribe(self._forward_begins, in_graph=True, reads_batch=True)

    def forget(self) -> None:
        """Drops what was measured in the open step, and removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []  # type: ignore[var-annotated]
        self._norms: list[Tensor] = []
        self._small: list[Tensor] = []
        self._large: Tensor | None = None
        self._scale: Tensor | None = None
        self._samples = self._forwards = 0
        self._world = 1
        self._why = ""

    def _forward_begins(self, model: nn.Module, count: Callable[[], Sizes]) -> None:
        if not self._is_logging() or not model.training:
            return
        samples, _ = count()
        self._samples += samples
        self._forwards += samples > 0
        if not self._forwards:
            self._why = NO_SIZES
        elif sharded_tensors.is_gathered_to_run(model):
            self._why = GATHERED
        elif not self._handles:
            self._world = _averaged_over(model)
            for parameter in self._parameters().values():
                if parameter.requires_grad:
                    node = accumulation_node(parameter)
                    self._nodes.append(node)  # the hook lives as long as the node
                    self._handles.append(node.register_prehook(self._on_gradient))

    def _on_gradient(self, gradients: tuple[Tensor | None, ...]) -> None:
        with self._report.guarded("noise scale"), torch.no_grad(), without_dispatch_modes():
            self._norms += [total_norm([gradient.detach()]) for gradient in gradients if gradient is not None]

    def backward_ended(self, norm: Tensor | None, scale: Tensor | None) -> None:
        """A backward has ended. `norm` is that of all gradients accumulated so far, divided by the loss scale."""
        norms, self._norms = self._norms, []
        self._scale = scale
        if not norms or norm is None:
            self._why = self._why or ("" if norm is not None else NO_GRADIENTS)
            return
        with torch.no_grad():
            small = torch.stack([each.to(norm.device) for each in norms]).square().sum()
            self._small.append(small if scale is None else small / scale.to(norm.device).square())
            self._large = norm.square()

    def log(self) -> None:
        """Adds the noise scale to the step that ends."""
        with torch.no_grad():
            squares = self._squares()
        if squares is None:
            self._report.mark_unseen(NOISE_SCALE, self._why or TOO_FEW, replace=True)
            self._recorder.scalar(NOISE_SCALE, float("nan"))
            self._recorder.scalar(CRITICAL_BATCH, float("nan"))
        else:
            self._report.mark_seen(NOISE_SCALE)
            self._recorder.scalars(NOISE_PARTS, self._updated(squares))
        self.forget()

    def _squares(self) -> _Squares | None:
        batches = len(self._small)
        if batches * self._world < 2 or self._why == GATHERED:
            return self._of_samples() if self._forwards == 1 else None
        if batches != self._forwards:
            self._why = (
                f"a step has {self._forwards} forwards and {batches} backwards: which of them belong together is not "
                "known"
            )
        if self._why or self._large is None:
            return None
        mean = self._large / batches**2
        return _Squares(torch.stack(self._small).mean(), mean, batches * self._world, self._samples / batches)

    def _of_samples(self) -> _Squares | None:
        found = self._norm_gradients.squares(self._samples)
        if found is None:
            return None
        each, mean = found
        scale = 1.0 if self._scale is None else self._scale.to(each.device).square()
        return _Squares(each / scale, mean / scale, self._samples, 1.0)

    def _updated(self, of: _Squares) -> Tensor:
        """The running means of trace and signal; and the sum and number of the noise scales that followed from them."""
        noise = (of.each - of.mean) / (1 - 1 / of.batches)
        signal = of.mean - noise / of.batches
        new = torch.stack([noise * of.samples, signal])
        if self._means is None or self._means.device != new.device:
            self._means = new.new_zeros(5)  # the two means, their weight, the sum and number of noise scales
        old = self._means
        weight = DECAY * old[2] + (1 - DECAY)
        pair = (DECAY * old[2] * old[:2] + (1 - DECAY) * new) / weight
        ratio = pair[0].clamp(min=0) / pair[1]
        is_known = (pair[1] > 0).to(new.dtype)
        tail = torch.stack([weight, old[3] + ratio.nan_to_num(0, 0, 0) * is_known, old[4] + is_known])
        self._means = torch.where(new.isfinite().all(), torch.cat([pair, tail]), old)
        return self._means[[0, 1, 3, 4]]


def _averaged_over(model: nn.Module) -> int:
    """Over how many ranks DistributedDataParallel averages the gradients of a model whose forward has just begun."""
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or not sharded_tensors.are_several() or wrapper.module is not model:
        return 1
    return int(torch.distributed.get_world_size(wrapper.process_group))
