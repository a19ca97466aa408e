"""What tests of torch.compile share: a backend that keeps its graphs, cases that compile themselves, and trials."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

import tbhooks
from tests.support import float64_recorder, reference, zoo

Operations = list[tuple[str, str]]
Scenario = Callable[["Trial"], None]


def operations(graph: fx.GraphModule) -> Operations:
    """What each node of a graph does, in order; names are left out."""
    return [(node.op, "" if node.op in ("placeholder", "output") else str(node.target)) for node in graph.graph.nodes]


class Graphs:
    """A backend that records the operations of the graphs it compiles: those of dynamo, and those below autograd."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.traced: list[Operations] = []
        self.lowered: list[Operations] = []
        self._backend = backend

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        self.traced.append(operations(graph))
        if self._backend != "aot_eager":
            return lookup_backend(self._backend)(graph, inputs, **options)
        return aot_autograd(
            fw_compiler=self._lower,
            bw_compiler=self._lower,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(graph, inputs)

    def _lower(self, graph: fx.GraphModule, _inputs: list[Tensor]) -> Any:
        self.lowered.append(operations(graph))
        return make_boxed_func(graph.forward)

    def __len__(self) -> int:
        return len(self.traced)


def breaks() -> dict[str, int]:
    """Why graphs broke since the last reset, and how often; the numbers in a reason may differ between runs."""
    return {reason: count for reason, count in counters["graph_break"].items() if count}


# For `pytestmark` of files that compile: nothing is left of an earlier compilation, and compilers may warn.
ISOLATED = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def reset() -> None:
    """Forgets everything that was compiled, and the counters of it."""
    torch._dynamo.reset()
    counters.clear()


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Fails where anything is compiled that is not compiled already."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def compiled_case(case: zoo.Case, backend: Any = "aot_eager", fullgraph: bool = True, **options: Any) -> zoo.Case:
    """The same case with its model compiled on the first call."""
    made: list[tuple[nn.Module, Any]] = []

    def loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
        if not made or made[-1][0] is not model:
            made.append((model, torch.compile(model, backend=backend, fullgraph=fullgraph, **options)))
        return case.loss(made[-1][1], batch)

    return replace(case, loss=loss)


def watched(case: zoo.Case, steps: int = 3, **options: Any) -> tuple[zoo.Trace, tbhooks.Watch]:
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> nn.Module:
        made.append(tbhooks.watch(model, **options))
        return model

    trace = zoo.train(case, steps, before=before)
    made[0].close()
    return trace, made[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.1)
        self.narrow = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.dropout(self.widen(x).tanh()))


class Blocks(nn.Module):
    """Two blocks of one class, which compiled one by one share one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = zoo.Case("blocks", Blocks, lambda: (torch.randn(4, 8),), lambda m, batch: m(*batch).square().mean(), zoo.sgd)


class Trial:
    """One scenario, run eagerly or compiled, watched or not."""

    def __init__(self, scenario: Scenario, compiled: bool, is_watched: bool) -> None:
        reset()
        self.compiled, self.is_watched = compiled, is_watched
        self.graphs = Graphs()
        self.watches: list[Any] = []
        self.losses: list[bytes] = []
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        scenario(self)
        self.breaks = breaks()
        for watching in self.watches:
            watching.close()
        self.left = self.losses, [zoo.raw(p) for p in self.model.parameters()], zoo.raw(torch.get_rng_state())

    def compile(self, thing: Any, **options: Any) -> Any:
        return torch.compile(thing, backend=self.graphs, **options) if self.compiled else thing

    def watch(self, **options: Any) -> Any:
        self.watches.append(tbhooks.watch(self.model, **options) if self.is_watched else MagicMock())
        return self.watches[-1]

    def forward(self, called: Callable[[Tensor], Tensor], batch: int = 6) -> Tensor:
        return called(torch.randn(batch, 4)).square().mean()

    def step(self, loss: Tensor, backward: bool = True) -> None:
        if backward:
            loss.backward()
        self.losses.append(zoo.raw(loss))
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_same(frame: tbhooks.Frame, expected: tbhooks.Frame) -> None:
    assert {(s.name, s.kind) for s in frame.sites} == {(s.name, s.kind) for s in expected.sites}
    assert frame.scalars == pytest.approx(expected.scalars)
    for site in expected.sites:
        reading, should = frame[site.name, site.kind], expected[site.name, site.kind]
        for stat in float64_recorder.STATS:
            same = reference.is_close(getattr(reading, stat), getattr(should, stat), 1e-5, 1e-8)
            assert same, f"{site}: {stat} is {getattr(reading, stat)}, should be {getattr(should, stat)}"
        assert np.array_equal(reading.counts, should.counts) or site.kind == "update"
