"""The metrics of one watch (`Watch.metric`): functions of the user, called with the tensors of logged steps.

A function is called in the training thread with the detached tensor, without gradients and outside of autocast. What it
returns stays on the device until the one copy of the step. A function that cannot be used is reported and switched off.
"""

from __future__ import annotations

import contextlib
import fnmatch
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tbhooks.capture import selection, sharded_tensors
from tbhooks.capture.autograd import profiler_label, without_dispatch_modes
from tbhooks.capture.recording.packed_step import Attached, Read, TablePart
from tbhooks.capture.recording.step_table import StepTable
from tbhooks.data.errors import ArgumentError, TbhooksError, nearest
from tbhooks.data.frame import EVALUATION, METRIC, ROOT
from tbhooks.data.self_report import Report, describe_exception
from tbhooks.reduction.metrics import write_ratio
from tbhooks.reduction.torch_rows import has_no_data

KINDS = ("activation", "gradient", "input", "weight", "weight_gradient")
PAIR = "write_ratio"
"""Beside these kinds: how much a module changes its first input, which is computed before metrics are called."""
MOST_NUMBERS = 64
REDUCTIONS: dict[str, Callable[..., Any]] = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}
"""How the numbers of several calls, and of several ranks, become one."""


class MetricError(TbhooksError):
    """What is wrong with the function of a metric."""


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that would change the tensor a metric was given, wait for the device or draw random numbers,
    before they run.
    """

    def __init__(self, given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = _storage(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:  # noqa: SLF001
            for argument, value in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, Tensor) and _storage(value) == self._storage:
                    raise MetricError(f"it changes the tensor it is called with ({func})")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise MetricError(f"it draws random numbers, which would change those of training ({func})")
        if _waits(func, args, kwargs):
            raise MetricError(f"it waits for the device ({func}): return a tensor, without .item() and the like")
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> object:
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return tensor.untyped_storage()._cdata  # noqa: SLF001  equal for all views of a tensor
    return id(tensor)


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host has to see data of a device before this operation can return."""
    if not any(isinstance(value, Tensor) and value.device.type != "cpu" for value in (*args, *kwargs.values())):
        return False
    if func is torch.ops.aten._to_copy.default:  # noqa: SLF001  the operator's own name
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu"
    if func is torch.ops.aten.copy_.default:
        return bool(args[0].device.type == "cpu")
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


Match = Callable[[str], bool]
"""Whether the metric is computed at a path: that of a module, of a parameter, or of a tap."""


@dataclass(eq=False)
class Metric:
    """One metric of the user."""

    name: str
    function: Callable[[Tensor], Any]
    kind: str
    reduce: str
    matches: Match
    tag: str = ""
    is_off: bool = False
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """The function of each site: some keep something from step to step."""
    known: dict[str, bool] = field(default_factory=dict)

    def wants(self, path: str) -> bool:
        if path not in self.known:
            self.known[path] = self.matches(path)
        return self.known[path] and not self.is_off

    def of_site(self, name: str) -> Callable[..., Any]:
        if name not in self.functions:
            make = getattr(self.function, "for_site", None)
            function = self.function if make is None else make()
            self.functions[name] = getattr(function, "on_device", function)
        return self.functions[name]


@dataclass(eq=False)
class _Call:
    """What one call of a metric's function returned."""

    metric: Metric
    site: str
    numbers: Tensor | float
    owner: object


