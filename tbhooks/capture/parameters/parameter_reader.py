"""Weights, weight gradients and updates, read before and after the optimizer's step.

Weights are read before the step, gradients as the optimizer uses them (clipped and unscaled), and updates as the
difference between the weights after and before it. The capture session calls this module; it registers no hook.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tbhooks.capture import sharded_tensors
from tbhooks.capture.hooks.eager_hooks import UNREADABLE, describe_all
from tbhooks.capture.parameters import master_weights
from tbhooks.capture.parameters.grad_norm import GradientVersion, total_norm
from tbhooks.capture.parameters.optimizer_state import OptimizerStateReader
from tbhooks.capture.parameters.plain_parameters import PlainParameters
from tbhooks.capture.parameters.watched_parameters import WatchedParameters
from tbhooks.capture.parameters.weight_snapshots import WeightSnapshots
from tbhooks.capture.recording.recorder import NO_SITE, Recorder, Wanted, can_be_one_of_many, can_be_together
from tbhooks.capture.scalars.noise_scale import NoiseScale
from tbhooks.capture.step import zero_step
from tbhooks.capture.step.optimizer_round import GroupNumbers, parameter_ids
from tbhooks.data.frame import MISSING_GRADIENT, OPTIMIZER_KINDS, OPTIMIZER_PARTS, RAW_GRADIENT_NORM, Site
from tbhooks.data.self_report import Report
from tbhooks.reduction import batched
from tbhooks.reduction.cpu import NULL
from tbhooks.reduction.torch_rows import describe

NOT_COPIED = (
    "the device has too little free memory for a copy of the weights, which the update is computed from. Leave more "
    'free, or leave "update" out of kinds'
)

NOT_READ = (
    "the gradients and updates of weights are not seen: DeepSpeed ZeRO keeps them in partitions of its own, and no "
    "torch optimizer has stepped those. Log what you need of them with w.log()"
)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tensors that are reduced or copied together."""

    by_kernel: list[Wanted] = field(default_factory=list)
    together: list[batched.Wanted] = field(default_factory=list)
    clones: dict[int, Tensor] = field(default_factory=dict)


