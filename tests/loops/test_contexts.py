"""Odd modules, odd tensors and modes around training: profilers, anomaly mode, parametrizations, quantisation.

A run is compared with the same run unwatched, bit for bit, and its frames with everything a float64 recorder kept.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.autograd import graph
from torch.masked import masked_tensor
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tbhooks
from tbhooks.capture.recording.recorder import Recorder
from tests.support import float64_recorder, zoo
from tests.support.float64_recorder import Float64Recorder
from tests.support.loops import mlp, sgd, steps_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
both_kernels = pytest.mark.usefixtures("both_kernels")

Around = Callable[[], contextlib.AbstractContextManager[Any]]
VECTORS, IMAGES = zoo.ZOO["mlp"], zoo.ZOO["cnn"]


class PartlyBlind(Float64Recorder):
    """Leaves out what has no numbers to read: nested and meta tensors, and layouts other than dense and COO."""

    def _keep(self, key: float64_recorder.Key, tensor: Tensor) -> None:
        if not (tensor.is_nested or tensor.is_meta) and tensor.layout in (torch.strided, torch.sparse_coo):
            super()._keep(key, tensor)


def observe(case: zoo.Case, steps: int = 3) -> list[float64_recorder.Step]:
    seen: list[Float64Recorder] = []
    try:
        zoo.train(case, steps, before=lambda model: seen.append(PartlyBlind(getattr(model, "module", model))))
    finally:
        seen[0].close()
    return seen[0].steps


def assert_right_and_unchanged(
    case: zoo.Case, around: Around = contextlib.nullcontext, steps: int = 3
) -> tbhooks.Watch:
    """Training is that of an unwatched run, bit for bit, and every number that of the recorder."""
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> nn.Module:
        made.append(tbhooks.watch(model, every=1))
        return model

    with around():
        bare = zoo.train(case, steps)
    with around():
        trace = zoo.train(case, steps, before=before)
    made[0].close()
    assert trace == bare
    assert made[0].stats.errors == 0, made[0].stats.messages
    assert steps_of(made[0].history) == list(range(steps))
    with around():
        expected = observe(case, steps)
    for frame, step in zip(made[0].history, expected, strict=True):
        float64_recorder.assert_frame_equals(frame, step)
    return made[0]


# -- modes around the whole run ---------------------------------------------------------------------


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


MODES: dict[str, Around] = {
    "anomaly": torch.autograd.detect_anomaly,
    "profiler": lambda: torch.profiler.profile(record_shapes=True, with_modules=True, with_flops=True),
    "save_on_cpu": graph.save_on_cpu,
    "packing": lambda: graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy),
    "mutable_saved": graph.allow_mutation_on_saved_tensors,
    "no_packing": lambda: graph.disable_saved_tensors_hooks("not allowed here"),
    "flop_counter": lambda: FlopCounterMode(display=False),
    "dispatch_mode": Passing,
    "function_mode": PassingFunctions,
    "deterministic": deterministic,
    "one_thread_autograd": lambda: torch.autograd.set_multithreading_enabled(False),
    "warnings_are_errors": strict_warnings,
}


@both_kernels
@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_training_changes_neither_the_numbers_nor_the_training(name: str) -> None:
    watching = assert_right_and_unchanged(IMAGES, MODES[name])
    assert not any("no data" in why for why in watching.stats.unseen.values())


@both_kernels
def test_flops_are_those_of_the_model_alone() -> None:
    def flops(begin: Callable[[nn.Module], Any] | None) -> Any:
        with FlopCounterMode(display=False) as counter:
            zoo.train(IMAGES, 2, before=begin)
        return {path: dict(counts) for path, counts in counter.get_flop_counts().items()}

    assert flops(lambda model: tbhooks.watch(model, every=1)) == flops(None) != {}


@both_kernels
def test_nothing_of_ours_is_saved_for_backward() -> None:
    def saved(begin: Callable[[nn.Module], Any] | None) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        with graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            zoo.train(IMAGES, 2, before=begin)
        return shapes

    assert saved(lambda model: tbhooks.watch(model, every=1)) == saved(None) != []


def test_anomaly_mode_finds_the_same_operation() -> None:
    def found(watch: bool) -> str:
        model = mlp()
        with contextlib.ExitStack() as stack:
            if watch:
                stack.enter_context(tbhooks.watch(model, every=1))
            stack.enter_context(torch.autograd.detect_anomaly())
            with pytest.raises(RuntimeError, match="returned nan values") as failure:
                (model(torch.randn(3, 4)) * 0).sqrt().mul(0).sum().backward()
        return str(failure.value)

    assert found(watch=True) == found(watch=False)


# -- modules that are not what they seem ------------------------------------------------------------


def built(change: Callable[[Any], Any], case: zoo.Case = VECTORS) -> zoo.Case:
    def build() -> nn.Module:
        model = case.build()
        return change(model) or model

    return replace(case, build=build)


def on_linears(change: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[nn.Module], None]:
    def changed(model: nn.Module) -> None:
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                change(module, *arguments, **options)

    return changed


class CalledTwice(nn.Linear):
    """Its own `__call__` goes through the usual one, twice."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + super().__call__(2 * x)


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def replaced_outputs(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda _module, _args, output: output.tanh())
    model[2].register_forward_hook(lambda _module, _args, output: (output, output.exp()))
    model[3].register_forward_pre_hook(lambda _module, args: (args[0][0] + args[0][1],))


