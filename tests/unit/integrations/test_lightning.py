"""WatchCallback in a real Trainer, of either package: the numbers of a plain loop, under the trainer's own labels."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn

import tbhooks
from tbhooks import runs
from tbhooks.integrations.lightning import WatchCallback
from tests.support import wandb_file, zoo
from tests.support.digits_training import (
    ACCUMULATED,
    BATCH,
    STEPS,
    assert_same_frames,
    assert_same_numbers,
    loader,
    same_bits,
    train,
    weights,
)
from tests.support.frames import event_files, scalar_series, tags
from tests.support.lightning_training import fit, make_module, make_trainer
from tests.support.script_host import ScriptHost
from tests.support.slow import slow

PACKAGES = {package.__name__: package for package in (lightning.pytorch, pytorch_lightning)}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


@pytest.fixture(scope="module")
def plain() -> Any:
    """The frames of a plain loop, and the weights it ends with."""
    module = make_module()
    frames = train(module, module.net)
    return frames, weights(module)


@pytest.mark.parametrize("name", PACKAGES)
def test_accumulated_clipped_and_validated_the_numbers_are_those_of_a_plain_loop(
    name: str, plain: Any, tmp_path: Path
) -> None:
    package, sink = PACKAGES[name], tbhooks.MemorySink()
    callback = WatchCallback(every=1, writer=sink)
    assert isinstance(callback, package.Callback)
    module = fit(make_trainer(tmp_path, [callback], package), make_module(package))
    assert_same_frames(sink.frames, plain[0])
    assert [frame.step for frame in sink.frames] == list(range(STEPS))
    assert callback.watch is not None
    assert callback.watch.stats.errors == 0
    unwatched = fit(make_trainer(tmp_path, [], package), make_module(package))
    assert same_bits(weights(module), weights(unwatched))
    assert same_bits(weights(module), plain[1])


def test_of_several_loggers_the_one_of_tensorboard_gets_it_under_the_labels_of_the_users_own_numbers(
    plain: Any, tmp_path: Path
) -> None:
    loggers = [
        lightning.pytorch.loggers.CSVLogger(tmp_path / "csv"),
        lightning.pytorch.loggers.TensorBoardLogger(tmp_path / "board"),
    ]
    callback = WatchCallback(every=1)
    fit(make_trainer(tmp_path, [callback], logger=loggers), make_module())
    (directory,) = {file.parent for file in event_files(tmp_path / "board")}
    assert len(event_files(directory)) == 1
    ours, theirs = scalar_series(directory, "activation.mean/net.0"), scalar_series(directory, "loss")
    assert list(ours) == list(theirs) == list(range(STEPS))
    expected = [frame["net.0", "activation"].mean for frame in plain[0]]
    assert list(ours.values()) == pytest.approx(expected, rel=1e-6)
    assert "weight_gradient/net.3.weight" in tags(directory)
    assert "val_loss" in tags(directory)


def test_without_a_logger_frames_stay_in_memory_and_every_counts_optimizer_steps(plain: Any, tmp_path: Path) -> None:
    callback = WatchCallback(every=4, kinds=("weight",), histograms=False)
    fit(make_trainer(tmp_path, [callback]), make_module())
    assert callback.watch is not None
    assert [frame.step for frame in callback.watch.history] == [0, 4]
    assert list(tmp_path.rglob("*tfevents*")) == []


def test_a_second_fit_and_a_resumed_one_go_on_counting(plain: Any, tmp_path: Path) -> None:
    sink = tbhooks.MemorySink()
    trainer = make_trainer(tmp_path, [WatchCallback(every=1, writer=sink)])
    module = fit(trainer, make_module())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(trainer, module)  # which trains nothing, but validates: that is no step
    assert [frame.step for frame in sink.frames] == list(range(STEPS))

    trainer.fit_loop.max_epochs = 2
    fit(trainer, module)
    assert [frame.step for frame in sink.frames] == list(range(2 * STEPS))

    whole, resumed = tbhooks.MemorySink(), tbhooks.MemorySink()
    fit(make_trainer(tmp_path, [WatchCallback(every=1, writer=whole)], max_epochs=2), make_module())
    trainer = make_trainer(tmp_path, [WatchCallback(every=4, writer=resumed)], max_epochs=2)
    fit(trainer, make_module(), ckpt_path=tmp_path / "half.ckpt")
    # The first in any case, then every fourth of all steps.
    assert_same_frames(resumed.frames, [whole.frames[6], whole.frames[8]])


def test_an_exception_closes_the_watch_and_what_was_seen_stays(plain: Any, tmp_path: Path) -> None:
    callback = WatchCallback(every=1)
    module = make_module(fails_at=2 * ACCUMULATED)
    with pytest.raises(RuntimeError, match="mine"):
        fit(make_trainer(tmp_path, [callback]), module)
    assert zoo.hook_count(module) == 0
    assert callback.watch is not None
    with pytest.raises(tbhooks.ClosedError):
        callback.watch.step()
    assert_same_frames(list(callback.watch.history), plain[0][:2])


def make_adversaries() -> Any:
    class Adversaries(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(64, 4), nn.Linear(64, 4)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(net(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.first, self.second)]

    return Adversaries()


def test_two_optimizers_make_one_step_labelled_as_the_trainer_counts(tmp_path: Path) -> None:
    sink, plainly = tbhooks.MemorySink(), tbhooks.MemorySink()
    trainer = make_trainer(
        tmp_path, [WatchCallback(every=1, writer=sink)], accumulate_grad_batches=1, gradient_clip_val=None,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(make_adversaries(), loader(3))
    assert [frame.step for frame in sink.frames] == [0, 2, 4]

    module = make_adversaries()
    optimizers = module.configure_optimizers()
    with tbhooks.watch(module, plainly, every=1, step="manual") as watching:
        for x, _ in loader(3):
            for net, optimizer in zip((module.first, module.second), optimizers, strict=True):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
            watching.step()
    assert_same_numbers(sink.frames, plainly.frames)


def test_loggers_of_wandb_and_tensorboard_both_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = [
        # Its offline=True is a variable, which is read once a process.
        lightning.pytorch.loggers.WandbLogger(mode="offline", save_dir=tmp_path, project="tests"),
        lightning.pytorch.loggers.TensorBoardLogger(tmp_path / "board"),
    ]
    fit(make_trainer(tmp_path, [WatchCallback(every=2, scalars=("std",))], logger=loggers), make_module())
    loggers[0].experiment.finish()
    (directory,) = {file.parent for file in event_files(tmp_path / "board")}
    ours = [row for row in wandb_file.rows(tmp_path) if "activation.std/net.0" in row]
    assert [row["tbhooks/step"] for row in ours] == [0, 2, 4]
    series = scalar_series(directory, "activation.std/net.0")
    assert [row["activation.std/net.0"] for row in ours] == pytest.approx(list(series.values()), rel=1e-6)
    losses = {row["trainer/global_step"] for row in wandb_file.rows(tmp_path) if "loss" in row}
    assert losses == set(range(STEPS))


def run_alone(scripts: ScriptHost, program: str) -> str:
    done = scripts.run("-c", program, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_class_is_of_the_package_that_is_imported(scripts: ScriptHost) -> None:
    program = (
        "import sys, pytorch_lightning\nfrom tbhooks.integrations.lightning import WatchCallback\n"
        "print(issubclass(WatchCallback, pytorch_lightning.Callback), 'lightning.pytorch' in sys.modules)"
    )
    assert run_alone(scripts, program) == "True False\n"


def test_without_either_package_it_says_what_to_install(scripts: ScriptHost) -> None:
    program = (
        "import sys\nsys.modules.update({'lightning': None, 'pytorch_lightning': None})\n"
        "try:\n    import tbhooks.integrations.lightning\nexcept ImportError as problem:\n    print(problem)"
    )
    assert "pip install 'tbhooks[lightning]'" in run_alone(scripts, program)


@slow("compiles", covered_by="test_a_model_that_is_compiled_in_mid_run_and_first_called_in_an_unlogged_step_is_seen")
def test_a_compiled_net_is_seen_although_the_sanity_check_runs_it_first(plain: Any, tmp_path: Path) -> None:
    torch.compiler.reset()
    module, sink = make_module(), tbhooks.MemorySink()
    module.net.compile(backend="eager")
    fit(make_trainer(tmp_path, [WatchCallback(every=2, writer=sink)]), module)
    assert_same_frames(sink.frames, plain[0][::2])


@slow(
    "two processes that import Lightning",
    covered_by="test_torchrun_starts_it_on_every_rank_and_the_first_writes",
)
@pytest.mark.parametrize(("ranks", "seen_by"), [("local", 1), ("merge", 2)])
def test_of_two_ranks_the_first_writes(ranks: str, seen_by: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.lightning_training", str(tmp_path), ranks]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (file,) = event_files(tmp_path)
    frames = runs.read(file.parent).training
    assert [frame.step for frame in frames] == list(range(STEPS // 2))
    assert frames[0]["net.0", "activation"].count == seen_by * ACCUMULATED * BATCH * 24


def test_a_wrong_option_is_refused_at_once() -> None:
    with pytest.raises(tbhooks.ArgumentError, match="unknown option 'evry'"):
        WatchCallback(evry=10)
    with pytest.raises(tbhooks.ArgumentError, match="every must be an integer"):
        WatchCallback(every=0)
    with pytest.raises(tbhooks.ArgumentError, match="the framework decides"):
        WatchCallback(step="forward")


def test_a_copy_of_the_callback_has_trainings_of_its_own(tmp_path: Path) -> None:
    callback = WatchCallback(every=2, kinds=("weight",))
    sent = pickle.dumps(callback)
    fit(make_trainer(tmp_path, [callback]), make_module())
    for copied in (copy.deepcopy(callback), pickle.loads(sent)):
        assert copied.watch is None
        fit(make_trainer(tmp_path, [copied]), make_module())
        assert [frame.step for frame in copied.watch.history] == [0, 2, 4]
