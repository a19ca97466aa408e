"""`log_every`: running means of logged scalars, summed on their device and written on a schedule of their own."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tests.support import fake_device, zoo

VALUES = [3.0, 1.5, -2.0, 8.0, 0.25, 4.0, 7.0]


def written(kept: tbhooks.MemorySink, tag: str = "train/loss") -> dict[int, float]:
    steps = [frame.step for frame in kept.frames if tag in frame.scalars]
    assert len(steps) == len(set(steps)), f"{tag} is written twice in a step: {steps}"
    return {frame.step: frame.scalars[tag] for frame in kept.frames if tag in frame.scalars}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    each: Callable[[tbhooks.Watch, int, str], None], steps: int, every: int, log_every: int, **options: Any
) -> tbhooks.MemorySink:
    """Trains, and calls `each` where users log: with the watch, the step, and "early" or "late"."""
    model, optimizer = made()
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=every, **options).log_every(log_every)
    for step in range(steps):
        loss = model(torch.ones(4, 3)).sum()
        each(w, step, "early")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        each(w, step, "late")
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    return kept


@pytest.mark.parametrize("place", ["early", "late"])
@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_means_since_the_last_write_are_written_on_their_own_schedule(place: str, every: int) -> None:
    def log(w: tbhooks.Watch, step: int, here: str) -> None:
        if here == place:
            w.log({"loss": torch.tensor(VALUES[step])})

    kept = train(log, steps=7, every=every, log_every=3)
    v = VALUES
    assert written(kept) == pytest.approx({0: v[0], 3: (v[1] + v[2] + v[3]) / 3, 6: (v[4] + v[5] + v[6]) / 3})
    assert [frame.step for frame in kept.frames if frame.sites] == [step for step in range(7) if step % every == 0]


def test_remaining_means_are_written_on_close() -> None:
    kept = train(lambda w, step, here: w.log({"loss": VALUES[step]}) if here == "early" else None, 6, 100, 4)
    assert written(kept) == pytest.approx({0: VALUES[0], 4: sum(VALUES[1:5]) / 4, 5: VALUES[5]})


def test_a_tag_may_have_no_value_or_several_in_a_step() -> None:
    def log(w: tbhooks.Watch, step: int, here: str) -> None:
        if here == "early":
            for i in range(step % 3):
                w.log({"loss": VALUES[step] + i})
            if step == 4:
                w.log({"rare": 5})

    kept = train(log, steps=7, every=2, log_every=6)
    assert written(kept) == pytest.approx(
        {6: (VALUES[1] + VALUES[2] + VALUES[2] + 1 + VALUES[4] + VALUES[5] + VALUES[5] + 1) / 6}
    )
    assert written(kept, "train/rare") == {6: 5.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_value_affects_only_its_own_mean(bad: float) -> None:
    kept = train(lambda w, step, here: w.log({"loss": bad if step == 1 else 1.0}), steps=5, every=100, log_every=2)
    values = written(kept)
    assert values[0] == 1.0
    assert math.isnan(values[2]) if math.isnan(bad) else values[2] == bad
    assert values[4] == 1.0


def test_a_log_at_the_end_of_each_micro_batch_belongs_to_its_own_step() -> None:
    """Accumulation as people write it: the last log of a step comes after the optimizer, the others before."""
    model, optimizer = made()
    kept = tbhooks.MemorySink()
    with tbhooks.watch(model, kept, every=100) as w:
        w.log_every(1)
        for i in range(12):
            model(torch.ones(4, 3)).sum().backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            w.log({"loss": float(i)})
    assert written(kept) == {0: 1.5, 1: 5.5, 2: 9.5}


def test_steps_are_labelled_as_the_user_says() -> None:
    model, optimizer = made()
    kept = tbhooks.MemorySink()
    with tbhooks.watch(model, kept, every=100) as w:
        w.log_every(2)
        for step in range(5):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            w.log({"loss": VALUES[step]})
            w.step(step + 1000)
    assert written(kept) == pytest.approx(
        {1000: VALUES[0], 1002: (VALUES[1] + VALUES[2]) / 2, 1004: (VALUES[3] + VALUES[4]) / 2}
    )


def test_an_evaluation_has_a_mean_of_its_own_written_when_training_goes_on() -> None:
    model, optimizer = made()
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=2).log_every(2)
    for step in range(6):
        model.train()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        w.log({"loss": VALUES[step]})
        if step % 3 == 1:
            model.eval()
            with torch.inference_mode():
                for i in range(4):
                    w.log({"eval/loss": model(torch.ones(2, 3)).sum() * 0 + step + i, "accuracy": i})
            assert step not in written(kept, "eval/loss")
            model.train()
            w.log({"eval/best": 9.0})
    w.close()
    assert written(kept, "eval/loss") == {1: 2.5, 4: 5.5}
    assert written(kept, "train/accuracy") == {1: 1.5, 4: 1.5}
    assert written(kept, "eval/best") == {1: 9.0, 4: 9.0}
    v = VALUES
    assert written(kept) == pytest.approx({0: v[0], 2: (v[1] + v[2]) / 2, 4: (v[3] + v[4]) / 2, 5: v[5]})


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("place", ["early", "late"])
def test_on_a_device_there_is_one_copy_per_written_step_and_no_sync(every: int, place: str) -> None:
    case, kept, made_, counts = zoo.ZOO["mlp"], tbhooks.MemorySink(), [], []
    losses: list[float] = []
    zoo.train(case, 9, each_step=lambda _, loss: losses.append(float(loss.detach())))

    def loss_logged_at_once(model: nn.Module, batch: Any) -> Tensor:
        loss = case.loss(model, batch)
        counts.append(len(record.copies))
        if place == "early":
            made_[0].log({"loss": loss})
        return loss

    def before(model: nn.Module) -> None:
        made_.extend([tbhooks.watch(model, kept, every=every).log_every(2), model])

    def each_step(_: int, loss: Tensor) -> None:
        if place == "late":
            made_[0].log({"loss": loss})

    early = zoo.Case(case.name, case.build, case.batch, loss_logged_at_once, case.optimizer)
    with fake_device.Log() as record:
        zoo.plain_loop(zoo.moved(early, fake_device.to_device, fake_device.put), 9, before, each_step)
        made_[0].log({"after": 1.0})
        counts.append(len(record.copies))
        assert record.syncs == 0
    made_[0].close()
    per_step = [b - a for a, b in itertools.pairwise(counts)]
    assert per_step[:-1] == [int(step % every == 0 or step % 2 == 0) for step in range(8)]
    assert per_step[-1] == 0, "the last step is held for late scalars"
    expected = {0: losses[0], **{step: (losses[step - 1] + losses[step]) / 2 for step in range(2, 9, 2)}}
    assert written(kept) == pytest.approx(expected, rel=1e-6)


def test_an_unwritten_step_launches_one_addition_per_value() -> None:
    def launches(log_every: int | None) -> list[int]:
        counts: list[int] = []
        made_: list[Any] = []

        def before(model: nn.Module) -> None:
            watching = tbhooks.watch(model, every=100)
            made_.extend([watching.log_every(log_every) if log_every else watching, model])

        def each_step(_: int, loss: Tensor) -> None:
            made_[0].log({"loss": loss.detach(), "other": loss.detach()})
            counts.append(sum(record.launches.values()))

        with fake_device.Log() as record:
            case = zoo.moved(zoo.ZOO["mlp"], fake_device.to_device, fake_device.put)
            zoo.plain_loop(case, 6, before, each_step)
        made_[0].close()
        return [b - a for a, b in itertools.pairwise(counts)]

    with_means, without = launches(50), launches(None)
    assert [a - b for a, b in zip(with_means, without, strict=True)][-2:] == [2, 2]


def test_training_is_the_same_to_the_bit() -> None:
    case = zoo.ZOO["cnn"]
    made_: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> nn.Module:
        made_.append(tbhooks.watch(model, every=2).log_every(1).progress())
        return model

    seen = zoo.train(case, 3, before=before, each_step=lambda _, loss: made_[0].log({"loss": loss}))
    made_[0].close()
    assert seen == zoo.train(case, 3)
    assert made_[0].stats.errors == 0


def test_there_is_no_hook_after_close_or_in_a_pause() -> None:
    model, _ = made()
    w = tbhooks.watch(model, every=100, step="manual")
    model(torch.ones(1, 3))
    w.step()
    w.step()
    assert not model._forward_pre_hooks, "no hook unless it is turned on"
    w.log_every(1).progress()
    assert len(model._forward_pre_hooks) == 1
    with w.paused():
        assert not model._forward_pre_hooks
    assert len(model._forward_pre_hooks) == 1
    copy.deepcopy(model)(torch.ones(1, 3))
    assert not w._session.metrics._samples, "forwards of a copy of the model are not counted"
    w.close()
    assert not model._forward_pre_hooks


def test_values_on_several_devices_have_one_mean() -> None:
    def log(w: tbhooks.Watch, step: int, here: str) -> None:
        value = torch.tensor(VALUES[step])
        w.log({"loss": [fake_device.put(value), value, VALUES[step]][step % 3]})

    kept = train(log, steps=7, every=100, log_every=6)
    assert written(kept)[6] == pytest.approx(sum(VALUES[1:]) / 6)


def test_means_are_float64_whatever_the_dtype_of_the_values() -> None:
    def log(w: tbhooks.Watch, step: int, here: str) -> None:
        if here == "early":
            w.log({"loss": fake_device.put(torch.tensor(2048.0 if step == 1 else 1.0, dtype=torch.bfloat16))})

    kept = train(log, steps=65, every=100, log_every=64)
    assert written(kept) == {0: 1.0, 64: (2048 + 63) / 64}


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", None, True])
def test_n_is_a_whole_number_of_at_least_one(n: Any) -> None:
    with tbhooks.watch(made()[0]) as w, pytest.raises(tbhooks.ArgumentError, match="n must be an integer"):
        w.log_every(n)


def test_compiled_models_are_logged_alike() -> None:
    model, optimizer = made()
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=2).log_every(1).progress("speed")
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    for i in range(8):
        called(torch.ones(4, 3)).sum().backward()
        if i % 2:
            optimizer.step()
        w.log({"loss": float(i)})
    w.close()
    assert written(kept) == {0: 0.5, 1: 2.5, 2: 4.5, 3: 6.5}
    speeds, times = written(kept, "train.samples_per_second"), written(kept, "train.step_seconds")
    assert list(speeds) == [1, 2, 3]
    assert [speeds[step] * times[step] for step in speeds] == pytest.approx([8.0] * 3)
    assert w.stats.errors == 0


def test_means_between_logged_steps_leave_the_latest_frame_and_the_rules_alone() -> None:
    model, optimizer = made()
    with tbhooks.watch(model, every=4) as w:
        w.log_every(1)
        for step in range(7):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            w.log({"loss": VALUES[step]})
        latest = w.latest
        assert latest is not None
        assert latest.step == 4
        assert latest["(root)", "activation"].count == 8
        assert [frame.step for frame in w.history] == [0, 4]
        steps, values = w.history.scalar("train/loss")
        assert steps == list(range(7))
        assert values.tolist() == VALUES


# --- Progress -------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Takes floats by position and tokens by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(7, 3), nn.Linear(3, 3)

    def forward(self, scale: float, features: Tensor, *, mask: Tensor, tokens: Tensor) -> Tensor:
        return (self.mix(features) + self.table(tokens).sum(1)).sum() * scale


def read(model: nn.Module) -> Tensor:
    tokens = torch.ones(5, 4, dtype=torch.int64)
    return model(1.0, torch.ones(5, 3), mask=torch.ones(5, 4, dtype=torch.bool), tokens=tokens)


def test_progress_logs_settings_of_each_group_speed_and_memory() -> None:
    model, kept = Reader(), tbhooks.MemorySink()
    groups: list[Any] = [
        {"params": model.table.parameters(), "name": "table", "weight_decay": 0.5},
        {"params": model.mix.parameters(), "lr": 0.25, "betas": (0.5, 0.75)},
    ]
    adam = torch.optim.AdamW(groups, lr=0.125, weight_decay=0.0)
    w = tbhooks.watch(model, kept, every=3).log_every(2).progress()
    for step in range(7):
        for _ in range(2):
            read(model).backward()
        adam.step()
        w.log({"loss": step})
    w.close()
    steps = [0, 2, 3, 4, 6]
    assert written(kept, "train.lr/table") == dict.fromkeys(steps, 0.125)
    assert written(kept, "train.lr/1") == dict.fromkeys(steps, 0.25)
    assert written(kept, "train.weight_decay/table") == dict.fromkeys(steps, 0.5)
    assert written(kept, "train.beta1/1") == dict.fromkeys(steps, 0.5)
    assert written(kept, "train.beta2/table") == pytest.approx(dict.fromkeys(steps, 0.999))
    times, samples = written(kept, "train.step_seconds"), written(kept, "train.samples_per_second")
    tokens = written(kept, "train.tokens_per_second")
    assert list(times) == list(samples) == list(tokens) == [2, 3, 4, 6]
    for step in times:
        assert times[step] > 0
        assert samples[step] * times[step] == pytest.approx(2 * 5), "samples of both micro-batches, in a step"
        assert tokens[step] * times[step] == pytest.approx(2 * 20)
    memory = written(kept, "train.peak_memory_bytes")
    assert list(memory) == steps
    assert 10e6 < memory[0] <= memory[6] < 1e12
    assert w.stats.errors == 0


def test_the_logged_learning_rate_is_the_one_of_the_step() -> None:
    model, kept = made()[0], tbhooks.MemorySink()
    sgd = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, gamma=0.5)
    w = tbhooks.watch(model, kept, every=100).log_every(1).progress("optimizer")
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
        sgd.step()
        scheduler.step()
    w.close()
    assert written(kept, "train.lr/0") == {0: 1.0, 1: 0.5, 2: 0.25}


def test_momentum_is_logged_and_other_parts_are_not() -> None:
    model, kept = made()[0], tbhooks.MemorySink()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.875)
    w = tbhooks.watch(model, kept, every=1).progress("optimizer")
    model(torch.ones(4, 3)).sum().backward()
    sgd.step()
    w.close()
    tags = {tag for tag in kept.frames[0].scalars if tag.startswith("train.") and "grad_norm" not in tag}
    assert tags == {"train.lr/0", "train.momentum/0", "train.weight_decay/0"}
    assert kept.frames[0].scalars["train.momentum/0"] == 0.875


def test_the_time_of_evaluations_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbhooks.capture.scalars import training_metrics

    now = [0.0]
    monkeypatch.setattr(training_metrics.time, "perf_counter", lambda: now[0])
    model, kept = made()[0], tbhooks.MemorySink()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, kept, every=4).progress("speed")
    for _ in range(5):
        model.train()
        model(torch.ones(4, 3)).sum().backward()
        now[0] += 2.0
        sgd.step()
        model.eval()
        for _ in range(3):
            model(torch.ones(9, 3))
            now[0] += 100.0
    w.close()
    assert written(kept, "train.step_seconds") == {4: 2.0}
    assert written(kept, "train.samples_per_second") == {4: 2.0}


def test_an_unknown_part_names_the_nearest() -> None:
    with tbhooks.watch(made()[0]) as w, pytest.raises(tbhooks.ArgumentError, match="did you mean 'memory'"):
        w.progress("memry")


def test_tensorboard_reads_the_means(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, optimizer = made()
    with tbhooks.watch(model, str(tmp_path), every=100) as w:
        w.log_every(2)
        for step in range(5):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            w.log({"loss": VALUES[step]})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 2, 4]
    assert len(list(tmp_path.iterdir())) == 1


def test_remaining_means_are_written_when_the_model_is_deleted() -> None:
    model, kept = nn.Linear(3, 2), tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=4).log_every(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        w.log({"loss": float(step)})
    del model, optimizer
    gc.collect()
    w.close()
    assert [(frame.step, frame.scalars["train/loss"]) for frame in kept.frames if "train/loss" in frame.scalars] == [
        (0, 0.0), (4, 2.5), (6, 5.5),
    ]  # fmt: skip
