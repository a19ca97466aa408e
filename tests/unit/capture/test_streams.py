"""No two streams access the same memory of ours without an order, as torch's CUDA sanitizer sees it on the simulated
device: what is recorded on a side stream, what the next step clears, and constants that are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.frame import KINDS, Site
from tbhooks.reduction import histogram, torch_rows
from tests.support import fake_device
from tests.support.fake_device import put
from tests.support.fake_streams import Sanitizer, Stream, current_stream, on
from tests.support.slow import slow


@pytest.fixture
def sanitizer() -> Iterator[Sanitizer]:
    histogram._tables.clear()
    torch_rows._constants.clear()
    with Sanitizer(fake_device.host_of) as opened:
        yield opened


def side_stream() -> Stream:
    """A stream on which everything that was launched so far has happened."""
    made = Stream()
    made.wait_stream(current_stream())
    return made


def used_recorder() -> Recorder:
    """With everything made that is made once."""
    recorder = Recorder(KINDS)
    for _ in range(2):
        recorder.begin(with_buckets=True)
        record(recorder, put(torch.randn(50)))
        recorder.scalar("loss", put(torch.ones(())))
        recorder.pack(0, 0)
    recorder.begin(with_buckets=True)
    return recorder


def record(recorder: Recorder, tensor: Tensor) -> None:
    recorder.record(recorder.number(Site("a", "activation")), tensor)


def record_together(recorder: Recorder, tensor: Tensor) -> None:
    recorder.record_together([(recorder.number(Site("w", "weight")), tensor, None, None)])


USES: dict[str, Callable[[Recorder, Tensor], object]] = {
    "a tensor": record,
    "small tensors together": record_together,
    "a scalar": lambda recorder, tensor: recorder.scalar("loss", tensor[0]),
    "scalars": lambda recorder, tensor: recorder.scalars(["a", "b"], tensor[:2]),
    "an attached tensor": lambda recorder, tensor: recorder.attach(tensor),
}


def test_the_sanitizer_sees_an_access_that_nothing_orders(sanitizer: Sanitizer) -> None:
    tensor, side = put(torch.zeros(50)), side_stream()
    tensor.add_(1)
    with on(side):
        tensor.mul_(2)
    assert len(sanitizer.races) > 0


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_what_is_recorded_on_a_side_stream_is_in_the_copy(sanitizer: Sanitizer, use: Callable[..., object]) -> None:
    recorder, tensor = used_recorder(), put(torch.randn(50))
    with on(side_stream()):
        use(recorder, tensor)
    record(recorder, tensor)
    recorder.pack(0, 0)
    assert sanitizer.races == []


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_the_next_step_may_begin_on_another_stream(sanitizer: Sanitizer, use: Callable[..., object]) -> None:
    recorder, tensor = used_recorder(), put(torch.randn(50))
    side = side_stream()
    use(recorder, tensor)
    recorder.pack(0, 0)
    with on(side):
        use(recorder, tensor)
        recorder.pack(1, 0)
    assert sanitizer.races == []


def test_constants_are_first_used_on_two_streams(sanitizer: Sanitizer) -> None:
    recorder, tensor = Recorder(KINDS), put(torch.randn(50))
    recorder.begin(with_buckets=True)
    first, second = side_stream(), side_stream()
    for stream in (first, second):
        with on(stream):
            record(recorder, tensor)
    recorder.pack(0, 0)
    assert sanitizer.races == []


def test_a_buffer_that_grows_on_one_stream_is_used_on_another(sanitizer: Sanitizer) -> None:
    recorder, tensor = used_recorder(), put(torch.randn(5))
    first, second = side_stream(), side_stream()
    for stream in (first, second, first):
        with on(stream):
            for _ in range(60):
                recorder.scalar("loss", tensor[0])
    recorder.pack(0, 0)
    assert sanitizer.races == []


def test_memory_of_another_stream_is_kept_until_the_copy_has_read_it() -> None:
    recorder, tensor = used_recorder(), put(torch.randn(50))
    with on(side_stream()):
        recorder.attach(tensor)
    _, buffer = recorder._buffer(tensor)
    (attached,) = buffer._attached
    recorder.pack(0, 0)
    assert attached.streams == {current_stream()}


# --- Whole trainings ------------------------------------------------------------------------------


class HalfLinear(nn.Linear):
    """In bfloat16 with float32 weights, as under autocast, which the simulated device does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class TwoStreams(nn.Module):
    """A branch that runs on a stream of its own, as users write it."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = linear(6, 6), nn.Sequential(linear(6, 6), nn.ReLU()), linear(6, 2)
        self.side: Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = tbhooks.tap("trunk", self.trunk(x))
        if self.side is None:
            return self.head(x + self.branch(x))
        main = current_stream()
        self.side.wait_stream(main)
        with on(self.side):
            beside = tbhooks.tap("branch", self.branch(x))
        main.wait_stream(self.side)
        return self.head(x + beside)


def everything(watching: tbhooks.Watch) -> None:
    watching.graph().images("*").per_channel("*", histograms=True).embeddings("*")
    watching.progress().log_every(2).environment().profile((2, 3)).evaluation().summary()
    watching.metric("largest", lambda tensor: tensor.abs().amax()).flight_recorder(steps=8)


MODES = ["eager", "amp", "accumulation", "evaluation", "everything"]
ONE_STREAM = slow("accesses of one stream are in order, whatever is read")
ALONE = slow("what a mode reads is read with everything else too")


@pytest.mark.parametrize(
    ("mode", "streams"),
    [
        ("everything", 2),
        *(pytest.param(mode, 2, marks=ALONE) for mode in ("eager", "amp", "accumulation", "evaluation")),
        *(pytest.param(mode, 1, marks=ONE_STREAM) for mode in MODES),
    ],
)
def test_a_watched_training_has_no_unordered_access(
    sanitizer: Sanitizer, tmp_path: Path, mode: str, streams: int
) -> None:
    model = fake_device.to_device(TwoStreams(HalfLinear if mode == "amp" else nn.Linear))
    model.side = side_stream() if streams == 2 else None
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(fake_device.DEVICE.type, enabled=mode == "amp")
    batch, ids = put(torch.randn(4, 6)), put(torch.arange(4))
    kinds = (*KINDS, "input", "functional") if mode == "everything" else KINDS
    with tbhooks.watch(model, str(tmp_path), every=2, kinds=kinds) as watching:
        if mode == "everything":
            everything(watching)
        elif mode == "evaluation":
            watching.evaluation()
        for _ in range(4):
            for _ in range(2 if mode == "accumulation" else 1):
                losses = model(batch).float().square().mean(-1)
                loss = losses.mean()
                scaler.scale(loss).backward()
            watching.samples(losses.detach(), ids)
            watching.log({"loss": loss})
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if mode in ("evaluation", "everything"):
                model.eval()
                with torch.no_grad():
                    model(batch)
                model.train()
        if mode == "everything":
            watching.dump("the end of the test")
    assert watching.stats.errors == 0
    assert len(watching.history) >= 2
    assert sanitizer.races == []


@pytest.mark.parametrize("is_asked", [True, False], ids=["dump", "close"])
def test_the_flight_recorder_of_a_training_on_a_side_stream_is_dumped_on_another(
    sanitizer: Sanitizer, is_asked: bool
) -> None:
    model = fake_device.to_device(nn.Linear(6, 2))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), put(torch.randn(4, 6))
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=8)
    side = side_stream()
    for _ in range(12):  # longer than the ring
        with on(side):
            losses = model(batch).square().mean(-1)
            losses.mean().backward()
            watching.samples(losses.detach())
            watching.log({"loss": losses.mean()})
            optimizer.step()
            optimizer.zero_grad()
        if is_asked:
            watching.dump("on the stream of the rest of the program")
    watching.close()
    assert len(watching.flights) == (12 if is_asked else 0)
    assert watching.stats.errors == 0
    assert sanitizer.races == []