def backward_hooked(model: nn.Module) -> None:
    model[0].register_full_backward_hook(lambda _module, given, _got: (2 * given[0],) if given[0] is not None else None)
    model[2].register_full_backward_pre_hook(lambda _module, got: (3 * got[0],))


def lazy(_model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))


def quantised_part(model: nn.Module) -> None:
    model.insert(4, quantization.quantize_dynamic(nn.Sequential(nn.Linear(16, 16))).requires_grad_(False))
    model.insert(4, Detaching())


class Detaching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def data_parallel(model: nn.Module) -> nn.Module:
    # It would take the simulated device of other tests for a real one.
    with mock.patch("torch.nn.parallel.data_parallel._get_available_device_type", return_value=None):
        return nn.DataParallel(model)


BUILT: dict[str, zoo.Case] = {
    "weight_norm": built(on_linears(parametrizations.weight_norm)),
    "spectral_norm": built(on_linears(parametrizations.spectral_norm)),
    "orthogonal": built(on_linears(parametrizations.orthogonal)),
    "own_parametrization": built(on_linears(lambda m: parametrize.register_parametrization(m, "weight", Doubling()))),
    "hooks_weight_norm": built(on_linears(nn.utils.weight_norm)),
    "pruned": built(on_linears(prune.l1_unstructured, "weight", amount=0.5)),
    "lazy": built(lazy),
    "own_call": built(lambda model: model.insert(2, CalledTwice(16, 16)) and None),
    "replaced_outputs": built(replaced_outputs),
    "backward_hooks": built(backward_hooked),
    "data_parallel": built(data_parallel),
    "quantised_part": built(quantised_part),
    "qat": built(lambda model: quantization.prepare_qat(with_qconfig(model)), VECTORS),
}


def with_qconfig(model: nn.Module) -> nn.Module:
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return model


@pytest.mark.parametrize("name", BUILT)
def test_odd_modules_are_read_right(name: str) -> None:
    assert_right_and_unchanged(BUILT[name])


