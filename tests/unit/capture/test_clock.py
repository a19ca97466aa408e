"""When a step ends (one optimizer, several, forwards, or the user), and which steps are logged."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.capture.schedule import Schedule
from tbhooks.capture.step.manual_updates import FORWARDS_WITHOUT_OPTIMIZER
from tbhooks.capture.step.optimizer_round import OptimizerRound
from tests.support import zoo
from tests.support.loops import forward, mlp, sgd, steps_of, train


@pytest.mark.parametrize(("every", "logged"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (5, [0, 5]), (100, [0])])
def test_step_k_is_logged_when_every_divides_it(every: int, logged: list[int]) -> None:
    model = mlp()
    with tbhooks.watch(model, every=every) as watching:
        train(model, 7)
    assert steps_of(watching.history) == logged
    assert watching.stats.steps == 7


def test_micro_batches_merge_into_one_step() -> None:
    model = mlp()
    with tbhooks.watch(model, every=2) as watching:
        train(model, 3, accumulate=4)
    assert steps_of(watching.history) == [0, 2]
    assert watching.latest["0", "activation"].count == 4 * 16 * 8
    assert watching.latest["0.weight", "weight_gradient"].count == 4 * 8


def test_clipped_gradients_are_logged_as_the_optimizer_used_them() -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        (1e3 * forward(model)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected = float(model[0].weight.grad.norm())
        optimizer.step()
    assert watching.latest["0.weight", "weight_gradient"].norm == pytest.approx(expected, rel=1e-5)
    assert expected <= 0.5


def test_evaluation_passes_are_no_steps_and_not_in_the_numbers() -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(3):
            train(model, 1, optimizer)
            model.eval()
            for _ in range(5):
                forward(model, batch=1000)
            model.train()
    assert steps_of(watching.history) == [0, 1, 2]
    assert {frame["0", "activation"].count for frame in watching.history} == {16 * 8}


def test_evaluation_before_the_first_training_pass_is_forgotten() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        model.eval()
        forward(model, batch=1000)
        model.train()
        train(model, 1)
    assert watching.latest["0", "activation"].count == 16 * 8


def test_a_model_that_is_never_in_training_mode_is_read_all_the_same() -> None:
    model = mlp().eval()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 2)
    assert steps_of(watching.history) == [0, 1]


def test_another_models_optimizer_ends_nothing() -> None:
    model, other = mlp(), mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(other, 5)
        assert watching.stats.steps == 0
        assert watching.stats.clock == "auto"
        train(model, 2)
    assert steps_of(watching.history) == [0, 1]


def test_the_two_watches_of_a_gan_have_a_clock_each() -> None:
    torch.manual_seed(0)
    case = zoo.ZOO["gan"]
    model = case.build()
    generator, discriminator = tbhooks.watch(model.generator, every=1), tbhooks.watch(model.discriminator, every=1)
    optimizers = sgd(model.generator), sgd(model.discriminator)
    for _ in range(3):
        zoo.gan_step(model, case.batch(), *optimizers)
    assert generator.stats.steps == discriminator.stats.steps == 3
    assert steps_of(generator.history) == steps_of(discriminator.history) == [0, 1, 2]


def test_two_optimizers_on_one_model_make_one_step_and_both_updates_are_seen() -> None:
    model = mlp()
    first, second = sgd(model[0]), sgd(model[2])
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(4):
            forward(model).backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    assert steps_of(watching.history) == [0, 1, 2, 3]
    for frame in list(watching.history)[1:]:
        assert ("0.weight", "update") in frame
        assert ("2.weight", "update") in frame
        assert frame["2.weight", "weight"].count == 8
        assert frame["0", "activation"].count == 16 * 8


def test_an_optimizer_that_stops_stepping_does_not_stop_the_clock() -> None:
    model = mlp()
    first, second = sgd(model[0]), sgd(model[2])
    with tbhooks.watch(model, every=1) as watching:
        for i in range(6):
            forward(model).backward()
            first.step()
            if i < 2:
                second.step()
            model.zero_grad()
    assert watching.stats.steps in (5, 6)


def test_a_new_optimizer_for_the_same_parameters_replaces_the_old_one() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(3):
            train(model, 2)
    assert steps_of(watching.history) == [0, 1, 2, 3, 4, 5]


def test_a_round_counts_once_per_cycle_whatever_the_order() -> None:
    optimizers = OptimizerRound()
    ended = []
    for key in [1, 2, 1, 2, 1, 2]:
        assert not optimizers.ended_before(key)
        ended.append(optimizers.ended_after(key, frozenset([key])))
    assert ended == [True, False, False, True, False, True]


def test_optimizers_that_step_inside_backward_make_one_step() -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step_at_once(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    with tbhooks.watch(model, every=2) as watching:
        for _ in range(5):
            forward(model).backward()
    assert steps_of(watching.history) == [0, 2, 4]
    for frame in watching.history:
        kinds = {(site.name, site.kind) for site in frame.sites}
        assert {(name, "update") for name, _ in model.named_parameters()} <= kinds
        assert {(name, "weight_gradient") for name, _ in model.named_parameters()} <= kinds
        assert ("0", "gradient") in kinds


def test_a_backward_that_fails_does_not_stop_the_clock_of_optimizers_inside_it() -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    fails = True

    def step_at_once(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        if fails:
            raise ValueError("not yet")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    with tbhooks.watch(model, every=1) as watching:
        with pytest.raises(ValueError, match="not yet"):
            forward(model).backward()
        fails = False
        for _ in range(3):
            forward(model).backward()
    assert watching.stats.steps == 3


def test_lbfgs_steps_once_and_its_gradients_are_those_of_the_closure() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(16, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with tbhooks.watch(model, every=1) as watching:
        optimizer.step(closure)
        last = float(model[0].weight.grad.norm())
        optimizer.step(closure)
    assert steps_of(watching.history) == [0, 1]
    assert watching.history[0]["0.weight", "weight_gradient"].norm == pytest.approx(last, rel=1e-5)
    assert watching.history[0]["0", "activation"].count > 16 * 8
    assert watching.history[1]["0.weight", "weight_gradient"].count == 4 * 8


def test_a_custom_optimizer_subclass_is_a_clock() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.grad

    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 3, Plain(model.parameters()))
    assert steps_of(watching.history) == [0, 1, 2]
    assert watching.stats.clock == "optimizer"


def test_weights_changed_by_hand_count_forwards_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    with caplog.at_level(logging.WARNING, "tbhooks"), tbhooks.watch(model, every=2) as watching:
        for _ in range(6):
            gradients = torch.autograd.grad(forward(model), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= 0.01 * g
    assert steps_of(watching.history) == [0, 2, 4]
    assert {frame["0", "activation"].count for frame in watching.history} == {16 * 8}
    assert watching.stats.clock == "forward"
    assert sum("no torch optimizer" in record.message for record in caplog.records) == 1


def test_forwards_without_any_change_count_as_steps_after_a_while() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching, torch.no_grad():
        for _ in range(FORWARDS_WITHOUT_OPTIMIZER + 3):
            forward(model)
    assert watching.stats.clock == "forward"
    assert steps_of(watching.history) == [0, 1, 2, 3]


def test_step_forward_counts_forwards_from_the_start() -> None:
    model = mlp()
    with tbhooks.watch(model, every=2, step="forward") as watching:
        for _ in range(5):
            forward(model).backward()
    assert steps_of(watching.history) == [0, 2, 4]
    assert ("0", "gradient") in watching.latest
    assert ("0.weight", "weight_gradient") in watching.latest


def test_an_optimizer_that_comes_late_takes_over_the_clock() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(FORWARDS_WITHOUT_OPTIMIZER + 2):
            forward(model).backward()
        assert watching.stats.clock == "forward"
        train(model, 2)
        assert watching.stats.clock == "optimizer"
        assert watching.stats.steps == 2


def test_explicit_steps_win_and_carry_their_label() -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=2) as watching:
        for i in range(5):
            train(model, 1, optimizer)
            watching.step(1000 + i)
            _ = watching.latest  # submits the step: what is logged now is written separately, under its label
            watching.log({"i": i})
    assert steps_of(watching.history) == [1000, 1002, 1004]
    assert watching.history.scalar("train/i")[1].tolist() == [0, 2, 4]
    assert watching.stats.clock == "manual"
    assert watching.stats.steps == 5


def test_manual_steps_without_label_use_the_watchs_own_count() -> None:
    model = mlp()
    with tbhooks.watch(model, every=2, step="manual") as watching:
        train(model, 6, after=lambda i, _: watching.step() if i % 2 else None)
    assert steps_of(watching.history) == [0, 2]
    assert watching.latest["0", "activation"].count == 2 * 16 * 8


def test_learning_rates_are_logged_by_group_and_follow_the_scheduler() -> None:
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "lr": 0.2, "name": "head"},
    ]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with tbhooks.watch(model, every=1) as watching:
        train(model, 2, optimizer, after=lambda *_: scheduler.step())
    rates = [{tag: v for tag, v in frame.scalars.items() if "lr" in tag} for frame in watching.history]
    assert rates == [{"train.lr/0": 0.1, "train.lr/head": 0.2}, {"train.lr/0": 0.05, "train.lr/head": 0.1}]


@pytest.mark.parametrize("order", ["before", "after", "every micro-batch"])
@pytest.mark.parametrize("every", [1, 3])
def test_logged_values_belong_to_their_own_step(order: str, every: int) -> None:
    model = mlp()
    optimizer = sgd(model)
    losses = []
    with tbhooks.watch(model, every=every) as watching:
        for _ in range(7):
            loss = forward(model)
            losses.append(float(loss.detach()))
            if order != "after":
                watching.log({"loss": loss, "twice": 2 * loss})
            if order == "every micro-batch":
                watching.log({"loss": loss})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if order == "after":
                watching.log({"loss": loss})
                watching.log({"twice": 2 * loss})
    for tag, factor in (("train/loss", 1), ("train/twice", 2)):
        steps, values = watching.history.scalar(tag)
        assert steps == list(range(0, 7, every))
        assert values.tolist() == pytest.approx([factor * losses[i] for i in steps], rel=1e-6)


def test_a_scalar_that_is_logged_late_only_once_mixes_no_steps() -> None:
    model = mlp()
    optimizer = sgd(model)
    losses = []
    with tbhooks.watch(model, every=2) as watching:
        for i in range(6):
            loss = forward(model)
            losses.append(float(loss.detach()))
            watching.log({"loss": loss})
            loss.backward()
            optimizer.step()
            if i == 0:
                watching.log({"seldom": 1.0})
    steps, values = watching.history.scalar("train/loss")
    assert steps == [0, 2, 4]
    assert values.tolist() == pytest.approx([losses[i] for i in steps], rel=1e-6)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("reads", ["latest", "flush", "stats", "history"])
def test_reading_between_the_step_and_its_log_moves_nothing(reads: str, every: int) -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=every) as watching:
        for i in range(7):
            train(model, 1, optimizer)
            read = getattr(watching, reads)
            _ = read() if callable(read) else read
            watching.log({"i": i})
    steps, values = watching.history.scalar("train/i")
    assert steps == values.tolist() == list(range(0, 7, every))


@pytest.mark.parametrize("every", [1, 2])
def test_values_logged_after_an_explicit_step_belong_to_it(every: int) -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=every, step="manual") as watching:
        for n in range(100, 106):
            train(model, 1, optimizer)
            watching.step(n)
            watching.log({"n": n})
    steps, values = watching.history.scalar("train/n")
    assert steps == values.tolist() == list(range(100, 106, every))


def test_values_logged_before_anything_of_their_step_is_seen() -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=2) as watching:
        for i in range(6):
            watching.log({"i": i})
            train(model, 1, optimizer)
    steps, values = watching.history.scalar("train/i")
    assert steps == values.tolist() == [0, 2, 4]


def test_reading_from_another_thread_moves_nothing() -> None:
    model = mlp()
    optimizer = sgd(model)
    done = threading.Event()
    with tbhooks.watch(model, every=1) as watching:

        def poll() -> None:
            while not done.is_set():
                _ = watching.latest

        reader = threading.Thread(target=poll)
        reader.start()
        for i in range(200):
            train(model, 1, optimizer)
            watching.log({"i": i})
        done.set()
        reader.join()
    assert steps_of(watching.history) == list(range(200))
    assert watching.history.scalar("train/i")[1].tolist() == list(range(200))


def test_an_explicit_step_after_counted_forwards_ends_the_open_one() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, step="forward") as watching:
        forward(model)
        forward(model)
        watching.step(77)
        forward(model)
        watching.step(78)
    assert steps_of(watching.history) == [0, 77, 78]
    assert {frame["0", "activation"].count for frame in watching.history} == {16 * 8}


def test_loading_a_checkpoint_between_forwards_is_no_step() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        forward(model)
        model.load_state_dict(mlp(seed=1).state_dict())
        train(model, 3)
    assert watching.stats.steps == 3
    assert watching.history[0]["0", "activation"].count == 16 * 8
    (message,) = watching.stats.messages  # about the first forward; the clock does not count forwards
    assert "no backward went through" in message


def test_lazy_modules_and_long_accumulation_are_counted_by_the_optimizer() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
    with tbhooks.watch(model, every=1) as watching:
        forward(model).backward()
        optimizer = sgd(model)
        train(model, 2, optimizer, accumulate=80)
    assert watching.stats.steps == 2


def test_a_fused_half_precision_optimizers_gradients_do_not_vanish_in_the_unscaling() -> None:
    model = nn.Linear(4, 4).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with tbhooks.watch(model, every=1) as watching:
        loss = model(torch.full((2, 4), 1e-4).half()).float().mean() * 1e-3
        scaler.scale(loss).backward()
        expected = float(model.weight.grad.double().norm()) / 65536.0
        scaler.step(optimizer)
    assert watching.latest["weight", "weight_gradient"].norm == pytest.approx(expected, rel=1e-5)
    assert expected > 0


def test_logged_tensors_may_be_overwritten_afterwards() -> None:
    model = mlp()
    optimizer = sgd(model)
    total = torch.zeros(())
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(2):
            total += 1
            forward(model).backward()
            watching.log({"total": total})
            optimizer.step()
            total.zero_()
    assert watching.history.scalar("train/total")[1].tolist() == [1.0, 1.0]


def test_names_with_a_slash_are_tags_of_their_own() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1, after=lambda *_: watching.log({"eval/accuracy": 0.5, "n": 3}))
    assert watching.latest.scalars["eval/accuracy"] == 0.5
    assert watching.latest.scalars["train/n"] == 3.0


def test_a_scaled_step_that_is_skipped_is_no_step() -> None:
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with tbhooks.watch(model, every=1) as watching:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(factor * forward(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert watching.stats.steps == 2


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_under_a_scaler_are_logged_unscaled(fused: bool) -> None:
    def run(scale: float) -> float:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with tbhooks.watch(model, every=1) as watching:
            scaler.scale(forward(model)).backward()
            scaler.step(optimizer)
        return watching.latest["0.weight", "weight_gradient"].norm

    assert run(1024.0) == pytest.approx(run(1.0), rel=1e-5)


def test_histograms_thin_themselves_out_on_long_runs() -> None:
    schedule = Schedule(every=1, histograms=True)
    taken = [n for n in range(1600) if schedule.takes_histograms(n)]
    assert taken[:100] == list(range(100))
    assert [sum(lo <= n < hi for n in taken) for lo, hi in ((100, 200), (200, 400), (400, 800), (800, 1600))] == [
        50
    ] * 4
    assert [n for n in range(9) if Schedule(1, 3).takes_histograms(n)] == [0, 3, 6]
    assert not any(Schedule(1, False).takes_histograms(n) for n in range(9))
    assert all(Schedule(1, 1).takes_histograms(n) for n in range(500))


# --- Steps that raise, skip or are made by others -----------------------------------------------------------------


class Raising(torch.optim.SGD):
    """Raises in the middle of a step while `fails` is set."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fails:
            raise MemoryError("out of memory")
        return result


