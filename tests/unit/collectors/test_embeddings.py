"""`embeddings()`: which points are kept, with whose labels and thumbnails, and that nobody's dice are thrown."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.collectors import embeddings as collector
from tbhooks.collectors.embeddings import Reservoir, texts
from tbhooks.data.artifacts import Embedding
from tests.support import fake_device, zoo


class Net(nn.Module):
    def __init__(self, after: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.encoder = Encoder(after)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.last = self.encoder(x)
        return self.head(self.encoder.plain).mean()


class Encoder(nn.Module):
    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(4, 3), after

    def forward(self, x: Tensor) -> Tensor:
        self.plain = self.linear(x.flatten(1)[:, :4])
        return self.after(self.plain)


def train(model: nn.Module, batches: Any, ask: Callable[[tbhooks.Watch], Any], **options: Any) -> Any:
    """The watch, and the embeddings of each step; a batch is what the model is called with."""
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=1, **options)
    ask(w)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for args in batches:
        optimizer.zero_grad()
        model(*args).backward()
        optimizer.step()
    w.close()
    return w, [embeddings_of(frame) for frame in kept.frames]


def embeddings_of(frame: tbhooks.Frame) -> dict[str, Embedding]:
    return {shown.tag: shown for shown in frame.artifacts if isinstance(shown, Embedding)}


def test_points_are_what_the_layer_made_of_each_sample_with_its_label() -> None:
    model, y = Net(), torch.tensor([3, 1, 4, 1, 5])
    _, (found,) = train(model, [(torch.randn(5, 4),)], lambda w: w.embeddings("encoder", labels=lambda: y))
    np.testing.assert_array_equal(found["encoder"].points, model.last.detach().double().numpy())
    assert found["encoder"].labels == ("3", "1", "4", "1", "5")


def test_each_batch_has_labels_of_its_own() -> None:
    current: list[Tensor] = []
    batches = [(torch.randn(2, 4),), (torch.randn(3, 4),)]
    labels = iter([torch.tensor([0, 1]), torch.tensor([2, 3, 4])])

    class Labelled(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            current[:] = [next(labels)]
            return super().forward(x)

    _, steps = train(Labelled(), batches, lambda w: w.embeddings("encoder", labels=lambda: current[0]))
    assert [found["encoder"].labels for found in steps] == [("0", "1"), ("2", "3", "4")]


POOLED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "sequence": (lambda h: h[:, None] * torch.arange(4.0)[:, None], lambda h: h * 1.5),
    "maps": (lambda h: h[:, :, None, None] * torch.arange(4.0).reshape(2, 2), lambda h: h * 1.5),
    "half": (lambda h: h.bfloat16(), lambda h: h),
    "double": (lambda h: h.double(), lambda h: h),
}


@pytest.mark.parametrize("name", POOLED)
def test_a_point_is_the_mean_over_positions(name: str) -> None:
    after, wanted = POOLED[name]
    model = Net(after)
    _, (found,) = train(model, [(torch.randn(5, 4),)], lambda w: w.embeddings("encoder"))
    reference = wanted(model.encoder.plain.detach().double().numpy())
    np.testing.assert_allclose(found["encoder"].points, reference, rtol=1e-2 if name == "half" else 1e-6)
    assert found["encoder"].labels == ()


@pytest.mark.parametrize("name", ["x", "y"])
def test_arguments_of_the_model_give_labels_and_thumbnails(name: str) -> None:
    batch, y = torch.rand(6, 1, 8, 8), torch.arange(6)
    options = {"thumbnails": "x"} if name == "x" else {"labels": "y", "thumbnails": "x"}
    _, (found,) = train(Net(), [(batch, y)], lambda w: w.embeddings("encoder", **options))
    thumbnails = found["encoder"].thumbnails
    assert thumbnails is not None
    assert thumbnails.shape == (6, 24, 24, 3)
    low, high = np.percentile(batch.numpy().astype(np.float64), [0.5, 99.5])
    wanted = 255 * np.clip((batch[:, 0].double().numpy() - low) / (high - low), 0, 1)
    np.testing.assert_allclose(thumbnails[:, 1::3, 1::3, 0], wanted, atol=1.5)
    assert found["encoder"].labels == (("0", "1", "2", "3", "4", "5") if name == "y" else ())


def test_a_model_that_is_given_one_tensor_knows_it_by_name() -> None:
    _, (found,) = train(Net(), [(torch.rand(6, 3, 8, 8),)], lambda w: w.embeddings("encoder", thumbnails="x"))
    assert found["encoder"].thumbnails is not None


def test_large_thumbnails_are_made_small() -> None:
    batch = torch.rand(2, 3, 100, 70)
    _, (found,) = train(Net(), [(batch,)], lambda w: w.embeddings("encoder", thumbnails=lambda: batch))
    assert found["encoder"].thumbnails is not None
    assert found["encoder"].thumbnails.shape == (2, 25, 18, 3)


def test_labels_that_do_not_fit_the_batch_are_reported_and_not_shown() -> None:
    w, (found,) = train(Net(), [(torch.randn(5, 4),)], lambda w: w.embeddings("encoder", labels=["a", "b"]))
    assert found["encoder"].labels == ()
    assert any("got 2 labels for a batch of 5 samples" in message for message in w.stats.messages)


def test_a_call_for_labels_that_fails_costs_the_labels_alone() -> None:
    def labels() -> Any:
        raise KeyError("y")

    w, (found,) = train(Net(), [(torch.randn(5, 4),)], lambda w: w.embeddings("encoder", labels=labels))
    assert len(found["encoder"].points) == 5
    assert any("labels of embeddings" in message for message in w.stats.messages)


def test_entries_are_made_at_powers_of_two_or_every_so_many_logged_steps() -> None:
    batches = [(torch.randn(2, 4),)] * 18
    for every, wanted in ((None, [0, 1, 2, 4, 8, 16]), (7, [0, 7, 14])):
        _, steps = train(Net(), batches, lambda w, every=every: w.embeddings("encoder", every=every))
        assert [i for i, found in enumerate(steps) if found] == wanted
        assert [len(found["encoder"].points) for found in steps if found] == [
            2 * (step - before) for before, step in zip([-1, *wanted], wanted, strict=False)
        ]


def test_at_most_so_many_points_are_kept_and_taken() -> None:
    batches = [(torch.randn(300, 4),)] * 3
    _, steps = train(Net(), batches, lambda w: w.embeddings("encoder", most=20, every=2))
    assert [len(found["encoder"].points) for found in steps if found] == [20, 20]
    _, steps = train(Net(), batches, lambda w: w.embeddings("encoder", every=1))
    assert [len(found["encoder"].points) for found in steps] == [256] * 3


@pytest.mark.parametrize("when", ["before", "between"])
def test_points_of_rollouts_leave_room_for_those_of_training_and_are_not_piled_up(when: str) -> None:
    model, most = Net(), 8
    kept, seen = tbhooks.MemorySink(), []
    watching = tbhooks.watch(model, kept, every=1).embeddings("encoder", every=1, most=most)
    (gathering,) = watching._session.observer.collectors._all

    def roll_out() -> None:
        for _ in range(9):
            with torch.no_grad():
                model(torch.randn(5, 4) + 100)
            waiting = gathering._collected["encoder"].values()
            seen.append(sum(len(rows.points) for several in waiting for rows in several))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if when == "before":
        roll_out()
    loss = model(torch.randn(6, 4))
    points = model.last.detach().double().numpy()
    if when == "between":
        roll_out()
    loss.backward()
    optimizer.step()
    watching.close()
    (frame,) = kept.frames
    np.testing.assert_array_equal(embeddings_of(frame)["encoder"].points, points)
    assert max(seen) <= 2 * most


def test_every_point_is_as_likely_to_stay() -> None:
    stayed = np.zeros(200)
    reservoir = Reservoir(20)
    for _ in range(400):
        for start in range(0, 200, 50):
            reservoir.offer(np.arange(start, start + 50.0)[:, None], None, None)
        found = reservoir.embedding("x")
        assert found is not None
        stayed[found.points[:, 0].astype(int)] += 1
        reservoir.clear()
    assert stayed.sum() == 400 * 20
    assert abs(stayed - 40).max() < 6 * np.sqrt(40 * 0.9)


def test_points_that_are_not_finite_are_left_out_and_reported() -> None:
    batch = torch.randn(5, 4)
    batch[2, 0] = torch.nan
    w, (found,) = train(Net(), [(batch,)], lambda w: w.embeddings("encoder", labels=list("abcde")), rules=())
    assert found["encoder"].labels == ("a", "b", "d", "e")
    assert any("NaN or Inf" in message for message in w.stats.messages)


def test_a_wide_layer_keeps_fewer_points() -> None:
    reservoir = Reservoir(1000)
    reservoir.offer(np.zeros((100, 1 << 15)), None, None)
    found = reservoir.embedding("x")
    assert found is not None
    assert len(found.points) == 32


def test_outputs_that_are_no_points_are_reported() -> None:
    w, (found,) = train(Net(lambda h: h.long()), [(torch.randn(5, 4),)], lambda w: w.embeddings("encoder"))
    assert not found
    assert "int64" in w.stats.unseen["embeddings/encoder"]


def test_labels_are_one_line_each() -> None:
    hostile = ["a\tb", "c\nd\r", "\u2028", "", " ", "x" * 900, 0.1234567891, np.int64(3), None, "<script>", "\ud800"]
    lines = texts(hostile)
    assert len(lines) == len(hostile)
    assert not any(letter in line for line in lines for letter in "\t\n\r\u2028")
    assert lines[:2] == ["a b", "c d"]
    assert lines[2:5] == ["(none)"] * 3
    assert len(lines[5]) == 200
    assert lines[6:10] == ["0.123457", "3", "None", "<script>"]


def test_nobody_elses_random_numbers_are_touched_and_runs_are_alike() -> None:
    def run() -> Any:
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        batches = [(torch.randn(50, 4),) for _ in range(5)]
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        model = Net()
        state = torch.get_rng_state()
        _, steps = train(model, batches, lambda w: w.embeddings("encoder", most=10, every=2))
        assert torch.equal(torch.get_rng_state(), state)
        assert (np.random.get_state()[1] == before[1]).all()
        assert random.getstate() == before[2]
        return [found["encoder"].points for found in steps if found]

    for one, other in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_training_is_the_same_to_the_bit() -> None:
    case = zoo.ZOO["cnn"]
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> None:
        made.append(tbhooks.watch(model, every=1).embeddings("*", thumbnails="input"))

    assert zoo.train(case, 3, before=before) == zoo.train(case, 3)
    made[0].close()
    assert not made[0].stats.errors, made[0].stats.messages


def test_on_a_device_points_ride_in_the_one_copy() -> None:
    kept = tbhooks.MemorySink()

    def begin(model: nn.Module) -> tbhooks.Watch:
        labels = fake_device.put(torch.arange(len(zoo.ZOO["cnn"].batch()[0])))
        watching = tbhooks.watch(model, kept, every=2)
        return watching.embeddings("10", labels=lambda: labels, thumbnails="input", every=1)

    assert zoo.copies_on_device(zoo.ZOO["cnn"], begin) == [1, 1, 2, 2, 3]
    for frame in kept.frames:
        found = embeddings_of(frame)["10"]
        assert found.labels == tuple(str(i) for i in range(len(found.points)))
        assert found.thumbnails is not None


def test_compiled_models_give_the_same_points() -> None:
    torch.compiler.reset()  # a model alike may have been compiled without hooks
    torch.manual_seed(0)
    model, kept, batch = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), tbhooks.MemorySink(), torch.randn(5, 4)
    output = model[0](batch).detach().double().numpy()
    w = tbhooks.watch(model, kept, every=1).embeddings("0")
    torch.compile(model, backend="aot_eager")(batch).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    w.close()
    np.testing.assert_array_equal(embeddings_of(kept.frames[0])["0"].points, output)


def test_several_collectors_of_one_layer_all_get_it() -> None:
    def ask(w: tbhooks.Watch) -> None:
        w.images("encoder.linear").per_channel("encoder.linear").embeddings("encoder.linear").images()

    model, kept = Net(), tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=1)
    ask(w)
    model(torch.randn(5, 4)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    w.close()
    kinds = [type(shown).__name__ for shown in kept.frames[0].artifacts]
    assert kinds == ["Picture", "Channels", "Channels", "Embedding", "Picture"]


def test_a_run_that_is_elsewhere_than_in_a_directory_gets_none_and_a_message() -> None:
    class Remote(tbhooks.MemorySink):
        destination = "s3://bucket/run"

        def flush_before_close(self, flush: Callable[[], None]) -> None: ...

    model = Net()
    with tbhooks.watch(model, Remote()) as w:
        w.embeddings("encoder")
        assert any("s3://bucket/run gets none" in message for message in w.stats.messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "encodr"}, "did you mean 'encoder'"),
        ({"pattern": "encoder", "labels": "z"}, "labels='z' is not an argument of the model's forward"),
        ({"pattern": "encoder", "labels": 3}, "labels must be a function without arguments"),
        ({"pattern": "encoder", "thumbnails": 3.0}, "thumbnails must be a function"),
        ({"pattern": "encoder", "most": 0}, "most must be an integer"),
        ({"pattern": "encoder", "every": -1}, "every must be an integer"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(arguments: dict[str, Any], message: str) -> None:
    model = Net()
    with tbhooks.watch(model) as w, pytest.raises(tbhooks.ArgumentError, match=message):
        w.embeddings(**arguments)


def test_thumbnails_of_another_shape_are_refused() -> None:
    with pytest.raises(tbhooks.ArgumentError, match="thumbnails must be"):
        collector._small(torch.zeros(2, 5, 8, 8), 2)


def test_an_argument_that_is_not_given_again_leaves_no_labels_behind() -> None:
    labels = torch.tensor([7, 8])
    batches = [(torch.randn(2, 4), labels), (torch.randn(2, 4),)]
    _, found = train(Net(), batches, lambda w: w.embeddings("encoder", labels="y", every=1))
    assert [shown["encoder"].labels for shown in found] == [("7", "8"), ()]


def test_nor_does_it_in_the_next_micro_batch_of_the_step() -> None:
    model, kept = Net(), tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=1).embeddings("encoder", labels="y")
    (model(torch.randn(2, 4), torch.tensor([7, 8])) + model(torch.randn(2, 4))).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    w.close()
    assert embeddings_of(kept.frames[0])["encoder"].labels == ("7", "8", "(none)", "(none)")


def test_arrays_that_are_filled_anew_for_each_batch_are_read_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, may_read = np.zeros(2, dtype=np.int64), threading.Event()

    def read_late(given: Any) -> list[str]:
        may_read.wait(10)
        return texts(given)

    def filled() -> np.ndarray[Any, Any]:
        labels[:] += 1
        return labels

    monkeypatch.setattr(collector, "texts", read_late)
    model, kept = Net(), tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=1).embeddings("encoder", labels=filled, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).backward()
        optimizer.step()
    may_read.set()
    w.close()
    assert [embeddings_of(frame)["encoder"].labels for frame in kept.frames] == [("1", "1"), ("2", "2"), ("3", "3")]


@pytest.mark.parametrize("make", [torch.rand, np.random.default_rng(0).random], ids=["tensors", "arrays"])
def test_thumbnails_may_be_a_list(make: Callable[[Any], Any]) -> None:
    pictures = [make((3, 24, 24)) for _ in range(2)]
    _, found = train(Net(), [(torch.randn(2, 4),)], lambda w: w.embeddings("encoder", thumbnails=pictures))
    assert found[0]["encoder"].thumbnails is not None
    assert found[0]["encoder"].thumbnails.shape == (2, 24, 24, 3)


def test_an_argument_that_has_no_labels_costs_the_labels_alone() -> None:
    w, found = train(Net(), [(torch.randn(2, 4), torch.tensor(1))], lambda w: w.embeddings("encoder", labels="y"))
    assert len(found[0]["encoder"].points) == 2
    assert w.stats.errors == 1