def test_a_call_that_goes_round_the_hooks_is_said_and_its_parameters_are_watched() -> None:
    class Bypassing(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return self.forward(x)

    case = built(lambda model: model.insert(2, Bypassing(16, 16)) and None)
    watching = assert_right_and_unchanged(case)
    assert watching.stats.unseen == {"2": "forward() never called; its parameters are watched all the same"}
    assert ("2.weight", "update") in watching.latest


GLOBAL_HOOKS: dict[str, Callable[[], Any]] = {
    "forward": lambda: global_hooks.register_module_forward_hook(lambda _m, _args, output: output * 1.5),
    "forward_pre": lambda: global_hooks.register_module_forward_pre_hook(lambda _m, args: (args[0] * 1.5,)),
    "backward": lambda: global_hooks.register_module_full_backward_hook(lambda _m, _given, _got: None),
    "always": lambda: global_hooks.register_module_forward_hook(lambda _m, _args, _output: None, always_call=True),
}


@pytest.mark.parametrize("name", GLOBAL_HOOKS)
def test_hooks_that_others_register_on_every_module_come_first_and_their_outputs_are_read(name: str) -> None:
    @contextlib.contextmanager
    def hooked() -> Iterator[None]:
        handle = GLOBAL_HOOKS[name]()
        try:
            yield
        finally:
            handle.remove()

    assert_right_and_unchanged(VECTORS, hooked)


# -- tensors that are not what they seem ------------------------------------------------------------


class Through(nn.Module):
    """Hands `change(x)` from a first module to a second that makes an ordinary tensor of it again."""

    class Step(nn.Module):
        def __init__(self, change: Callable[[Any], Any]) -> None:
            super().__init__()
            self.change = change

        def forward(self, x: Any) -> Any:
            return self.change(x)

    def __init__(self, change: Callable[[Tensor], Any], back: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.odd, self.back = self.Step(change), self.Step(back)
        self.after = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.back(self.odd(self.before(x))))


def float4(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


TWICE = torch.tensor([[0, 0, 2, 3, 3, 5]])
OFFSETS = torch.tensor([0, 2, 6])
ODD: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, str]]] = {
    "nested": (
        lambda x: torch.nested.as_nested_tensor([x[:2], x[2:]]),
        lambda x: torch.cat(x.unbind()),
        {"odd": "nested float32"},
    ),
    "jagged": (
        lambda x: torch.nested.nested_tensor_from_jagged(x, OFFSETS),
        lambda x: x.values(),
        {"odd": "nested float32"},
    ),
    "sparse": (lambda x: x.relu().to_sparse(), lambda x: x.to_dense(), {}),
    "uncoalesced": (lambda x: torch.sparse_coo_tensor(TWICE, x, (6, 8)), lambda x: x.to_dense(), {}),
    "csr": (lambda x: x.relu().to_sparse_csr(), lambda x: x.to_dense(), {"odd": "torch.sparse_csr"}),
    "bsr": (lambda x: x.relu().to_sparse_bsr((2, 2)), lambda x: x.to_dense(), {"odd": "torch.sparse_bsr"}),
    "mkldnn": (lambda x: x.to_mkldnn(), lambda x: x.to_dense(), {"odd": "torch._mkldnn"}),
    "quantised": (
        lambda x: (x, torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)),
        lambda x: x[0] + x[1].dequantize(),
        {"odd[1]": "qint8"},
    ),
    "float8": (
        lambda x: (x, x.detach().to(torch.float8_e4m3fn)),
        lambda x: x[0] * x[1].float(),
        {},
    ),
    "fake_quantised": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        lambda x: x,
        {},
    ),
    "expanded": (lambda x: (x, x.detach()[:, :1].expand(6, 8)), lambda x: x[0] + x[1], {}),
    "every_other": (lambda x: (x, x.t()[::2]), lambda x: x[0] + x[1].mean(), {}),
    "meta": (lambda x: (x, x.detach().to("meta")), lambda x: x[0], {"odd[1]": "no data"}),
}


@both_kernels
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_are_read_right_or_said_with_the_reason(name: str) -> None:
    change, back, unseen = ODD[name]
    case = replace(VECTORS, build=lambda: Through(change, back))
    watching = assert_right_and_unchanged(case)
    assert watching.stats.unseen.keys() == unseen.keys()
    for site, why in unseen.items():
        assert why in watching.stats.unseen[site]


@pytest.mark.parametrize(
    ("change", "back"),
    [
        pytest.param(lambda x: (x, masked_tensor(x.detach(), x > 0)), lambda x: x[0], id="masked"),
        pytest.param(float4, lambda x: x[0], id="float4"),
    ],
)
def test_a_tensor_torch_cannot_compute_with_is_said_and_is_no_error_of_ours(change: Any, back: Any) -> None:
    torch.manual_seed(0)
    model = Through(change, back)
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(2):
            VECTORS.loss(model, VECTORS.batch()).backward()
            optimizer.step()
    assert watching.stats.errors == 0
    assert "only real numbers" in watching.stats.unseen["odd[1]"]
    assert ("odd[0]", "activation") in watching.latest


