"""`per_channel()`: numbers of each channel and head against float64 references, stored, served and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks import runs
from tbhooks.collectors import channels as collector
from tbhooks.data import stats
from tbhooks.data.artifacts import Channels
from tbhooks.data.frame import Site
from tbhooks.reduction import channel_rows, cpu
from tests.support import fake_device, frames, images, reference, zoo


class Net(nn.Module):
    """Keeps what its layers returned."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.up = nn.ConvTranspose2d(5, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 6)
        self.function = function
        self.kept: dict[str, list[Any]] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.keep("conv", self.conv(self.function(x)))
        h = self.keep("norm", self.norm(self.keep("up", self.up(h))))
        return self.keep("linear", self.linear(h.mean((2, 3))))

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        self.kept.setdefault(name, []).append(tensor.detach().clone())
        return tensor


def train(
    model: nn.Module, batches: Any, ask: Callable[[tbhooks.Watch], Any], writer: Any = None, **options: Any
) -> tuple[tbhooks.Watch, list[dict[str, Channels]]]:
    """One step a list of batches, which are accumulated."""
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept if writer is None else [writer, kept], every=1, **options)
    ask(w)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches:
        optimizer.zero_grad()
        for batch in step:
            model(batch).square().mean().backward()
        optimizer.step()
    w.close()
    assert not w.stats.errors, w.stats.messages
    return w, [channels_of(frame) for frame in kept.frames]


def channels_of(frame: tbhooks.Frame) -> dict[str, Channels]:
    return {shown.kind: shown for shown in frame.artifacts if isinstance(shown, Channels)}


def wanted(data: dict[tuple[str, str], Any], step: int = 0) -> tbhooks.Frame:
    """What the channels would be if each were a tensor of its own."""
    return frames.make_frame(step, {Site(path, "activation", index): array for (path, index), array in data.items()})


def check_rows(found: Any, expected: Any, rtol: float, atol: float) -> None:
    """Higher moments feel the rounded mean of numbers far from zero more; cubes are as exact as fourth powers."""
    higher = [stats.M3, stats.M4]
    np.testing.assert_allclose(np.delete(found, higher, 1), np.delete(expected, higher, 1), rtol=rtol, atol=atol)
    fourths = expected[:, stats.M4]
    np.testing.assert_allclose(found[:, stats.M4], fourths, rtol=10 * rtol, atol=atol)
    assert (np.abs(found[:, stats.M3] - expected[:, stats.M3]) <= 100 * rtol * fourths**0.75 + atol).all()


