"""`Watch.checksums`: the bits of every tensor of a logged step, in eager and compiled loops, in frames and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.capture.scalars import checksums as step_checksums
from tbhooks.data.frame import Frame, Site
from tests.support import compiling, fake_device, reference, zoo
from tests.support.loops import mlp, sgd, train

CASES = ["mlp", "shared_module", "checkpointed", "dict_output", "tied_weights"]


class Keeper:
    """Keeps what a training step of `mlp` has computed, by hand."""

    def __init__(self, model: nn.Sequential) -> None:
        self.kept: dict[tuple[str, str], list[Tensor]] = {}
        for path, module in (("0", model[0]), ("2", model[2])):
            module.register_forward_hook(lambda _m, _a, out, path=path: self._keep(path, out))

    def _keep(self, path: str, output: Tensor) -> None:
        self.kept.setdefault((path, "activation"), []).append(output.detach().clone())
        output.register_hook(lambda g: self.kept.setdefault((path, "gradient"), []).append(g.clone()))

    def keep_parameters(self, model: nn.Module, *kinds: str) -> None:
        for name, parameter in model.named_parameters():
            for kind in kinds:
                tensor = parameter.grad if kind == "weight_gradient" else parameter
                assert tensor is not None
                self.kept[name, kind] = [tensor.detach().clone()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_kind_equals_the_reference_and_calls_add_up(accumulate: int) -> None:
    model = mlp()
    optimizer, keeper = sgd(model), Keeper(model)
    w = tbhooks.watch(model, every=1).checksums()
    for _ in range(accumulate):
        model(torch.randn(8, 4)).square().mean().backward()
    keeper.keep_parameters(model, "weight", "weight_gradient")
    optimizer.step()
    keeper.keep_parameters(model, "update")
    frame = w.latest
    assert frame is not None
    for (name, kind), tensors in keeper.kept.items():
        assert frame[name, kind].checksum == reference.checksum(*tensors), (name, kind)
    w.close()
    assert w.stats.errors == 0, w.stats.messages


def checksums_of(frame: Frame | None) -> dict[Site, int | None]:
    assert frame is not None
    return {site: frame[site.name, site.kind].checksum for site in frame.sites}


def run(case: zoo.Case, asks: bool, steps: int = 3, **options: Any) -> tuple[zoo.Trace, tbhooks.Watch]:
    watches: list[tbhooks.Watch] = []

    def begin(model: nn.Module) -> nn.Module:
        watches.append(tbhooks.watch(model, every=1, **options))
        if asks:
            watches[0].checksums()
        return model

    trace = zoo.train(case, steps, before=begin)
    watches[0].close()
    assert watches[0].stats.errors == 0, watches[0].stats.messages
    return trace, watches[0]


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_to_the_bit_and_two_runs_have_the_same_checksums(name: str) -> None:
    case = zoo.ZOO[name]
    bare = zoo.train(case, 3)
    first, w = run(case, asks=True)
    _, again = run(case, asks=True)
    assert first == bare
    assert checksums_of(w.latest) == checksums_of(again.latest)
    known = [checksum for checksum in checksums_of(w.latest).values() if checksum is not None]
    assert len(known) == len(checksums_of(w.latest))


def test_a_compiled_model_has_the_checksums_of_its_tensors() -> None:
    compiling.reset()
    _, eager = run(zoo.ZOO["mlp"], asks=True)
    _, compiled = run(compiling.compiled_case(zoo.ZOO["mlp"]), asks=True)
    assert checksums_of(compiled.latest) == checksums_of(eager.latest)


def test_a_device_gives_the_same_in_the_one_copy_and_nothing_waits() -> None:
    def on_device(asks: bool) -> tuple[int, int, tbhooks.Watch]:
        model = fake_device.to_device(mlp())
        optimizer = sgd(model)
        w = tbhooks.watch(model, every=1)
        if asks:
            w.checksums()
        with fake_device.Log() as log:
            for step in range(2):
                torch.manual_seed(step)
                model(fake_device.put(torch.randn(16, 4))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        w.close()
        assert w.stats.errors == 0, w.stats.messages
        return len(log.copies), log.syncs, w

    assert on_device(False)[:2] == on_device(True)[:2] == (2, 0)
    model = mlp()
    w = tbhooks.watch(model, every=1).checksums()
    optimizer = sgd(model)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    w.close()
    assert checksums_of(w.latest) == checksums_of(on_device(True)[2].latest)


def test_a_frame_without_them_has_none() -> None:
    model = mlp()
    w = tbhooks.watch(model, every=1)
    train(model, 1)
    assert set(checksums_of(w.latest).values()) == {None}
    w.close()


@pytest.mark.parametrize("name", ["run", "frames.jsonl"])
def test_files_have_them(tmp_path: Path, name: str) -> None:
    model = mlp()
    writer: Any = tmp_path / name if name == "run" else tbhooks.JsonlSink(tmp_path / name)
    w = tbhooks.watch(model, writer, every=1).checksums()
    train(model, 3)
    w.close()
    run = tbhooks.runs.read(tmp_path / name if name == "run" else tmp_path)
    assert not run.problems
    assert [checksums_of(frame) for frame in run.frames] == [checksums_of(frame) for frame in w.history]
    assert name != "run" or run.environment["torch"] == torch.__version__


def test_a_damaged_file_costs_the_checksums_only() -> None:
    from tbhooks.data import checksums

    made = np.array([[2**64 - 1, 1], [7, 2]], np.uint64)
    assert np.array_equal(checksums.decode(checksums.encode(made), 2), made)
    with pytest.raises(ValueError, match="checksums of 17 bytes"):
        checksums.decode(checksums.encode(made)[:-1], 2)
    with pytest.raises(ValueError, match="not one"):
        checksums.of_rows([(-1, 1)])


def test_a_failure_switches_them_off_and_costs_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(step_checksums.checksum, "sums", fails)
    model = mlp()
    w = tbhooks.watch(model, every=1).checksums()
    train(model, 2)
    w.close()
    assert w.stats.errors == 1
    assert "checksums are switched off" in " ".join(w.stats.messages)
    assert w.latest is not None
    assert w.latest["0", "activation"].count > 0
    assert set(checksums_of(w.latest).values()) == {None}
