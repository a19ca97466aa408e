"""Weights, their gradients and their updates, read around the optimizer's step.

Only what the optimizer really used counts: weights before the step, gradients after clipping and
unscaling, updates as the difference it made. Registers no hook; the clock calls.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from tbhooks.capture import selection, sharded_tensors
from tbhooks.capture.recorder import NO_SITE, Recorder, Wanted, can_be_one_of_many
from tbhooks.capture.step.grad_norm import total_norm
from tbhooks.capture.step.optimizer_round import GroupNumbers
from tbhooks.capture.step.weight_snapshots import Copies
from tbhooks.data.frame import MISSING_GRADIENT, RAW_GRADIENT_NORM, Site
from tbhooks.data.self_report import Report
from tbhooks.reduction import batched
from tbhooks.reduction.cpu import NULL
from tbhooks.reduction.torch_rows import describe, has_no_data


@dataclass(frozen=True, slots=True)
class _Mark:
    """A gradient as it was when a backward pass began. Holds no tensor."""

    gradient: weakref.ref[Tensor]
    version: int

    def is_still(self, gradient: Tensor) -> bool:
        return self.gradient() is gradient and gradient._version == self.version


@dataclass(frozen=True, slots=True)
class _Batch:
    by_kernel: list[Wanted] = field(default_factory=list)
    small: list[batched.Wanted] = field(default_factory=list)
    clones: dict[int, Tensor] = field(default_factory=dict)


class ParameterReader:
    """Reads the watched parameters of one model, once each in a logged step."""

    def __init__(
        self, model: nn.Module, selector: selection.Selector, recorder: Recorder, groups: GroupNumbers, report: Report
    ) -> None:
        self._model = weakref.ref(selection.unwrap(model))
        self._selector = selector
        self._recorder = recorder
        self._groups = groups
        self._report = report
        self._before = Copies()
        self._sites: dict[tuple[str, str], int] = {}
        self.forget()

    def forget(self) -> None:
        """Lets go of every tensor; the next step looks the parameters up anew, as some may be replaced."""
        self._paths: dict[int, str] = {}
        self._tensors: dict[int, nn.Parameter] = {}
        self._read: set[int] = set()
        self._read_gradients: set[int] = set()
        self._without_gradient: set[int] = set()
        self._before.forget()
        self._marks: dict[int, _Mark] = {}
        # What a scaler has multiplied a parameter's gradient by, and not yet divided it by.
        self._scales: dict[int, Tensor] = {}

    def release(self) -> None:
        """Lets go of everything."""
        self.forget()
        self._before.release()

    def owned(self, optimizer: Optimizer) -> frozenset[int]:
        """Which parameters of this model the optimizer steps, by id."""
        return self.now().intersection(id(p) for group in optimizer.param_groups for p in group["params"])

    def now(self) -> frozenset[int]:
        """The parameters the model has now, by id."""
        model = self._model()
        return frozenset() if model is None else frozenset(id(parameter) for parameter in model.parameters())

    def backward_begins(self) -> None:
        """To tell afterwards which gradients it has added to: another model's backward leaves these as they are."""
        if self._recorder.wants("weight_gradient") and self._shows_its_parameters():
            self._look_up()
            gradients = {key: parameter.grad for key, parameter in self._tensors.items()}
            self._marks = {key: _Mark(weakref.ref(g), g._version) for key, g in gradients.items() if g is not None}

    def backward_ended(self, scale: Tensor | None) -> None:
        """The norm before anything clips or unscales; `scale` is what the gradients carry."""
        if not self._recorder.wants("weight_gradient") or not self._shows_its_parameters():
            return
        self._look_up()
        gradients = {key: p.grad for key, p in self._tensors.items() if p.grad is not None}
        added = [key for key, g in gradients.items() if key not in self._marks or not self._marks[key].is_still(g)]
        if not added:
            return
        for key in added:
            self._scales.pop(key, None)
            if scale is not None:
                self._scales[key] = scale.clone()  # the scaler changes its own in place
        with torch.no_grad():
            norm = total_norm(list(gradients.values()))
            self._recorder.scalar(RAW_GRADIENT_NORM, norm if scale is None else norm / scale.to(norm.device))

    def _shows_its_parameters(self) -> bool:
        """In the middle of a pass, too."""
        model = self._model()
        return model is not None and not sharded_tensors.is_gathered_to_run(model)

    def unscaled(self, optimizer: Optimizer) -> None:
        """A scaler has divided its gradients."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._scales.pop(id(parameter), None)

    def before(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Weights, and the gradients the step will use; with a closure those are made inside the step."""
        with self._report.guarded("reading parameters"), torch.no_grad():
            self._log_learning_rates(optimizer)
            # A fused optimizer is handed scaled gradients and divides them itself.
            scale = getattr(optimizer, "grad_scale", None)
            with self._batch() as batch:
                for key in self._stepped_by(optimizer):
                    self._read_weight(key, batch, keep=self._recorder.wants("update"))
                    if not has_closure:
                        self._read_gradient(key, batch, scale)

    def _log_learning_rates(self, optimizer: Optimizer) -> None:
        for group, name in zip(optimizer.param_groups, self._groups.of(optimizer), strict=True):
            if isinstance(group.get("lr"), Tensor | float | int):
                self._recorder.scalar(f"train.lr/{name}", group["lr"])

    def after(self, optimizer: Optimizer, has_closure: bool) -> None:
        """What the step changed."""
        with self._report.guarded("reading updates"), torch.no_grad(), self._batch() as batch:
            for key in self._stepped_by(optimizer):
                if has_closure:
                    self._read_gradient(key, batch, None)
                if key in self._before:
                    self._read_update(key, batch)

    def rest(self) -> None:
        """Parameters no optimizer stepped: frozen, left out, or updated by hand."""
        with self._report.guarded("reading parameters"), torch.no_grad(), self._batch() as batch:
            self._look_up()
            for key in [key for key in self._paths if key not in self._read]:
                self._read_weight(key, batch, keep=False)
                if self._tensors[key].grad is not None:
                    self._read_gradient(key, batch, self._scales.get(key))
            for key in self._without_gradient - self._read_gradients:
                self._recorder.scalar(MISSING_GRADIENT + self._paths[key], 1.0)

    @contextlib.contextmanager
    def _batch(self) -> Iterator[_Batch]:
        """What is put into it is read together in the end, and before anything else can change it."""
        batch = _Batch()
        try:
            yield batch
        finally:
            if self._recorder.record_all(batch.by_kernel):
                self._before.written()
            self._recorder.record_together(batch.small)
            self._before.clone(batch.clones)

    def _stepped_by(self, optimizer: Optimizer) -> Iterator[int]:
        self._look_up()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._paths:
                    yield id(parameter)

    def _look_up(self) -> None:
        model = self._model()
        if self._paths or model is None:
            return
        modules = self._selector.choose(selection.walk(model).by_path)
        for path, parameter in selection.parameters(modules).items():
            if isinstance(parameter, UninitializedParameter) or has_no_data(parameter):
                self._report.mark_unseen(f"weight/{path}", "it holds no data yet")
                continue
            self._paths[id(parameter)] = path
            self._tensors[id(parameter)] = parameter
            if sharded_tensors.is_sharded(parameter):
                for kind in ("weight", "weight_gradient", "update"):
                    self._recorder.shards[Site(path, kind)] = sharded_tensors.shard_index(parameter)
        if self._recorder.wants("update"):
            local = ((key, self._weight(key)) for key in self._tensors)
            self._before.make_room((key, weight) for key, weight in local if can_be_one_of_many(weight))

    def _weight(self, key: int) -> Tensor:
        """What of it is on this rank."""
        parameter = self._tensors[key]
        local = sharded_tensors.local_tensor(parameter)
        return parameter if local is None else local

    def _site(self, key: int, kind: str) -> int:
        name = self._paths[key], kind
        if name not in self._sites:
            self._sites[name] = self._recorder.number(Site(*name))
        return self._sites[name]

    def _read_weight(self, key: int, batch: _Batch, keep: bool) -> None:
        """`keep`: and keeps a copy of it, to tell the update from."""
        parameter, site = self._weight(key), self._site(key, "weight")
        fresh = key not in self._read and site != NO_SITE
        self._read.add(key)
        if fresh and can_be_one_of_many(parameter):
            copy = self._before.place(key, parameter) if keep else NULL
            batch.by_kernel.append((site, parameter, copy or NULL, NULL))
            fresh, keep = False, copy is None
        if keep:
            batch.clones[key] = parameter
        if fresh and batched.fits(parameter):
            batch.small.append((site, parameter, None, None))
        elif fresh and self._recorder.record(site, parameter) is None:
            why = f"{describe(parameter)}: only real numbers have statistics"
            self._report.mark_unseen(f"weight/{self._paths[key]}", why)

    def _read_update(self, key: int, batch: _Batch) -> None:
        site, parameter = self._site(key, "update"), self._weight(key)
        copy = self._before.take_place(key, parameter) if can_be_one_of_many(parameter) else None
        if copy is not None:
            batch.by_kernel.append((site, parameter, NULL, copy))
            return
        before = self._before.take(key)
        if before is not None and batched.fits(parameter):
            batch.small.append((site, parameter, before, None))
        elif before is not None:
            self._recorder.record_difference(site, parameter.detach(), before)

    def _read_gradient(self, key: int, batch: _Batch, scale: Tensor | None) -> None:
        site, gradient = self._site(key, "weight_gradient"), self._tensors[key].grad
        if site == NO_SITE or key in self._read_gradients:
            return
        if gradient is None:
            if self._tensors[key].requires_grad:
                self._without_gradient.add(key)
                self._report.mark_unseen(f"weight_gradient/{self._paths[key]}", "no gradient reached it")
            return
        if self._report.unseen:
            self._report.mark_seen(f"weight_gradient/{self._paths[key]}")
        self._read_gradients.add(key)
        local = sharded_tensors.local_tensor(gradient)
        if local is None:
            self._report.mark_unseen(f"weight_gradient/{self._paths[key]}", describe(gradient))
            return
        gradient = local
        if scale is None and can_be_one_of_many(gradient):
            batch.by_kernel.append((site, gradient, NULL, NULL))
        elif batched.fits(gradient):
            batch.small.append((site, gradient, None, scale))
        else:
            self._recorder.record(site, gradient, scale)
