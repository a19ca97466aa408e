"""The front door: lifetime, several watches, reading back, and an error for everything that is wrong."""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import math
import os
import pickle
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks import Frame, MemorySink, runs
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.errors import ArgumentError
from tests.support import frames, zoo
from tests.support.loops import forward, mlp, sgd, steps_of, train
from tests.support.script_host import ScriptHost

# -- lifetime ---------------------------------------------------------------------------------------


def test_one_line_is_enough_and_reading_waits_for_what_has_ended() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=1)
    train(model, 3)
    assert steps_of(watching.history) == [0, 1, 2]
    assert watching.latest["0", "activation"].count == 16 * 8


def test_paused_takes_every_hook_off_and_goes_on_afterwards() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
        with watching.paused():
            assert zoo.hook_count(model) == 0
            train(model, 2)
            assert zoo.hook_count(model) == 0
        train(model, 1)
    assert watching.stats.steps == 4
    assert watching.latest.step == 3
    assert watching.latest["0", "activation"].count == 16 * 8
    assert not any(frame.sites for frame in watching.history if frame.step in (1, 2))


def test_pauses_may_be_nested() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching, watching.paused():
        with watching.paused():
            pass
        assert zoo.hook_count(model) == 0
        train(model, 1)
    assert watching.latest is None
    assert watching.stats.logged == 0


def test_a_small_model_that_logs_every_step_drops_none_for_a_slow_sink() -> None:
    class Slow(tbhooks.MemorySink):
        def write(self, frame: tbhooks.Frame) -> None:
            time.sleep(0.02)
            super().write(frame)

    model, sink = mlp(), Slow()
    with tbhooks.watch(model, sink, every=1) as watching:
        train(model, 100)
    assert watching.stats.dropped == 0
    assert steps_of(sink.frames) == list(range(100))


def test_a_later_chdir_sends_nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = mlp()
    with tbhooks.watch(model, "run", every=1) as watching:
        train(model, 1)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(model, 1)
    assert watching.stats.errors == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()].count("run") == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_watches_on_one_writer_are_warned_that_they_mix(tmp_path: Path) -> None:
    model, other = mlp(), mlp()
    with SummaryWriter(str(tmp_path)) as writer, tbhooks.watch(model, writer), tbhooks.watch(other, writer) as second:
        assert any("another open watch" in message for message in second.stats.messages)


def test_the_last_watch_to_close_gives_sigterm_back() -> None:
    model = mlp()
    before = signal.getsignal(signal.SIGTERM)
    with tbhooks.watch(model), tbhooks.watch(model):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_without_a_world_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, world in (("3", "1"), ("abc", "2"), ("2", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        model = mlp()
        with tbhooks.watch(model, every=1) as watching:
            train(model, 1)
        assert watching.latest.rank == 0


def test_two_watches_on_one_model_and_closing_one_leaves_the_other() -> None:
    model = mlp()
    first, second = tbhooks.watch(model, every=1), tbhooks.watch(model, every=2, kinds="weight")
    optimizer = train(model, 3)
    first.close()
    train(model, 2, optimizer)
    assert steps_of(first.history) == [0, 1, 2]
    assert steps_of(second.history) == [0, 2, 4]
    second.close()
    assert zoo.hook_count(model) == 0


def test_unwatch_closes_every_watch_on_the_model_and_no_other() -> None:
    model, other = mlp(), mlp()
    mine, mine_too, theirs = tbhooks.watch(model), tbhooks.watch(model), tbhooks.watch(other)
    tbhooks.unwatch(model)
    assert zoo.hook_count(model) == 0
    for closed in (mine, mine_too):
        with pytest.raises(tbhooks.ClosedError):
            closed.step()
    theirs.log({"x": 1})
    tbhooks.unwatch(model)


def test_close_is_idempotent_and_what_was_read_stays_readable() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=1)
    train(model, 2)
    watching.close()
    watching.close()
    assert steps_of(watching.history) == [0, 1]
    assert watching.stats.steps == 2
    for use in (watching.step, watching.flush, lambda: watching.log({"x": 1}), watching.__enter__):
        with pytest.raises(tbhooks.ClosedError, match="closed"):
            use()
    with pytest.raises(tbhooks.ClosedError), watching.paused():
        pass


def test_closing_removes_the_hooks_on_optimizers_too() -> None:
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    tbhooks.watch(mlp()).close()
    assert before == (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))


