"""`Watch.samples`: the samples of a step with the largest values, and the mean of each group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tbhooks
from tbhooks.capture.scalars import step_samples
from tbhooks.capture.scalars.step_samples import SampleCall, WorstSamples
from tbhooks.data.artifacts.samples import Sample, Samples, merge
from tests.support import fake_device

SOURCES = ["web", "books", "code"]


def losses(step: int, n: int = 12) -> Tensor:
    return torch.from_numpy(np.random.default_rng(step).gamma(2.0, size=n)).float()


def train(
    place: str, steps: int = 5, every: int = 2, device: Any = None, micro: int = 1, most: int = 4
) -> tuple[tbhooks.Watch, tbhooks.MemorySink]:
    torch.manual_seed(0)
    model, kept = nn.Linear(3, 2), tbhooks.MemorySink()
    put = (lambda tensor: tensor) if device is None else fake_device.put
    if device is not None:
        fake_device.to_device(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, kept, every=every)

    def show(step: int, part: int) -> None:
        values = losses(step * 10 + part)
        ids = torch.arange(12) + 100 * step + 1000 * part
        w.samples(put(values), put(ids), put(torch.arange(12) % 3 * 7), most=most)

    for step in range(steps):
        for part in range(micro):
            model(put(torch.ones(4, 3))).sum().backward()
            if place == "early":
                show(step, part)
        optimizer.step()
        optimizer.zero_grad()
        if place == "late":
            show(step, 0)
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    return w, kept


def expected(step: int, micro: int = 1, most: int = 4) -> tuple[list[int], list[float], dict[str, float]]:
    values = np.concatenate([losses(step * 10 + part).double().numpy() for part in range(micro)])
    ids = np.concatenate([np.arange(12) + 100 * step + 1000 * part for part in range(micro)])
    groups = np.concatenate([np.arange(12) % 3 * 7] * micro)
    order = np.argsort(-values)[:most]
    means = {str(group): float(values[groups == group].mean()) for group in np.unique(groups)}
    return ids[order].tolist(), values[order].tolist(), means


@pytest.mark.parametrize("device", [None, "fake"])
@pytest.mark.parametrize("place", ["early", "late"])
def test_the_largest_values_and_the_means_of_groups_belong_to_their_step(place: str, device: Any) -> None:
    w, _ = train(place, device=device)
    assert [frame.step for frame in w.history] == [0, 2, 4]
    for frame in w.history:
        ids, values, means = expected(frame.step)
        assert list(frame.samples.ids) == ids
        assert list(frame.samples.values) == pytest.approx(values, rel=1e-6)
        assert {name: group.mean for name, group in frame.samples.groups.items()} == pytest.approx(means, rel=1e-12)
        assert {tag: frame.scalars[tag] for tag in frame.scalars if tag.startswith("train.loss_by/")} == pytest.approx(
            {f"train.loss_by/{name}": mean for name, mean in means.items()}
        )
        assert all(int(sample.group) == sample.id % 100 % 3 * 7 for sample in frame.samples)


def test_several_calls_of_a_step_are_merged() -> None:
    w, _ = train("early", micro=3)
    for frame in w.history:
        ids, values, means = expected(frame.step, micro=3)
        assert list(frame.samples.ids) == ids
        assert list(frame.samples.values) == pytest.approx(values, rel=1e-6)
        assert frame.samples.total == 36
        assert {name: group.mean for name, group in frame.samples.groups.items()} == pytest.approx(means, rel=1e-12)


def shown(*calls: tuple[Any, ...], device: bool = False, **options: Any) -> Samples:
    """What one step has after these calls."""
    model, kept = nn.Linear(3, 2), tbhooks.MemorySink()
    with tbhooks.watch(model, kept, every=1) as w:
        model(torch.ones(4, 3)).sum().backward()
        for call in calls:
            w.samples(*(fake_device.put(a) if device and isinstance(a, Tensor) else a for a in call), **options)
        w.step()
        w.flush()
    assert w.stats.errors == 0, w.stats.messages
    return kept.frames[-1].samples


def test_ids_and_groups_may_be_known_on_the_host_only() -> None:
    values = losses(3, 6)
    names = [f"file{i}" for i in range(6)]
    found = shown((values, names, SOURCES * 2), device=True)
    order = np.argsort(-values.double().numpy())
    assert found.ids == tuple(names[i] for i in order)
    assert [sample.group for sample in found] == [SOURCES[i % 3] for i in order]
    assert found.groups["books"].mean == pytest.approx(values[[1, 4]].double().mean().item())
    assert found.groups["books"].total == 2


def test_values_of_tokens_have_the_id_of_their_sample_and_a_position() -> None:
    values = losses(4, 12).reshape(3, 4)
    found = shown((values, torch.tensor([7, 8, 9]), torch.tensor([1, 1, 2])), most=3)
    order = np.argsort(-values.double().numpy().ravel())[:3]
    assert [(sample.id, sample.position) for sample in found] == [(7 + i // 4, i % 4) for i in order]
    assert found.groups["1"].mean == pytest.approx(values[:2].double().mean().item())
    assert found.groups["1"].total == 8


def test_without_ids_samples_are_numbered_within_the_step() -> None:
    found = shown((torch.tensor([1.0, 5.0]),), (torch.tensor([3.0, 4.0]),), most=3)
    assert found.ids == (1, 3, 2)
    assert found.groups == {}


def test_one_group_for_all_and_lists_of_numbers() -> None:
    found = shown(([1.0, 2.0, 4.5], None, "web"))
    assert found.groups["web"] == (2.5, 3)
    assert found[0] == Sample(2, 4.5, "web")


def test_nan_comes_before_all_numbers() -> None:
    found = shown((torch.tensor([1.0, math.inf, math.nan, 2.0]),), most=3)
    assert found.ids == (2, 1, 3)


@pytest.mark.parametrize("on_host", [False, True])
def test_groups_beyond_the_64th_share_one_mean(on_host: bool) -> None:
    values, groups = torch.arange(100.0), torch.arange(100) * 3
    found = shown((values, None, [str(group) for group in groups.tolist()] if on_host else groups))
    assert len(found.groups) == 65
    assert found.groups["189"] == (63.0, 1)
    assert found.groups["(other)"] == (pytest.approx(np.arange(64, 100).mean()), 36)


@pytest.mark.parametrize("values", [torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int64)])
def test_other_dtypes_are_read_as_float32(values: Tensor) -> None:
    assert shown((values,)).values == (1.0, 1.0, 1.0)


def test_no_values_at_all_are_no_samples() -> None:
    assert not shown((torch.ones(0),))


def test_a_call_neither_copies_nor_waits_and_the_step_has_its_one_copy() -> None:
    torch.manual_seed(0)
    model = fake_device.to_device(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, every=2)
    for step in range(4):
        with fake_device.Log() as log:
            model(fake_device.put(torch.ones(4, 3))).sum().backward()
            w.samples(fake_device.put(losses(0)), fake_device.put(torch.arange(12)), fake_device.put(torch.arange(12)))
            w.samples(fake_device.put(losses(1)), None, SOURCES * 4)
            assert log.copies == []
            optimizer.step()
        assert (len(log.copies), log.syncs) == (int(step % 2 == 0), 0), step
    w.close()
    assert w.stats.errors == 0, w.stats.messages


def test_late_samples_cost_one_copy_of_their_own_once_and_then_ride_in_the_copy_of_their_step() -> None:
    model = fake_device.to_device(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, every=1)
    copies = []
    for _ in range(4):
        with fake_device.Log() as log:
            model(fake_device.put(torch.ones(4, 3))).sum().backward()
            optimizer.step()
            w.samples(fake_device.put(losses(0)), fake_device.put(torch.arange(12)))
        copies.append(len(log.copies))
        assert log.syncs == 0
    w.close()
    assert copies == [2, 1, 1, 1]
    assert all(len(frame.samples) == 12 for frame in w.history)


def test_training_and_its_graph_are_the_same_with_and_without() -> None:
    def run(shows: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        w = tbhooks.watch(model, every=2)
        for _ in range(4):
            values = model(torch.randn(6, 3)).square().squeeze(1)
            if shows:
                before = values.grad_fn
                w.samples(values, torch.arange(6), "web")
                assert values.grad_fn is before
            values.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        w.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


def test_subscribers_get_the_samples_of_every_step_on_the_device() -> None:
    model = fake_device.to_device(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, every=100)
    got: list[WorstSamples] = []
    w._session.samples.subscribe(got.append)
    for step in range(3):
        model(fake_device.put(torch.ones(4, 3))).sum().backward()
        with fake_device.Log() as log:
            w.samples(fake_device.put(losses(step)), fake_device.put(torch.arange(12) + step), most=2)
        assert (log.copies, log.syncs) == ([], 0)
        optimizer.step()
    w.close()
    for step, one in enumerate(got):
        assert one.ids is not None
        assert one.ids.device == one.values.device == fake_device.DEVICE
        assert one.ids.cpu().tolist() == (np.argsort(-losses(step).numpy())[:2] + step).tolist()


def test_nothing_is_reduced_on_steps_that_are_not_logged() -> None:
    model = fake_device.to_device(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, every=100)
    for step in range(3):
        model(fake_device.put(torch.ones(4, 3))).sum().backward()
        values = fake_device.put(losses(step))
        with fake_device.Log() as log:
            w.samples(values)
        assert bool(log.ops) is (step == 0)
        optimizer.step()
    w.close()


def test_event_files_and_json_lines_hold_them(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    writers = [str(tmp_path / "run"), tbhooks.JsonlSink(tmp_path / "frames.jsonl")]
    with tbhooks.watch(model, writers, every=1) as w:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            w.samples(losses(step), [f"|{i}*" for i in range(12)], SOURCES * 4)
    for where in (tmp_path / "run", tmp_path / "frames.jsonl"):
        run = tbhooks.runs.read(where)
        assert not run.problems
        assert [frame.samples for frame in run.frames] == [frame.samples for frame in w.history]
        assert run.frames[1].scalars["train.loss_by/web"] == pytest.approx(losses(1)[::3].double().mean().item())


def test_the_text_tab_shows_a_table(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = nn.Linear(3, 2)
    with tbhooks.watch(model, str(tmp_path), every=1) as w:
        model(torch.ones(4, 3)).sum().backward()
        w.samples(torch.tensor([0.5, 2.0]), ["a|b", "<c>"], ["web", "code"])
        w.step()
    events = EventAccumulator(str(tmp_path)).Reload()
    text = events.Tensors("tbhooks/samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[2:6] == [
        "| sample | value | group |",
        "| --- | --- | --- |",
        "| &lt;c&gt; | 2 | code |",
        "| a\\|b | 0.5 | web |",
    ]
    assert "| web | 0.5 | 1 |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": "losses"}, "values must be a tensor or a list"),
        ({"values": torch.ones(3, dtype=torch.complex64)}, "values must be a dense tensor of real numbers"),
        ({"values": torch.ones(3), "ids": torch.ones(3)}, "ids must be a tensor of integers"),
        ({"values": torch.ones(3), "ids": torch.arange(2)}, r"ids has the shape \(2,\), which does not fit"),
        ({"values": torch.ones(3), "group": 7}, "group must be a tensor or a list"),
        ({"values": torch.ones(3), "most": 0}, "most must be an integer >= 1"),
        ({"values": torch.ones(3), "most": 5000}, "most must be an integer <= 1024"),
    ],
)
def test_wrong_arguments_raise_at_the_call(arguments: dict[str, Any], message: str) -> None:
    with tbhooks.watch(nn.Linear(3, 2), every=1) as w, pytest.raises(tbhooks.ArgumentError, match=message):
        w.samples(**arguments)


def test_a_failure_is_reported_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no topk here")

    monkeypatch.setattr(step_samples, "reduce_call", fails)
    model = nn.Linear(3, 2)
    with tbhooks.watch(model, every=1) as w:
        w.samples(torch.ones(3))
    assert w.stats.errors == 1
    assert "no topk here" in w.stats.messages[0]


floats = st.floats(-1e6, 1e6, width=32)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(floats, st.integers(-5, 5)), min_size=1, max_size=40), st.integers(1, 8))
def test_groups_by_integers_equal_numpy(pairs: list[tuple[float, int]], most: int) -> None:
    values, groups = np.array([value for value, _ in pairs], np.float32), np.array([group for _, group in pairs])
    call = SampleCall(torch.from_numpy(values), None, torch.from_numpy(groups), most)
    worst, sums = step_samples.reduce_call(call, 0)
    assert worst.values.tolist() == sorted(values.tolist(), reverse=True)[:most]
    assert sums is not None
    assert sums.labels is not None
    for label, total, count in zip(sums.labels.tolist(), sums.sums.tolist(), sums.counts.tolist(), strict=True):
        if count:
            own = values[groups == label].astype(np.float64)
            assert count == len(own)
            assert total == pytest.approx(own.sum(), rel=1e-12, abs=1e-9)
    assert sum(sums.counts.tolist()) == len(values)


def test_parts_of_ranks_merge_weighted_by_their_number() -> None:
    one = Samples((Sample(1, 3.0, "a"), Sample(2, 1.0, "a")), {"a": tbhooks.data.artifacts.samples.Group(2.0, 2)}, 2)
    other = Samples((Sample(5, 5.0, "a"),), {"a": tbhooks.data.artifacts.samples.Group(5.0, 1)}, 1)
    merged = merge([one, Samples(), other])
    assert merged.ids == (5, 1)
    assert merged.groups["a"] == (3.0, 3)
    assert Samples.from_dict(merged.to_dict()) == merged
