"""`w.summary()`: the layers of a model in words and numbers, before and after a pass has been seen."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.data.artifacts import Text
from tbhooks.drawing import model_table
from tbhooks.drawing.model_table import Layer, Layers
from tests.support import fake_device, zoo
from tests.support.slow import cases


class Model(nn.Module):
    """Layers that run in another order than they are made in; one is frozen, one is called twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2, bias=False)
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.twice = nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).mean(1).flatten(1)[:, :8]
        return self.last(self.twice(self.twice(x))) * self.scale


def train(model: nn.Module, *batches: Tensor, **options: Any) -> tuple[tbhooks.Watch, Any, tbhooks.MemorySink]:
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=1, **options)
    view = w.summary()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    return w, view, kept


def texts(kept: tbhooks.MemorySink) -> list[Text]:
    return [artifact for frame in kept.frames for artifact in frame.artifacts if isinstance(artifact, Text)]


# Counted by hand.
OWN = {"first": 2 * 9 + 2, "twice": 8 * 8 + 8, "last": 16, "never": 12, "(root)": 2}
TRAINABLE = {**OWN, "first": 0, "(root)": 0}


def test_before_a_pass_it_knows_parameters_and_no_shapes() -> None:
    model = Model()
    with tbhooks.watch(model, every=1) as w:
        layers = w.summary().layers
    assert {layer.path: layer.parameters for layer in layers.layers} == OWN
    assert {layer.path: layer.trainable for layer in layers.layers} == TRAINABLE
    assert not any(layer.shapes or layer.dtype or layer.calls for layer in layers.layers)
    assert layers.parameters == sum(OWN.values()) == sum(p.numel() for p in Model().parameters())
    assert layers.parameter_bytes == 4 * sum(OWN.values())
    assert "next logged pass" in model_table.as_text(layers)


def test_a_pass_fills_in_what_layers_put_out_in_the_order_they_ran() -> None:
    _, view, kept = train(Model(), torch.ones(5, 1, 4, 4), torch.ones(3, 1, 4, 4))
    layers = view.layers
    assert [layer.path for layer in layers.layers] == ["first", "twice", "last", "(root)", "never"]
    by_path = {layer.path: layer for layer in layers.layers}
    assert by_path["first"].shapes == ((5, 2, 4, 4),)
    assert by_path["twice"].shapes == ((5, 8),)
    assert [layer.calls for layer in layers.layers] == [1, 2, 1, 1, 0]
    assert by_path["first"].dtype == "float32"
    assert layers.samples == 5
    assert [layer.nbytes / 5 for layer in layers.layers] == [4 * 2 * 16, 2 * 4 * 8, 4 * 2, 4 * 2, 0]
    assert layers.bytes_per_sample == 128 + 64 + 8 + 8
    (reported,) = texts(kept)
    assert reported.tag == "tbhooks/summary"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_after_training_it_has_the_outputs_without_another_pass(compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    called = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, every=2)
    for _ in range(3):
        called(torch.ones(5, 4)).sum().backward()
        optimizer.step()
    shown = str(w.summary())
    w.close()
    for shape in ("5x8", "5x2"):
        assert shape in shown, shown


def test_it_prints_as_a_table() -> None:
    _, view, _ = train(Model(), torch.ones(5, 1, 4, 4))
    assert str(view).splitlines() == [
        "Model",
        "",
        "layer   class   output         dtype    parameters  trainable  share  bytes/sample",
        "first   Conv2d  5x2x4x4        float32          20  no         16.4%         128 B",
        "twice   Linear  5x8 (2 calls)  float32          72  yes        59.0%          64 B",
        "last    Linear  5x2            float32          16  yes        13.1%           8 B",
        "(root)  Model   5x2            float32           2  no          1.6%           8 B",
        "never   Linear                                  12  yes         9.8%",
        "",
        "122 parameters (488 B): 100 trainable, 22 not",
        "outputs of these layers: 208 B a sample, in a pass of 5",
    ]
    assert repr(view) == "<Summary: Model, 5 layers, 122 parameters>"


def test_parameters_of_two_layers_are_counted_once() -> None:
    case = zoo.ZOO["tied_weights"]
    model = case.build()
    with tbhooks.watch(model, every=1) as w:
        layers = w.summary().layers
    by_path = {layer.path: layer for layer in layers.layers}
    assert (by_path["head"].parameters, by_path["head"].tied_to) == (0, "embed.weight")
    assert layers.parameters == sum(p.numel() for p in model.parameters())
    assert "tied to embed.weight" in str(model_table.as_text(layers))