def test_a_step_cut_short_before_the_first_optimizer_step_is_written_at_close() -> None:
    model = mlp()
    with pytest.raises(ZeroDivisionError), tbhooks.watch(model, every=1) as watching:
        forward(model)
        raise ZeroDivisionError
    assert steps_of(watching.history) == [0]
    assert ("0", "activation") in watching.latest
    assert ("0", "gradient") not in watching.latest
    assert watching.stats.unseen == {}


def watched_and_trained(sink: MemorySink, steps: int) -> tuple[tbhooks.Watch, dict[str, Any]]:
    """A watch whose model and optimizer are held in one place only."""
    model = frames.make_model()
    held: dict[str, Any] = {"model": model, "optimizer": frames.make_optimizer(model)}
    w = tbhooks.watch(model, sink, every=1)
    for _ in range(steps):
        frames.train_step(held["model"], held["optimizer"])
    return w, held


def test_a_model_that_is_collected_in_another_thread_loses_no_step() -> None:
    sink = MemorySink()
    w, held = watched_and_trained(sink, 4)
    model = weakref.ref(held["model"])

    def collect() -> None:
        held.clear()
        gc.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join(30)
    assert model() is None
    w.flush()
    assert [frame.step for frame in sink] == [0, 1, 2, 3]
    w.close()
    assert [frame.step for frame in w.history] == [0, 1, 2, 3]
    assert (w.stats.logged, w.stats.dropped, w.stats.errors) == (4, 0, 0)


def test_a_model_that_is_collected_inside_write_loses_no_step_and_the_order_stays() -> None:
    trained, collected = threading.Event(), threading.Event()

    class Collecting(MemorySink):
        """Drops the model in the background thread, in the middle of writing the first frame."""

        def write(self, frame: Frame) -> None:
            assert trained.wait(30)
            held.clear()
            gc.collect()
            collected.set()
            super().write(frame)

    sink = Collecting()
    w, held = watched_and_trained(sink, 4)
    model = weakref.ref(held["model"])
    trained.set()
    assert collected.wait(30)
    assert model() is None
    w.close()
    assert [frame.step for frame in sink] == [0, 1, 2, 3]
    assert (w.stats.logged, w.stats.dropped, w.stats.errors) == (4, 0, 0)


def test_a_model_that_is_collected_while_its_step_is_being_copied_loses_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = Recorder.pack

    def collecting(recorder: Recorder, step: int, *args: Any) -> Any:
        if step == 2:
            held.pop("model", None)
            gc.collect()
        return stock(recorder, step, *args)

    sink = MemorySink()
    w, held = watched_and_trained(sink, 2)
    reference = weakref.ref(held["model"])
    monkeypatch.setattr(Recorder, "pack", collecting)
    held["model"](torch.randn(16, 4)).square().mean().backward()
    held["optimizer"].step()
    held["optimizer"].step()
    assert reference() is None
    w.close()
    assert [frame.step for frame in sink] == [0, 1, 2]
    assert (w.stats.dropped, w.stats.errors) == (0, 0)


def test_after_the_last_optimizer_step_only_numbers_of_the_user_are_written_at_close() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
        forward(model).backward()
        watching.log({"reward": 3.0})
    assert steps_of(watching.history) == [0]
    steps, values = watching.history.scalar("train/reward")
    assert (steps, list(values)) == ([1], [3.0])


