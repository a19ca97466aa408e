"""`experts()`: tokens of each expert and what follows from them, against float64 NumPy over logits kept by the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks import runs
from tbhooks.collectors import experts
from tbhooks.data import stats
from tbhooks.data.artifacts.vectors import expert_rows
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tests.support import fake_device, moe_models, reference, zoo


def kept_logits(model: nn.Module, names: tuple[str, ...] = ("gate", "router")) -> dict[str, list[np.ndarray]]:
    """The first output of every router in each forward from now on, as float64."""
    kept: dict[str, list[np.ndarray]] = {}

    def keep(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            logits = output if isinstance(output, Tensor) else output[0]
            kept.setdefault(path, []).append(logits.detach().reshape(-1, logits.shape[-1]).numpy().astype(np.float64))

        return hook

    for path, module in model.named_modules():
        if path.rpartition(".")[2] in names:
            module.register_forward_hook(keep(path))
    return kept


def expected(logits: np.ndarray, top_k: int) -> dict[str, Any]:
    order = np.argsort(-logits, axis=1, kind="stable")
    counts = np.bincount(order[:, :top_k].ravel(), minlength=logits.shape[1]).astype(np.float64)
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = np.sort(exponents / exponents.sum(1, keepdims=True), axis=1)[:, ::-1]
    shares = counts / counts.sum()
    return {
        "tokens": counts,
        "entropy": -sum(share * np.log(share) for share in shares if share) / np.log(len(counts)),
        "max_load": counts.max() / counts.mean(),
        "dead_fraction": np.mean(counts == 0),
        "margin": np.mean(probabilities[:, top_k - 1] - probabilities[:, top_k]),
    }


def check(frame: Frame, path: str, logits: np.ndarray, top_k: int) -> None:
    reading, numbers = frame[path, "experts"], expected(logits, top_k)
    np.testing.assert_array_equal(reading.tokens, numbers.pop("tokens"))
    for name, number in numbers.items():
        assert getattr(reading, name) == pytest.approx(number, rel=1e-5), name
        assert frame.scalars[f"experts.{name}/{path}"] == getattr(reading, name)


def train(model: nn.Module, steps: Any, ask: Any = lambda w: w.experts(), writer: Any = None) -> tbhooks.Watch:
    """Each step is a list of batches, which are accumulated."""
    w = tbhooks.watch(model, writer, every=1, histograms=False)
    assert ask(w) is w
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batches in steps:
        for batch in batches:
            output = model(batch)
            (output if isinstance(output, Tensor) else output.logits).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    w.close()
    assert not w.stats.errors, w.stats.messages
    return w


def batches(*sizes: int) -> list[Tensor]:
    return [torch.randn(size, 8) for size in sizes]


# --- Routers are found -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", moe_models.TRANSFORMERS)
def test_routers_of_transformers_are_found_and_their_experts_counted(name: str) -> None:
    torch.manual_seed(0)
    model = moe_models.build(name)
    kept = kept_logits(model)
    chosen: dict[str, np.ndarray] = {}
    for path, module in model.named_modules():
        if path.endswith((".gate", ".router")):
            module.register_forward_hook(lambda _m, _a, out, path=path: chosen.update({path: out[2].numpy().copy()}))
    w = train(model, [[moe_models.tokens()]])
    assert w.latest.routers == tuple(kept)
    assert len(kept) == (1 if name.startswith("Deepseek") else 2)
    for path, (logits,) in kept.items():
        np.testing.assert_array_equal(
            w.latest[path, "experts"].tokens, np.bincount(chosen[path].ravel(), minlength=logits.shape[1])
        )
        if not name.startswith("Deepseek"):  # those choose among the experts of the best groups
            check(w.latest, path, logits, moe_models.TRANSFORMERS[name]["num_experts_per_tok"])


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.wg(x).softmax(-1).topk(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 8)) * weights.unsqueeze(-1)).sum(1)


def test_a_linear_layer_beside_a_list_of_experts_is_a_router_whatever_its_name() -> None:
    model = Listed()
    kept = kept_logits(model, ("wg",))
    w = train(model, [batches(32)])
    assert w.latest.routers == ("wg",)
    check(w.latest, "wg", kept["wg"][0], 1)
    assert w.stats.unseen["experts/wg"] == experts.NO_TOP_K


def test_models_without_experts_have_no_router() -> None:
    for case in zoo.ZOO.values():
        found = experts.find_routers(dict(case.build().named_modules()))
        assert bool(found) is (case.name == "mixtral"), case.name
    model = nn.Linear(2, 2)
    with tbhooks.watch(model, every=1) as w, pytest.raises(ArgumentError, match="no router"):
        w.experts()


def test_an_encoder_of_two_layers_with_two_classes_has_no_router() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    model.head = nn.Linear(8, 2)
    model.conv, model.wide = nn.Conv1d(8, 4, 3), nn.Linear(8, 4)
    assert experts.find_routers(dict(model.named_modules())) == {}


def test_arguments_are_checked() -> None:
    model = moe_models.Net()
    with tbhooks.watch(model, every=1) as w:
        with pytest.raises(ArgumentError, match="matches no module"):
            w.experts("gates.*")
        with pytest.raises(ArgumentError, match="top_k"):
            w.experts(top_k=0)
        w.experts()
        with pytest.raises(ArgumentError, match="called before"):
            w.experts()


# --- What a router may return --------------------------------------------------------------------------


def indices(logits: Tensor, top_k: int) -> Any:
    return logits, logits.topk(top_k).indices


RETURNED = {
    "logits": lambda logits, _: logits,
    "probabilities": lambda logits, _: logits.softmax(-1),
    "bfloat16": lambda logits, _: logits.to(torch.bfloat16).float(),
    "with indices": indices,
    "probabilities and logits": lambda logits, top_k: (logits, logits.softmax(-1), logits.topk(top_k).indices),
    "dict": lambda logits, top_k: (logits, {"chosen": logits.topk(top_k).indices.int()}),
}


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("top_k", [1, 3])
def test_whatever_a_router_returns_the_same_is_counted(name: str, top_k: int) -> None:
    torch.manual_seed(1)
    model = moe_models.Net(top_k=top_k, returned=RETURNED[name])
    kept = kept_logits(model)
    w = train(model, [batches(40)], lambda w: w.experts("layers.*.gate", top_k=top_k))
    for path, (logits,) in kept.items():
        check(w.latest, path, np.log(logits) if name == "probabilities" else logits, top_k)
        assert np.isnan(w.latest[path, "experts"].drop_rate)


def capacity_mask(logits: Tensor, _top_k: int, capacity: int = 5) -> Any:
    """As of Switch Transformers: tokens beyond the capacity of their expert are dropped."""
    mask = nn.functional.one_hot(logits.argmax(-1), logits.size(-1))
    return logits, mask * (mask.cumsum(0) <= capacity)


def test_tokens_beyond_the_capacity_are_the_drop_rate() -> None:
    torch.manual_seed(2)
    model = moe_models.Net(top_k=1, returned=capacity_mask)
    kept = kept_logits(model)
    w = train(model, [batches(40, 25)])
    for path, logits in kept.items():
        fitting = [np.minimum(expected(each, 1)["tokens"], 5) for each in logits]
        np.testing.assert_array_equal(w.latest[path, "experts"].tokens, sum(fitting))
        assert w.latest[path, "experts"].drop_rate == pytest.approx(1 - sum(fitting).sum() / 65)
        assert w.latest.scalars[f"experts.drop_rate/{path}"] > 0


def test_choices_that_differ_from_the_logits_are_read_where_the_experts_are_called() -> None:
    """A bias that only the choice uses, as DeepSeek-V3's."""

    class Biased(moe_models.Block):
        def forward(self, x: Tensor) -> Tensor:
            logits = self.gate(x)
            chosen = (logits + 9 * (torch.arange(6) < 2)).topk(2).indices
            return x + self.experts(x, chosen, logits.softmax(-1).gather(1, chosen))

    model = nn.Sequential(Biased())
    w = train(model, [batches(16)])
    np.testing.assert_array_equal(w.latest["0.gate", "experts"].tokens, [16, 16, 0, 0, 0, 0])


