"""Operations that are no modules, through a whole training: right numbers at the right sites, and nothing changed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tbhooks
from tbhooks.data.frame import ALL_KINDS, KINDS, Frame
from tests.support import float64_recorder, frames, zoo
from tests.support.functional_models import (
    ATTENDING,
    CNN,
    LAYERS,
    Attention,
    Fused,
    Tutorial,
    depth,
    entropies,
    kept_operations,
    selective,
)
from tests.support.loops import steps_of
from tests.support.slow import cases, slow

pytestmark = pytest.mark.usefixtures("no_function_mode_left")
Array = NDArray[np.float64]
WITH_OPERATIONS = (*KINDS, "functional")
SDPA = "scaled_dot_product_attention"
aten = torch.ops.aten


def watched(case: zoo.Case, steps: int = 3, **options: Any) -> tuple[zoo.Trace, tbhooks.Watch]:
    held: list[Any] = []

    def before(model: nn.Module) -> Any:
        held.append(tbhooks.watch(model, **{"every": 1, "kinds": WITH_OPERATIONS, **options}))
        return model

    trace = zoo.train(case, steps, before=before)
    held[0].close()
    assert (held[0].stats.errors, held[0].stats.dropped) == (0, 0), held[0].stats.messages
    return trace, held[0]


def kinds_of(frame: Frame, *kinds: str) -> list[Any]:
    return [(s, row.tolist()) for s, row in zip(frame.sites, frame.values, strict=True) if s.kind in kinds]


# -- numbers ----------------------------------------------------------------------------------------


def test_operations_of_a_cnn_equal_float64_beside_every_other_kind() -> None:
    trace, watching = watched(CNN)
    assert trace == zoo.train(CNN, 3)
    for frame, step in zip(watching.history, kept_operations(3), strict=True):
        float64_recorder.assert_frame_equals(frame, step)
    reading = watching.latest["(root):relu[1]", "functional"]
    assert math.isnan(reading.entropy)
    assert math.isnan(reading.max_logit)
    assert math.isnan(watching.latest["conv1", "activation"].entropy)


SOME = (
    "inplace_relu", "shared_module", "lstm", "multihead", "never_called", "checkpointed", "checkpointed_reentrant",
    "autocast", "gan", "vit", "gpt2", "gpt2_checkpointed", "bert", "t5", "llama", "mamba", "mixtral",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    cases(
        SOME,
        always={"inplace_relu", "lstm", "multihead", "checkpointed_reentrant", "autocast", "gan", "gpt2", "mamba"},
        reason="the same operations in other models",
    ),
)
def test_training_graph_and_every_other_number_are_as_without(name: str) -> None:
    nodes: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        loss = zoo.ZOO[name].loss(model, batch)
        nodes.append(zoo.count_graph_nodes(loss))
        return loss

    case = replace(zoo.ZOO[name], loss=counted)
    bare = zoo.train(case, 2)
    trace, watching = watched(case, 2, kinds=ALL_KINDS)
    assert trace == bare
    assert nodes[:2] == nodes[2:]
    _, without = watched(case, 2, kinds=(*KINDS, "input"))
    for frame, other in zip(watching.history, without.history, strict=True):
        assert kinds_of(frame, *KINDS, "input") == kinds_of(other, *KINDS, "input")
    assert any(site.kind == "functional" for site in watching.latest.sites) or name in ("inplace_relu", "lstm", "gan",
        "checkpointed", "checkpointed_reentrant", "autocast", "vit")  # fmt: skip


@pytest.mark.parametrize(
    "name",
    cases(
        list(ATTENDING),
        always={
            "gpt2-eager-padded", "gpt2-sdpa-_language_loss", "bert-sdpa-padded", "multihead-causal",
            "multihead-padded", "multihead-fused", "multihead-fused-padded",
        },
        reason="other pairs of the same masks and implementations of attention",
    ),
)  # fmt: skip
def test_entropy_and_largest_logit_of_attention_equal_float64(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case, sites = ATTENDING[name]
    trace, watching = watched(case, 2, writer=tmp_path, scalars="core")
    kept = Attention(monkeypatch)
    assert trace == zoo.train(case, 2)
    assert len(kept.logits) == 2 * len(sites)
    expected = defaultdict(dict)
    for call, logits in enumerate(kept.logits):
        step, layer = divmod(call, len(sites))
        reading = watching.history[step][sites[layer], "functional"]
        assert reading.entropy == pytest.approx(np.mean(entropies(logits)), rel=1e-5)
        assert reading.max_logit == pytest.approx(logits.max(), rel=1e-5)
        expected[sites[layer]][step] = (reading.mean, reading.entropy, reading.max_logit)
    # Masks are minus infinity, and nothing is wrong with that.
    assert not [finding for finding in watching.findings if finding.rule == "non_finite"]
    assert not any("inf_count" in tag or "nan_count" in tag for tag in frames.tags(tmp_path))
    for site, values in expected.items():
        for i, stat in enumerate(("mean", "entropy", "max_logit")):
            expected = {step: pytest.approx(value[i], rel=1e-5) for step, value in values.items()}
            assert frames.scalar_series(tmp_path, f"functional.{stat}/{site}") == expected
        assert (1, f"functional/{site}") in frames.histograms(tmp_path)
    tags = frames.accumulator(tmp_path).Tags()["scalars"]
    assert not [tag for tag in tags if tag.endswith((".entropy", ".logits"))]
    assert {tag.partition("/")[2] for tag in tags if tag.startswith("functional.entropy")} == set(sites)


def test_an_infinity_that_is_no_mask_is_found() -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where((y := F.softplus(x / 0)).isinf(), x, y)

    case = replace(zoo.ZOO["mlp"], build=lambda: nn.Sequential(nn.Linear(8, 4), Overflows()))
    _, watching = watched(case)
    found = [str(finding.site) for finding in watching.findings if finding.rule == "non_finite"]
    assert found[0] == "functional/1:softplus"


@pytest.mark.parametrize(
    ("name", "path"), [("multihead", "layers.0.self_attn.out_proj"), ("mamba", "backbone.layers.0.mixer.conv1d")]
)
def test_weights_that_are_used_functionally_are_watched_as_parameters(name: str, path: str) -> None:
    _, watching = watched(zoo.ZOO[name])
    expected = float64_recorder.observe(zoo.ZOO[name])[-1]
    for kind in ("weight", "weight_gradient", "update"):
        norm = np.sqrt(np.square(expected[f"{path}.weight", kind]).sum())
        assert watching.latest[f"{path}.weight", kind].norm == pytest.approx(norm, rel=1e-5)
    assert (path, "activation") not in watching.latest
    assert "forward() never called" in watching.stats.unseen[path]


# -- when, and of what ------------------------------------------------------------------------------


def test_operations_are_seen_only_if_asked_for_and_alone_give_the_same_numbers() -> None:
    by_default, alone, together = (
        watched(zoo.ZOO["bert"], kinds=kinds)[1].latest for kinds in (KINDS, "functional", ALL_KINDS)
    )
    assert {site.kind for site in by_default.sites} == set(KINDS)
    assert kinds_of(alone, *ALL_KINDS) == kinds_of(together, "functional")


@pytest.mark.parametrize(
    ("choice", "seen"),
    [
        ({"include": "*.attention.self"}, {LAYERS["bert"].format(i) for i in (0, 1)}),
        ({"include": "bert.encoder.layer.1.*", "exclude": "*_act_fn"}, {LAYERS["bert"].format(1)}),
        ({"exclude": ["*.attention.*", "cls.*"]},
         {f"bert.encoder.layer.{i}.intermediate.intermediate_act_fn" for i in (0, 1)}),
    ],
)  # fmt: skip
def test_include_and_exclude_choose_by_the_path_of_the_module(choice: dict[str, Any], seen: set[str]) -> None:
    _, watching = watched(zoo.ZOO["bert"], kinds="functional", **choice)
    assert {site.path.partition(":")[0] for site in watching.latest.sites} == seen


def test_a_colon_in_the_name_of_a_module() -> None:
    def build() -> nn.Module:
        model = nn.Sequential()
        model.add_module("a:b", Tutorial())
        return model

    assert "a:b:relu" in {site.name for site in watched(replace(CNN, build=build))[1].latest.sites}


def test_unlogged_steps_have_no_mode_and_no_hooks() -> None:
    seen: list[tuple[int, int]] = []
    model = Tutorial()
    model.keep = lambda name, tensor: (seen.append((depth(), zoo.hook_count(model))), tensor)[1]
    case = replace(CNN, build=lambda: model)
    watched(case, 7, every=3)
    assert [counts == (0, 0) for counts in seen[::5]] == [False, True, True, False, True, True, False]
    assert {counts[0] for counts in seen[:5]} == {1}
    assert zoo.hook_count(model) == 0


# -- what ends a forward, and what runs it again ------------------------------------------------------


@pytest.mark.parametrize("problem", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("training", "every"), [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_a_forward_that_is_interrupted_leaves_nothing_behind(training: bool, every: int, problem: Any) -> None:
    def fails(name: str, tensor: Tensor) -> Tensor:
        raise problem

    def run(begin: Callable[[nn.Module], Any]) -> tuple[list[bytes], Any, list[int]]:
        torch.manual_seed(0)
        model, depths = Tutorial(), []
        optimizer, watching = zoo.sgd(model.parameters()), begin(model)
        for step in range(5):
            state = torch.get_rng_state()
            if step in (0, 2):
                model.keep = fails
                with pytest.raises(problem):
                    model.train(training)(torch.ones(1, 3, 8, 8))
                torch.set_rng_state(state)
            model.keep = lambda name, tensor: (depths.append(depth()), tensor)[1]
            CNN.loss(model.train(), CNN.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [zoo.raw(p) for p in model.parameters()], watching, depths

    bare, _, _ = run(lambda model: None)
    bits, watching, depths = run(lambda model: tbhooks.watch(model, every=every, kinds="functional").evaluation())
    watching.close()
    assert bits == bare
    assert watching.stats.errors == 0
    assert [any(depths[i : i + 5]) for i in range(0, 25, 5)] == [step % every == 0 for step in range(5)]
    training_frames = [frame for frame in watching.history if not frame.is_evaluation]
    assert steps_of(training_frames) == list(range(0, 5, every))
    assert all(frame["(root):max_pool2d", "functional"].count == 4 * 16 for frame in training_frames)


def test_a_run_that_ends_with_an_interrupt_leaves_no_mode() -> None:
    def interrupt(name: str, tensor: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = Tutorial()
    model.keep = interrupt
    with pytest.raises(KeyboardInterrupt), tbhooks.watch(model, every=1, kinds="functional"):
        model(torch.ones(1, 3, 8, 8))
    assert depth() == 0


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True}, "early stop": {"use_reentrant": False},
    "to the end": {"use_reentrant": False, "early_stop": False}, "selective": selective(aten.addmm.default),
}  # fmt: skip


class Around(nn.Module):
    """A whole module inside a checkpoint, so that it is entered again in backward."""

    def __init__(self, how: dict[str, Any] | None) -> None:
        super().__init__()
        self.inner, self.how = Tutorial(), how

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), **self.how) if self.how else self.inner(x)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_a_checkpoint_computes_again_is_not_counted_again(name: str) -> None:
    case, plain = (replace(CNN, build=lambda how=how: Around(how)) for how in (CHECKPOINTS[name], None))
    trace, watching = watched(case)
    assert trace == zoo.train(case, 3)
    for frame, other in zip(watching.history, watched(plain)[1].history, strict=True):
        assert kinds_of(frame, "functional", "activation") == kinds_of(other, "functional", "activation")


ATTENDS = replace(zoo.ZOO["multihead"], build=lambda: nn.Sequential(Fused(selective(aten.bmm.default)), Fused()))
SEEN_BY_OTHERS = "what is computed inside attention runs under the dispatch modes of others: unrecorded() is missing"


def test_a_selective_checkpoint_saves_nothing_of_ours() -> None:
    assert watched(ATTENDS)[0] == zoo.train(ATTENDS, 3)


def test_flops_are_those_of_the_model_alone() -> None:
    model, counts = Fused(), []
    for begin in (lambda: None, lambda: tbhooks.watch(model, every=1, kinds="functional")):
        begin()
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(2, 5, 8))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


# -- compiled models --------------------------------------------------------------------------------

ALONE = "Enter and LeaveHook never ask the gate, so nobody knows they are compiled: nothing is said, and all recompiles"


@pytest.mark.parametrize(
    "kinds",
    [WITH_OPERATIONS, pytest.param(("functional",), marks=slow("compiles once more to read fewer kinds"))],
)
def test_a_compiled_model_trains_as_before_and_what_is_not_seen_is_said(kinds: Any) -> None:
    def build() -> nn.Module:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model = Tutorial()
        model.compile(backend="aot_eager")
        return model

    case = replace(CNN, build=build)
    trace, watching = watched(case, 7, kinds=kinds, every=2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert trace == zoo.train(case, 7)
    assert "inside compiled code only attention is read" in watching.stats.unseen["functional"]
    assert any("inside compiled code only attention is read" in message for message in watching.stats.messages)
    expected = float64_recorder.observe(CNN, 7)
    for frame in watching.history:
        float64_recorder.assert_frame_equals(
            frame, {key: x for key, x in expected[frame.step].items() if key[1] in kinds}
        )