class StepMetrics:
    """The metrics of the open step. The recorder of the step has it, and drops and copies it with its records."""

    def __init__(self, report: Report, phase: str = "") -> None:
        self._report, self._phase = report, phase
        self._by_kind: dict[str, list[Metric]] = {}
        self._calls: list[_Call] = []

    def of_evaluations(self) -> StepMetrics:
        """The same metrics for evaluation passes, with `eval.` before their tags."""
        made = StepMetrics(self._report, EVALUATION)
        made._by_kind = self._by_kind
        return made

    @property
    def has_something(self) -> bool:
        return bool(self._calls)

    def add(self, metric: Metric) -> None:
        self._by_kind.setdefault(metric.kind, []).append(metric)

    @property
    def names(self) -> set[str]:
        return {metric.name for metrics in self._by_kind.values() for metric in metrics}

    def wants(self, kind: str, path: str) -> bool:
        """Whether any metric wants this kind at this path."""
        return any(metric.wants(path) for metric in self._by_kind.get(kind, ()))

    def read(
        self, kind: str, path: str, index: str, tensor: Tensor, owner: object, scale: Tensor | None = None
    ) -> None:
        """Calls the functions that want this tensor. `owner` identifies the numbers for `drop`."""
        wanted = [each for each in self._by_kind.get(kind, ()) if each.wants(path)]
        if not wanted:
            return
        local = sharded_tensors.local_tensor(tensor)
        if local is None or has_no_data(local) or not local.numel():
            return
        with _prepared(local) as detached:
            given = detached
            if scale is not None:
                given = (given.float() if given.dtype.itemsize < 4 else given) / scale.to(given.device)
            for metric in wanted:
                self._run(metric, path + index, owner, given)

    def _run(self, metric: Metric, site: str, owner: object, given: Tensor) -> None:
        try:
            with _Guard(given):
                numbers = metric.of_site(site)(given)
            self._calls.append(_Call(metric, site, _checked(numbers, metric), owner))
        except Exception as problem:
            metric.is_off = True
            why = str(problem) if isinstance(problem, MetricError) else f"it failed: {describe_exception(problem)}"
            self._report.mark_unseen(f"{METRIC}{metric.name}", f"{why}; it is switched off", replace=True)
            self._report.error(f"metric {metric.name!r} at {site} is switched off", problem)

    def drop(self, owners: Set[object]) -> None:
        """Removes the numbers of forwards and backwards that are not part of the step."""
        self._calls = [call for call in self._calls if call.owner not in owners]

    def forget(self) -> None:
        self._calls = []

    def part(self, attach: Callable[[Tensor], Attached]) -> TablePart | None:
        """What adds the numbers of the step to its table, after `attach` has put them into the copy."""
        calls, self._calls = self._calls, []
        if not calls:
            return None
        flat = _flat_by_device(calls)
        attached = {device: attach(tensor) for device, (tensor, _) in flat.items()}
        places = {device: where for device, (_, where) in flat.items()}
        return partial(self._build, calls, attached, places)

    def _build(
        self, calls: Sequence[_Call], attached: dict[torch.device, Attached],
        places: dict[torch.device, list[tuple[int, int, tuple[int, ...]]]], table: StepTable, read: Read,
    ) -> StepTable:  # fmt: skip
        """In the background, after the copy."""
        try:
            results: dict[int, Any] = {
                i: call.numbers for i, call in enumerate(calls) if not isinstance(call.numbers, Tensor)
            }
            for device, what in attached.items():
                data, at = read(what).astype(np.float64), 0
                for i, size, shape in places[device]:
                    results[i], at = data[at : at + size].reshape(shape), at + size
            scalars, metrics = _scalars(calls, results, self._phase)
            return replace(table, scalars={**table.scalars, **scalars}, metrics={**table.metrics, **metrics})
        except Exception as problem:  # it must not cost the logged step
            self._report.error("metrics", problem)
            return table