def check(found: Channels, data: dict[tuple[str, str], Any]) -> None:
    reference_frame = wanted(data)
    assert found.names == tuple(data)
    check_rows(found.values, reference_frame.values, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(found.counts, reference_frame.buckets)


def by_channel(name: str, tensors: list[Tensor], dim: int) -> dict[tuple[str, str], Any]:
    moved = [tensor.double().numpy() for tensor in tensors]
    return {
        (name, f"[{i}]"): np.concatenate([array.take(i, axis=dim).ravel() for array in moved])
        for i in range(moved[0].shape[dim])
    }


def test_each_channel_is_reduced_as_if_it_were_alone() -> None:
    torch.manual_seed(0)
    model = Net()
    weights = {name: getattr(model, name).weight.detach().clone() for name in ("conv", "up", "linear")}
    _, (found,) = train(model, [[torch.randn(2, 3, 8, 8)]], lambda w: w.per_channel("*"))
    outputs: dict[tuple[str, str], Any] = {}
    for name, dim in (("conv", 1), ("up", 1), ("norm", 1), ("linear", 1)):
        outputs |= by_channel(name, model.kept[name], dim)
    check(found["activation"], outputs)
    kernels: dict[tuple[str, str], Any] = {}
    for name, dim in (("conv", 0), ("up", 1), ("linear", 0)):
        kernels |= by_channel(f"{name}.weight", [weights[name]], dim)
    check(found["weight"], kernels)


def test_calls_of_one_step_are_merged() -> None:
    torch.manual_seed(0)
    model = Net()
    batches = [[torch.randn(n, 3, 8, 8) for n in (2, 1, 4)]]
    _, (found,) = train(model, batches, lambda w: w.per_channel(["conv", "linear"], kinds="activation"))
    assert set(found) == {"activation"}
    check(
        found["activation"], by_channel("conv", model.kept["conv"], 1) | by_channel("linear", model.kept["linear"], 1)
    )


AWKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "far from zero": lambda x: x * 1e-3 + 3e4,
    "not finite": lambda x: x.masked_fill(x > 1.5, torch.inf).masked_fill(x < -1.5, torch.nan),
    "zeros": lambda x: x.clamp(min=0),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "tiny": lambda x: x * 1e-30,
}
FORMATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", AWKWARD)
def test_numbers_of_any_kind_are_those_of_the_reference(
    name: str, dtype: torch.dtype, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_kernel:
        monkeypatch.setattr(cpu, "library", None)
        monkeypatch.setattr(channel_rows, "PART", 100)
    torch.manual_seed(0)
    tensor = AWKWARD[name](torch.randn(3, 4, 5, 6)).to(dtype)
    sums = channel_rows.Sums(4)
    channel_rows.reduce_channels(tensor.movedim(1, 0).reshape(4, -1), sums, with_buckets=True)
    riding = {id(piece): piece.numbers.numpy() for piece in sums.pieces}
    pieces: Any = [(id(piece), piece.size, piece.finished) for piece in sums.pieces]
    rows = collector._merged(4, pieces, riding.__getitem__)  # type: ignore[arg-type]
    reference_frame = wanted(by_channel("x", [tensor], 1))
    check_rows(rows, reference_frame.values, rtol=1e-9, atol=1e-300)
    assert sums.counts is not None
    np.testing.assert_array_equal(sums.counts.numpy()[:, : reference.BUCKETS], reference_frame.buckets)


def test_histograms_come_with_the_steps_that_take_them() -> None:
    _, steps = train(Net(), [[torch.randn(1, 3, 8, 8)]] * 4, lambda w: w.per_channel("conv"), histograms=3)
    assert [found["activation"].counts.shape for found in steps] == [(5, 385), (5, 0), (5, 0), (5, 385)]


class Attention(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        output, self.weights = self.attention(x, x, x, **self.how)
        return output


def test_heads_of_attention_are_seen_in_the_weights_it_returns() -> None:
    torch.manual_seed(0)
    model = Attention(average_attn_weights=False)
    projection = model.attention.in_proj_weight.detach().clone().double().numpy()
    _, (found,) = train(model, [[torch.randn(3, 5, 8)]], lambda w: w.per_channel("attention"))
    weights = model.weights.detach().double().numpy()
    check(found["activation"], {("attention[1]", f"[head {i}]"): weights[:, i].ravel() for i in range(2)})
    parts = projection.reshape(3, 2, 4, 8)
    check(found["weight"], {("attention.in_proj_weight", f"[head {i}]"): parts[:, i].ravel() for i in range(2)})


def test_heads_that_nobody_returns_are_reported() -> None:
    w, (found,) = train(Attention(), [[torch.randn(3, 5, 8)]], lambda w: w.per_channel("attention"))
    assert "activation" not in found
    assert "average_attn_weights=False" in w.stats.unseen["per_channel/attention"]


def test_heads_are_seen_in_the_operations_of_attention() -> None:
    kinds = ("activation", "functional")
    batch = [[torch.randn(3, 5, 8)]]
    _, (found,) = train(Attention(), batch, lambda w: w.per_channel("attention", kinds="activation"), kinds=kinds)
    assert found["activation"].names == (("attention:softmax", "[head 0]"), ("attention:softmax", "[head 1]"))
    assert list(found["activation"].values[:, 0]) == [3 * 5 * 5] * 2


def test_heads_of_transformers_are_what_their_projection_is_given() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    gpt2 = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9, n_positions=8)
    for config, path in (
        (gpt2, "h.0.attn"),
        (transformers.LlamaConfig(num_key_value_heads=1, **sizes), "layers.0.self_attn"),
        (transformers.BertConfig(**sizes), "encoder.layer.0.attention.self"),
    ):
        model = transformers.AutoModel.from_config(config)
        kept = tbhooks.MemorySink()
        w = tbhooks.watch(model, kept, every=1).per_channel(path, kinds="activation")
        model(torch.arange(6)[None]).last_hidden_state.mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        w.close()
        found = channels_of(kept.frames[0])["activation"]
        ours = [row for row, (name, _) in zip(found.values, found.names, strict=True) if name in (path, f"{path}[0]")]
        assert [row[0] for row in ours] == [6 * 4] * 2, path


def test_integers_and_sparse_outputs_are_left_out_and_reported() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            h = super().forward(x)
            return h.mean(), {"ids": h.long(), "sparse": h.detach().to_sparse()}

    model = nn.Sequential(Odd(4, 4))
    w = tbhooks.watch(model, every=1).per_channel("0")
    loss, _ = model(torch.randn(2, 4))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    w.close()
    assert not w.stats.errors
    assert {"per_channel/0[1][ids]", "per_channel/0[1][sparse]"} <= set(w.stats.unseen)


def test_of_very_many_channels_the_first_are_taken_and_that_is_reported() -> None:
    w, (found,) = train(nn.Sequential(nn.Linear(4, 600)), [[torch.randn(2, 4)]], lambda w: w.per_channel("0"))
    assert len(found["activation"].names) == len(found["weight"].names) == 512
    assert "512 of 600" in w.stats.unseen["per_channel/0"]


def test_compiled_layers_are_seen_as_others() -> None:
    torch.compiler.reset()  # a model alike may have been compiled without hooks
    torch.manual_seed(0)
    model, kept, batch = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), tbhooks.MemorySink(), torch.randn(5, 4)
    output = model[0](batch).detach()
    w = tbhooks.watch(model, kept, every=1).per_channel("0")
    torch.compile(model, backend="aot_eager")(batch).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    w.close()
    check(channels_of(kept.frames[0])["activation"], by_channel("0", [output], 1))


