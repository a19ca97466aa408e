"""Optimizers and training loops of every kind: what the watch says of a step is what the loop did in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Optimizer, SparseAdam, lr_scheduler

import tbhooks
from tests.support import float64_recorder, reference, zoo
from tests.support.float64_recorder import Float64Recorder
from tests.support.slow import cases, slow

STEPS = 4
either_schedule = pytest.mark.parametrize(
    "every", [3, pytest.param(1, marks=slow("the first and the last step are the same; test_zoo.py logs every step"))]
)


class Ledger(Float64Recorder):
    """The float64 recorder: the loop itself says when weights are read and when a step is over."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.close()

    def weights(self) -> None:
        for name, parameter in self._parameters.values():
            self._keep((name, "weight"), parameter)
            self._before[name] = reference.to_numpy(parameter).copy()

    def gradient(self, parameter: Tensor) -> None:
        self._keep((self._parameters[id(parameter)][0], "weight_gradient"), parameter.grad)

    def over(self, stepped: Iterable[Tensor]) -> None:
        self._step_ends(SimpleNamespace(param_groups=[{"params": stepped}]), None, None)
        for (_, kind), array in self.steps[-1].items():
            if kind == "update":
                array[:] = array.astype(np.float32)  # the watch subtracts in the parameters' own precision


class Journal:
    """What a loop did, to the last bit; in the reference run also what a watch of it should have seen."""

    def __init__(self, model: nn.Module, ledger: Ledger | None) -> None:
        self.model, self.ledger = model, ledger
        self.bits: list[bytes] = []
        self.rates: list[dict[str, float]] = [{}]

    def weights(self) -> None:
        if self.ledger:
            self.ledger.weights()

    def gradients(self, of: Iterable[Tensor] | None = None) -> None:
        for parameter in self.model.parameters() if of is None else of:
            if parameter.grad is not None:
                self.bits.append(zoo.raw(parameter.grad))
                if self.ledger:
                    self.ledger.gradient(parameter)

    def lr(self, groups: Iterable[dict[str, Any]]) -> None:
        for group in groups:
            self.rates[-1][f"train.lr/{group.get('name', len(self.rates[-1]))}"] = float(group["lr"])

    def over(self, loss: Tensor, stepped: Iterable[Tensor]) -> None:
        self.bits += [zoo.raw(loss), *(zoo.raw(p) for p in self.model.parameters()), zoo.raw(torch.get_rng_state())]
        self.rates.append({})
        if self.ledger:
            self.ledger.over(list(stepped))


Loop = Callable[[Any, zoo.Case, Journal], Callable[[], None]]
"""Made once with a model; each call is one training step."""


def play(loop: Loop, case: zoo.Case, every: int | None, **options: Any) -> tuple[Journal, Any]:
    torch.manual_seed(0)
    model = case.build()
    journal = Journal(model, Ledger(model) if every is None else None)
    step = loop(model, case, journal)
    own_hooks = zoo.hook_count(model)
    watching = None if every is None else tbhooks.watch(model, every=every, **options)
    for _ in range(STEPS):
        step()
    if watching is not None:
        watching.close()
        assert zoo.hook_count(model) == own_hooks
    return journal, watching


@cache
def played(loop: Loop, name: str) -> Journal:
    return play(loop, zoo.ZOO[name], None)[0]


def check(loop: Loop, every: int, name: str = "gpt2", lacks_first: str = "", **options: Any) -> tbhooks.Watch:
    """Plays the loop without a watch and with one: same bits, and the frames have the numbers of the first."""
    expected = played(loop, name)
    seen, watching = play(loop, zoo.ZOO[name], every, **options)
    assert expected.ledger is not None
    assert seen.bits == expected.bits
    assert watching.stats.errors == watching.stats.dropped == 0
    # The last of counted forwards is open until another one, or the end.
    assert watching.stats.steps == STEPS - (watching.stats.clock == "forward")
    assert [frame.step for frame in watching.history] == list(range(0, STEPS, every))
    for frame in watching.history:
        step, rates = expected.ledger.steps[frame.step], expected.rates[frame.step]
        if frame.step == 0 and lacks_first:
            lacking = {key for key in step if key not in frame}
            assert {kind for _, kind in lacking} == {lacks_first}
            step = {key: step[key] for key in step.keys() - lacking}
            rates = {tag: rate for tag, rate in rates.items() if tag in frame.scalars}
        float64_recorder.assert_frame_equals(frame, step)
        assert {tag: frame.scalars[tag] for tag in frame.scalars if tag.startswith("train.lr/")} == rates
    return watching