def test_indices_that_name_no_expert_are_not_counted() -> None:
    chosen = torch.tensor([[0, 4], [-1, 3], [7, 3]])
    assert experts.tokens_of_choices(chosen, 4).tolist() == [1, 0, 0, 2]


# --- Which forwards are counted, and how they are merged ----------------------------------------------------


def test_micro_batches_are_added_before_shares_are_computed() -> None:
    torch.manual_seed(3)
    model = moe_models.Net()
    kept = kept_logits(model)
    w = train(model, [batches(5, 60), batches(12, 3, 1)])
    for frame, taken in zip(w.history, (slice(0, 2), slice(2, 5)), strict=True):
        for path, logits in kept.items():
            check(frame, path, np.concatenate(logits[taken]), 2)


def test_evaluation_and_forwards_without_a_backward_are_left_out() -> None:
    torch.manual_seed(4)
    model = moe_models.Net()
    kept = kept_logits(model)
    with tbhooks.watch(model, every=1).experts() as w:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(2):
            with torch.no_grad():
                model(torch.randn(30, 8))
            model(torch.randn(20, 8))  # no backward goes through it
            model(torch.randn(10, 8)).sum().backward()
            optimizer.step()
            model.eval()
            model(torch.randn(50, 8))
            model.train()
            w.flush()
            check(w.history[step], "layers.1.gate", kept["layers.1.gate"][4 * step + 2], 2)