# -- modules changed in the middle of training ------------------------------------------------------


def changed_in_the_middle(case: zoo.Case, change: Callable[[nn.Module], Any], watch: bool) -> tuple[Any, Any, Any]:
    """Two steps, the change in a logged step, two steps with a new optimizer; with all that is left of each run."""
    torch.manual_seed(0)
    model: Any = case.build()
    observer, frames, left = None, [], []
    watching = tbhooks.watch(model, every=1) if watch else None
    for stage in (0, 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if not watch:
            observer = PartlyBlind(model)
        for _ in range(2):
            optimizer.zero_grad()
            case.loss(model, case.batch()).backward()
            optimizer.step()
        if observer is not None:
            observer.close()
            frames += observer.steps
            remove_hooks(model, observer)
        if stage == 0:
            left.append(change(model))
        left.append({name: zoo.raw(tensor.clone()) for name, tensor in model.state_dict().items()})
    if watching is not None:
        watching.close()
        frames = list(watching.history)
    return left, frames, watching


def remove_hooks(model: nn.Module, observer: Float64Recorder) -> None:
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if "record_output" in getattr(hook, "__qualname__", ""):
                del module._forward_hooks[key]


def assigned(model: nn.Module) -> None:
    other = {name: (tensor * 0.5).clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(other, assign=True)


@contextlib.contextmanager
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swapped(model: nn.Module) -> None:
    with swapping():
        model.to(torch.float64).to(torch.float32)


def pruned_for_good(model: nn.Module) -> None:
    prune.random_unstructured(model[0], "weight", amount=0.5)
    prune.remove(model[0], "weight")


def unparametrized(model: nn.Module) -> None:
    parametrize.register_parametrization(model[0], "weight", Doubling())
    parametrize.remove_parametrizations(model[0], "weight")


def qat_prepared(model: nn.Module) -> None:
    quantization.prepare_qat(with_qconfig(model), inplace=True)


CHANGES: dict[str, Any] = {
    "assigned": assigned,
    "swapped": swapped,
    "to_double_and_back": lambda model: model.double().float() and None,
    "pruned": on_linears(prune.l1_unstructured, "weight", amount=0.5),
    "pruned_for_good": pruned_for_good,
    "weight_norm": on_linears(parametrizations.weight_norm),
    "unparametrized": unparametrized,
    "channels_last": lambda model: model.to(memory_format=torch.channels_last) and None,
    "requires_grad": lambda model: model[0].requires_grad_(False) and None,
    "qat": qat_prepared,
}


@pytest.mark.parametrize(
    "change",
    [pytest.param(*getattr(c, "values", (c,)), id=n, marks=getattr(c, "marks", ())) for n, c in CHANGES.items()],
)
def test_a_model_changed_between_logged_steps_goes_on_with_the_right_numbers(change: Any) -> None:
    bare, expected, _ = changed_in_the_middle(VECTORS, change, watch=False)
    left, frames, watching = changed_in_the_middle(VECTORS, change, watch=True)
    assert left == bare
    assert watching.stats.errors == 0, watching.stats.messages
    assert steps_of(frames) == [0, 1, 2, 3]
    # A step that was open already at the change does not know the modules that came with it; the next one does.
    expected[2] = {key: array for key, array in expected[2].items() if key in frames[2] or key in expected[1]}
    for frame, step in zip(frames, expected, strict=True):
        float64_recorder.assert_frame_equals(frame, step)


def fused(model: Any) -> None:
    quantization.fuse_modules_qat(model, ["0", "1", "2"], inplace=True)


@pytest.mark.parametrize(("case", "change"), [(VECTORS, qat_prepared), (IMAGES, fused)], ids=["qat", "fused"])
def test_modules_swapped_for_others_by_torch_ao_are_read_once_and_keep_no_hook(case: zoo.Case, change: Any) -> None:
    bare = case.build()
    change(bare)
    model = case.build()
    with tbhooks.watch(model, every=1, step="manual") as watching:
        change(model)
        for _ in range(3):
            case.loss(model, case.batch()).backward()
            watching.step()
        counts = {frame[site.name, site.kind].count for frame in watching.history for site in frame.sites
                  if site.name in ("0", "2") and site.kind == "activation"}  # fmt: skip
    sizes: set[int] = set()
    for name in ("0", "2"):
        bare.get_submodule(name).register_forward_hook(lambda _m, _args, output: sizes.add(output.numel()))
    case.loss(bare, case.batch())
    assert counts == sizes
    assert zoo.hook_count(model) == zoo.hook_count(bare) - 2


def test_averages_of_a_watched_model_are_those_of_a_bare_one() -> None:
    def averages(watch: bool) -> tuple[Any, ...]:
        held: list[Any] = []

        def before(model: nn.Module) -> None:
            if watch:
                held.append(tbhooks.watch(model, every=2))
            held.extend((model, AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))))

        def each_step(step: int, _loss: Tensor) -> None:
            for average in held[-2:]:
                average.update_parameters(held[-3])
            if step == 2:
                state = torch.get_rng_state()
                update_bn([IMAGES.batch()[0]], held[-1])
                torch.set_rng_state(state)

        trace = zoo.train(IMAGES, 5, before=before, each_step=each_step)
        left = [{name: zoo.raw(value) for name, value in average.state_dict().items()} for average in held[-2:]]
        return trace, left, held[0]

    trace, left, watching = averages(watch=True)
    assert (trace, left) == averages(watch=False)[:2]
    assert watching.stats.errors == 0
    for frame, step in zip(watching.history, observe(IMAGES, 5)[::2], strict=True):
        float64_recorder.assert_frame_equals(frame, step)