def test_a_dropped_model_is_freed_and_its_frames_are_kept() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=1)
    train(model, 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert steps_of(watching.history) == [0, 1]
    watching.log({"loss": 1.0})
    watching.step()
    watching.close()


def test_a_list_of_sinks_each_gets_every_frame(tmp_path: Path) -> None:
    model, memory = mlp(), tbhooks.MemorySink()
    with tbhooks.watch(model, [memory, tbhooks.JsonlSink(tmp_path / "run.jsonl"), tmp_path / "tb"], every=1):
        train(model, 2)
    assert steps_of(memory.frames) == [0, 1]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2
    assert len(list((tmp_path / "tb").glob("events*"))) == 1


def test_other_ranks_open_no_file_and_register_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = mlp()
    with tbhooks.watch(model, tmp_path / "run", every=1) as watching:
        assert zoo.hook_count(model) == 0
        train(model, 2, after=lambda *_: (watching.log({"loss": 1.0}), watching.step()))
        with watching.paused():
            pass
        watching.flush()
    assert not (tmp_path / "run").exists()
    assert watching.latest is None
    assert zoo.hook_count(model) == 0


def test_the_self_report_says_what_it_cost_and_counts() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 2)
    stats = watching.stats
    assert (stats.steps, stats.logged, stats.errors, stats.dropped, stats.clock) == (2, 2, 0, 0, "optimizer")
    assert stats.hooks_fired == 2 * (4 + 3)  # the root's gradient comes with the last layer's
    assert stats.seconds_training > 0
    assert stats.seconds_pump > 0


# -- copies -----------------------------------------------------------------------------------------


def test_a_copy_of_a_watched_model_does_not_log() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
        ema, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
        forward(model).backward()
        for copied in (ema, average):
            forward(copied, batch=1000).backward()
        sgd(model).step()
    assert watching.latest["0", "activation"].count == 16 * 8


def test_a_watched_model_pickles_and_saves(scripts: ScriptHost, tmp_path: Path) -> None:
    model = mlp()
    x = torch.randn(2, 4)
    with tbhooks.watch(model, every=1):
        assert zoo.hook_count(model) > 0
        keys = list(model.state_dict())
        again = pickle.loads(pickle.dumps(model))
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        torch.save(model, tmp_path / "model.pt")
    assert keys == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(again(x), model(x))
    assert torch.equal(loaded(x), model(x))
    script = (
        "import sys; sys.modules['tbhooks'] = None; import torch; "
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); "
        "model(torch.ones(1, 4)); print('fine')"
    )
    done = scripts.run("-c", script, timeout=120)
    assert done.stdout == "fine\n", done.stderr


def everything(model: nn.Module) -> tbhooks.Watch:
    """A watch with every kind of hook there is, on a step that is logged."""
    kinds = ("activation", "gradient", "weight", "weight_gradient", "update", "input", "functional")
    watching = tbhooks.watch(model, every=1, kinds=kinds).evaluation().graph().log_every(2)
    return watching.progress().per_channel("*").on_nonfinite("replay")


def hook_dictionaries(model: nn.Module) -> dict[str, Any]:
    """Every dictionary with anything in it that a module keeps for hooks, the flags of hooks included."""
    return {
        f"{path}.{name}": list(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "hook" in name and isinstance(value, dict) and value
    }


def save_and_load(model: nn.Module) -> nn.Module:
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
        return torch.load(buffer, weights_only=True)


AGAIN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.save": save_and_load, "deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}  # fmt: skip


@pytest.mark.parametrize("begin", [lambda model: tbhooks.watch(model, every=1), everything], ids=["plain", "all"])
@pytest.mark.parametrize("again", AGAIN)
def test_a_copy_of_a_watched_model_holds_no_hook_of_the_watch(
    again: str, begin: Callable[[nn.Module], tbhooks.Watch]
) -> None:
    model = mlp()
    x = torch.randn(16, 4)
    with begin(model):
        copies = [AGAIN[again](model)]
        loss = model(x).square().mean()
        copies.append(AGAIN[again](model))  # in the middle of a step
        loss.backward()
        assert zoo.hook_count(model) > 0
    assert [hook_dictionaries(one) for one in copies] == [{}, {}]
    assert all(torch.equal(one(x), model(x)) for one in copies)


