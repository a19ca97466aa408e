"""A wandb run, offline, read back from its file: every frame and every number the user logs, in any order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tbhooks
from tbhooks.data.frame import Finding, Site
from tbhooks.sinks import wandb as sink_module
from tests.support import wandb_file
from tests.support.digits_training import make_net, same_bits, weights
from tests.support.digits_training import train as train_on_digits
from tests.support.frames import make_frame
from tests.support.loops import mlp, sgd, steps_of, train

pytestmark = pytest.mark.xdist_group("wandb")  # a service in the background, which they share


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    import wandb  # it takes a second

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    found = wandb.init(project="tests", mode="offline", dir=tmp_path, settings=settings)
    yield found
    found.finish()


def rows_with(directory: Path, key: str) -> list[dict[str, Any]]:
    return [row for row in wandb_file.rows(directory) if key in row]


# What users do, as (what they log at a training step, how often they have logged which numbers in the end).
def each_step(run: Any, step: int) -> None:
    run.log({"loss": step})


def each_step_numbered_twice(run: Any, step: int) -> None:
    run.log({"loss": step}, step=step)
    time.sleep(0.001)
    run.log({"accuracy": step}, step=step)


def now_and_then(run: Any, step: int) -> None:
    if step % 5 == 4:
        run.log({"loss": step})


def now_and_then_numbered(run: Any, step: int) -> None:
    if step % 5 == 4:
        run.log({"loss": step}, step=step)


def epochs_numbered(run: Any, step: int) -> None:
    if step % 10 == 9:
        run.log({"loss": step}, step=step // 10)


def nothing(run: Any, step: int) -> None:
    """Leaves it all to the watch."""


MANNERS = {
    each_step: range(20), each_step_numbered_twice: range(20), now_and_then: range(4, 20, 5),
    now_and_then_numbered: range(4, 20, 5), epochs_numbered: range(9, 20, 10), nothing: (),
}  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
@pytest.mark.parametrize("manner", MANNERS, ids=lambda manner: manner.__name__)
def test_nothing_is_dropped_for_a_lower_step_however_the_user_logs(
    manner: Callable[[Any, int], None], late: bool, run: Any, tmp_path: Path
) -> None:
    model, memory = mlp(), tbhooks.MemorySink()
    optimizer = sgd(model)
    with tbhooks.watch(model, [run, memory], every=1) as watching:
        for step in range(20):
            train(model, 1, optimizer)
            if not late:
                watching.flush()
            manner(run, step)
        run.finish()  # before the watch is closed
    assert watching.stats.errors == watching.stats.dropped == 0
    assert [row["loss"] for row in rows_with(tmp_path, "loss")] == list(MANNERS[manner])
    if manner is each_step_numbered_twice:
        assert [row["accuracy"] for row in rows_with(tmp_path, "accuracy")] == list(range(20))
    ours = rows_with(tmp_path, "tbhooks/step")
    ours = [row for row in ours if "activation.mean/0" in row]
    assert [row["tbhooks/step"] for row in ours] == steps_of(memory.frames) == list(range(20))
    means = [frame["0", "activation"].mean for frame in memory.frames]
    assert [row["activation.mean/0"] for row in ours] == means


def test_numbers_and_histograms_are_those_of_the_frame_on_an_axis_of_their_own(run: Any, tmp_path: Path) -> None:
    import wandb

    model, memory = make_net(), tbhooks.MemorySink()
    with tbhooks.watch(model, [wandb, memory], every=3, scalars=("std", "update.ratio")) as watching:
        optimizer = sgd(model)
        for _ in range(4):
            loss = model(torch.randn(16, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watching.log({"loss": loss})
    run.finish()
    ours = rows_with(tmp_path, "tbhooks/step")
    assert [row["tbhooks/step"] for row in ours] == [0, 3]
    for row, frame in zip(ours, memory.frames, strict=True):
        assert row["train/loss"] == frame.scalars["train/loss"]
        assert row["gradient.std/2"] == frame["2", "gradient"].std
        assert row["update.ratio/0.weight"] == frame["0.weight", "update"].ratio
        assert "activation.mean/0" not in row
        stored = row["weight/0.weight"]
        assert len(stored["values"]) + 1 == len(stored["bins"]) <= 513
        assert sum(stored["values"]) == 64 * 24
        assert stored["bins"][0] == frame["0.weight", "weight"].min
        assert stored["bins"][-1] == frame["0.weight", "weight"].max
    axes = wandb_file.axes(tmp_path)
    for name in ("gradient.std/*", "weight/*", "train/loss", "update.ratio/*"):
        assert axes[name] == "tbhooks/step"
    assert not {"*", "train/*"} & set(axes)  # what users log themselves stays on their own axis


def test_weights_are_the_same_bits_with_and_without(run: Any) -> None:
    watched, bare = make_net(), make_net()
    with tbhooks.watch(watched, run, every=1):
        train_on_digits(watched)
    train_on_digits(bare)
    assert same_bits(weights(watched), weights(bare))


def test_nan_is_reported_and_never_stored_in_a_histogram(run: Any, tmp_path: Path, capfd: Any) -> None:
    site, gone = Site("0", "activation"), Site("1", "activation")
    sink = tbhooks.WandbSink(run)
    sink.write(make_frame(0, {site: [1.0, np.nan, np.inf, 3.0], gone: [np.nan] * 3}, scalars={"train/loss": np.nan}))
    sink.close()
    run.finish()
    (row,) = rows_with(tmp_path, "tbhooks/step")
    assert row["activation.mean/0"] == 2.0
    assert (row["activation.nan_count/0"], row["activation.inf_count/0"]) == (1, 1)
    assert sum(row["activation/0"]["values"]) == 2
    assert np.isfinite(row["activation/0"]["bins"]).all()
    assert "activation/1" not in row
    assert str(row["train/loss"]).lower() == "nan"
    assert capfd.readouterr() == ("", "")


def test_findings_are_in_the_summary_each_once(run: Any, tmp_path: Path) -> None:
    found = Finding(3, Site("0", "activation"), "dead_units", "warning", "0 is dead")
    other = Finding(4, None, "loss_spike", "error", "the loss jumped")
    sink = tbhooks.WandbSink(run)
    for step, findings in ((3, [found]), (4, [found, other])):
        sink.write(make_frame(step, findings=findings))
    sink.close()
    run.finish()
    text = wandb_file.summary(tmp_path)["tbhooks/findings"]
    assert text == "warning, step 3: 0 is dead\nerror, step 4: the loss jumped"


@pytest.mark.parametrize(("alerts", "told"), [(None, []), ("error", ["ERROR"]), ("warning", ["WARN", "ERROR"])])
def test_findings_become_alerts_if_that_is_asked_for(
    alerts: str | None, told: list[str], run: Any, tmp_path: Path
) -> None:
    found = Finding(3, Site("0", "activation"), "dead_units", "warning", "0 is dead")
    other = Finding(4, None, "loss_spike", "error", "the loss jumped")
    sink = tbhooks.WandbSink(run, alerts=alerts)
    for step, findings in ((3, [found]), (4, [found, other])):
        sink.write(make_frame(step, {Site("0", "activation"): [1.0, 2.0]}, findings=findings))
    sink.close()
    run.finish()
    kept = wandb_file.alerts(tmp_path)
    assert [level for _, _, level in kept] == told
    if "ERROR" in told:
        assert kept[-1] == ("tbhooks: loss_spike", "step 4: the loss jumped", "ERROR")


def test_a_user_who_logs_rarely_by_another_count_comes_first_and_is_warned(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "MAX_WAITING", 3)
    monkeypatch.setattr(sink_module, "MAX_VALUES", 3)
    model = mlp()
    with tbhooks.watch(model, run, every=1) as watching:
        optimizer = sgd(model)
        for epoch in range(3):
            train(model, 10, optimizer)
            watching.flush()
            run.log({"loss": epoch}, step=epoch)
            time.sleep(0.05)
        run.finish()
    assert [row["loss"] for row in rows_with(tmp_path, "loss")] == [0, 1, 2]
    assert watching.stats.errors > 0
    assert "increase every=" in " ".join(watching.stats.messages)
    assert len(rows_with(tmp_path, "activation.mean/0")) > 3


def test_of_a_small_model_every_step_waits_for_a_user_who_never_logs(run: Any, tmp_path: Path) -> None:
    model = mlp()
    with tbhooks.watch(model, run, every=1).hparams({"lr": 0.1}).environment() as watching:
        train(model, 200)
    run.finish()
    assert watching.stats.errors == 0
    assert [row["tbhooks/step"] for row in rows_with(tmp_path, "tbhooks/step")] == list(range(200))


def test_a_run_that_is_said_to_be_ours_alone_is_written_at_once(run: Any) -> None:
    model = mlp()
    with tbhooks.watch(model, tbhooks.WandbSink(run, alone=True), every=1) as watching:
        train(model, 12)
        watching.flush()
        assert run.step == 11


def test_the_module_without_a_run_says_what_is_missing() -> None:
    import wandb

    assert wandb.run is None
    with pytest.raises(tbhooks.ArgumentError, match=r"call wandb.init\(\) before watch"):
        tbhooks.watch(mlp(), wandb)


def test_evaluations_do_not_go_to_the_run_of_the_training(run: Any) -> None:
    model = mlp()
    with (
        tbhooks.watch(model, run, every=1) as watching,
        pytest.raises(tbhooks.ArgumentError, match=r"this watch writes to wandb run .* already"),
    ):
        watching.evaluation(run)