@pytest.mark.parametrize(
    "name",
    cases(
        list(zoo.ZOO),
        always=zoo.FEW | {"tied_weights", "two_names", "never_called", "frozen", "mixtral"},
        reason="totals are added up in the same way for every model",
    ),
)
def test_totals_of_every_model_are_right_and_it_trains_as_if_nobody_looked(name: str) -> None:
    case = zoo.ZOO[name]
    made: list[Any] = []

    def before(model: nn.Module) -> nn.Module:
        w = tbhooks.watch(model, every=100)
        made.append((model, w, w.summary()))
        return model

    trace = zoo.train(case, 2, before=before)
    ((model, w, view),) = made
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    assert view.layers.parameters == sum(p.numel() for p in model.parameters())
    assert view.layers.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert view.layers.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert view.layers.samples > 0
    assert any(layer.shapes for layer in view.layers.layers)
    assert trace == zoo.train(case, 2)
    assert str(view)


def test_micro_batches_and_later_steps_do_not_add_up() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    w = tbhooks.watch(model, every=1)
    view = w.summary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    w.close()
    assert [(layer.calls, layer.nbytes) for layer in view.layers.layers] == [(1, 32), (1, 32)]


def test_compiled_layers_are_described_too() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    w = tbhooks.watch(model, every=1)
    view = w.summary()
    called = torch.compile(model, backend="aot_eager")
    called(torch.ones(3, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    w.close()
    torch.compiler.reset()
    assert [layer.shapes for layer in view.layers.layers] == [((3, 4),), ((3, 4),), ((3, 2),)]


def test_on_a_device_it_costs_nothing() -> None:
    def counted(asked: bool) -> tuple[list[int], list[int], int]:
        made: list[Any] = []
        ops: list[int] = []
        copies: list[int] = []

        def before(model: nn.Module) -> None:
            w = tbhooks.watch(model, every=2)
            made.append((w, model, w.summary() if asked else None))

        with fake_device.Log() as record:
            zoo.plain_loop(
                zoo.moved(zoo.ZOO["mlp"], fake_device.to_device, fake_device.put), 4, before,
                lambda *_: (ops.append(record.launches.total()), copies.append(len(record.copies))),
            )  # fmt: skip
        made[0][0].close()
        return ops, copies, record.syncs

    counted(False)  # makes what is made once
    assert counted(True) == counted(False)
    assert counted(True)[1:] == ([1, 1, 2, 2], 0)


def test_it_is_the_same_table_however_often_it_is_asked_for() -> None:
    model = nn.Linear(4, 2)
    kept = tbhooks.MemorySink()
    with tbhooks.watch(model, kept, every=1) as w:
        first = w.summary()
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert str(w.summary()) == str(first)
    assert len(texts(kept)) == 1
    with pytest.raises(tbhooks.ClosedError):
        w.summary()
    assert "3x2" in str(first), "what is known stays known"


def test_after_the_pass_hooks_are_those_of_the_watch() -> None:
    def hooks(asked: bool) -> list[int]:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        with tbhooks.watch(model, every=1, include="0") as w:
            if asked:
                w.summary()
            counts = [zoo.hook_count(model)]
            model(torch.ones(3, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            return [*counts, zoo.hook_count(model)]

    asked, bare = hooks(True), hooks(False)
    assert asked[0] > bare[0]
    assert asked[1] == bare[1]


# --- As a notebook and TensorBoard show it --------------------------------------------------------

HOSTILE = '<script>alert("x")</script>|`*_\x1b[31m'


def made_up(count: int, name: str = "layer") -> Layers:
    layers = [Layer(f"{name}{i}", "Linear", ((2, 3),), "float32", 5, 5, "", 1, 24) for i in range(count)]
    return Layers(name, tuple(layers), 20 * count, 2)


class Known:
    def __init__(self, layers: Layers) -> None:
        self.layers = layers


def test_html_is_self_contained_and_escaped() -> None:
    bundle = model_table.Summary(Known(made_up(3, HOSTILE)))._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    html = bundle["text/html"]
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "\x1b" not in html + bundle["text/plain"]
    assert not re.search(r"https?://|url\(|@import", html)
    assert html.count("<tr>") == 4
    only = model_table.Summary(Known(made_up(3)))._repr_mimebundle_(include=["text/plain"])
    assert set(only) == {"text/plain"}


def test_long_tables_show_their_ends_and_text_all() -> None:
    view = model_table.Summary(Known(made_up(1000)))
    html = view._repr_mimebundle_()["text/html"]
    assert html.count("<tr>") == 2 * model_table.ENDS + 2
    assert "600 more" in html
    assert str(view).count("Linear") == 1000
    markdown = model_table.as_artifact(made_up(1000)).markdown
    assert markdown.count("Linear") == 2 * model_table.ENDS
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(model_table.COLUMNS) + 1}


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (2.5, "2.5 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_999, "1 MB"),
        (5e15, "5e+03 TB"),
    ],
)
def test_bytes_are_written_with_three_digits(count: float, words: str) -> None:
    assert model_table.in_bytes(count) == words