@pytest.mark.parametrize("again", ["torch.save", "pickle"])
def test_the_bytes_of_a_saved_model_are_those_of_an_unwatched_one(again: str) -> None:
    def saved(model: nn.Module) -> bytes:
        if again == "pickle":
            return pickle.dumps(model)
        torch.save(model, buffer := io.BytesIO())
        return buffer.getvalue()

    model = mlp()
    plain = saved(model)
    with everything(model):
        assert saved(model) == plain
    assert saved(model) == plain


def first_of_theirs(*_: Any) -> None: ...


def second_of_theirs(*_: Any) -> None: ...


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_hooks_of_the_user_stay_in_a_copy_and_in_their_order(again: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    model[0].register_forward_hook(first_of_theirs, with_kwargs=True)
    with everything(model):
        handle = model[0].register_forward_hook(second_of_theirs)
        model[0].register_forward_hook(first_of_theirs, prepend=True)
        one = again(model)
        assert list(one[0]._forward_hooks.values()) == [first_of_theirs, first_of_theirs, second_of_theirs]
        assert len(one[0]._forward_hooks_with_kwargs) == 1
        handle.remove()
        assert second_of_theirs not in model[0]._forward_hooks.values()


def test_a_copy_of_a_parametrized_model_holds_no_hook_of_the_watch() -> None:
    model = mlp()
    torch.nn.utils.parametrizations.weight_norm(model[0])  # copies itself by a method of its own
    before = hook_dictionaries(model)
    with tbhooks.watch(model, every=1):
        assert hook_dictionaries(copy.deepcopy(model)) == before


def test_other_ordered_dictionaries_are_copied_and_pickled_as_ever() -> None:
    mapping = OrderedDict(b=1, a=[2])
    mapping.name = "state"
    for one in (copy.deepcopy(mapping), pickle.loads(pickle.dumps(mapping)), copy.copy(mapping)):
        assert (type(one), list(one.items()), one.name) == (OrderedDict, [("b", 1), ("a", [2])], "state")
    assert type(copy.deepcopy(mlp().state_dict())) is OrderedDict


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, 1.5, "10", None, True, [1]])
def test_every_is_a_whole_number_of_at_least_one(every: Any) -> None:
    with pytest.raises(tbhooks.ArgumentError, match=r"every must be an integer >= 1, got "):
        tbhooks.watch(mlp(), every=every)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "resnet"}, "model must be a torch.nn.Module, got 'resnet'"),
        ({"model": nn.Linear}, "model must be a torch.nn.Module"),
        ({"writer": 3}, "writer must be a SummaryWriter .* got 3"),
        ({"writer": SummaryWriter}, "writer must be a SummaryWriter"),
        ({"writer": [None]}, "writer must be a SummaryWriter"),
        ({"writer": sys.stderr}, "writer must be a SummaryWriter"),
        ({"kinds": None}, "kinds must be a list"),
        ({"kinds": 5}, "kinds must be a list"),
        ({"include": []}, "include must not be an empty list"),
        ({"kinds": ("activation", "gradients")}, "unknown kind 'gradients': did you mean 'gradient'"),
        ({"kinds": ()}, "at least one of"),
        ({"kinds": "weights"}, "did you mean 'weight'"),
        ({"scalars": ("stdd",)}, "unknown stat 'stdd': did you mean 'std'"),
        ({"scalars": 3}, "scalars must be"),
        ({"rules": ["nonfinite"]}, "unknown rule 'nonfinite': did you mean 'non_finite'"),
        ({"rules": 3}, "rules must be"),
        ({"include": "encoder.*"}, "include='encoder.*' matches no module"),
        ({"include": "00"}, "did you mean '0'"),
        ({"include": 3}, "include must be a glob"),
        ({"exclude": "*"}, "leaves no module"),
        ({"step": "optimiser"}, "did you mean 'optimizer'"),
        ({"ranks": "all"}, "ranks"),
        ({"histograms": 0}, "histograms"),
        ({"histograms": "yes"}, "histograms"),
    ],
)
def test_a_wrong_argument_is_refused_at_once_with_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    model = arguments.pop("model", None) or mlp()
    with pytest.raises(tbhooks.ArgumentError, match=message):
        tbhooks.watch(model, **arguments)
    if isinstance(model, nn.Module):
        assert zoo.hook_count(model) == 0


