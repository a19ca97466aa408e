"""Reads many parameters at once, if all of them are plain tensors on the CPU, as those of most models are.

One call describes all tensors to C, and one call of the kernel reduces them. Anything else (a parameter without a
gradient, a DTensor, metrics of the user) is left to the reader that looks at one parameter after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor, nn

from tbhooks.capture.hooks.eager_hooks import UNREADABLE, describe_all
from tbhooks.capture.parameters.weight_snapshots import WeightSnapshots
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.self_report import Report

# Weights are read for themselves, or because their updates are compared with them.
WEIGHT = ("weight", "update")


class PlainParameters:
    """Reads the parameters of one optimizer. A parameter is known by its key."""

    def __init__(
        self, recorder: Recorder, snapshots: WeightSnapshots, site: Callable[[int, str], int], report: Report
    ) -> None:
        self._recorder, self._snapshots, self._report = recorder, snapshots, report
        self._site = site
        self._sites: dict[tuple[str, ...], tuple[list[int], list[int]]] = {}

    def forget_sites(self) -> None:
        """The keys may belong to other parameters now."""
        self._sites = {}

    def read(
        self, keys: list[int], tensors: Mapping[int, nn.Parameter], read: set[int], gradients_read: set[int]
    ) -> list[int]:
        """Reads weights and gradients before the optimizer's step, and copies the weights. Adds the keys to those that
        are read. Returns the keys that were not read: all or none.
        """
        recorder = self._recorder
        if not self._may_read(keys) or not (read | gradients_read).isdisjoint(keys) or not recorder.wants(*WEIGHT):
            return keys
        weights: list[Tensor] = [tensors[key] for key in keys]
        kinds = ("weight", "weight_gradient") if recorder.wants("weight_gradient") else ("weight",)
        gradients = [g for w in weights if (g := w.grad) is not None] if len(kinds) > 1 else []
        # Each weight is followed by its gradient, as when parameters are read one by one: frames keep that order.
        pairs = zip(weights, gradients, strict=False)
        described = describe_all(list(itertools.chain(*pairs)) if len(kinds) > 1 else weights)
        if described is None or len(described) < len(weights) * len(kinds) or (described[:, 2] == UNREADABLE).any():
            return keys
        copies = np.zeros(len(described), np.int64)
        if recorder.wants("update"):
            slots = self._snapshots.reserved(keys, weights, described[:: len(kinds)])
            if slots is None:
                return keys
            copies[:: len(kinds)] = slots
        if not recorder.record_described(self._sites_of(keys, *kinds), weights[0], described, copies=copies):
            return keys
        self._snapshots.commit()
        read.update(keys)
        if gradients:
            gradients_read.update(keys)
        return []

    def read_updates(self, keys: list[int], tensors: Mapping[int, nn.Parameter]) -> list[int]:
        """Reads updates after the optimizer's step. Returns the keys that were not read: all or none."""
        if not self._may_read(keys) or not self._recorder.wants("update"):
            return keys
        weights: list[Tensor] = [tensors[key] for key in keys]
        described = describe_all(weights)
        if described is None or (described[:, 2] == UNREADABLE).any():
            return keys
        before = self._snapshots.committed(keys, weights, described)
        if before is None:
            return keys
        if not self._recorder.record_described(self._sites_of(keys, "update"), weights[0], described, minus=before):
            return keys
        self._snapshots.drop(keys)
        return []

    def _may_read(self, keys: list[int]) -> bool:
        """Not if something was missing before: each parameter has to be looked at then."""
        is_once = len(set(keys)) == len(keys)
        return bool(keys) and is_once and not self._report.unseen and self._recorder.reads_rows_only

    def _sites_of(self, keys: list[int], *kinds: str) -> list[int]:
        """Returns the sites of all parameters, those of one parameter after the other."""
        known, sites = self._sites.get(kinds, ([], []))
        if known != keys:
            sites = [self._site(key, kind) for key in keys for kind in kinds]
            self._sites[kinds] = keys, sites
        return sites
