"""`images()`: what is shown, how it is normalised, how much is taken, and that training does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tbhooks
from tbhooks.capture.functional import attention
from tbhooks.collectors import image_tiles
from tbhooks.data.artifacts import Picture
from tbhooks.drawing import tensor_grid
from tests.support import images, zoo

RED = (255, 45, 60)


class Net(nn.Module):
    """Gives whatever its function makes of the convolution's output."""

    def __init__(self, channels: int = 3, after: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1)
        self.last = Returning(after)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(torch.relu(self.conv1(x)))
        self.last(h)
        return h.mean()


class Returning(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Any:
        return self.function(h)


def train(model: nn.Module, batch: Any, ask: Callable[[tbhooks.Watch], Any], steps: int = 1, **options: Any) -> Any:
    """What the watch was after some steps, and the pictures of each."""
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=1, **options)
    ask(w)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch() if callable(batch) else batch).backward()
        optimizer.step()
    w.close()
    assert not w.stats.errors, w.stats.messages
    return w, [pictures_of(frame) for frame in kept.frames]


def pictures_of(frame: tbhooks.Frame) -> dict[str, Picture]:
    return {shown.tag: shown for shown in frame.artifacts if isinstance(shown, Picture)}


def greys(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Black to white between the 0.5 and the 99.5 percentile, by itself."""
    low, high = np.percentile(values.astype(np.float64), [0.5, 99.5])
    return 255 * np.clip((values - low) / (high - low), 0, 1)


def test_without_a_pattern_the_input_the_first_filters_and_their_maps_are_shown() -> None:
    _, (shown,) = train(Net(), torch.randn(2, 3, 8, 8), lambda w: w.images())
    assert list(shown) == ["images.input/(root)", "images.activation/conv1", "images.weight/conv1.weight"]


def test_a_pattern_shows_outputs_and_filters_of_the_modules_it_means() -> None:
    _, (shown,) = train(Net(channels=1), torch.randn(2, 1, 8, 8), lambda w: w.images("conv*"))
    assert list(shown) == ["images.activation/conv1", "images.weight/conv1.weight", "images.activation/conv2"]
    assert "6 of 6 maps" in shown["images.activation/conv1"].caption


def test_two_calls_show_each_what_it_was_asked_for() -> None:
    _, (shown,) = train(Net(), torch.randn(2, 3, 8, 8), lambda w: w.images().images("conv2"))
    assert [tag for tag in shown if "conv2" in tag] == ["images.activation/conv2"]
    assert len(shown) == 4


def test_the_input_batch_is_black_to_white_between_its_percentiles() -> None:
    batch = torch.arange(2 * 8 * 8, dtype=torch.float32).reshape(2, 1, 8, 8).sqrt()
    batch[0, 0, 0, 0] = 1e6  # an outlier does not make the rest black
    _, (shown,) = train(Net(channels=1), batch, lambda w: w.images())
    pixels = shown["images.input/(root)"].pixels
    zoom = 30  # two tiles of eight pixels beside each other
    drawn = pixels[zoom // 2 : 8 * zoom : zoom, zoom // 2 : 8 * zoom : zoom, 0]
    np.testing.assert_allclose(drawn, greys(batch.numpy())[0, 0], atol=1.5)
    second = pixels[zoom // 2 : 8 * zoom : zoom, 8 * zoom + 2 + zoom // 2 :: zoom, 0]
    np.testing.assert_allclose(second, greys(batch.numpy())[1, 0], atol=1.5)


def test_colours_of_an_input_are_its_own() -> None:
    batch = torch.zeros(1, 3, 4, 4)
    batch[0, 0] = 1.0
    _, (shown,) = train(Net(), batch, lambda w: w.images())
    assert tuple(shown["images.input/(root)"].pixels[10, 10]) == (255, 0, 0)


def test_one_scale_for_all_maps_and_higher_is_lighter() -> None:
    maps = np.linspace(0, 1, 4 * 25).reshape(4, 5, 5)
    pixels, scale = tensor_grid.painted(maps)
    assert (scale.low, scale.high) == tuple(np.percentile(maps, [0.5, 99.5]))
    luminance = pixels[: -tensor_grid.STRIP].astype(float) @ [0.2, 0.7, 0.1]
    tall = (luminance.shape[0] - 2) // 2
    means = [luminance[:tall, :tall], luminance[:tall, -tall:], luminance[-tall:, :tall], luminance[-tall:, -tall:]]
    assert [part.mean() for part in means] == sorted(part.mean() for part in means)


def test_what_is_not_finite_is_red_and_counted() -> None:
    maps = np.ones((1, 4, 4))
    maps[0, 0, 0], maps[0, 1, 1] = np.nan, np.inf
    pixels, scale = tensor_grid.painted(maps)
    red = (pixels == RED).all(-1)
    assert scale.wrong == 2
    assert red[:119, :119].all()
    assert not red[: 4 * 120, 240:].any()
    assert red[4 * 120 :].any(), "how many there are is written in red"


@pytest.mark.parametrize("values", [np.full((1, 3, 3), np.nan), np.zeros((2, 3, 3)), np.full((1, 2, 2), 1e300)])
def test_pictures_of_nothing_or_one_number_are_drawn(values: np.ndarray[Any, Any]) -> None:
    pixels, _ = tensor_grid.painted(values)
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3


def test_the_strip_says_the_range() -> None:
    """Each end for itself: the same number gives the same letters, another one others."""

    def ends(low: float, high: float) -> tuple[bytes, bytes]:
        pixels, scale = tensor_grid.painted(np.repeat([low, high], 5000).reshape(1, 100, 100))
        assert (scale.low, scale.high) == (low, high)
        strip = pixels[-tensor_grid.STRIP :]
        written = (strip == tensor_grid.INK).all(-1)
        assert written[:, :40].any()
        assert written[:, -40:].any()
        return written[:, :48].tobytes(), written[:, -48:].tobytes()

    numbers = [-4.5e12, -321.0, -1.0, 0.0, 1.5e-7, 0.26, 6.78, 9.0]
    lows = {low: ends(low, 10.0)[0] for low in numbers}
    highs = {high: ends(-1e13, high)[1] for high in numbers}
    assert len(set(lows.values())) == len(set(highs.values())) == len(numbers)
    assert ends(-1.0, 9.0) == (lows[-1.0], highs[9.0])


def test_pictures_are_taken_of_the_first_steps_and_then_of_fewer() -> None:
    _, steps = train(Net(), torch.randn(2, 3, 8, 8), lambda w: w.images(), steps=30)
    assert [i for i, shown in enumerate(steps) if shown] == [*range(10), *range(10, 20, 2), *range(20, 30, 4)]


def test_every_is_a_number_of_logged_steps() -> None:
    _, steps = train(Net(), torch.randn(2, 3, 8, 8), lambda w: w.images(every=4), steps=9)
    assert [i for i, shown in enumerate(steps) if shown] == [0, 4, 8]


def test_what_does_not_fit_is_left_out_and_reported() -> None:
    one = 6 * 8 * 8 * 4
    w, (shown,) = train(Net(), torch.randn(2, 3, 8, 8), lambda w: w.images("conv*", most_bytes=one + 700))
    assert list(shown) == ["images.activation/conv1", "images.weight/conv1.weight"]
    assert "most_bytes" in w.stats.unseen["images.activation/conv2"]


def test_of_large_tensors_a_small_part_is_taken() -> None:
    part = image_tiles.of_output(torch.zeros(8, 100, 300, 200, device="meta"))
    assert part is not None
    assert tuple(part.numbers.shape) == (36, 50, 50)
    assert part.description == "sample 0, 36 of 100 maps, every 6. row and 4. column"
    for choose, shape in ((image_tiles.of_output, (2, 1, 999, 9999)), (image_tiles.of_input, (64, 3, 512, 512))):
        found = choose(torch.zeros(shape, device="meta"))
        assert found is not None
        assert found.numbers.numel() * 4 <= 1 << 20


UNSHOWN: dict[str, Callable[[Tensor], Any]] = {
    "integers": lambda h: h.long(),
    "complex": lambda h: torch.complex(h, h),
    "sparse": lambda h: h.detach()[0, 0].to_sparse(),
    "one number": lambda h: h.mean(),
    "nothing": lambda h: h[:0],
}


@pytest.mark.parametrize("name", UNSHOWN)
def test_outputs_that_are_no_pictures_are_left_out_and_reported(name: str) -> None:
    w, (shown,) = train(Net(after=UNSHOWN[name]), torch.randn(2, 3, 8, 8), lambda w: w.images(["last", "conv1"]))
    assert list(shown) == ["images.activation/conv1", "images.weight/conv1.weight"]
    assert "images.activation/last" in w.stats.unseen


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "sequence": lambda h: h.flatten(2),
    "vectors": lambda h: h.flatten(1),
    "volume": lambda h: h.unsqueeze(2).expand(-1, -1, 3, -1, -1),
    "pooled": lambda h: h.mean((2, 3), keepdim=True),
    "bfloat16": lambda h: h.bfloat16(),
    "float16": lambda h: h.half(),
    "float64": lambda h: h.double(),
    "channels_last": lambda h: h.contiguous(memory_format=torch.channels_last),
    "not finite": lambda h: h / 0,
}


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_of_many_shapes_and_formats_are_shown(name: str) -> None:
    _, (shown,) = train(Net(after=SHAPES[name]), torch.randn(2, 3, 8, 8), lambda w: w.images("last"))
    assert list(shown) == ["images.activation/last"]


def test_bytes_are_shown_as_inputs() -> None:
    class Bytes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float() / 255).mean()

    batch = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    _, (shown,) = train(Bytes(nn.Conv2d(3, 2, 3)), batch, lambda w: w.images())
    assert "images.input/(root)" in shown


def test_what_is_shown_is_what_was_there_before_others_overwrote_it() -> None:
    class Overwriting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    conv, batch, seen = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), []
    for inplace in (True, False):
        model = Overwriting(copy.deepcopy(conv), nn.ReLU(inplace=inplace))
        _, (shown,) = train(model, batch, lambda w: w.images("*"))
        seen.append([shown[f"images.activation/{name}"].pixels for name in "01"])
    for overwritten, kept in zip(*seen, strict=True):
        np.testing.assert_array_equal(overwritten, kept)
    assert (seen[0][0] != seen[0][1]).any()


def test_a_step_that_is_cut_short_shows_what_it_saw() -> None:
    model, kept = Net(), tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=1).images()
    model(torch.rand(2, 3, 8, 8))
    w.close()
    assert len(pictures_of(kept.frames[0])) == 3


def test_evaluation_passes_and_recomputed_blocks_are_not_shown_twice() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return checkpoint(self.conv, x * self.calls, use_reentrant=False).mean()

    model, kept = Checkpointed(), tbhooks.MemorySink()
    batch = torch.rand(1, 3, 6, 6)
    w = tbhooks.watch(model, kept, every=1).images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(batch).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(batch)
    model.train()
    w.close()
    assert [list(pictures_of(frame)) for frame in kept.frames] == [
        ["images.input/(root)", "images.activation/conv", "images.weight/conv.weight"]
    ]


def test_compiled_models_are_shown_as_others() -> None:
    torch.compiler.reset()  # a model alike may have been compiled without hooks
    torch.manual_seed(0)
    model, batch, kept = Net(), torch.randn(2, 3, 8, 8), tbhooks.MemorySink()
    _, (eager,) = train(model, batch, lambda w: w.images().images("conv2"))
    torch.manual_seed(0)
    model = Net()
    w = tbhooks.watch(model, kept, every=1).images().images("conv2")
    torch.compile(model, backend="aot_eager")(batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    w.close()
    compiled = pictures_of(kept.frames[0])
    assert set(compiled) == set(eager)
    for tag, picture in eager.items():
        np.testing.assert_array_equal(compiled[tag].pixels, picture.pixels)


def test_training_is_the_same_to_the_bit() -> None:
    case = zoo.ZOO["cnn"]
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> None:
        made.append(tbhooks.watch(model, every=1).images().images("*"))

    assert zoo.train(case, 3, before=before) == zoo.train(case, 3)
    made[0].close()
    assert not made[0].stats.errors


def test_on_a_device_pictures_ride_in_the_one_copy_and_nothing_waits() -> None:
    kept = tbhooks.MemorySink()
    counts = zoo.copies_on_device(
        zoo.ZOO["cnn"], lambda model: tbhooks.watch(model, kept, every=2).images().images("*")
    )
    assert counts == [1, 1, 2, 2, 3]
    assert [len(pictures_of(frame)) for frame in kept.frames] == [14, 14, 14]


# --- Attention ------------------------------------------------------------------------------------


def reference_weights(query: Tensor, key: Tensor, mask: Any, causal: bool) -> np.ndarray[Any, Any]:
    q, k = query.double().numpy(), key.double().numpy()
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf)
    if mask is not None:
        logits = np.where(mask.numpy(), logits, -np.inf) if mask.dtype == torch.bool else logits + mask.double().numpy()
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


@pytest.mark.parametrize("how", ["plain", "causal", "mask", "added", "grouped"])
@pytest.mark.parametrize("length", [5, 300])
def test_weights_of_fused_attention_are_those_of_the_first_sample(how: str, length: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, 8)
    key = torch.randn(2, 2 if how == "grouped" else 4, length, 8)
    options: dict[str, Any] = {"plain": {}, "causal": {"is_causal": True}, "grouped": {"enable_gqa": True}}.get(how, {})
    mask = None
    if how == "mask":
        mask = torch.rand(length, length) > 0.3
        mask[:, 0] = True
    elif how == "added":
        mask = torch.randn(2, 1, length, length)
    found = attention.first_weights((query, key, key), {"attn_mask": mask, **options})
    full_key = key.repeat_interleave(2, 1) if how == "grouped" else key
    wanted = reference_weights(query, full_key, mask, how == "causal")[0][:, :: -(-length // 128)]
    assert found is not None
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-6)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).mean()


def test_attention_maps_come_from_operations_where_those_are_watched() -> None:
    kinds = ("activation", "functional")
    _, (shown,) = train(nn.Sequential(Attending()), torch.randn(2, 6, 8), lambda w: w.images("0"), kinds=kinds)
    picture = shown["images.functional/0:scaled_dot_product_attention.weights"]
    assert "2 of 2 maps" in picture.caption
    above = picture.pixels[5:30, 150:200]
    assert (above == picture.pixels[5, 150]).all(), "no query attends to what comes after it"


class Heads(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **self.how)[0].mean()


def test_returned_attention_weights_are_shown_head_by_head() -> None:
    how = {"average_attn_weights": False}
    _, (shown,) = train(Heads(**how), torch.randn(2, 6, 8), lambda w: w.images("attention"))
    assert list(shown) == ["images.activation/attention[0]", "images.activation/attention[1]"]
    assert "2 of 2 maps" in shown["images.activation/attention[1]"].caption


def test_softmax_inside_attention_is_shown() -> None:
    kinds = ("activation", "functional")
    _, (shown,) = train(Heads(), torch.randn(2, 6, 8), lambda w: w.images("attention"), kinds=kinds)
    assert "images.functional/attention:softmax" in shown


def test_eager_attention_of_transformers_is_shown() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    model = transformers.GPT2Model._from_config(config, attn_implementation="eager")
    loss = Loss(model)
    _, (shown,) = train(loss, torch.arange(6)[None], lambda w: w.images("*.attn"))
    assert "2 of 2 maps" in shown["images.activation/inner.h.0.attn[1]"].caption


class Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).last_hidden_state.square().mean()


# --- What is refused, and what is written -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "covn1"}, "did you mean 'conv1'"),
        ({"pattern": 3}, "pattern must be a glob"),
        ({"every": 0}, "every must be an integer"),
        ({"most_bytes": "many"}, "most_bytes must be an integer"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(options: dict[str, Any], message: str) -> None:
    model = Net()
    with tbhooks.watch(model) as w, pytest.raises(tbhooks.ArgumentError, match=message):
        w.images(**options)


def test_what_two_calls_ask_for_is_written_once(tmp_path: Path) -> None:
    model = Net()
    w = tbhooks.watch(model, tmp_path, every=1).images().images("*")
    model(torch.rand(2, 3, 8, 8)).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    w.close()
    tags = [value.tag for _, value in images.values(tmp_path) if value.tag.startswith("images.")]
    assert len(tags) == len(set(tags)) == 5


def test_event_files_hold_pngs_that_others_can_read(tmp_path: Path) -> None:
    model, kept = Net(), tbhooks.MemorySink()
    w = tbhooks.watch(model, [tmp_path, kept], every=1).images()
    model(torch.rand(2, 3, 8, 8)).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    w.close()
    found = images.written(tmp_path)
    shown = pictures_of(kept.frames[0])
    assert set(found) == set(shown)
    for tag, picture in shown.items():
        np.testing.assert_array_equal(found[tag][0], picture.pixels)
