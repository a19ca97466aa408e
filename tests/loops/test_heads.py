"""Largest logit, entropy and weight of the first key of every attention head, against float64 NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tbhooks
from tbhooks import runs
from tbhooks.capture.functional import attention
from tests.support import compiling, fake_device, zoo
from tests.support.slow import slow

HEADS, WIDTH, LENGTH = 4, 8, 10
KINDS = ("activation", "functional")


class Attention(nn.Module):
    """Causal attention with four heads, as a fused operation or as a softmax; two key heads if it is grouped."""

    def __init__(self, fused: bool = True, key_heads: int = HEADS) -> None:
        super().__init__()
        self.fused, self.key_heads = fused, key_heads
        self.query = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.key, self.value = (nn.Linear(HEADS * WIDTH, key_heads * WIDTH) for _ in range(2))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return 4 * query, key, value

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        if self.fused:
            grouped = self.key_heads != HEADS
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        else:
            logits = query @ key.mT / WIDTH**0.5
            logits = logits.masked_fill(torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1), -torch.inf)
            output = torch.softmax(logits, -1) @ value
        return x + output.transpose(1, 2).flatten(-2)


def net(fused: bool, key_heads: int = HEADS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(fused, key_heads), Attention(fused, key_heads))


def expected(layer: Attention, inputs: list[Tensor]) -> dict[str, np.ndarray]:
    """Of all queries of these inputs, which the attention was called with."""
    logits, entropies, first = [], [], []
    with torch.no_grad():
        pairs = [layer.split(x)[:2] for x in inputs]
    for query, key in pairs:
        q, k = query.double().numpy(), np.repeat(key.double().numpy(), HEADS // key.shape[1], 1)
        scores = q @ k.swapaxes(-1, -2) / WIDTH**0.5
        scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        logs = np.log(np.where(weights > 0, weights, 1))
        logits.append(scores.max((0, 2, 3)))
        entropies.append(-(weights * logs).sum(-1).swapaxes(0, 1).reshape(HEADS, -1))
        first.append(weights[..., 0].swapaxes(0, 1).reshape(HEADS, -1))
    return {
        "max_logit": np.max(logits, axis=0),
        "entropy": np.concatenate(entropies, 1).mean(1),
        "first_token": np.concatenate(first, 1).mean(1),
    }


def check(frame: tbhooks.Frame, model: nn.Sequential, inputs: list[Tensor], rtol: float = 2e-5) -> None:
    name = "scaled_dot_product_attention" if model[0].fused else "softmax"
    for path, layer in (("0", model[0]), ("1", model[1])):
        reading, numbers = frame[f"{path}:{name}", "functional"], expected(layer, inputs)
        assert set(reading.vectors) == set(numbers)
        for stat, vector in numbers.items():
            np.testing.assert_allclose(reading.vectors[stat], vector, rtol=rtol, err_msg=f"{stat} of {path}")
        assert reading.first_token == pytest.approx(numbers["first_token"].mean(), rel=rtol)
        with torch.no_grad():
            inputs = [layer(x) for x in inputs]


def train(model: nn.Module, inputs: list[Tensor], called: Any = None, **options: Any) -> tbhooks.Watch:
    w = tbhooks.watch(model, options.pop("writer", None), every=1, kinds=KINDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for x in inputs:
        (model if called is None else called)(x).square().mean().backward()
    optimizer.step()
    w.close()
    assert not w.stats.errors, w.stats.messages
    return w


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_heads_of_all_micro_batches(fused: bool, key_heads: int) -> None:
    if not fused and key_heads != HEADS:
        pytest.skip("a softmax over grouped keys repeats them")
    model, inputs = net(fused, key_heads), [torch.randn(3, LENGTH, 32), torch.randn(1, 7, 32)]
    check(train(model, inputs).latest, model, inputs)


@pytest.mark.parametrize(
    ("fused", "backend"),
    [
        (True, "aot_eager"),
        (False, "eager"),
        pytest.param(False, "aot_eager", marks=slow("another pair of a kind of attention and a backend")),
        pytest.param(True, "eager", marks=slow("another pair of a kind of attention and a backend")),
    ],
)
def test_heads_inside_compiled_graphs(fused: bool, backend: str) -> None:
    compiling.reset()
    model, inputs = net(fused), [torch.randn(3, LENGTH, 32), torch.randn(2, LENGTH, 32)]
    w = train(model, inputs, torch.compile(model, backend=backend, fullgraph=True, dynamic=False))
    check(w.latest, model, inputs)
    assert "only attention" in w.stats.unseen["functional"]


def test_heads_in_a_graph_of_any_length() -> None:
    compiling.reset()
    model, inputs = net(True), [torch.randn(2, length, 32) for length in (6, 9, 12)]
    w = train(model, inputs, torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True))
    check(w.latest, model, inputs)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_training_is_the_same_to_the_bit(backend: str | None) -> None:
    compiling.reset()

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        called = model if backend is None else torch.compile(model, backend=backend)
        return called(*batch).square().mean()

    case = zoo.Case("heads", lambda: net(True), lambda: (torch.randn(2, LENGTH, 32),), loss)
    made: list[tbhooks.Watch] = []
    watched = zoo.train(case, 3, before=lambda model: made.append(tbhooks.watch(model, every=1, kinds=KINDS)))
    made[0].close()
    compiling.reset()
    assert watched == zoo.train(case, 3)


class Flex(nn.Module):
    """FlexAttention with a bias by distance. A CPU has no backward of it, so that its inputs need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        with torch.no_grad():
            query = self.query(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

        def by_distance(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + self.slopes[h] * (j - i)

        output = flex_attention(query, query[:, :2], query[:, :2], by_distance, mask, enable_gqa=True)
        return self.out(output.transpose(1, 2).flatten(-2))


class Around(nn.Module):
    """Hooks of the compiled module itself run outside of its graph: only attention of its submodules is read."""

    def __init__(self) -> None:
        super().__init__()
        self.flex = Flex()

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return self.flex(x, mask).unflatten(-1, (HEADS, WIDTH))


@pytest.mark.parametrize("most", [1 << 22, 300])
def test_flex_attention_inside_compiled_graphs(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.reset()
    monkeypatch.setattr(attention, "MOST_LOGITS", most)
    torch.manual_seed(0)
    model, x, i = Around(), torch.randn(2, 16, 32), np.arange(16)
    mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, 16, 16, device="cpu")
    w = tbhooks.watch(model, every=1, kinds=KINDS)
    torch.compile(model, backend="aot_eager", fullgraph=True)(x, mask).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    w.close()
    assert not w.stats.errors, w.stats.messages
    q = model.flex.query(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2).detach().double().numpy()
    bias = model.flex.slopes.double().numpy()[:, None, None] * (i[None] - i[:, None])
    scores = q @ np.repeat(q[:, :2], 2, 1).swapaxes(-1, -2) / WIDTH**0.5 + bias
    scores[..., i[:, None] < i[None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    vectors = w.latest["flex:flex_attention", "functional"].vectors
    np.testing.assert_allclose(vectors["max_logit"], scores.max((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(vectors["first_token"], weights[..., 0].mean((0, 2)), rtol=1e-5)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    np.testing.assert_allclose(vectors["entropy"], entropy.mean((0, 2)), rtol=1e-5)


def test_attention_of_the_compiled_module_itself_is_reported_as_unseen() -> None:
    compiling.reset()
    model, x = Attention(), torch.randn(2, LENGTH, 32)
    w = train(model, [x], torch.compile(model, backend="aot_eager", fullgraph=True))
    assert {site.name for site in w.latest.sites} == {"query", "key", "value", "(root)"}
    assert "in submodules of the module that was compiled" in w.stats.unseen["functional"]


def test_no_mode_is_left_when_a_graph_ends_by_an_exception() -> None:
    compiling.reset()

    class Raises(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            return fail(x) if self.fails else x

    @torch.compiler.allow_in_graph
    def fail(x: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise RuntimeError("out of memory")
        return x + 1

    model = nn.Sequential(Attention(), Raises())
    w = tbhooks.watch(model, every=1, kinds=KINDS)
    model[1].fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.compile(model, backend="eager")(torch.randn(2, LENGTH, 32))
    w.close()
    assert torch._C._len_torch_function_stack() == 0


def test_multihead_attention_that_returns_its_weights_has_heads() -> None:
    model = nn.MultiheadAttention(32, HEADS, batch_first=True)
    w = tbhooks.watch(model, every=1, kinds=KINDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(3, LENGTH, 32)
    _, weights = model(x, x, x, average_attn_weights=False)
    weights.square().mean().backward()
    optimizer.step()
    w.close()
    reading = w.latest["(root):softmax", "functional"]
    share = weights.detach().double().numpy()
    np.testing.assert_allclose(reading.vectors["first_token"], share[..., 0].mean((0, 2)), rtol=1e-5)
    entropy = -(share * np.log(share)).sum(-1).mean((0, 2))
    np.testing.assert_allclose(reading.vectors["entropy"], entropy, rtol=1e-5)


def test_a_run_that_is_read_back_has_the_heads(tmp_path: Path) -> None:
    model, inputs = net(True), [torch.randn(2, LENGTH, 32)]
    w = train(model, inputs, writer=tmp_path)
    read = runs.read(tmp_path)
    assert not read.problems
    for tag, vector in w.latest.vectors.items():
        np.testing.assert_allclose(read.frames[0].vectors[tag], vector, rtol=1e-6)
    heads = [site for site in read.channels[0].sites if site.kind == "channel.heads"]
    assert [site.index for site in heads[:HEADS]] == [f"[head {i}]" for i in range(HEADS)]
    assert len(heads) == 2 * 3 * HEADS


def test_forwards_without_a_backward_are_left_out() -> None:
    model, x = net(True), torch.randn(2, LENGTH, 32)
    w = tbhooks.watch(model, every=1, kinds=KINDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model(torch.randn(2, 5, 32))
    model(torch.randn(2, 6, 32))
    model(x).sum().backward()
    optimizer.step()
    w.close()
    check(w.latest, model, [x])


def test_on_a_device_nothing_waits_and_there_is_one_copy() -> None:
    model = fake_device.to_device(net(True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1, kinds=KINDS) as w:
        for _ in range(2):
            with fake_device.Log() as record:
                model(fake_device.put(torch.randn(2, LENGTH, 32))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert not w.stats.errors, w.stats.messages
    assert record.syncs == 0
    assert len(record.copies) == 1