def test_a_wrong_argument_leaves_no_file_behind(tmp_path: Path) -> None:
    with pytest.raises(tbhooks.ArgumentError):
        tbhooks.watch(mlp(), tmp_path / "run", scalars=("nope",))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        "1.0x",
        None,
        torch.ones(1, dtype=torch.complex64),
        object(),
        10**400,
        torch.ones(1, device="meta"),
    ],
)
def test_log_takes_one_number_a_name(value: Any) -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching, pytest.raises(tbhooks.ArgumentError, match="loss"):
        watching.log({"loss": value})


@pytest.mark.parametrize("values", [3, [("loss", 1)], {1: 2}, {"": 2}])
def test_log_takes_a_dict_of_names(values: Any) -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching, pytest.raises(tbhooks.ArgumentError):
        watching.log(values)


@pytest.mark.parametrize("n", [-1, 1.5, "3"])
def test_step_labels_are_whole_numbers(n: Any) -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching, pytest.raises(tbhooks.ArgumentError, match="n must be an integer"):
        watching.step(n)


def test_reading_a_wrong_place_names_the_nearest() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
    with pytest.raises(tbhooks.UnknownSiteError, match=r"did you mean '0.weight'"):
        watching.latest["0.weigth", "weight"]
    with pytest.raises(tbhooks.UnknownSiteError, match=r"did you mean 'weight_gradient'"):
        watching.latest["0.weight", "weight_gradients"]
    with pytest.raises(KeyError):
        watching.latest["nowhere", "activation"]
    with pytest.raises(AttributeError, match="did you mean 'std'"):
        _ = watching.latest["0", "activation"].stdd
    with pytest.raises(tbhooks.ArgumentError):
        watching.latest["0"]  # type: ignore[index]
    with pytest.raises(tbhooks.ArgumentError):
        watching.latest[["0"], "activation"]  # type: ignore[index]
    assert math.isnan(watching.latest["0", "activation"].ratio)


# --- Directories that are URLs ------------------------------------------------------------------------


def test_a_url_that_tensorboard_can_write_to_is_a_directory_and_nothing_is_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, "memory://watched/", every=1):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    [path] = files.find("/watched")
    (tmp_path / "copied.tfevents").write_bytes(files.cat_file(path))
    files.store.clear()
    assert path.split("/")[2].startswith("Linear-2")
    assert [frame.step for frame in runs.read(tmp_path / "copied.tfevents").frames] == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["copied.tfevents"]


@pytest.mark.parametrize(
    ("writer", "problem"),
    [
        (
            "nowhere://bucket/run",
            "TensorBoard cannot write to 'nowhere://bucket/run': it has no file system for nowhere",
        ),
        (["memory://fine", "nowhere://bucket/run"], "TensorBoard cannot write to 'nowhere://bucket/run'"),
        (Path("s3://bucket/run"), "'s3:/bucket/run' is a URL as a Path: pass it as a str"),
    ],
)
def test_a_url_that_tensorboard_cannot_write_to_is_refused_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Any, problem: str
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=re.escape(problem)):
        tbhooks.watch(nn.Linear(2, 1), writer)
    assert not list(tmp_path.iterdir())