# -- replicas and threads ---------------------------------------------------------------------------


def replica(module: nn.Module) -> nn.Module:
    """What DataParallel makes of a module for each device: hooks and all, the children replaced by replicas."""
    made = module._replicate_for_data_parallel()
    made._parameters = dict(module._parameters)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else replica(child)
    return made


class Parallel(nn.Module):
    """Two replicas of a part, each in a thread of its own with its half of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        halves = x.chunk(2)
        ready = threading.Barrier(len(halves))

        def call(module: nn.Module, half: Tensor) -> Tensor:
            ready.wait()
            return module(half)

        with ThreadPoolExecutor(len(halves)) as pool:
            return self.head(torch.cat(list(pool.map(call, [replica(self.part) for _ in halves], halves))))


@pytest.fixture
def quick_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def assert_replicas_are_right(log: Callable[[tbhooks.Watch, int, Tensor], None], steps: int) -> None:
    case = replace(VECTORS, build=Parallel)
    made: list[tbhooks.Watch] = []
    kept: list[nn.Module] = []

    def before(model: nn.Module) -> None:
        kept.append(model)
        made.append(tbhooks.watch(model, every=1))

    trace = zoo.train(case, steps, before=before, each_step=lambda step, loss: log(made[0], step, loss))
    assert trace == zoo.train(case, steps)
    assert made[0].stats.errors == 0, made[0].stats.messages
    for frame, step in zip(made[0].history, observe(case, steps), strict=True):
        float64_recorder.assert_frame_equals(frame, step)


@both_kernels
@pytest.mark.usefixtures("quick_switches")
def test_replicas_in_threads_are_read_as_one_module() -> None:
    assert_replicas_are_right(lambda watching, step, loss: watching.log({"loss": loss}), steps=20)


def test_replicas_that_end_the_step_before_theirs_are_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Recorder.pack

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return pack(*arguments)

    monkeypatch.setattr(Recorder, "pack", slow)

    def log(watching: tbhooks.Watch, step: int, loss: Tensor) -> None:
        if step % 3:  # where it is missing, the step's copy waits for it until the next forward
            watching.log({"loss": loss})

    assert_replicas_are_right(log, steps=6)
