"""Weights, their gradients and their updates, read around the optimizer's step.

Only what the optimizer really used counts: weights before the step, gradients after clipping and
unscaling, updates as the difference it made. Registers no hook; the clock calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from tbhooks import select
from tbhooks.buffer import NO_SITE, Recorder
from tbhooks.frame import Site
from tbhooks.report import Report
from tbhooks.rows import describe, has_no_data


class ParameterReader:
    """Reads the watched parameters of one model, once each in a logged step."""

    def __init__(self, model: nn.Module, selector: select.Selector, recorder: Recorder, report: Report) -> None:
        self._model = weakref.ref(select.unwrap(model))
        self._selector = selector
        self._recorder = recorder
        self._report = report
        self.forget()

    def forget(self) -> None:
        """Lets go of every tensor; the next step looks the parameters up anew, as some may be replaced."""
        self._paths: dict[int, str] = {}
        self._tensors: dict[int, nn.Parameter] = {}
        self._read: set[int] = set()
        self._read_gradients: set[int] = set()
        self._before: dict[int, Tensor] = {}

    def owned(self, optimizer: Optimizer) -> frozenset[int]:
        """Which parameters of this model the optimizer steps, by id."""
        model = self._model()
        mine = set() if model is None else {id(parameter) for parameter in model.parameters()}
        return frozenset(mine.intersection(id(p) for group in optimizer.param_groups for p in group["params"]))

    def before(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Weights, and the gradients the step will use; with a closure those are made inside the step."""
        with self._report.guarded("reading parameters"), torch.no_grad():
            for key in self._stepped_by(optimizer):
                self._read_weight(key)
                if not has_closure:
                    self._read_gradient(key, getattr(optimizer, "grad_scale", None))
                if self._recorder.wants("update"):
                    self._before[key] = self._tensors[key].detach().clone()

    def after(self, optimizer: Optimizer, has_closure: bool) -> None:
        """What the step changed."""
        with self._report.guarded("reading updates"), torch.no_grad():
            for key in self._stepped_by(optimizer):
                if has_closure:
                    self._read_gradient(key, None)
                before = self._before.pop(key, None)
                if before is not None:
                    site = self._recorder.number(Site(self._paths[key], "update"))
                    self._recorder.record_difference(site, self._tensors[key].detach(), before)

    def rest(self) -> None:
        """Parameters no optimizer stepped: frozen, left out, or updated by hand."""
        with self._report.guarded("reading parameters"), torch.no_grad():
            self._look_up()
            for key in [key for key in self._paths if key not in self._read]:
                self._read_weight(key)
                if self._tensors[key].grad is not None:
                    self._read_gradient(key, None)

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
        modules = self._selector.choose(select.walk(model).by_path)
        for path, parameter in select.parameters(modules).items():
            if isinstance(parameter, UninitializedParameter) or has_no_data(parameter):
                self._report.cannot_see(f"weight/{path}", "it holds no data yet")
            else:
                self._paths[id(parameter)] = path
                self._tensors[id(parameter)] = parameter

    def _read_weight(self, key: int) -> None:
        if key in self._read:
            return
        self._read.add(key)
        site = self._recorder.number(Site(self._paths[key], "weight"))
        if site != NO_SITE and self._recorder.record(site, self._tensors[key]) is None:
            why = f"{describe(self._tensors[key])}: only real numbers have statistics"
            self._report.cannot_see(f"weight/{self._paths[key]}", why)

    def _read_gradient(self, key: int, scale: Tensor | None) -> None:
        site = Site(self._paths[key], "weight_gradient")
        number = self._recorder.number(site)
        gradient = self._tensors[key].grad
        if number == NO_SITE or key in self._read_gradients:
            return
        if gradient is None:
            if self._tensors[key].requires_grad:
                self._report.cannot_see(str(site), "no gradient reached it")
            return
        self._report.sees(str(site))
        self._read_gradients.add(key)
        if scale is not None:
            # A fused optimizer is handed scaled gradients and divides them itself; by a tensor, so without a sync.
            # In half precision the quotient could be zero.
            gradient = (gradient.float() if gradient.dtype.itemsize < 4 else gradient) / scale
        self._recorder.record(number, gradient)