def test_the_package_that_is_missing_for_a_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("gcsfs") or importlib.util.find_spec("tensorflow"):
        pytest.skip("gs:// can be written to here")
    with pytest.raises(ArgumentError, match=r"no file system for gs://: pip install gcsfs"):
        tbhooks.watch(nn.Linear(2, 1), "gs://bucket/run")


def test_a_run_elsewhere_is_not_read_and_that_is_said() -> None:
    for read in (runs.read, runs.find):
        with pytest.raises(ArgumentError, match="copy 's3://bucket/run' to one first"):
            read("s3://bucket/run")


# --- What it says of itself ---------------------------------------------------------------------------


def test_stats_print_line_by_line_and_nothing_twice() -> None:
    model = mlp()
    model.add_module("unused", nn.Linear(2, 2))
    model.add_module("again", model[0])
    with tbhooks.watch(model, every=1) as w:
        model.unused.forward = lambda x: x
        optimizer = sgd(model)
        model[0](torch.ones(2, model[0].in_features)).sum().backward()
        optimizer.step()
        w.step()
        w.flush()
    w._report.log_once("something happened")
    lines = str(w.stats).splitlines()
    assert repr(w.stats) == str(w.stats)
    assert len(lines) > 5
    assert len(lines) == len(set(lines))
    assert "message: something happened" in lines
    for why in set(w.stats.unseen.values()):
        assert str(w.stats).count(why) == 1
    assert any(line.startswith("also called again: 0") for line in lines)
    assert w.stats.unseen


class KerasLayer(nn.Linear):
    """As in Keras 3: a module with a name and a list of further layers, which torch does not see."""

    __module__ = "keras.src.layers.layer"

    def __init__(self, name: str, layers: Sequence[nn.Module] = ()) -> None:
        super().__init__(4, 4)
        self.name, self._layers = name, list(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return super().forward(x)


def test_a_keras_model_is_read_layer_by_layer_and_what_is_not_read_is_said() -> None:
    inner = KerasLayer("dense")
    model = KerasLayer("model", [KerasLayer("dense"), KerasLayer("block", [inner]), inner])
    with tbhooks.watch(model, every=1) as w:
        assert any("Keras" in message for message in w.stats.messages)
        model(torch.randn(2, 4)).sum().backward()
        w.step()
        assert {"dense", "block", "block.dense", "(root)"} == {
            site.name for site in w.latest.sites if site.kind == "activation"
        }
    assert not any(zoo.hook_count(layer) for layer in [model, inner, *model._layers])
    with tbhooks.watch(nn.Linear(4, 1), every=1) as w:
        assert not w.stats.messages


def test_an_output_is_saved_without_a_warning_of_our_hooks() -> None:
    model = mlp()
    with tbhooks.watch(model, every=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            torch.save(model(torch.randn(2, 4)), io.BytesIO())


class Lazy(dict[str, Any]):
    """A batch with a part that cannot be had."""

    def items(self) -> Any:
        raise RuntimeError("this part is not loaded")


def test_a_container_that_raises_when_it_is_looked_into_does_not_raise_in_training() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, batch: Lazy) -> torch.Tensor:
            return self.layer(batch["x"])

    model = Takes()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1, step="forward") as w:
        for _ in range(3):
            optimizer.zero_grad()
            model(Lazy(x=torch.randn(2, 4))).mean().backward()
            optimizer.step()
    assert w.stats.logged == 3


def test_a_child_that_is_forked_while_another_thread_puts_hooks_on_does_not_hang() -> None:
    with tbhooks.watch(mlp(), every=1) as w:
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with w._session.observer.placement._lock, w._session.clock.lock, w._report._lock:
                held.set()
                release.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(10)
        child = os.fork()
        if child == 0:
            os._exit(0)
        deadline = time.monotonic() + 20
        ended = 0
        while not ended and time.monotonic() < deadline:
            ended, _ = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        release.set()
        thread.join()
        if not ended:
            os.kill(child, signal.SIGKILL)
        assert ended == child