def ordinary(
    make: Callable[[Any], Any], accumulate: int = 1, clip: Any = list, set_to_none: bool = True, schedule: Any = None,
    mid_run: Any = None,
) -> Loop:  # fmt: skip
    """Forward, backward, clip, step, zero. `make` gets the model and gives one optimizer or several."""

    def begin(model: Any, case: zoo.Case, journal: Journal) -> Callable[[], None]:
        made = make(model)
        optimizers = made if isinstance(made, tuple) else (made,)
        scheduler = schedule(optimizers[0]) if schedule else None

        def step() -> None:
            if mid_run and len(journal.rates) == 3:
                mid_run(model, *optimizers)
            for _ in range(accumulate):
                loss = case.loss(model, case.batch()) / accumulate
                loss.backward()
            clip(model.parameters())
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            journal.weights()
            journal.gradients()
            journal.lr(groups)
            for optimizer in optimizers:
                optimizer.step()
            journal.over(loss, [p for group in groups for p in group["params"]])
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
            if scheduler:
                scheduler.step(*([loss.detach()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))

        return step

    return begin


class SignDescent(Optimizer):
    """A subclass as people write them: its own step, which takes no closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign_(), alpha=1e-3)  # the gradient is spoilt


class Decaying(SGD):
    """Overrides a step that is hooked already, and goes on after it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        torch._foreach_mul_(self.param_groups[0]["params"], 0.9)
        return loss


class Sharpness(Optimizer):
    """Climbs, calls the closure again, goes back and steps, by itself or by another optimizer."""

    def __init__(self, parameters: Any, base: bool) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.base = SGD(self.param_groups, lr=0.05) if base else None

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        closure = torch.enable_grad()(closure)
        closure()
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        climbs = [0.01 * p.grad.sign() for p in parameters]
        torch._foreach_add_(parameters, climbs)
        loss = closure()
        torch._foreach_sub_(parameters, climbs)
        if self.base:
            self.base.step()
        else:
            torch._foreach_sub_(parameters, [0.05 * p.grad for p in parameters])
        return loss


def two_groups(model: Any, **second: Any) -> list[dict[str, Any]]:
    blocks = list(model.transformer.h.parameters())
    inside = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [{"params": blocks, "lr": 0.1}, {"params": rest, "lr": 0.01, **second}]


decayed = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step)
one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1)
plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1.0, threshold_mode="abs")
clip_norm = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
clip_value = partial(nn.utils.clip_grad_value_, clip_value=1e-3)


def unfreeze_blocks(model: Any, optimizer: Optimizer) -> None:
    model.transformer.h.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.transformer.h.parameters()), "lr": 0.5, "name": "blocks"})


def frozen_blocks(model: Any) -> Optimizer:
    model.transformer.h.requires_grad_(False)
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


