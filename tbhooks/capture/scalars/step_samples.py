"""The samples that the user shows (`Watch.samples`): the largest values with their ids, and the mean of each group.

They are reduced at once on the device of the values, without a sync, and copied to the host with the logged step. What
one call became on the device is a `WorstSamples`. Others may subscribe to those of every step, logged or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tbhooks.capture.autograd import without_dispatch_modes
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recording.packed_step import Attached, PackedStep, Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.recording.step_table import StepTable
from tbhooks.capture.step.step import State, Step
from tbhooks.data.artifacts import samples
from tbhooks.data.artifacts.samples import OTHER_GROUPS, Group, Sample, SampleId, Samples, as_id
from tbhooks.data.self_report import Report
from tbhooks.reduction import pinned

MOST_GROUPS = 64
"""The groups of one call that have a mean of their own; all further ones share one."""
MOST_CALLS = 256
LATE_AND_MERGED = "given after the end of the step, where ranks are merged: call samples() before optimizer.step()"


@dataclass(frozen=True, eq=False)
class SampleCall:
    """The checked arguments of one call of `Watch.samples`."""

    values: Tensor
    ids: Tensor | tuple[SampleId, ...] | None
    """One for each sample: integers on the device of the values, or what the host knows."""
    group: Tensor | tuple[str, ...] | str | None
    """One for each sample, on the device or on the host; or one for all."""
    most: int


@dataclass(frozen=True, eq=False)
class WorstSamples:
    """The largest values of one call, on the device of the values; nothing was copied to the host."""

    values: Tensor
    """[k], the largest first, NaN before all numbers."""
    positions: Tensor
    """[k] of int64: where each value is in the flattened tensor that the user gave."""
    ids: Tensor | None
    """[k] of int64, if the ids of the call are integers on the device. Else `id_of(position)` returns them."""
    host_ids: tuple[SampleId, ...] | None
    per_sample: int
    """How many values a sample has: more than one for values per token."""
    first: int
    """How many values earlier calls of the step had."""

    def id_of(self, position: int) -> SampleId:
        """The id of the sample at a position, if `ids` is None."""
        sample = position // self.per_sample
        return self.first // self.per_sample + sample if self.host_ids is None else self.host_ids[sample]


@dataclass(frozen=True, eq=False)
class GroupSums:
    """The sum and the number of the values of each group of one call, on the device."""

    sums: Tensor
    counts: Tensor
    labels: Tensor | None
    """The group of each entry, if groups are integers on the device."""
    names: tuple[str, ...]
    """The group of each entry, if the host knows it."""
    of_worst: Tensor | None
    """The group of each of the largest values: of `labels`, or a position in `names`."""


def reduce_call(call: SampleCall, first: int) -> tuple[WorstSamples, GroupSums | None]:
    """Reduces one call on the device of its values."""
    with torch.no_grad(), torch.autocast(call.values.device.type, enabled=False):
        values = call.values.detach().reshape(-1)
        values = values if values.dtype in (torch.float32, torch.float64) else values.float()
        worst, positions = values.topk(min(call.most, values.numel()))
        per_sample = _per_sample(values, call.ids)
        ids = call.ids.reshape(-1)[positions // per_sample] if isinstance(call.ids, Tensor) else None
        host_ids = None if isinstance(call.ids, Tensor) else call.ids
        return WorstSamples(worst, positions, ids, host_ids, per_sample, first), _sums(call.group, values, positions)


def _per_sample(values: Tensor, given: Tensor | Sequence[object] | None) -> int:
    several = given.numel() if isinstance(given, Tensor) else 0 if given is None else len(given)
    return values.numel() // several if several else 1


def _sums(group: Tensor | tuple[str, ...] | str | None, values: Tensor, positions: Tensor) -> GroupSums | None:
    if group is None:
        return None
    wide = values.float() if values.device.type == "mps" else values.double()
    if isinstance(group, str):
        return GroupSums(wide.sum().reshape(1), torch.full_like(positions[:1], values.numel()), None, (group,), None)
    labels: Tensor | None = None
    names: tuple[str, ...] = ()
    if isinstance(group, Tensor):
        code, labels = _ranked(group.reshape(-1).long())
        of_worst = group.reshape(-1).long()[positions // _per_sample(values, group)]
    else:
        names = tuple(dict.fromkeys(group))
        code = _on_device([min(names.index(name), MOST_GROUPS) for name in group], values)
        names = (*names[:MOST_GROUPS], OTHER_GROUPS) if len(names) > MOST_GROUPS else names
        of_worst = code[positions // _per_sample(values, group)]
    code = code[:, None].expand(-1, _per_sample(values, group)).reshape(-1)
    sums = wide.new_zeros(MOST_GROUPS + 1).scatter_add_(0, code, wide)
    counts = torch.zeros_like(sums, dtype=torch.int64).scatter_add_(0, code, torch.ones_like(code))
    return GroupSums(sums, counts, labels, names, of_worst)


def _ranked(group: Tensor) -> tuple[Tensor, Tensor]:
    """For each element the rank of its value among the distinct ones, at most MOST_GROUPS; and the distinct values.

    All shapes are known on the host: nothing waits for the device.
    """
    ordered, order = group.sort()
    is_new = torch.zeros_like(ordered)
    is_new[1:] = (ordered[1:] != ordered[:-1]).long()
    rank = is_new.cumsum(0).clamp_(max=MOST_GROUPS)
    labels = ordered.new_zeros(MOST_GROUPS + 1).scatter_(0, rank, ordered)
    return torch.empty_like(rank).scatter_(0, order, rank), labels


def _on_device(numbers: list[int], like: Tensor) -> Tensor:
    return pinned.upload(torch.tensor(numbers, dtype=torch.int64, device="cpu"), like.device)


@dataclass(frozen=True)
class _AttachedCall:
    """One call, on its way to the host."""

    worst: WorstSamples
    total: int
    values: Attached
    positions: Attached
    ids: Attached | None
    sums: GroupSums | None
    of_groups: tuple[Attached | None, ...]

    @classmethod
    def of(cls, call: SampleCall, worst: WorstSamples, sums: GroupSums | None, recorder: Recorder) -> _AttachedCall:
        parts = () if sums is None else (sums.sums, sums.counts, sums.labels, sums.of_worst)
        attached = [None if part is None else recorder.attach(part) for part in (worst.ids, *parts)]
        values, positions = recorder.attach(worst.values), recorder.attach(worst.positions)
        return cls(worst, call.values.numel(), values, positions, attached[0], sums, tuple(attached[1:]))

    def samples(self, read: Read) -> Samples:
        """In the background, after the copy."""
        positions = [int(position) for position in read(self.positions)]
        ids = [self.worst.id_of(one) for one in positions] if self.ids is None else [int(x) for x in read(self.ids)]
        groups, of_worst = self._groups(read, len(positions))
        inside = [position % self.worst.per_sample for position in positions]
        worst = [
            Sample(as_id(ids[i]), float(value), of_worst[i], inside[i] if self.worst.per_sample > 1 else None)
            for i, value in enumerate(read(self.values))
        ]
        return Samples(samples.worst_first(worst, len(worst)), groups, self.total)

    def _groups(self, read: Read, most: int) -> tuple[dict[str, Group], list[str]]:
        if self.sums is None:
            return {}, [""] * most
        sums, counts, labels, of_worst = (None if part is None else read(part) for part in self.of_groups)
        assert sums is not None
        assert counts is not None
        names = list(self.sums.names)
        if labels is not None:
            names = [str(int(label)) for label in labels[:MOST_GROUPS]] + [OTHER_GROUPS]
        groups = {
            name: Group(float(total / count), int(count))
            for name, total, count in zip(names, sums, counts.astype(np.int64), strict=False)
            if count
        }
        if of_worst is None:
            return groups, names * most
        return groups, [str(int(one)) if labels is not None else names[int(one)] for one in of_worst]


Subscriber = Callable[[WorstSamples, int], None]
"""Called with the largest values of a call, and the number of the step they belong to."""


class StepSamples:
    """Adds the samples of each call to the open step, or to the one that has just ended.

    The rules are those of scalars (step_scalars.py): what is given between a step's end and the next training forward
    belongs to the step that has ended.
    """

    def __init__(
        self, recorder: Recorder, observer: Observer, context: RankContext, submit: Callable[[PackedStep], None],
        report: Report,
    ) -> None:  # fmt: skip
        self._recorder, self._observer, self._submit, self._report = recorder, observer, submit, report
        self._rank, self._is_merged = context.rank, context.rank_group is not None
        self._late = Recorder(())
        self._subscribers: list[Subscriber] = []
        self.come_late = False
        """Whether samples were ever given to a step that had ended: then steps wait for them with their copy."""
        # The open step of the last call, and the number of calls and of values it had so far.
        self._step: Step | None = None
        self._calls = self._values = 0

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on it is called with the largest values of every call, in steps that are not logged, too."""
        self._subscribers.append(subscriber)

    def add(self, call: SampleCall, step: Step, ended: Step | None) -> None:
        """Adds one call; `step` is the open step, `ended` the one before it if it still takes late scalars."""
        step.was_skipped = step.was_skipped and not self._observer.called
        # Samples of a step that has ended came before its end: these belong to the next one.
        came_early = ended is not None and ended.has_samples and not self.come_late
        is_late = ended is not None and not came_early and (ended.is_logged or self.come_late)
        owner = ended if ended is not None and is_late else step
        if not (owner.is_logged or self._subscribers) or step.was_skipped or not call.values.numel():
            return
        if owner is not self._step:
            self._step, self._calls, self._values = owner, 0, 0
        owner.has_samples = True
        with torch.inference_mode(False), without_dispatch_modes():
            worst, sums = reduce_call(call, self._values)
            self._calls, self._values = self._calls + 1, self._values + call.values.numel()
            for subscriber in self._subscribers:
                subscriber(worst, owner.number)
            if owner.is_logged and self._calls <= MOST_CALLS:
                self._record(call, worst, sums, owner, is_late)
        if self._calls > MOST_CALLS:
            self._report.mark_unseen("samples", f"more than {MOST_CALLS} calls in a step: the rest is left out")

    def _record(
        self, call: SampleCall, worst: WorstSamples, sums: GroupSums | None, owner: Step, is_late: bool
    ) -> None:
        self.come_late = self.come_late or is_late
        # While a step that has ended waits with its copy, the recorder holds that step, and not the open one.
        in_step = owner.state is State.CLOSED if is_late else self._observer.seen is not None
        recorder = self._recorder if in_step else self._late
        attached = _AttachedCall.of(call, worst, sums, recorder)
        recorder.part(partial(self._build, attached, call.most))
        if in_step:
            return
        part = self._late.pack(owner.label, self._rank)
        if owner.state is State.OPEN:
            owner.early_parts.append(part.added_to)
        elif owner.state is State.PACKED:
            owner.add_part(part.added_to)
        elif self._is_merged:
            self._report.mark_unseen("samples", LATE_AND_MERGED)
        else:
            self._submit(part)

    def _build(self, attached: _AttachedCall, most: int, table: StepTable, read: Read) -> StepTable:
        try:
            one = attached.samples(read)
            merged = samples.merge([table.samples, one])
            worst = samples.worst_first([*table.samples, *one], most)
            return replace(table, samples=replace(merged, worst=worst))
        except Exception as problem:  # it must not cost the logged step
            self._report.error("samples", problem)
            return table
