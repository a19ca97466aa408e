"""Counts the tokens that the routers of a mixture of experts send to each expert (`Watch.experts`).

Tokens are counted on the device from what a router returns, without waiting for it. Counts of micro-batches and ranks
are added before shares are computed from them (data/vectors.py).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from tbhooks.capture import selection
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.recording.packed_step import Attached, Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.recording.step_table import StepTable
from tbhooks.data import stats
from tbhooks.data.artifacts import vectors
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import CHANNEL, ROOT, Site
from tbhooks.data.self_report import Report
from tbhooks.reduction import torch_rows

# Attribute names in common implementations, of modules and of their configurations.
_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "n_activated_experts", "moe_top_k",
)  # fmt: skip
_EXPERTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "out_features")
_ROUTER_WORDS = ("router", "gate", "gating")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NO_TOP_K = "it returns no indices of experts and has no attribute top_k: each token is counted for one expert"


@dataclass
class Router:
    """A module that decides which experts each token is sent to."""

    experts: int | None
    """None if only its output will tell."""
    top_k: int | None
    called_with_choices: str | None = None
    """The path of the experts' module, if it is called with the choices and the router does not return them."""
    returns_probabilities: Tensor | None = None
    """Whether it returns probabilities, not logits; known on the device from its first output."""


@dataclass
class _Tokens:
    """The tokens of each expert, counted from one kind of output."""

    top_k: int
    of_experts: Tensor
    total: int


@dataclass
class _Counts:
    """What was counted of one router in one forward."""

    by_source: dict[str, _Tokens] = field(default_factory=dict)
    margin: Tensor | None = None
    """The sum over tokens."""
    margins: int = 0

    def add(self, source: str, top_k: int, tokens: Tensor, total: int) -> None:
        known = self.by_source.get(source)
        if known is None or len(known.of_experts) != len(tokens):
            self.by_source[source] = _Tokens(top_k, tokens, total)
        else:
            known.of_experts = known.of_experts + tokens.to(known.of_experts.device)
            known.total += total

    def add_margin(self, margin: Tensor, tokens: int) -> None:
        self.margin = margin if self.margin is None else self.margin + margin.to(self.margin.device)
        self.margins += tokens

    @property
    def best(self) -> _Tokens | None:
        """What was really chosen counts more than what follows from the logits."""
        return next((self.by_source[name] for name in _SOURCES if name in self.by_source), None)


# A mask of the experts that take each token; indices of the experts chosen; the largest logits.
_MASK, _INDICES, _LOGITS = _SOURCES = ("mask", "indices", "logits")