HOOKED_BEFORE = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # so that the steps of SGD itself are hooked
ORDINARY = {
    "sgd": ordinary(lambda model: SGD(model.parameters(), lr=0.1)),
    "sgd_nesterov": ordinary(lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)),
    "adamw_foreach": ordinary(lambda model: AdamW(model.parameters(), foreach=True)),
    "adamw_fused": ordinary(lambda model: AdamW(model.parameters(), fused=True)),
    "adamw_for_loop": ordinary(lambda model: AdamW(model.parameters(), foreach=False, amsgrad=True)),
    "adamw_maximize": ordinary(lambda model: AdamW(model.parameters(), maximize=True)),
    "adafactor": ordinary(lambda model: Adafactor(model.parameters(), lr=0.01)),
    "tensor_lr_fused": ordinary(lambda model: AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)),
    "tensor_lr_scheduled": ordinary(lambda model: SGD(model.parameters(), lr=torch.tensor(0.1)), schedule=decayed),
    "custom_that_spoils_gradients": ordinary(lambda model: SignDescent(model.parameters())),
    "groups_by_index": ordinary(lambda model: SGD(two_groups(model), lr=1.0)),
    "groups_by_name": ordinary(lambda model: AdamW(two_groups(model, name="embeddings")), schedule=decayed),
    "one_cycle": ordinary(lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), schedule=one_cycle),
    "plateau": ordinary(lambda model: SGD(model.parameters(), lr=0.1), schedule=plateau),
    "zeroed_in_place": ordinary(lambda model: AdamW(model.parameters()), set_to_none=False),
    "accumulated": ordinary(lambda model: AdamW(model.parameters()), accumulate=3),
    "clipped_norm": ordinary(lambda model: SGD(model.parameters(), lr=0.1), clip=clip_norm, accumulate=2),
    "clipped_value": ordinary(lambda model: AdamW(model.parameters(), fused=True), clip=clip_value),
    "frozen_outside_the_optimizer": ordinary(frozen_blocks),
    "unfrozen_and_added": ordinary(frozen_blocks, mid_run=unfreeze_blocks),
    "left_out_but_not_frozen": ordinary(lambda model: SGD(two_groups(model)[:1])),
    "overridden_step": ordinary(lambda model: Decaying(model.parameters(), lr=0.1)),
}


@either_schedule
@pytest.mark.parametrize(
    "loop",
    cases(
        ORDINARY,
        always={
            "sgd", "adamw_fused", "adafactor", "tensor_lr_fused", "custom_that_spoils_gradients", "groups_by_name",
            "one_cycle", "clipped_norm", "unfrozen_and_added", "overridden_step",
        },
        reason="other options of the same optimizers and schedulers",
    ),
)  # fmt: skip
def test_a_step_is_what_its_optimizer_did(loop: Loop, every: int) -> None:
    check(loop, every)


@either_schedule
@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("sparse_embedding", ordinary(lambda model: SparseAdam(model[0].parameters()))),
        ("bert", ORDINARY["clipped_norm"]),
        pytest.param("resnet", ORDINARY["zeroed_in_place"], marks=slow("another large model")),
        pytest.param("vit", ORDINARY["tensor_lr_fused"], marks=slow("another large model")),
    ],
)
def test_other_models_step_the_same_way(name: str, loop: Loop, every: int) -> None:
    check(loop, every, name)


CLOSURES = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "adamw_fused": lambda model: AdamW(model.parameters(), fused=True),
    "lbfgs": lambda model: LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "strong_wolfe": lambda model: LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
    "called_twice": lambda model: Sharpness(model.parameters(), base=False),
    "around_another": lambda model: Sharpness(model.parameters(), base=True),
}


@either_schedule
@pytest.mark.parametrize("make", CLOSURES.values(), ids=CLOSURES)
def test_a_closure_called_any_number_of_times_is_one_step(make: Callable[[Any], Optimizer], every: int) -> None:
    def begin(model: Any, case: zoo.Case, journal: Journal) -> Callable[[], None]:
        optimizer = make(model)
        calls: list[Tensor] = []

        def step() -> None:
            batch = case.batch()

            def closure() -> Tensor:
                optimizer.zero_grad()
                calls.append(case.loss(model, batch))
                calls[-1].backward()
                return calls[-1]

            journal.weights()
            journal.lr(optimizer.param_groups)
            optimizer.step(closure)
            journal.gradients()
            journal.over(calls[-1], model.parameters())

        return step

    check(begin, every, "vit")


@either_schedule
def test_one_optimizer_a_parameter_that_steps_inside_backward(every: int) -> None:
    def begin(model: Any, case: zoo.Case, journal: Journal) -> Callable[[], None]:
        optimizers = {p: AdamW([p], lr=1e-3, fused=True) for p in model.parameters()}

        def step_at_once(parameter: Tensor) -> None:
            journal.gradients([parameter])
            journal.lr(optimizers[parameter].param_groups)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)

        def step() -> None:
            journal.weights()
            loss = case.loss(model, case.batch())
            loss.backward()
            journal.over(loss, model.parameters())

        return step

    check(begin, every)