def test_the_numbers_are_the_same_in_a_compiled_graph() -> None:
    torch.manual_seed(5)
    model = moe_models.Net(returned=indices)
    kept: dict[str, list[np.ndarray]] = {}
    w = tbhooks.watch(model, every=1).experts()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    given = batches(40, 13)
    for batch in given:
        compiled(batch).square().mean().backward()
    optimizer.step()
    w.close()
    assert not w.stats.errors, w.stats.messages
    kept = kept_logits(model)
    for batch in given:
        model(batch)
    for path, logits in kept.items():
        check(w.latest, path, np.concatenate(logits), 2)


def launches(is_asked: bool) -> Iterator[Any]:
    torch.manual_seed(0)
    model = fake_device.to_device(moe_models.Net(returned=indices))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1) as w:
        if is_asked:
            w.experts()
        for _ in range(3):
            with fake_device.Log() as record:
                model(fake_device.put(torch.randn(16, 8))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            yield record


def test_on_a_device_nothing_waits_and_nothing_more_is_copied() -> None:
    *_, plain = launches(is_asked=False)
    *_, asked = launches(is_asked=True)
    assert asked.syncs == 0
    assert len(asked.copies) == len(plain.copies) == 1
    routers = 2
    assert 0 < sum(asked.launches.values()) - sum(plain.launches.values()) <= 26 * routers


@pytest.mark.parametrize("returned", [None, indices])
def test_training_is_the_same_to_the_bit(returned: Any) -> None:
    case = zoo.Case(
        "experts", lambda: moe_models.Net(returned=returned), lambda: (torch.randn(12, 8),),
        lambda model, batch: model(*batch).square().mean(),
    )  # fmt: skip
    made: list[tbhooks.Watch] = []
    watched = zoo.train(case, 3, before=lambda model: made.append(tbhooks.watch(model, every=1).experts()))
    made[0].close()
    assert watched == zoo.train(case, 3)


# --- What is written --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "/frames.jsonl"])
def test_a_run_that_is_read_back_has_the_same_numbers(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(6)
    model = moe_models.Net(top_k=1, returned=capacity_mask)
    writer = f"{tmp_path}/run{suffix}"
    w = train(model, [batches(40), batches(7)], writer=tbhooks.JsonlSink(writer) if suffix else writer)
    read = runs.read(tmp_path / "run")
    assert not read.problems
    for frame, stored in zip(w.history, read.frames, strict=True):
        assert stored.routers == frame.routers == ("layers.0.gate", "layers.1.gate")
        for path in frame.routers:
            one, other = frame[path, "experts"], stored[path, "experts"]
            np.testing.assert_array_equal(one.tokens, other.tokens)
            for name in ("entropy", "max_load", "dead_fraction", "margin", "drop_rate", "count", "max"):
                assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6), name
    if not suffix:
        channels = read.channels[0]
        assert {site.kind for site in channels.sites} == {"channel.experts"}
        tokens = w.history[0]["layers.0.gate", "experts"].tokens
        loads = channels.stat("mean")[[site.path == "layers.0.gate" for site in channels.sites]]
        np.testing.assert_allclose(loads, tokens / 40 * 6, rtol=1e-6)


def test_the_row_of_an_expert_is_that_of_zeros_and_its_weight() -> None:
    tokens = np.array([0.0, 3.0, 10.0, 7.0])
    for row, count in zip(expert_rows(tokens, 10.0, 2), tokens, strict=True):
        numbers = np.zeros(10)
        numbers[: int(count)] = 4 / 2
        for name, number in reference.stats(numbers).items():
            if name in stats.STATS and name != "ratio":
                assert stats.STATS[name](row[None])[0] == pytest.approx(number, nan_ok=True), name


def test_a_frame_names_the_routers_it_has() -> None:
    w = train(moe_models.Net(), [batches(9)])
    assert ("layers.0.gate", "experts") in w.latest
    assert ("layers.0", "experts") not in w.latest
    with pytest.raises(tbhooks.UnknownSiteError, match="experts"):
        w.latest["layers.0", "experts"]
    assert w.latest["layers.0.gate", "experts"].count == 6
    assert len(w.latest["layers.0.gate", "activation"].tokens) == 0