@pytest.mark.parametrize("where", ["step", "closure"])
def test_a_step_that_raises_and_is_caught_does_not_stop_the_clock(where: str) -> None:
    model = mlp()
    optimizer = Raising(model.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(model)
        loss.backward()
        if optimizer.fails and where == "closure":
            raise MemoryError("out of memory")
        return loss

    def step() -> None:
        optimizer.step(closure)

    with tbhooks.watch(model, every=1) as watching:
        for i in range(20):
            optimizer.fails = i == 5
            try:
                step()
            except MemoryError:
                assert i == 5
    assert watching.stats.steps == 19
    assert steps_of(watching.history) == list(range(19))
    assert watching.stats.errors == 0


def test_steps_inside_a_step_are_part_of_it_after_one_that_raised_too() -> None:
    model = mlp()
    inner = sgd(model)

    class Outer(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> None:
            inner.step()
            if self.fails:
                raise ValueError("not now")
            inner.step()

    outer = Outer(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1) as watching:
        for i in range(6):
            outer.fails = i in (1, 2)
            forward(model).backward()
            try:
                outer.step()
            except ValueError:
                assert outer.fails
    assert watching.stats.steps == 4


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("skips", [(3,), (4,), (3, 4), (1, 2), (4, 5, 6)])
def test_skipped_iterations_after_a_value_was_logged_late_lose_no_step_and_mislabel_none(
    every: int, skips: tuple[int, ...]
) -> None:
    model = mlp()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    counts, batches = {}, {}
    with tbhooks.watch(model, every=every) as watching:
        for i in range(12):
            batches[watching.stats.steps] = 10 + i
            scaler.scale(forward(model, batch=10 + i) * (float("inf") if i in skips else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if i == 0:
                watching.log({"late": 1.0})
    counts = {frame.step: frame["0", "activation"].count for frame in watching.history}
    steps = 12 - len(skips)
    assert counts == {step: batches[step] * 8 for step in range(0, steps, every)}


def test_a_value_of_an_unlogged_step_is_not_logged_to_the_step_before_it() -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=2) as watching:
        for i in range(6):
            loss = forward(model)
            watching.log({"loss": loss})
            if i % 2:
                watching.log({"odd": i})
            loss.backward()
            optimizer.step()
    assert not any("train/odd" in frame.scalars for frame in watching.history)
    assert not model._forward_pre_hooks


def test_one_group_has_one_learning_rate_however_often_it_steps_in_a_manual_step() -> None:
    model = mlp()
    optimizer = sgd(model, lr=0.25)
    with tbhooks.watch(model, every=1, step="manual") as watching:
        watching.progress("optimizer")
        for _ in range(3):
            train(model, 4, optimizer)
            watching.step()
    for frame in watching.history:
        assert {tag: v for tag, v in frame.scalars.items() if "lr" in tag} == {"train.lr/0": 0.25}


def test_two_optimizers_keep_their_groups_numbers_whichever_steps() -> None:
    model = mlp()
    first, second = sgd(model[0], lr=0.5), sgd(model[2], lr=0.25)
    with tbhooks.watch(model, every=1, step="manual") as watching:
        for optimizers in ([first, second], [second], [first, second, second]):
            forward(model).backward()
            for optimizer in optimizers:
                optimizer.step()
            watching.step()
    rates = [{tag: v for tag, v in frame.scalars.items() if "lr" in tag} for frame in watching.history]
    both = {"train.lr/0": 0.5, "train.lr/1": 0.25}
    assert rates == [both, {"train.lr/1": 0.25}, both]


def test_replaced_parameters_are_reported_and_the_old_optimizers_steps_still_count() -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=2) as watching:
        train(model, 3, optimizer)
        model.load_state_dict(mlp(seed=1).state_dict(), assign=True)
        train(model, 6, optimizer)
        assert sum("no longer the model's" in message for message in watching.stats.messages) == 1
        assert watching.stats.steps == 9
        train(model, 4)
    assert watching.stats.steps == 13
    assert steps_of(watching.history) == [0, 2, 4, 6, 8, 10, 12]
    assert ("0.weight", "update") in watching.latest


def test_several_threads_may_step_one_model() -> None:
    model = nn.Linear(4, 1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with tbhooks.watch(model, every=2) as watching:

        def run() -> None:
            optimizer = sgd(model, lr=0.001)
            for i in range(50):
                forward(model).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                watching.log({"i": i})

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert watching.stats.errors == 0, watching.stats.messages
    assert watching.stats.steps == 200
    assert steps_of(watching.history) == list(range(0, 200, 2))


def train_td3(every: int, first: int, iterations: int = 24) -> tbhooks.Watch:
    """The critic's optimizer steps in every iteration, the actor's in every second."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"critic": nn.Linear(3, 1), "actor": nn.Linear(3, 3)})
    critic, actor = sgd(model["critic"]), sgd(model["actor"])
    with tbhooks.watch(model, every=every) as watching:
        for i in range(iterations):
            states = torch.randn(4, 3)
            model["critic"](states).square().mean().backward()
            critic.step()
            model.zero_grad()
            if i % 2 == first:
                model["critic"](model["actor"](states)).mean().backward()
                actor.step()
                model.zero_grad()
    assert watching.stats.steps == iterations
    return watching


@pytest.mark.parametrize("every", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_an_optimizer_that_steps_every_second_time_is_logged_or_reported_as_missing(every: int, first: int) -> None:
    watching = train_td3(every, first)
    frames = [frame for frame in watching.history if frame.step < watching.stats.steps]
    shown = [("actor.weight", "update") in frame for frame in frames]
    messages = [message for message in watching.stats.messages if "never in a step that is logged" in message]
    assert any(shown[2:]) != bool(messages)
    assert len(messages) <= 1
    assert all(frame["critic.weight", "update"].count == 3 for frame in frames)
    assert all(
        frame["actor.weight", "update"].count == 9 for frame, is_shown in zip(frames, shown, strict=True) if is_shown
    )


# --- Loops without an optimizer -----------------------------------------------------------------------------------

UPDATES = {
    "data": lambda p: p.data.add_(p.grad, alpha=-0.01),
    "in place": lambda p: p.detach().sub_(0.01 * p.grad),
    "new data": lambda p: setattr(p, "data", p.data - 0.01 * p.grad),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("clears", ["before forward", "before backward", "in place"])
def test_weights_updated_by_hand_step_where_a_forward_follows_a_backward(
    update: Any, clears: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    with caplog.at_level(logging.WARNING, "tbhooks"), tbhooks.watch(model, every=10) as watching:
        for _ in range(32):
            if clears == "before forward":
                model.zero_grad()
            loss = forward(model)
            with torch.no_grad():
                forward(model, batch=3)
            if clears != "before forward":
                model.zero_grad(set_to_none=clears == "before backward")
            loss.backward()
            for parameter in model.parameters():
                update(parameter)
    assert steps_of(watching.history) == [0, 10, 20, 30]
    assert sum("no torch optimizer" in record.message for record in caplog.records) == 1
    assert watching.stats.steps == 31
    assert {frame["0", "gradient"].count for frame in watching.history} == {16 * 8}


def test_gradients_cleared_without_an_optimizer_are_steps_even_where_weights_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tbhooks.capture.step.manual_updates.LARGEST_COMPARED", 0)  # as on a device
    model = mlp()
    with tbhooks.watch(model, every=10) as watching:
        for _ in range(35):
            model.zero_grad()
            forward(model).backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.01)
    assert steps_of(watching.history) == [0, 10, 20, 30]


def test_accumulation_before_an_optimizers_first_step_is_no_loop_without_one() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 2, accumulate=20)
    assert watching.stats.messages == ()
    assert watching.stats.steps == 2


def test_iterations_that_a_scaler_skips_at_the_start_are_no_loop_without_an_optimizer() -> None:
    model = mlp()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    with tbhooks.watch(model, every=1) as watching:
        for i in range(8):
            scaler.scale(forward(model) * (float("inf") if i < 6 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert watching.stats.clock == "optimizer"
    assert steps_of(watching.history) == [0, 1]