@contextlib.contextmanager
def _prepared(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as functions of metrics are called with it."""
    with (
        torch.inference_mode(False), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False),
        without_dispatch_modes(), profiler_label("metric"),
    ):  # fmt: skip
        yield tensor.detach()


def compared(given: Tensor, output: Tensor) -> Tensor:
    """How much a module changes its first input, for metrics of the kind PAIR."""
    with _prepared(output) as detached:
        return write_ratio(given.detach(), detached)


def _flat_by_device(
    calls: Sequence[_Call],
) -> dict[torch.device, tuple[Tensor, list[tuple[int, int, tuple[int, ...]]]]]:
    """The numbers of all calls as one tensor per device; and for each call its position, size and shape."""
    by_device: dict[torch.device, list[int]] = {}
    for i, call in enumerate(calls):
        if isinstance(call.numbers, Tensor):
            by_device.setdefault(call.numbers.device, []).append(i)
    made = {}
    with torch.inference_mode(False), torch.no_grad():
        for device, indices in by_device.items():
            wide = torch.float32 if device.type == "mps" else torch.float64
            tensors = [calls[i].numbers for i in indices]
            parts = [each.detach().to(wide).reshape(-1) for each in tensors if isinstance(each, Tensor)]
            where = [(i, part.numel(), tuple(t.shape)) for i, part, t in zip(indices, parts, tensors, strict=True)]  # type: ignore[union-attr]
            made[device] = torch.cat(parts), where
    return made


def _scalars(
    calls: Sequence[_Call], results: dict[int, Any], phase: str
) -> tuple[dict[str, float], dict[str, tuple[str, str]]]:
    """The scalars of the step by tag; and for each group of tags the kind, and how it is merged over ranks."""
    by_site: dict[tuple[Metric, str], list[Any]] = {}
    for i, call in enumerate(calls):
        finish = getattr(call.metric.function, "on_host", None)
        by_site.setdefault((call.metric, call.site), []).append(results[i] if finish is None else finish(results[i]))
    scalars: dict[str, float] = {}
    metrics: dict[str, tuple[str, str]] = {}
    for (metric, site), numbers in by_site.items():
        reduced = np.asarray(REDUCTIONS[metric.reduce](np.stack([np.asarray(each) for each in numbers]), axis=0))
        start = phase + (metric.tag or f"{METRIC}{metric.name}")
        metrics[start] = phase + ("activation" if metric.kind == PAIR else metric.kind), metric.reduce
        if reduced.ndim == 0:
            scalars[f"{start}/{site}"] = float(reduced)
        else:
            scalars |= {f"{start}/{site}[{i}]": float(number) for i, number in enumerate(reduced)}
    return scalars, metrics


def _checked(numbers: Any, metric: Metric) -> Tensor | float:
    if isinstance(numbers, Tensor):
        if hasattr(metric.function, "on_host"):
            return numbers
        if numbers.is_complex() or numbers.dim() > 1 or not 0 < numbers.numel() <= MOST_NUMBERS:
            shape, dtype = tuple(numbers.shape), numbers.dtype
            raise MetricError(
                f"it returned a tensor of shape {shape} and {dtype}: return one number, or up to {MOST_NUMBERS} in a "
                "1-d tensor"
            )
        return numbers.detach()
    if isinstance(numbers, int | float):
        return float(numbers)
    raise MetricError(f"it returned {type(numbers).__name__}: return a tensor of one number or up to {MOST_NUMBERS}")


class MetricHooks:
    """Asks for hooks on the modules whose outputs or inputs metrics want. It collects nothing itself."""

    def __init__(self, metrics: StepMetrics) -> None:
        self._metrics = metrics

    def wants(self, path: str, module: nn.Module) -> bool:
        return self._metrics.wants("activation", path) or self.wants_pairs(path)

    def wants_pairs(self, path: str) -> bool:
        return self._metrics.wants(PAIR, path)

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return self._metrics.wants("input", path)

    def begin(self) -> None: ...

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None: ...

    def end(self, recorder: object) -> None: ...

    def forget(self) -> None: ...


def matcher(given: object, model: nn.Module) -> Match:
    """A function that returns whether a path matches patterns as `include` takes them.

    Globs match the path of a module, a parameter, a parameter's module, or a tap; classes and callables match modules
    and their parameters. Raises an ArgumentError for a pattern that matches nothing of the model.
    """
    patterns, reference = selection.parse_patterns("pattern", given), weakref.ref(model)

    def matches(path: str) -> bool:
        alive = reference()
        return not patterns or (alive is not None and any(_matches(pattern, path, alive) for pattern in patterns))

    paths = [*selection.walk(model).by_path, *selection.parameters(selection.walk(model).by_path)]
    for pattern in patterns:
        # Which taps there are is known only when the model runs.
        if ":" not in str(pattern) and not any(_matches(pattern, path, model) for path in paths):
            known = nearest(str(pattern).rstrip(".*"), paths)
            raise ArgumentError(f"pattern={pattern!r} matches no module and no parameter of this model: {known}")
    return matches


def _matches(pattern: Any, path: str, model: nn.Module) -> bool:
    modules = selection.walk(model).by_path
    is_parameter = path in selection.parameters(modules)
    owner = (path.rpartition(".")[0] or ROOT) if is_parameter else path
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(owner, pattern)
    return owner in modules and selection.matches(pattern, owner, modules[owner])