def test_on_a_device_channels_ride_in_the_one_copy_and_are_the_same_numbers() -> None:
    def run(case: zoo.Case) -> list[tbhooks.Frame]:
        kept, made = tbhooks.MemorySink(), []

        def before(model: nn.Module) -> None:
            made.append((tbhooks.watch(model, kept, every=2).per_channel("*"), model))

        zoo.plain_loop(case, 5, before, lambda *_: counts.append(len(record.copies)))
        made[0][0].close()
        assert not made[0][0].stats.errors
        return kept.frames

    counts: list[int] = []
    case = zoo.ZOO["cnn"]
    with fake_device.Log() as record:
        there = run(zoo.moved(case, fake_device.to_device, fake_device.put))
        assert record.syncs == 0
    assert counts == [1, 1, 2, 2, 3]
    for device, host in zip(there, run(case), strict=True):
        for kind in ("activation", "weight"):
            one, other = channels_of(device)[kind], channels_of(host)[kind]
            assert one.names == other.names
            np.testing.assert_allclose(one.values, other.values, rtol=1e-9, atol=1e-12)
            np.testing.assert_array_equal(one.counts, other.counts)


def test_training_is_the_same_to_the_bit() -> None:
    case = zoo.ZOO["cnn"]
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> None:
        made.append(tbhooks.watch(model, every=1).per_channel("*"))

    assert zoo.train(case, 3, before=before) == zoo.train(case, 3)
    made[0].close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "covn"}, "did you mean 'conv'"),
        ({"pattern": nn.ReLU}, "matches no module of this model"),
        ({"pattern": "(root)"}, "no module with channels or heads"),
        ({"pattern": "conv", "kinds": "gradient"}, "unknown kind 'gradient'"),
        ({"pattern": "conv", "kinds": ()}, "takes kinds"),
        ({"pattern": "conv", "histograms": 3}, "histograms=True or False"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(arguments: dict[str, Any], message: str) -> None:
    model = Net()
    with tbhooks.watch(model) as w, pytest.raises(tbhooks.ArgumentError, match=message):
        w.per_channel(**arguments)


# --- On disk ----------------------------------------------------------------------------------------


def test_runs_give_channels_back_and_leave_frames_as_they_are(tmp_path: Path) -> None:
    def ask(w: tbhooks.Watch) -> None:
        w.per_channel("conv").per_channel(["conv", "linear"])  # one asked for twice is stored once

    _, steps = train(Net(), [[torch.randn(2, 3, 8, 8)]] * 3, ask, tmp_path)
    run = runs.read(tmp_path)
    assert not run.problems
    assert [frame.step for frame in run.channels] == [0, 1, 2]
    assert not [site for frame in run.frames for site in frame.sites if "channel" in site.kind]
    for found, stored in zip(steps, run.channels, strict=True):
        rows = {site.name: i for i, site in enumerate(stored.sites) if site.kind == "channel.activation"}
        assert list(rows) == [f"conv[{i}]" for i in range(5)] + [f"linear[{i}]" for i in range(6)]
        chosen = [rows[path + index] for path, index in found["activation"].names]
        np.testing.assert_allclose(stored.values[chosen], found["activation"].values, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(stored.buckets[chosen], found["activation"].counts)


def test_ordinary_histograms_are_written_on_request(tmp_path: Path) -> None:
    def twice(w: tbhooks.Watch) -> None:
        w.per_channel("conv", histograms=True).per_channel("conv", histograms=True)

    train(Net(), [[torch.randn(2, 3, 8, 8)]], twice, tmp_path / "with")
    train(Net(), [[torch.randn(2, 3, 8, 8)]], lambda w: w.per_channel("conv"), tmp_path / "without")
    tags = {
        name: [value.tag for _, value in images.values(tmp_path / name) if value.HasField("histo")]
        for name in ("with", "without")
    }
    more = [f"activation/conv[{i}]" for i in range(5)] + [f"weight/conv.weight[{i}]" for i in range(5)]
    assert sorted(tags["with"]) == sorted(tags["without"] + more)


def test_heads_that_did_not_run_are_not_listed_as_unseen() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, average_attn_weights=False)[0]

    model = Attends()
    w = tbhooks.watch(model, every=1).per_channel("inner")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with w.paused():
        model(torch.randn(2, 3, 4)).sum().backward()
        optimizer.step()
    model(torch.randn(2, 3, 4)).sum().backward()
    optimizer.step()
    w.close()
    assert "per_channel/inner" not in w.stats.unseen


def launches_of_a_logged_step(*, asked: bool) -> int:
    torch.manual_seed(0)
    model = fake_device.to_device(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1) as w, fake_device.Log() as record:
        if asked:
            w.per_channel("0", kinds="activation")
        model(fake_device.put(torch.randn(16, 1, 8, 8))).sum().backward()
        optimizer.step()
        return sum(record.launches.values())


def test_a_layer_takes_thirty_launches_whatever_its_channels() -> None:
    launches_of_a_logged_step(asked=True)  # tables are made once
    more = launches_of_a_logged_step(asked=True) - launches_of_a_logged_step(asked=False)
    assert 0 < more <= 30
