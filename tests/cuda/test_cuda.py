"""What only a GPU can prove: no sync, one copy to pinned memory, right numbers from the real kernels, safe streams.

Skipped where there is none; run with `pytest -m cuda`. Nothing here has run unless a GPU was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.capture.recording import reducers
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data import stats
from tbhooks.data.frame import KINDS, Site
from tbhooks.reduction import histogram, triton
from tests.support import reference
from tests.support.tensors import DISTRIBUTIONS, SITE, assert_same_stats, reduced, tensor_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(params=["triton", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the Triton kernels, and with the torch operations that serve without them."""
    if request.param == "triton" and not triton.is_installed():
        pytest.skip("Triton is not installed")
    if request.param == "torch":
        monkeypatch.setattr(triton, "failure", "left out by a test")
    else:
        triton.prepare(torch.device("cuda", torch.cuda.current_device()))
    yield request.param
    if request.param == "triton":
        assert triton.failure == ""


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()


def train(model: nn.Module, steps: int, each_step: Callable[[Tensor], None] = lambda _: None) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(8, 64, device="cuda")
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        each_step(loss)


@pytest.mark.parametrize("histograms", [False, True])
def test_a_step_never_syncs(kernels: str, histograms: bool) -> None:
    model = small_model()
    with tbhooks.watch(model, every=2, histograms=histograms) as watching:
        train(model, 3)  # the first steps may compile and allocate
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(model, 6, lambda loss: watching.log({"loss": loss}))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert watching.stats.errors == 0


def test_one_copy_to_the_host_in_a_logged_step(kernels: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    model = small_model()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 3)
        watching.flush()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            train(model, 4)
            torch.cuda.synchronize()
    copies = [event for event in recorded.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 4
    assert all("Pinned" in event.name for event in copies)


def test_the_copy_lands_in_pinned_memory_with_an_event() -> None:
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=True)
    recorder.record(recorder.number(SITE), torch.randn(1000, device="cuda"))
    (copy,) = recorder.pack(0, 0).copies.values()
    assert all(piece.is_pinned() for piece in copy.copied.pieces)
    assert copy.copied.event is not None


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_equal_the_reference(kernels: str, dtype: torch.dtype, distribution: str) -> None:
    for n in (1, 100, 5000, 300_001):
        tensor = tensor_of((n,), dtype, distribution, "contiguous", 5)
        reading, data = reduced(tensor.cuda()), reference.to_numpy(tensor)
        assert_same_stats(lambda name, reading=reading: getattr(reading, name), data)
        assert np.array_equal(reading.counts, reference.bucket_counts(data))


@pytest.mark.parametrize(("mean", "std"), [(300.0, 0.01), (1e4, 1e-2), (0.0, 1.0)])
def test_errors_do_not_grow_with_millions(kernels: str, mean: float, std: float) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(20_000_001) * std + mean
    wide = tensor.double().numpy()
    reading = reduced(tensor.cuda())
    assert reading.count == wide.size
    assert reading.mean == pytest.approx(wide.mean(), rel=1e-9, abs=1e-10 * std)
    assert reading.std == pytest.approx(wide.std(), rel=1e-6)


def test_what_two_launches_say_is_what_the_reference_says() -> None:
    """The kernels themselves, compiled: the same that the interpreter is asked elsewhere."""
    if not triton.is_installed():
        pytest.skip("Triton is not installed")
    tensor = tensor_of((1_000_003,), torch.float32, "sprinkled", "contiguous", 6)
    row = torch.zeros(stats.WIDTH, dtype=torch.float64, device="cuda")
    counts = torch.zeros(histogram.SLOTS, dtype=torch.int32, device="cuda")
    scratch, on_gpu = triton.Scratch(row.device), tensor.cuda()
    scratch.reduce(triton.Job(on_gpu, None, None, row.data_ptr(), counts.data_ptr()))
    scratch.merge()
    expected = reference.bucket_counts(reference.to_numpy(tensor))
    assert np.array_equal(counts[: stats.BUCKETS].cpu().numpy(), expected)
    assert counts.sum() == tensor.numel()


def test_what_is_reduced_on_a_side_stream_is_in_the_step(kernels: str) -> None:
    recorder, side = Recorder(KINDS), torch.cuda.Stream()
    for seed in range(20):
        recorder.begin(with_buckets=True)
        tensor = tensor_of((3_000_000,), torch.float32, "normal", "contiguous", seed)
        on_device = tensor.cuda()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            recorder.record(recorder.number(SITE), on_device)
        reading = recorder.pack(0, 0).frames()[-1]["layer", "activation"]
        wide = tensor.double()
        assert reading.mean == pytest.approx(wide.mean().item(), rel=1e-5, abs=1e-9)
        assert reading.counts.sum() == tensor.numel()


def test_a_model_with_modules_on_two_streams_trains_to_the_same_bits() -> None:
    def run(watched: bool) -> Tensor:
        torch.manual_seed(0)
        model, side = small_model(), torch.cuda.Stream()
        watching = tbhooks.watch(model, every=1) if watched else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                model(torch.ones(8, 64, device="cuda")).sum().backward()
            torch.cuda.current_stream().wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
        if watching is not None:
            watching.close()
            assert watching.stats.errors == 0
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(watched=True), run(watched=False))


def test_a_watched_model_can_be_captured_in_a_graph() -> None:
    model, batch = small_model(), torch.ones(8, 64, device="cuda")
    expected = model(batch).detach().clone()
    with tbhooks.watch(model, every=1) as watching:
        train(model.eval(), 0)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), torch.no_grad():
            model(batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out = model(batch)
        graph.replay()
        torch.testing.assert_close(out, expected)
    assert watching.stats.errors == 0


@pytest.mark.parametrize("with_buckets", [False, True])
def test_temporaries_are_bounded(kernels: str, with_buckets: bool) -> None:
    tensor = torch.randn(32 << 20, device="cuda")
    recorder = Recorder(KINDS)
    for _ in range(2):
        recorder.begin(with_buckets)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        recorder.record(recorder.number(Site("a", "activation")), tensor)
        peak = torch.cuda.max_memory_allocated() - before
        recorder.pack(0, 0)
    # Triton: a few numbers of each program. Torch: 40 bytes an element of a part; norms are cast inside.
    assert peak <= (1 << 20 if kernels == "triton" else 100 * reducers.PART)


def test_deterministic_algorithms_are_no_obstacle(kernels: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.use_deterministic_algorithms(True)
    try:
        with tbhooks.watch(model, every=1) as watching:
            model(torch.ones(2, 3, 8, 8, device="cuda")).sum().backward()
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert watching.stats.errors == 0


def test_a_kernel_that_fails_to_compile_is_replaced_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(triton, "failure", "")
    monkeypatch.setattr(triton, "_ready", set())
    monkeypatch.setattr(triton, "_begun", set())
    monkeypatch.setattr(triton, "_try_all", broken)
    triton.prepare(torch.device("cuda", torch.cuda.current_device()))
    tensor = torch.randn(1000)
    reading = reduced(tensor.cuda())
    assert_same_stats(lambda name: getattr(reading, name), reference.to_numpy(tensor))
    assert triton.name() == "torch: RuntimeError: no ptxas"
