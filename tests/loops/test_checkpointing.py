"""Activation checkpointing, of every kind: the numbers of the same model without it, and nothing left behind."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import tbhooks
from tbhooks.reduction import cpu
from tests.support import float64_recorder, reference, zoo
from tests.support.slow import cases

aten = torch.ops.aten
STEPS = 3
# Blocks to checkpoint, and blocks inside those. The layers of ALBERT are one block called twice.
BLOCKS = {
    "gpt2": (r"transformer\.h\.\d", r"transformer\.h\.\d\.mlp"),
    "bert": (r"bert\.encoder\.layer\.\d", r"bert\.encoder\.layer\.\d\.attention"),
    "resnet": (r"resnet\.encoder\.stages\.\d\.layers\.0\.layer", r"resnet\.encoder\.stages\.\d\.layers\.0\.layer\.0"),
    "vit": (r"vit\.layers\.\d", r"vit\.layers\.\d\.mlp"),
    "albert": (r"albert\.encoder\.albert_layer_groups\.0", r".*albert_layers\.0\.attention"),
}


def selective(*operators: Any) -> dict[str, Any]:
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, list(operators))}


REENTRANT = {"use_reentrant": True}
NON_REENTRANT = {"use_reentrant": False}
STYLES = {
    "reentrant": REENTRANT,
    "non_reentrant": NON_REENTRANT,
    "no_early_stop": {**NON_REENTRANT, "early_stop": False},
    "selective": selective(aten.addmm.default, aten.mm.default, aten.bmm.default, aten.convolution.default),
}
OTHER_MODELS = "the same checkpoints in another large model"
both_ways = pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT], ids=["reentrant", "non_reentrant"])


def put_under_checkpoint(module: nn.Module, how: dict[str, Any]) -> None:
    """From now on the module is called as `checkpoint(module, ...)`: its own hooks run in the checkpoint too."""
    plain = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(plain.__call__, self, **kwargs), *args, **how)

    module.__class__ = type(plain.__name__, (plain,), {"__call__": call})


def changed(case: zoo.Case, change: Callable[[Any], Any]) -> zoo.Case:
    def build() -> nn.Module:
        model: Any = case.build()
        if hasattr(model, "config"):
            model.config.use_cache = False  # a cache would grow once more when recomputed
        change(model)
        return model

    return replace(case, build=build)


def with_blocks(case: zoo.Case, pattern: str, how: dict[str, Any]) -> zoo.Case:
    def change(model: nn.Module) -> None:
        blocks = [module for path, module in model.named_modules() if re.fullmatch(pattern, path)]
        assert blocks
        for block in blocks:
            put_under_checkpoint(block, how)

    return changed(case, change)


@cache
def plain(name: str) -> zoo.Case:
    return changed(zoo.ZOO[name], lambda model: None)


@dataclass
class Run:
    trace: zoo.Trace
    watching: tbhooks.Watch | None
    calls: int = 0
    alive: list[int] = field(default_factory=list)
    """Module outputs, recomputed ones too, that are alive when their step has ended."""
    hooks: list[int] = field(default_factory=list)
    """Hooks on the model after each step, and after closing."""


def run(case: zoo.Case, every: int | None = None, steps: int = STEPS) -> Run:
    outputs: list[weakref.ref[Tensor]] = []
    made: list[tbhooks.Watch] = []
    models: list[nn.Module] = []
    result = Run(None, None)  # type: ignore[arg-type]

    def spy(_module: nn.Module, _args: Any, output: Any) -> None:
        result.calls += 1
        if isinstance(output, Tensor) and not output.is_leaf:
            outputs.append(weakref.ref(output))

    def before(model: nn.Module) -> None:
        models.append(model)
        if every is not None:
            made.append(tbhooks.watch(model, every=every))

    def each_step(_step: int, _loss: Tensor) -> None:
        result.alive.append(sum(output() is not None for output in outputs))
        result.hooks.append(zoo.hook_count(models[0]))

    handle = register_module_forward_hook(spy)
    try:
        result.trace = zoo.train(case, steps, before=before, each_step=each_step)
    finally:
        handle.remove()
    for result.watching in made:
        result.watching.close()
    result.hooks.append(zoo.hook_count(models[0]))
    return result


@cache
def run_without(case: zoo.Case, _by_kernel: bool) -> Run:
    """A watched run without checkpoints, each of its numbers compared with float64."""
    without = run(case, every=2)
    assert without.watching is not None
    assert [frame.step for frame in without.watching.history] == [0, 2]
    for frame, step in zip(without.watching.history, float64_recorder.observe(case, STEPS)[::2], strict=True):
        float64_recorder.assert_frame_equals(frame, step)
    return without


def assert_same_as_without(checked: zoo.Case, unchecked: zoo.Case) -> None:
    """The promise of this file: the watched checkpointed model has the numbers of the one without checkpoints."""
    bare, seen = run(checked), run(checked, every=2)
    without = run_without(unchecked, cpu.library is not None)
    assert seen.trace == bare.trace
    assert seen.trace.parameters == without.trace.parameters, "the reference is of another training"
    assert seen.calls == bare.calls > without.calls, "nothing was recomputed"
    watching, same = seen.watching, without.watching
    assert watching is not None
    assert same is not None
    for one, other in zip(watching.history, same.history, strict=True):
        assert one.step == other.step
        assert set(one.sites) == set(other.sites)
        for site in one.sites:
            here, there = one[site.name, site.kind], other[site.name, site.kind]
            assert np.array_equal(here.row, there.row, equal_nan=True), f"{here} should be {there}"
            assert np.array_equal(here.counts, there.counts), site
    assert watching.stats.errors == same.stats.errors == 0
    assert watching.stats.unseen == same.stats.unseen
    assert seen.alive == bare.alive
    assert [now - before for now, before in zip(seen.hooks, bare.hooks, strict=True)][::2] == [0, 0]
    assert seen.hooks[-1] == bare.hooks[-1]


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", cases(list(BLOCKS), always={"gpt2"}, reason=OTHER_MODELS))
def test_checkpointed_blocks_have_the_numbers_of_plain_ones(name: str, style: str) -> None:
    assert_same_as_without(with_blocks(zoo.ZOO[name], BLOCKS[name][0], STYLES[style]), plain(name))


@pytest.mark.parametrize("name", cases(["gpt2", "resnet", "albert"], always={"albert"}, reason=OTHER_MODELS))
@pytest.mark.parametrize(
    ("outer", "inner"),
    [("reentrant", "reentrant"), ("non_reentrant", "non_reentrant"), ("no_early_stop", "no_early_stop"),
     ("reentrant", "non_reentrant"), ("non_reentrant", "selective")],
)  # fmt: skip
def test_checkpoints_inside_checkpoints_have_the_numbers_of_none(name: str, outer: str, inner: str) -> None:
    inside = with_blocks(zoo.ZOO[name], BLOCKS[name][1], STYLES[inner])
    checked = with_blocks(inside, BLOCKS[name][0], STYLES[outer])
    assert_same_as_without(checked, plain(name))


@both_ways
@pytest.mark.parametrize("name", cases(["gpt2", "bert", "vit"], always={"vit"}, reason=OTHER_MODELS))
def test_checkpointing_of_transformers_has_the_numbers_of_none(name: str, how: dict[str, Any]) -> None:
    def enable(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)

    assert_same_as_without(changed(zoo.ZOO[name], enable), plain(name))


@both_ways
def test_frozen_embeddings_that_are_made_to_require_gradients(how: dict[str, Any]) -> None:
    def freeze(model: Any) -> None:
        model.enable_input_require_grads()
        model.transformer.wte.requires_grad_(False)
        model.transformer.wpe.requires_grad_(False)

    def enable(model: Any) -> None:
        freeze(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)

    assert_same_as_without(changed(zoo.ZOO["gpt2"], enable), changed(zoo.ZOO["gpt2"], freeze))


@both_ways
@pytest.mark.parametrize("segments", [2, 3])
def test_segments_of_a_sequential_have_the_numbers_of_the_whole(segments: int, how: dict[str, Any]) -> None:
    def batch() -> zoo.Batch:
        images, labels = zoo.ZOO["cnn"].batch()
        return images.requires_grad_(), labels

    def cut(model: nn.Module) -> None:
        call = {"forward": lambda self, x: checkpoint_sequential(self, segments, x, **how)}
        model.__class__ = type("Segments", (nn.Sequential,), call)

    case = replace(zoo.ZOO["cnn"], batch=batch)
    assert_same_as_without(changed(case, cut), case)


def test_early_stop_may_be_turned_off_around_the_training() -> None:
    checked = with_blocks(zoo.ZOO["vit"], BLOCKS["vit"][0], NON_REENTRANT)
    stopped = run(checked).calls
    with set_checkpoint_early_stop(False):
        assert run(checked).calls > stopped
        assert_same_as_without(checked, plain("vit"))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", cases(["gpt2", "resnet"], always={"resnet"}, reason=OTHER_MODELS))
def test_checkpoints_under_autocast_have_the_numbers_of_none_under_autocast(name: str, style: str) -> None:
    case = zoo.ZOO[name]

    def loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss(model, batch).float()

    low = replace(case, loss=loss)
    assert_same_as_without(with_blocks(low, BLOCKS[name][0], STYLES[style]), changed(low, lambda model: None))


@both_ways
@pytest.mark.parametrize("name", cases(["bert", "resnet"], always={"bert"}, reason=OTHER_MODELS))
def test_micro_batches_of_a_checkpointed_model_merge_as_those_of_a_plain_one(name: str, how: dict[str, Any]) -> None:
    case = zoo.ZOO[name]

    def loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
        for _ in range(2):
            (case.loss(model, batch) / 3).backward()
            batch = case.batch()
        return case.loss(model, batch) / 3

    accumulating = replace(case, loss=loss)
    checked = with_blocks(accumulating, BLOCKS[name][0], how)
    assert_same_as_without(checked, changed(accumulating, lambda model: None))


@both_ways
def test_without_its_random_state_kept_activations_are_those_of_the_first_pass(how: dict[str, Any]) -> None:
    checked = with_blocks(zoo.ZOO["gpt2"], BLOCKS["gpt2"][0], {**how, "preserve_rng_state": False})
    bare, seen = run(checked), run(checked, every=2)
    assert seen.trace == bare.trace
    assert seen.watching is not None
    assert seen.watching.stats.errors == 0
    for frame, step in zip(seen.watching.history, float64_recorder.observe(checked, STEPS)[::2], strict=True):
        float64_recorder.assert_frame_equals(frame, step)
    first, dropped = float64_recorder.observe(plain("gpt2"), 1)[0], "transformer.h.0.mlp.dropout"
    of_first_pass = reference.stats(first[dropped, "activation"])["zero_fraction"]
    assert seen.watching.history[0][dropped, "activation"].zero_fraction == of_first_pass


@both_ways
def test_nothing_grows_over_many_checkpointed_steps(how: dict[str, Any]) -> None:
    checked = with_blocks(zoo.ZOO["gpt2"], BLOCKS["gpt2"][0], how)
    bare, seen = run(checked, steps=8), run(checked, every=1, steps=8)
    assert seen.trace == bare.trace
    assert seen.alive == bare.alive
    assert len(set(seen.alive[1:])) == 1
    assert len(set(seen.hooks[:-1])) == 1
    assert seen.hooks[-1] == 0
    assert seen.watching is not None
    assert len({frame.values.shape for frame in seen.watching.history}) == 1
    assert len({tuple(frame.stat("count")) for frame in seen.watching.history}) == 1


@both_ways
@pytest.mark.parametrize("every", [1, 2])
def test_a_recomputed_model_is_no_forward_of_a_clock_that_counts_them(every: int, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    case = zoo.ZOO["cnn"]
    model = case.build()
    outputs: list[np.ndarray[Any, Any]] = []
    gradients: list[np.ndarray[Any, Any]] = []
    with tbhooks.watch(model, every=every, step="forward") as watching:
        for _ in range(4):
            images, labels = case.batch()
            out = checkpoint(model, images.requires_grad_(), **how)
            out.register_hook(lambda gradient: gradients.append(reference.to_numpy(gradient)))
            outputs.append(reference.to_numpy(out))
            nn.functional.cross_entropy(out, labels).backward()
    assert watching.stats.errors == 0
    assert [frame.step for frame in watching.history] == list(range(0, 4, every))
    for frame in watching.history:
        for kind, seen in (("activation", outputs), ("gradient", gradients)):
            expected = reference.stats(seen[frame.step])
            assert frame["(root)", kind].count == expected["count"]
            assert frame["(root)", kind].std == pytest.approx(expected["std"], rel=1e-5)


@pytest.mark.parametrize("how", [NON_REENTRANT, REENTRANT], ids=["non_reentrant", "reentrant"])
def test_optimizers_inside_a_backward_that_recomputes_make_one_step(how: dict[str, Any]) -> None:
    def train(every: int | None) -> tuple[list[bytes], list[float64_recorder.Step], tbhooks.Watch | None]:
        torch.manual_seed(0)
        case = with_blocks(zoo.ZOO["gpt2"], BLOCKS["gpt2"][0], how)
        model = case.build()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step_at_once(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)
        watching = None if every is None else tbhooks.watch(model, every=every)
        steps = []
        for _ in range(4):
            before = {name: reference.to_numpy(p).copy() for name, p in model.named_parameters()}
            case.loss(model, case.batch()).backward()
            after = {name: reference.to_numpy(p) for name, p in model.named_parameters()}
            steps.append({(name, "update"): after[name] - before[name] for name in before})
        return [zoo.raw(p) for p in model.parameters()], steps, watching

    bits, steps, _ = train(None)
    same_bits, _, watching = train(3)
    assert watching is not None
    watching.close()
    assert same_bits == bits
    assert watching.stats.steps == 4
    assert [frame.step for frame in watching.history] == [0, 3]
    for frame in watching.history:
        for (name, kind), update in steps[frame.step].items():
            assert frame[name, kind].norm == pytest.approx(reference.stats(update)["norm"], rel=1e-5)


@both_ways
@pytest.mark.parametrize(
    ("name", "block"), [("identity_dropout", ""), ("returns_parameter", ""), ("resnet", r"resnet\.encoder\.stages\.0")]
)
def test_a_tensor_passed_through_a_checkpointed_block_is_counted_once(
    name: str, block: str, how: dict[str, Any]
) -> None:
    def batch() -> zoo.Batch:
        return tuple(part.requires_grad_(part.is_floating_point()) for part in zoo.ZOO[name].batch())

    case = replace(zoo.ZOO[name], batch=batch)
    assert_same_as_without(with_blocks(case, block, how), case)


@pytest.mark.parametrize("name", cases(["gpt2", "bert"], always={"bert"}, reason=OTHER_MODELS))
def test_a_selective_checkpoint_that_saves_what_the_reductions_use_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "library", None)
    saved = selective(aten.mul.Tensor, aten.sub.Tensor, aten.sum.default, aten.add.Tensor, aten.view.default)
    assert_same_as_without(with_blocks(zoo.ZOO[name], BLOCKS[name][0], saved), plain(name))