class ParameterReader:
    """Reads the selected parameters of one model, each once per logged step. `key` is the id of a parameter."""

    def __init__(
        self, parameters: WatchedParameters, recorder: Recorder, groups: GroupNumbers, report: Report,
        merges_ranks: bool = False,
    ) -> None:  # fmt: skip
        self._watched = parameters
        self._recorder = recorder
        self._groups = groups
        self._report = report
        self._merges_ranks = merges_ranks
        self._snapshots = WeightSnapshots()
        self._sites: dict[tuple[str, str], int] = {}
        # Whether the running backward leaves gradients that can be read at its end.
        self._reads_norm = False
        self._plain = PlainParameters(recorder, self._snapshots, self._site, report)
        self._sites_of_walk = 0
        self._optimizer_state: OptimizerStateReader | None = None
        self.noise: NoiseScale | None = None
        """Measures the noise of gradients, if the user has asked for it."""
        self.clear()

    def clear(self) -> None:
        """Drops every tensor. The next step finds the parameters again, because some may have been replaced."""
        self._watched.clear()
        self._read: set[int] = set()
        self._read_gradients: set[int] = set()
        self._without_gradient: set[int] = set()
        # The tensor of the optimizer that each master is a part of.
        self._held: dict[int, Tensor] = {}
        self._snapshots.clear()
        self._has_reserved = False
        self._versions: dict[int, GradientVersion] = {}
        # The loss scale that a parameter's gradient still has to be divided by.
        self._scales: dict[int, Tensor] = {}
        if self.noise is not None:
            self.noise.forget()

    def prepare(self) -> None:
        """Finds the parameters before the first logged step, so that it takes hardly longer than later ones."""
        if self._reads_parameters:
            self._watched.prepare()
            for key in self._watched.paths:
                for kind in ("weight", "weight_gradient", "update"):
                    self._site(key, kind)
            self.clear()

    def release(self) -> None:
        """Drops every tensor and frees the memory for copies of weights."""
        self.clear()
        self._snapshots.release()

    def backward_begins(self) -> None:
        """Notes the version of each gradient, so that `backward_ended` knows which ones this backward has changed. A
        backward of another model changes none of them.
        """
        self._reads_norm = self._recorder.wants("weight_gradient") and self._watched.are_readable_in_backward()
        if self._reads_norm:
            self._versions = {key: GradientVersion(weakref.ref(g), g._version) for key, g in self._gradients().items()}

    def backward_ended(self, scale: Tensor | None) -> None:
        """Records the norm of all gradients, before clipping. `scale` is the loss scale they are multiplied by."""
        norm = self._read_norm(scale)
        if self.noise is not None:
            self.noise.backward_ended(norm, scale)

    def _read_norm(self, scale: Tensor | None) -> Tensor | None:
        if not self._reads_norm:
            return None
        self._find_parameters()
        gradients, versions = self._gradients(), self._versions
        changed = [key for key, g in gradients.items() if key not in versions or not versions[key].is_current(g)]
        if not changed:
            return None
        if scale is not None:
            self._scales |= {key: scale.clone() for key in changed}  # the GradScaler changes its own tensor in place
        elif self._scales:
            for key in changed:
                self._scales.pop(key, None)
        with torch.no_grad():
            norm = total_norm(list(gradients.values()))
            norm = norm if scale is None else norm / scale.to(norm.device)
            self._recorder.scalar(RAW_GRADIENT_NORM, norm)
        return norm

    def _gradients(self) -> dict[int, Tensor]:
        return {key: p.grad for key, p in self._watched.tensors.items() if p.grad is not None}

    def gradients_unscaled(self, optimizer: Optimizer) -> None:
        """A GradScaler has divided the optimizer's gradients by the loss scale."""
        for key in parameter_ids(optimizer):
            self._scales.pop(key, None)

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Reads weights and gradients before the step. A closure computes the gradients inside the step."""
        with self._report.guarded("reading parameters"), torch.no_grad():
            self._log_learning_rates(optimizer)
            if not self._reads_parameters:
                return
            # A fused optimizer gets scaled gradients and divides them itself.
            scale = getattr(optimizer, "grad_scale", None)
            keys = self._keys(optimizer)
            if scale is None and not has_closure and not self._watched.masters:
                keys = self._plain.read(keys, self._watched.tensors, self._read, self._read_gradients)
            with self._batch() as batch:
                for key in keys:
                    self._read_weight(key, batch, copies=self._recorder.wants("update"))
                    if not has_closure:
                        self._read_gradient(key, batch, scale)
            for key in self._snapshots.clone_what_fits(batch.clones, optimizer, self._watched.model()):
                self._report.mark_unseen(f"update/{self._watched.paths[key]}", NOT_COPIED)

    @property
    def _reads_parameters(self) -> bool:
        """Whether statistics of parameters are wanted at all. Finding the parameters takes a while."""
        return self._recorder.wants("weight", "weight_gradient", "update")

    def _log_learning_rates(self, optimizer: Optimizer) -> None:
        names = self._groups.of(optimizer)
        if zero_step.is_running() and len(optimizer.param_groups) == 1:  # of several, one at a time
            names = [optimizer.param_groups[0].get("name", zero_step.count_step())]
        for group, name in zip(optimizer.param_groups, names, strict=True):
            if isinstance(group.get("lr"), Tensor | float | int):
                self._recorder.scalar(f"train.lr/{name}", group["lr"])

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Reads the updates, and the gradients if a closure has computed them."""
        with self._report.guarded("reading the optimizer's state"), torch.no_grad():
            self._read_optimizer_state(optimizer)
        if not self._reads_parameters:
            return
        with self._report.guarded("reading updates"), torch.no_grad(), self._batch() as batch:
            keys = self._keys(optimizer)
            if not has_closure and not self._watched.masters:
                keys = self._plain.read_updates(keys, self._watched.tensors)
            for key in keys:
                if has_closure:
                    self._read_gradient(key, batch, None)
                if key in self._snapshots:
                    self._read_update(key, batch)

    def _read_optimizer_state(self, optimizer: Optimizer) -> None:
        if self._optimizer_state is not None:
            self._find_parameters()
            self._optimizer_state.read(
                optimizer, self._watched.paths, self._snapshots.whole, self._held, self._watched.masters
            )

    def read_optimizer_state(self) -> None:
        """From now on the state of optimizers is read, too."""
        self._recorder.add_kinds(OPTIMIZER_KINDS, OPTIMIZER_PARTS)
        self._optimizer_state = OptimizerStateReader(self._recorder, self._report)

    def read_remaining(self) -> None:
        """Reads the parameters that no optimizer has stepped: frozen, in no optimizer, or updated by hand."""
        if self.noise is not None:
            with self._report.guarded("noise scale"):
                self.noise.log()
        if not self._reads_parameters:
            return
        with self._report.guarded("reading parameters"), torch.no_grad(), self._batch() as batch:
            self._find_parameters()
            for key in [key for key in self._watched.paths if key not in self._read]:
                self._read_weight(key, batch, copies=False)
                if self._gradient(key) is not None:
                    self._read_gradient(key, batch, self._scales.get(key))
                else:
                    self._note_absence(key)
            for key in self._without_gradient - self._read_gradients:
                self._recorder.scalar(MISSING_GRADIENT + self._watched.paths[key], 1.0)

    def _note_absence(self, key: int) -> None:
        """Says that the gradient and the update of a parameter are on another rank, or in no optimizer of torch."""
        parameter = self._watched.tensors[key]
        if not master_weights.is_partitioned(parameter) or not parameter.requires_grad:
            return
        is_elsewhere = getattr(parameter, "_hp_mapping", self) is None
        if is_elsewhere and self._merges_ranks:
            return
        why = master_weights.ELSEWHERE if is_elsewhere else NOT_READ
        if not is_elsewhere:
            self._report.log_once(why)
        for kind in ("weight_gradient", "update"):
            self._report.mark_unseen(f"{kind}/{self._watched.paths[key]}", why)

    def watched(self) -> dict[int, nn.Parameter]:
        """Returns the selected parameters of the model, by their ids."""
        self._find_parameters()
        return self._watched.tensors

    @contextlib.contextmanager
    def _batch(self) -> Iterator[_Batch]:
        """Gives a batch to fill, and reads all of it together at the end of the block."""
        batch = _Batch()
        try:
            yield batch
        finally:
            if self._recorder.record_all(batch.by_kernel):
                self._snapshots.commit()
            self._recorder.record_together(batch.together)

    def _keys(self, optimizer: Optimizer) -> list[int]:
        """Returns the selected parameters of the optimizer, in its order."""
        self._find_parameters()
        ids = map(id, itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
        keys = [*filter(self._watched.paths.__contains__, ids)]
        if self._watched.masters:
            held = ((key, master.held_by(optimizer)) for key, master in self._watched.masters.items())
            found = {key: tensor for key, tensor in held if tensor is not None}
            self._held |= found
            keys += found
        return keys

    def _find_parameters(self) -> None:
        self._watched.find()
        if not self._has_reserved and self._recorder.wants("update"):
            self._has_reserved = True
            self._reserve_copies()
        if self._sites_of_walk != self._watched.walks:
            self._sites_of_walk = self._watched.walks
            self._plain.forget_sites()

    def _reserve_copies(self) -> None:
        """Reserves memory for the copies of CPU parameters."""
        described = None if self._watched.masters else describe_all(list(self._watched.tensors.values()))
        if described is not None and (described[:, 2] != UNREADABLE).all():
            self._snapshots.reserve_described(self._watched.tensors, described)
            return
        local = ((key, self._weight(key)) for key in self._watched.tensors)
        self._snapshots.reserve((key, weight) for key, weight in local if can_be_one_of_many(weight))

    def _gradient(self, key: int) -> Tensor | None:
        """Returns the gradient that the optimizer uses: that of its own tensor, or that of the parameter."""
        held, parameter = self._held.get(key), self._watched.tensors[key]
        if held is not None:
            return None if held.grad is None else self._watched.masters[key].part_of(held.grad, held)
        return master_weights.gradient(parameter) if parameter.grad is None else parameter.grad

    def _weight(self, key: int) -> Tensor:
        """Returns the parameter, or the part of it that this rank holds."""
        if key in self._watched.masters:
            return self._watched.masters[key].weight
        parameter = self._watched.tensors[key]
        local = sharded_tensors.local_tensor(parameter)
        return parameter if local is None else local

    def _site(self, key: int, kind: str) -> int:
        name = self._watched.paths[key], kind
        if name not in self._sites:
            self._sites[name] = self._recorder.number(Site(*name))
        return self._sites[name]

    def _read_weight(self, key: int, batch: _Batch, copies: bool) -> None:
        """Reads a weight and, with `copies`, copies it, so that the update can be computed after the step."""
        parameter, site = self._weight(key), self._site(key, "weight")
        is_unread = key not in self._read and site != NO_SITE
        self._read.add(key)
        if is_unread:
            self._recorder.read_metrics("weight", self._watched.paths[key], "", parameter, None)
        if is_unread and can_be_one_of_many(parameter):
            slot = self._snapshots.slot(key, parameter) if copies else NULL
            batch.by_kernel.append((site, parameter, slot or NULL, NULL))
            is_unread, copies = False, slot is None
        if copies:
            batch.clones[key] = parameter
        if is_unread and can_be_together(parameter):
            batch.together.append((site, parameter, None, None))
        elif is_unread and self._recorder.record(site, parameter) is None:
            why = f"{describe(parameter)}: only real numbers have statistics"
            self._report.mark_unseen(f"weight/{self._watched.paths[key]}", why)

    def _read_update(self, key: int, batch: _Batch) -> None:
        site, parameter = self._site(key, "update"), self._weight(key)
        slot = self._snapshots.take_slot(key, parameter) if can_be_one_of_many(parameter) else None
        if slot is not None:
            batch.by_kernel.append((site, parameter, NULL, slot))
            return
        part, before = self._snapshots.part_of(key, parameter), self._snapshots.take(key)
        if self._report.unseen:
            self._report.mark_seen(f"update/{self._watched.paths[key]}")
        if before is not None and part is parameter and can_be_together(parameter):
            batch.together.append((site, parameter, before, None))
        elif before is not None:
            whole = None if part is parameter else parameter.numel()
            self._recorder.record_difference(site, part.detach(), before, whole)

    def _read_gradient(self, key: int, batch: _Batch, scale: Tensor | None) -> None:
        site, gradient = self._site(key, "weight_gradient"), self._gradient(key)
        if site == NO_SITE or key in self._read_gradients:
            return
        name = f"weight_gradient/{self._watched.paths[key]}"
        if gradient is None:
            if self._watched.tensors[key].requires_grad:
                self._without_gradient.add(key)
                self._report.mark_unseen(name, "no gradient reached it")
            return
        if self._report.unseen:
            self._report.mark_seen(name)
        self._read_gradients.add(key)
        local = sharded_tensors.local_tensor(gradient)
        self._recorder.read_metrics("weight_gradient", self._watched.paths[key], "", gradient, None, scale)
        if local is None:
            self._report.mark_unseen(name, describe(gradient))
        elif scale is None and can_be_one_of_many(local):
            batch.by_kernel.append((site, local, NULL, NULL))
        elif can_be_together(local):
            batch.together.append((site, local, None, scale))
        else:
            self._recorder.record(site, local, scale)