BLOCKS_AND_REST = ordinary(lambda model: (SGD(two_groups(model)[:1]), AdamW(two_groups(model)[1:])))
EMBEDDING_AND_REST = ordinary(lambda model: (SparseAdam(model[0].parameters(), lr=0.01), SGD(model[1].parameters())))


@either_schedule
@pytest.mark.parametrize(("loop", "name"), [(BLOCKS_AND_REST, "gpt2"), (EMBEDDING_AND_REST, "sparse_embedding")])
def test_several_optimizers_make_one_step_and_number_their_groups_on(loop: Loop, name: str, every: int) -> None:
    check(loop, every, name, lacks_first="update")  # as the known limits say


def test_an_optimizer_given_the_watched_parameters_mid_run_is_their_clock() -> None:
    case, model = zoo.ZOO["gpt2"], zoo.ZOO["gpt2"].build()
    model.transformer.h.requires_grad_(False)
    optimizer = SGD(model.transformer.ln_f.parameters(), lr=0.1)
    with tbhooks.watch(model.transformer.h[0], every=1) as watching:
        for step in range(5):
            if step == 2:
                unfreeze_blocks(model, optimizer)
            case.loss(model, case.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any("optimizer" in message for message in watching.stats.messages)
    assert [frame.step for frame in watching.history] == [0, 1, 2]


def by_hand(how: str, training: bool = True) -> Loop:
    """No optimizer. Without one weights are read when the next forward begins, or the watch is closed."""

    def begin(model: Any, case: zoo.Case, journal: Journal) -> Callable[[], None]:
        parameters = list(model.train(training).parameters())

        def step() -> None:
            with torch.set_grad_enabled(how != "forward"):
                loss = case.loss(model, case.batch())
            model.zero_grad()
            if how == "backward":
                loss.backward()
            gradients = (
                torch.autograd.grad(loss, parameters) if how == "autograd_grad" else [p.grad for p in parameters]
            )
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0 if gradient is None else 0.1 * gradient
            journal.weights()
            journal.gradients()
            journal.over(loss, [])

        return step

    return begin


BY_HAND = {how: by_hand(how) for how in ("autograd_grad", "backward")}
ONLY_RUN = {"training": by_hand("forward"), "evaluation": by_hand("forward", training=False)}


@either_schedule
@pytest.mark.parametrize(
    ("name", "mode"),
    [("resnet", "auto"), ("vit", "forward"), pytest.param("gpt2", "auto", marks=slow("another large model"))],
)
@pytest.mark.parametrize("loop", BY_HAND.values(), ids=BY_HAND)
def test_weights_updated_by_hand_have_every_number_but_the_update(loop: Loop, name: str, mode: str, every: int) -> None:
    assert check(loop, every, name, step=mode).stats.clock == "forward"


@either_schedule
@pytest.mark.parametrize("loop", ONLY_RUN.values(), ids=ONLY_RUN)
def test_a_model_that_is_only_run_forward_shows_activations_and_weights(loop: Loop, every: int) -> None:
    check(loop, every, "vit", step="forward")


# --- Weights without a gradient -------------------------------------------------------------------


def missing(watching: tbhooks.Watch) -> list[set[str]]:
    """Of each frame, the weights it says had no gradient when their optimizer stepped."""
    mark = "weight_gradient.missing/"
    return [{tag.removeprefix(mark) for tag in frame.scalars if tag.startswith(mark)} for frame in watching.history]


@pytest.mark.parametrize("make", [SGD, AdamW, LBFGS])
def test_a_frame_tells_which_weights_of_an_optimizer_had_no_gradient(make: Callable[..., Optimizer]) -> None:
    """Those that require one: not the frozen ones, nor those that no optimizer has."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("cut", "used", "frozen", "left_out")})
    model["frozen"].requires_grad_(False)
    optimizer = make([p for name, p in model.named_parameters() if not name.startswith("left_out")], lr=0.01)

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = model["used"](model["frozen"](model["cut"](torch.ones(2, 4)).detach())).square().mean()
        found.backward()
        return found

    with tbhooks.watch(model, every=2, rules=()) as watching:
        for _ in range(4):
            if make is LBFGS:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
    assert watching.stats.errors == 0
    assert missing(watching) == [{"cut.weight"}, {"cut.weight"}]


def test_a_weight_whose_gradient_comes_later_in_the_step_has_one() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 1), "other": nn.Linear(4, 1)})
    optimizer = SGD(model.parameters(), lr=0.01)
    with tbhooks.watch(model, every=1, rules=()) as watching:
        for _ in range(2):
            for part in ("one", "other"):
                optimizer.zero_grad()
                model[part](torch.ones(2, 4)).sum().backward()
                optimizer.step()
            watching.step()
    assert missing(watching)[-1] == set()


class Megatron:
    """Keeps gradients in `main_grad` as Megatron's DDP does, and gives a torch optimizer float32 copies of the weights
    (`main_param`), each as a whole or as a flat shard.
    """

    def __init__(self, model: nn.Module, form: str) -> None:
        self.model, self.form = model, form
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._accumulate)
            if form != "weights":
                main = parameter.detach().clone().float()
                parameter.main_param = (main if form == "copies" else main.view(-1)[1:].clone()).requires_grad_()
                parameter.main_param_sharded = form == "shards"
        self.optimizer = SGD([getattr(p, "main_param", p) for p in model.parameters()], lr=0.1)

    @staticmethod
    def _accumulate(parameter: nn.Parameter) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def step(self) -> None:
        for parameter in self.model.parameters():
            if self.form == "weights":
                parameter.grad = parameter.main_grad
            else:
                main = parameter.main_param
                main.grad = parameter.main_grad.view(-1)[-main.numel() :].view(main.shape).clone()
        self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None
            if self.form != "weights":
                main = parameter.main_param.detach()
                parameter.data.view(-1)[-main.numel() :] = main.view(-1).to(parameter.dtype)
            parameter.main_grad.zero_()


@pytest.mark.parametrize("form", ["weights", "copies", "shards"])
@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_that_megatron_keeps_in_main_grad_are_read(form: str, micro: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(torch.bfloat16 if form != "weights" else torch.float32)
    training = Megatron(model, form)
    seen = []
    with tbhooks.watch(model, every=1, rules=()) as watching:
        for step in range(3):
            for part in range(micro):
                x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + part))
                model(x.to(model.weight.dtype)).float().square().sum().backward()
            mains = {name: getattr(p, "main_param", p) for name, p in model.named_parameters()}
            before = {name: main.detach().double().numpy().copy() for name, main in mains.items()}
            gradients = {name: p.main_grad.double().numpy().copy() for name, p in model.named_parameters()}
            training.step()
            seen.append((before, gradients, {name: main.detach().double().numpy() for name, main in mains.items()}))
    assert [frame.step for frame in watching.history] == [0, 1, 2]
    assert watching.stats.errors == 0
    for frame, (before, gradients, after) in zip(watching.history, seen, strict=True):
        for name, weight in before.items():
            used = gradients[name].reshape(-1)[-weight.size :]
            change = after[name].copy() if frame.step == 2 else seen[frame.step + 1][0][name]
            assert frame[name, "weight"].norm == pytest.approx(np.linalg.norm(weight))
            assert frame[name, "weight_gradient"].norm == pytest.approx(np.linalg.norm(used))
            assert frame[name, "weight_gradient"].count == weight.size
            assert frame[name, "update"].norm == pytest.approx(np.linalg.norm(change - weight), rel=1e-5)


def test_partitions_that_no_torch_optimizer_steps_are_named() -> None:
    """DeepSpeed marks a parameter with such an attribute, and moves its gradient away during backward."""
    model = nn.Linear(4, 2)
    for parameter in model.parameters():
        parameter._hp_mapping = SimpleNamespace(get_hp_fragment=parameter.detach().clone)
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with tbhooks.watch(model, every=1, step="manual") as watching:
        model(torch.ones(2, 4)).sum().backward()
        watching.step()
    assert {"weight_gradient/weight", "update/weight", "weight_gradient/bias", "update/bias"} <= set(
        watching.stats.unseen
    )
    assert "DeepSpeed" in watching.stats.unseen["weight_gradient/weight"]
    assert any("DeepSpeed" in message for message in watching.stats.messages)
    assert ("weight", "weight") in watching.latest