class ExpertCollector:
    """Counts the tokens of each expert in the forwards of one step."""

    def __init__(self, routers: dict[str, Router], report: Report) -> None:
        self._routers, self._report = routers, report
        self._choosers = {r.called_with_choices: path for path, r in routers.items() if r.called_with_choices}
        # Of each router, which of its outputs is read for what: a router may return logits and probabilities.
        self._outputs: dict[tuple[str, bool], str] = {}
        self.begin()

    @property
    def rows(self) -> int:
        """About how many rows a step has, for the buffer that ranks exchange."""
        return sum((router.experts or 64) + 2 for router in self._routers.values())

    def wants(self, path: str, module: nn.Module) -> bool:
        return path in self._routers

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return path in self._choosers

    def begin(self) -> None:
        self._by_forward: dict[Pass | None, dict[str, _Counts]] = {}
        self._forward: Pass | None = None

    def in_forward(self, forward: Pass) -> None:
        self._forward = forward

    def drop(self, forwards: Set[Pass]) -> None:
        for forward in forwards:
            self._by_forward.pop(forward, None)

    def forget(self) -> None:
        self.begin()

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        is_integer = tensor.dtype in _INTEGERS
        if kind == "input" and is_integer:
            path = self._choosers.get(path, "")
        elif kind != "activation":
            return
        router = self._routers.get(path)
        if router is None or not tensor.numel() or not tensor.dim() or tensor.layout is not torch.strided:
            return
        is_choice = is_integer and (router.experts is not None or tensor.dtype is torch.bool)
        is_wanted = is_choice or self._may_be_logits(router, tensor)
        if is_wanted and self._outputs.setdefault((path, is_integer), index) == index:
            counts = self._by_forward.setdefault(self._forward, {}).setdefault(path, _Counts())
            with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
                (self._add_choices if is_choice else self._add_logits)(path, tensor.detach(), counts)

    def _may_be_logits(self, router: Router, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.size(-1) == (router.experts or tensor.size(-1)) > 1

    def _add_logits(self, path: str, logits: Tensor, counts: _Counts) -> None:
        router = self._routers[path]
        experts = router.experts = logits.size(-1)
        top_k, matrix = min(router.top_k or 1, experts), logits.reshape(-1, experts)
        if router.returns_probabilities is None or router.returns_probabilities.device != logits.device:
            router.returns_probabilities = are_probabilities(matrix)
        chosen, margin = choices_of_logits(matrix, top_k, router.returns_probabilities)
        if (path, True) not in self._outputs:  # else it says itself what was chosen
            counts.add(_LOGITS, top_k, tokens_of_choices(chosen, experts), len(chosen))
        if margin is not None:
            counts.add_margin(margin, len(chosen))

    def _add_choices(self, path: str, chosen: Tensor, counts: _Counts) -> None:
        router = self._routers[path]
        experts, width = router.experts or chosen.size(-1), chosen.size(-1)
        if width == experts and (router.top_k or 1) < experts:
            mask = (chosen != 0).reshape(-1, experts)
            counts.add(_MASK, router.top_k or 1, mask.sum(0), len(mask))
        elif width <= experts:
            router.top_k = width
            counts.add(_INDICES, width, tokens_of_choices(chosen, experts), chosen.numel() // width)

    def end(self, recorder: Recorder) -> None:
        collected, self._by_forward = self._merged(), {}
        attached = []
        for path, counts in collected.items():
            best = counts.best
            if best is not None:
                if self._routers[path].top_k is None:
                    self._report.mark_unseen(f"experts/{path}", NO_TOP_K)
                margin = None if counts.margin is None else recorder.attach(counts.margin)
                attached.append((path, counts, recorder.attach(best.of_experts), margin))
        if attached:
            recorder.part(partial(self._add_to, attached))

    def _merged(self) -> dict[str, _Counts]:
        """The counts of all forwards that are part of the step."""
        merged: dict[str, _Counts] = {}
        for by_path in list(self._by_forward.values()):
            for path, new in by_path.items():
                counts = merged.setdefault(path, _Counts())
                for source, tokens in new.by_source.items():
                    counts.add(source, tokens.top_k, tokens.of_experts, tokens.total)
                if new.margin is not None:
                    counts.add_margin(new.margin, new.margins)
        return merged

    def _add_to(self, attached: Sequence[_Attached], table: StepTable, read: Read) -> StepTable:
        """In the background, after the copy: adds a row for each expert."""
        try:
            for path, counts, tokens, margin in attached:
                margins = 0.0 if margin is None else float(read(margin))
                table = table.with_rows(*_rows(path, counts, read(tokens).astype(np.float64), margins))
        except Exception as problem:  # it must not cost the logged step
            self._report.error("counts of experts", problem)
        return table


_Attached = tuple[str, _Counts, Attached, Attached | None]
"""A router, what was counted, and where its tokens and its margins are in the copy."""


def _rows(path: str, counts: _Counts, tokens: stats.Floats, margins: float) -> tuple[list[Site], stats.Floats]:
    assert counts.best is not None
    total, top_k = float(counts.best.total), counts.best.top_k
    indices = [f"[{i}]" for i in range(len(tokens))]
    rows = [vectors.expert_rows(tokens, total, top_k)]
    if counts.margins:
        row = stats.row_of(np.full(1, margins / counts.margins))
        row[stats.COUNT] = counts.margins
        indices.append(vectors.MARGIN)
        rows.append(row[None])
    if _MASK in counts.by_source:
        indices.append(vectors.ASSIGNED)
        rows.append(vectors.two_valued_rows(tokens.sum(keepdims=True), np.full(1, total * top_k)))
    return [Site(path, CHANNEL + vectors.EXPERTS, index) for index in indices], np.concatenate(rows)


def tokens_of_choices(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen. Indices that name no expert are left out."""
    flat = chosen.reshape(-1).to(torch.int64)
    named = torch.where((flat >= 0) & (flat < experts), flat, experts)
    return flat.new_zeros(experts + 1).scatter_add_(0, named, torch.ones_like(named))[:experts]


def are_probabilities(numbers: Tensor) -> Tensor:
    """Whether each row is a distribution, as a tensor: the host does not wait for it."""
    return (numbers >= 0).all() & ((numbers.float().sum(-1) - 1).abs() < 1e-2).all()


def choices_of_logits(logits: Tensor, top_k: int, are_probabilities: Tensor) -> tuple[Tensor, Tensor | None]:
    """The `top_k` experts of each token, and the sum of the margins: by how much the probability of the last one chosen
    exceeds that of the next. None if there is no next one.
    """
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    order = wide.topk(min(top_k + 1, wide.size(-1)), -1).indices
    if order.size(-1) == top_k:
        return order, None
    probabilities = torch.where(are_probabilities, wide, wide.softmax(-1))
    last, following = probabilities.gather(-1, order[:, top_k - 1 :]).unbind(-1)
    return order[:, :top_k], (last - following).sum(dtype=torch_rows.row_type(wide.device))


def of_model(model: nn.Module, pattern: object, top_k: int | None, report: Report) -> ExpertCollector:
    """A collector of the routers that match a pattern, or of all that are found. Raises ArgumentError without any."""
    modules = selection.walk(model).by_path
    found = find_routers(modules)
    if pattern is not None:
        matches = selection.choice("pattern", pattern, model)
        chosen = {path for path, module in modules.items() if matches(path, module)}
        found = {path: found.get(path) or Router(_experts_of(modules[path]), None) for path in chosen}
    if not found:
        raise ArgumentError(
            "no router of a mixture of experts was found in this model: name the modules that return router logits, as "
            'in w.experts("layers.*.gate", top_k=2)'
        )
    for path, router in found.items():
        router.top_k = top_k or router.top_k or _top_k_of(path, modules)
    return ExpertCollector(found, report)


def find_routers(modules: dict[str, nn.Module]) -> dict[str, Router]:
    """The modules beside a group of experts whose weight has one row per expert."""
    routers: dict[str, Router] = {}
    for path, block in modules.items():
        prefix = "" if path == ROOT else f"{path}."
        parts = {name: modules[prefix + name] for name in block._modules if prefix + name in modules}
        for name, part in parts.items():
            experts = _size_of_group(name, part)
            others = {other: module for other, module in parts.items() if other != name}
            for router in _routers_among(others, experts) if experts is not None else ():
                is_plain = type(others[router]) is nn.Linear and not isinstance(part, nn.ModuleList | nn.ModuleDict)
                routers[prefix + router] = Router(experts, None, prefix + name if is_plain else None)
    return routers


def _size_of_group(name: str, module: nn.Module) -> int | None:
    """The number of experts in a module that holds them: as a list, or as weights with one slice per expert."""
    sizes = {parameter.size(0) for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    is_named = "expert" in f"{name} {type(module).__name__}".lower()
    parts = [part for part in module._modules.values() if part is not None]
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and is_named:
        sizes = {len(parts)} if len({type(part) for part in parts}) == 1 else set()
    named = _number(module, _EXPERTS[:-1])
    if len(sizes) == 1 and (is_named or named in sizes):
        (size,) = sizes
        return size if size > 1 else None
    return None


def _routers_among(parts: dict[str, nn.Module], experts: int) -> list[str]:
    fitting = [name for name, module in parts.items() if experts in _widths(module)]
    named = [name for name in fitting if _is_named_router(name, parts[name])]
    return named or fitting[: len(fitting) == 1]


def _is_named_router(name: str, module: nn.Module) -> bool:
    words = f"{name} {type(module).__name__}".lower()
    return any(word in words for word in _ROUTER_WORDS) and "shared" not in words


def _widths(module: nn.Module) -> set[int | None]:
    """How many numbers it may return for each token."""
    rows = {parameter.size(0) for parameter in module.parameters() if parameter.dim() == 2}
    return {*rows, _experts_of(module)}


def _experts_of(module: nn.Module) -> int | None:
    return _number(module, _EXPERTS)


def _top_k_of(path: str, modules: dict[str, nn.Module]) -> int | None:
    """From the attributes of the router and its block, and from the configuration of any module around them."""
    router, block = modules[path], modules.get(path.rpartition(".")[0] or ROOT)
    found = _number(router, ("top_k", "topk", "k", *_PER_TOKEN)) or _number(block, ("top_k", "topk", "k", *_PER_TOKEN))
    while found is None and path:
        path = path.rpartition(".")[0]
        found = _number(getattr(modules.get(path or ROOT), "config", None), _PER_TOKEN)
    return found


def _number(owner: object, names: Sequence[str]) -> int | None:
    numbers = (getattr(owner, name, None) for name in names)
    return next((n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)
