"""Tests of the tests' own tools: the zoo, the reference statistics and the simulated device."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.support import compatibility, fake_device, groups, reference, zoo
from tests.support.fake_device import DEVICE, FakeDeviceTensor, Log, put, to_device
from tests.support.script_host import ScriptHost
from tests.support.slow import COLLECTED, cases, slow
from tests.support.zoo import ZOO

# --- Scripts --------------------------------------------------------------------------------------

PROBE = """
import atexit, multiprocessing, os, random, sys, threading

atexit.register(lambda: print("at exit", __name__, repr(getattr(sys, "last_value", None))))
finish = threading.Event()
threading.Thread(target=lambda: (finish.wait(5), print("a thread")), daemon=False).start()
main = sys.modules["__main__"]
print(__name__, vars(main) is globals(), sorted(globals()), __doc__, __package__)
print(globals().get("__file__"), __spec__ and (__spec__.name, __spec__.origin), type(__loader__).__name__)
print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), sys.flags.interactive)
print(sorted(os.environ.items()), sys.stdin.read() == "", sys.stdout.isatty(), sys.gettrace())
print([name for name in sys.modules if name.startswith(("tbhooks", "tests"))], threading.active_count())
print(os.getpgid(0) == os.getpid() or "no group", file=sys.stderr)
import near
"""
NEAR = """
import __main__
import sys
import torch
print(torch.get_num_threads(), torch.is_grad_enabled(), file=sys.stderr)
__main__.finish.set()
def fail():
    raise LookupError("out of luck")
how = sys.argv[-1]
if how == "raises":
    fail()
if how == "killed":
    import os, signal
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit({"text": "said at the end"}.get(how, 3))
"""


@pytest.mark.parametrize(
    ("started", "how"),
    [
        ("script", "raises"),
        ("module", "text"),
        ("program", "killed"),
        pytest.param("script", "exits", marks=slow("exits as it does with a text")),
        pytest.param("module", "raises", marks=slow("a script and a module end in the same way")),
    ],
)
def test_a_forked_script_is_what_it_is_under_python(
    started: str, how: str, scripts: ScriptHost, tmp_path: Path
) -> None:
    (tmp_path / "below").mkdir()
    for name, text in (("probe", PROBE), ("near", NEAR)):
        (tmp_path / "below" / f"{name}.py").write_text(text)
    first = {
        "script": (["below/probe.py"], tmp_path), "module": (["-m", "probe"], tmp_path / "below"),
        "program": (["-c", PROBE], tmp_path / "below"),
    }  # fmt: skip
    words, directory = first[started]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "MINE": "x"}
    expected = subprocess.run(
        [sys.executable, *words, "--a", how], cwd=directory, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100, check=False, start_new_session=True,
    )  # fmt: skip
    done = scripts.run(*words, "--a", how, cwd=directory, env=environment)
    assert done.returncode == expected.returncode == {"exits": 3, "killed": -signal.SIGTERM}.get(how, 1)
    assert done.stdout == expected.stdout
    assert done.stderr == expected.stderr


def test_two_forked_scripts_draw_other_random_numbers(scripts: ScriptHost) -> None:
    draws = "import random, torch; print(random.random(), torch.rand(1).item())"
    first, second = (scripts.run("-c", draws).stdout.split() for _ in range(2))
    assert len({*first, *second}) == 4


def test_a_forked_script_that_hangs_is_killed(scripts: ScriptHost) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        scripts.run("-c", "import time; time.sleep(60)", timeout=0.5)


# --- The zoo --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())
def test_case_learns_and_is_deterministic(case: zoo.Case) -> None:
    first, second = zoo.train(case, 3), zoo.train(case, 3)
    assert first == second
    assert len(first.losses) == 3
    assert first.gradients
    assert zoo.train(case, 0).parameters != first.parameters
    assert zoo.train(case, 3, seed=1) != first


def test_train_calls_back() -> None:
    hooked: list[nn.Module] = []
    steps: list[tuple[int, int]] = []
    zoo.train(
        ZOO["mlp"],
        2,
        before=hooked.append,
        each_step=lambda step, loss: steps.append((step, zoo.count_graph_nodes(loss))),
    )
    assert len(hooked) == 1
    assert [step for step, _ in steps] == [0, 1]
    assert steps[0][1] == steps[1][1] > 10


def test_train_takes_another_optimizer() -> None:
    with_sgd = zoo.train(ZOO["mlp"], optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9))
    assert with_sgd.parameters != zoo.train(ZOO["mlp"]).parameters
    assert with_sgd.losses[0] == zoo.train(ZOO["mlp"]).losses[0]


def test_trace_notices_the_smallest_disturbance() -> None:
    def nudge(model: nn.Module) -> None:
        weight = next(model.parameters())
        weight.data.view(-1)[0].copy_(torch.nextafter(weight.data.view(-1)[0], torch.tensor(9.0)))

    def draw(model: nn.Module) -> None:
        torch.rand(1)

    quiet = zoo.train(ZOO["mlp"])
    assert zoo.train(ZOO["mlp"], before=nudge).parameters != quiet.parameters
    assert zoo.train(ZOO["mlp"], before=draw).rng != quiet.rng


def test_graph_nodes_grow_with_a_full_backward_hook_only() -> None:
    def nodes(prepare: Callable[[nn.Linear], Any]) -> int:
        layer = nn.Linear(3, 2)
        prepare(layer)
        return zoo.count_graph_nodes(layer(torch.ones(1, 3, requires_grad=True)).sum())

    plain = nodes(lambda layer: None)
    assert nodes(lambda layer: layer.register_forward_hook(lambda *_: None)) == plain
    assert nodes(lambda layer: layer.register_full_backward_hook(lambda *_: None)) > plain


def test_hook_count_sees_every_kind() -> None:
    layer = nn.Linear(3, 2)
    model = nn.Sequential(layer, layer)
    handles = [
        layer.register_forward_hook(lambda *_: None),
        layer.register_forward_pre_hook(lambda *_: None),
        layer.register_full_backward_hook(lambda *_: None),
        layer.register_full_backward_pre_hook(lambda *_: None),
        layer.weight.register_hook(lambda _: None),
        layer.weight.register_post_accumulate_grad_hook(lambda _: None),
    ]
    assert zoo.hook_count(model) == 6
    for handle in handles:
        handle.remove()
    assert zoo.hook_count(model) == 0


def test_gan_step_trains_both_models() -> None:
    torch.manual_seed(0)
    model = zoo.Gan()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    generator, discriminator = AdamW(model.generator.parameters()), AdamW(model.discriminator.parameters())
    losses = zoo.gan_step(model, ZOO["gan"].batch(), generator, discriminator)
    assert all(torch.isfinite(loss) for loss in losses)
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_awkward_cases_are_awkward() -> None:
    flattened: list[Tensor] = []
    torch.manual_seed(0)
    model = ZOO["flatten_inplace"].build()
    model[1].register_forward_hook(lambda _module, _args, output: flattened.append(output))  # type: ignore[index]
    ZOO["flatten_inplace"].loss(model, ZOO["flatten_inplace"].batch())
    assert flattened[0]._is_view()
    assert flattened[0].min() == 0

    tied: Any = ZOO["tied_weights"].build()
    assert tied.head.weight is tied.embed.weight
    sparse: Any = ZOO["sparse_embedding"].build()
    ZOO["sparse_embedding"].loss(sparse, ZOO["sparse_embedding"].batch()).backward()
    assert sparse[0].weight.grad.is_sparse


# --- What make test leaves out ----------------------------------------------------------------------


def slow_marks(request: pytest.FixtureRequest) -> dict[str, list[pytest.Mark | None]]:
    """The marker `slow` of every case, or None, by test."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some cases were collected")
    found: dict[str, list[pytest.Mark | None]] = {}
    for item in request.config.stash[COLLECTED]:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item.get_closest_marker("slow"))
    return found


def test_every_slow_case_says_why(request: pytest.FixtureRequest) -> None:
    marks = {test: [mark for mark in each if mark is not None] for test, each in slow_marks(request).items()}
    assert not [test for test, each in marks.items() if not all(mark.kwargs.get("reason") for mark in each)]


def test_every_test_keeps_a_case_in_make_test_or_names_the_test_that_covers_it(request: pytest.FixtureRequest) -> None:
    names = {test.partition("::")[2].split("::")[0] for test in slow_marks(request)}
    whole = len(names) > 1000  # and not some files alone
    for test, marks in slow_marks(request).items():
        if None not in marks:
            covered_by = {mark.kwargs.get("covered_by") for mark in marks if mark is not None}
            assert all(covered_by), f"{test} has no case in make test, and does not say what covers it"
            assert not whole or covered_by <= names, f"{test} is covered by {covered_by}, which there is not"


def test_cases_are_slow_but_for_those_that_are_named() -> None:
    plain, left_out = cases({"a": 1, "b": 2}, always={"a"}, reason="long")
    assert (plain.values, plain.id, [*plain.marks]) == ((1,), "a", [])
    assert (left_out.values, left_out.id, left_out.marks[0].kwargs["reason"]) == ((2,), "b", "long")
    with pytest.raises(ValueError, match="no such case"):
        cases(["a"], always={"b"}, reason="long")
    with pytest.raises(ValueError, match="at least one"):
        cases(["a"], always=(), reason="long")


def test_groups_say_what_was_skipped_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no mains')\n"
        "@pytest.mark.xfail\ndef test_c(): assert False\n"
    )
    broken = tmp_path / "test_broken.py"
    broken.write_text("def test_d(): assert False\n")
    absent = groups.Group((), missing=lambda: "there is no oven")
    monkeypatch.setattr(groups, "GROUPS", {"some": groups.Group((str(file),)), "absent": absent})
    assert groups.main([]) == 0
    some, skipped = capsys.readouterr().out.splitlines()[-2:]
    assert some.startswith("some: passed in ")
    assert some.endswith(" s, 2 passed, 1 skipped; 1 skipped: no mains")
    assert skipped == "absent: skipped, there is no oven"
    assert groups.main(["absent"]) == 1, "a group that was asked for and cannot run"
    groups.GROUPS["some"] = groups.Group((str(broken),))
    assert groups.main(["some"]) == 1
    assert "some: FAILED in " in capsys.readouterr().out


def test_every_file_of_tests_is_in_a_group() -> None:
    """Those that the groups of all files ignore have a group of their own."""
    ignored = {argument.removeprefix("--ignore=") for argument in groups.OTHERS}
    whole = [group for name, group in groups.GROUPS.items() if name not in groups.PARTS]
    own = {argument for group in whole for argument in group.arguments if argument[:6] == "tests/"}
    assert ignored == own
    assert all((compatibility.PAGE.parents[1] / part).is_dir() for part in groups.DEPEND_ON_TORCH)


def test_a_run_on_another_torch_replaces_its_row_in_the_table_of_versions(tmp_path: Path) -> None:
    page = "# Versions\n\n" + "\n".join((compatibility.line(compatibility.HEADER), compatibility.RULE)) + "\n\nMore.\n"
    for name, failed in (("2.15.0", "3"), ("2.9.1", "0"), ("2.11.0", "0"), ("2.15.0", "0")):
        page = compatibility.with_row(page, (name, "3.11.7", "torch", "12", failed, "1", "2026-11-18"))
    page = compatibility.with_row(page, ("2.15.0", "3.11.7", "test", "40", "0", "2", "2026-11-19"))
    lines = page.splitlines()
    assert lines[:2] == ["# Versions", ""]
    assert lines[-2:] == ["", "More."]
    assert [line.split(" | ")[0] for line in lines[4:-2]] == ["| 2.9.1", "| 2.11.0", "| 2.15.0", "| 2.15.0"]
    assert "| 2.15.0 | 3.11.7 | torch | 12 | 0 | 1 | 2026-11-18 |" in lines


def test_the_row_of_a_run_in_parts_has_the_sums_of_its_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "compatibility.md"
    page.write_text(f"{compatibility.line(compatibility.HEADER)}\n{compatibility.RULE}\n")
    monkeypatch.setattr(compatibility, "PAGE", page)
    report = tmp_path / "report.xml"
    case = '<testcase name="a"/>'
    bad = '<testcase name="b"><failure message="x"/></testcase><testcase name="c"><skipped message="y"/></testcase>'
    report.write_text(f"<testsuites><testsuite>{case}{case}{bad}</testsuite></testsuites>")
    assert compatibility.main(["torch", "--reports", str(report), str(report)]) == 1
    version = torch.__version__.partition("+")[0]
    assert page.read_text().splitlines()[2].startswith(f"| {version} | ")
    assert " | torch | 4 | 2 | 2 | " in page.read_text()
    assert "4 passed, 2 failed, 2 skipped" in capsys.readouterr().out


def test_the_table_of_versions_can_be_written_to() -> None:
    page = compatibility.PAGE.read_text()
    assert (
        compatibility.with_row(page, ("99.0.0", "3.11.7", "torch", "1", "0", "0", "2026-11-18")).count("| 99.0.0 |")
        == 1
    )


# --- Reference statistics -------------------------------------------------------------------------


def test_stats_of_known_values() -> None:
    stats = reference.stats(np.array([3.0, -4.0, 0.0, np.nan, np.inf]))
    assert stats == {
        "count": 5,
        "zero_fraction": 0.2,
        "nan_count": 1,
        "inf_count": 1,
        "mean": pytest.approx(-1 / 3, rel=1e-15),
        "std": pytest.approx(math.sqrt(25 / 3 - 1 / 9), rel=1e-15),
        "norm": 5.0,
        "rms": pytest.approx(5 / math.sqrt(3), rel=1e-15),
        "min": -4.0,
        "max": 3.0,
        "abs_max": 4.0,
        "skewness": pytest.approx((-330 / 81) / (222 / 27) ** 1.5, rel=1e-14),
        "kurtosis": pytest.approx(1.5, rel=1e-14),
    }


@pytest.mark.parametrize("array", [np.array([]), np.array([np.nan, -np.inf])])
def test_stats_without_finite_elements(array: np.ndarray[Any, Any]) -> None:
    stats = reference.stats(array)
    assert stats["count"] == array.size
    assert all(math.isnan(stats[key]) for key in ("mean", "std", "norm", "rms", "min", "max", "abs_max"))
    assert math.isnan(reference.quantile(array, 0.5))
    assert reference.bucket_counts(array).sum() == 0


def test_std_beside_a_large_mean() -> None:
    array = 1e4 + 1e-2 * np.tile([-1.0, 1.0], 5000)
    stats = reference.stats(array)
    assert stats["mean"] == pytest.approx(1e4, rel=1e-15)
    assert stats["std"] == pytest.approx(1e-2, rel=1e-9)


def test_one_outlier_and_huge_values() -> None:
    outlier = reference.stats(np.array([1e20, *([1.0] * 999)]))
    assert outlier["mean"] == pytest.approx(1e17, rel=1e-15)
    assert outlier["norm"] == 1e20
    huge = reference.stats(np.full(4, 1e300))
    assert huge["norm"] == pytest.approx(2e300)
    assert huge["std"] == 0
    cancelling = reference.stats(np.array([1e20, 1.0, -1e20]))
    assert cancelling["mean"] == pytest.approx(1 / 3)


def test_stats_agree_with_numpy_on_ordinary_values() -> None:
    array = np.random.default_rng(0).normal(size=(40, 50))
    stats = reference.stats(array)
    assert stats["mean"] == pytest.approx(array.mean(), rel=1e-12)
    assert stats["std"] == pytest.approx(array.std(), rel=1e-12)
    assert stats["norm"] == pytest.approx(np.linalg.norm(array), rel=1e-12)
    assert reference.quantile(array, 0.25) == np.quantile(array, 0.25)


def test_complex_is_taken_as_magnitude() -> None:
    array = np.array([3 + 4j, 0j])
    assert reference.stats(array)["max"] == 5
    assert reference.stats(array)["zero_fraction"] == 0.5
    assert reference.to_numpy(torch.from_numpy(array)).tolist() == [5.0, 0.0]


def test_edges_split_octaves_in_two() -> None:
    assert reference.EDGES.shape == (192,)
    assert reference.EDGES[:3].tolist() == [2.0**-64, 1.5 * 2.0**-64, 2.0**-63]
    assert reference.EDGES[-1] == 1.5 * 2.0**31


@pytest.mark.parametrize(
    ("value", "bucket"),
    [
        (0.0, 192),
        (-0.0, 192),
        (5e-324, 192),
        (np.nextafter(2.0**-64, 0), 192),
        (2.0**-64, 193),
        (np.nextafter(1.5 * 2.0**-64, 0), 193),
        (1.5 * 2.0**-64, 194),
        (2.0**-63, 195),
        (1.0, 192 + 129),
        (np.nextafter(1.5, 0), 192 + 129),
        (1.5, 192 + 130),
        (np.nextafter(2.0, 0), 192 + 130),
        (1.5 * 2.0**31, 384),
        (2.0**32, 384),
        (1e300, 384),
    ],
)
def test_bucket_of_a_value_and_its_mirror(value: float, bucket: int) -> None:
    assert np.flatnonzero(reference.bucket_counts(np.array([value]))).tolist() == [bucket]
    assert np.flatnonzero(reference.bucket_counts(np.array([-value]))).tolist() == [384 - bucket]


def test_buckets_count_every_finite_element_once() -> None:
    rng = np.random.default_rng(0)
    array = rng.normal(size=3000) * 10.0 ** rng.integers(-30, 30, size=3000)
    array[:7] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38]
    counts = reference.bucket_counts(array)
    assert counts.shape == (reference.BUCKETS,)
    assert counts.dtype == np.int64
    assert counts.sum() == np.isfinite(array).sum() == 2997


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.int32],
)
def test_to_numpy_is_exact(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, -1.5, 2.0, 0.4375, 240.0]).to(dtype)
    array = reference.to_numpy(tensor)
    assert array.dtype == np.float64
    assert array.tolist() == [float(element) for element in tensor]


def test_to_numpy_of_other_tensors() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]], requires_grad=True)
    assert reference.to_numpy(dense.to_sparse()).tolist() == dense.tolist()
    assert reference.to_numpy(torch.tensor([True, False])).tolist() == [1.0, 0.0]
    assert reference.to_numpy(put(dense)).tolist() == dense.tolist()


def test_close_is_what_it_is_to_numpy() -> None:
    numbers = (0.0, -0.0, 1.0, 1.0 + 1e-6, 1.0 + 1e-4, -1.0, 1e-9, 1e300, math.inf, -math.inf, math.nan)
    for value, expected, rel, tolerance in itertools.product(numbers, numbers, (0.0, 1e-5), (0.0, 1e-8, 2.0)):
        should = np.isclose(value, expected, rtol=rel, atol=tolerance, equal_nan=True)
        assert reference.is_close(value, expected, rel, tolerance) == should, (value, expected, rel, tolerance)


# --- The simulated device: what is recorded -------------------------------------------------------


@pytest.fixture
def log() -> Iterator[Log]:
    with Log() as opened:
        yield opened


@pytest.mark.parametrize(
    "fetch",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.to(device="cpu", dtype=torch.float64),
        lambda x: torch.empty(2, 3).copy_(x),
        lambda x: torch.empty(2, 3).copy_(x, non_blocking=True),
        lambda x: x.tolist(),
    ],
)
def test_copy_to_host_is_recorded_once(log: Log, fetch: Callable[[Tensor], Any]) -> None:
    values = torch.arange(6.0).view(2, 3)
    fetched = torch.as_tensor(fetch(put(values)))
    assert log.copies == [(2, 3)]
    assert log.syncs == 0
    assert not isinstance(fetched, FakeDeviceTensor)
    assert torch.equal(fetched.float(), values)


def test_copies_to_host_of_a_list_are_recorded_each(log: Log) -> None:
    targets = [torch.empty(2), torch.empty(3)]
    torch._foreach_copy_(targets, [put(torch.ones(2)), put(torch.ones(3))])
    assert log.copies == [(2,), (3,)]
    assert targets[1].tolist() == [1.0, 1.0, 1.0]


def test_copy_into_part_of_a_host_tensor(log: Log) -> None:
    host = torch.zeros(3, 2)
    host[1].copy_(put(torch.ones(2)))
    assert host.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert log.copies == [(2,)]


@pytest.mark.parametrize(
    "upload",
    [
        lambda host, _: host.to(DEVICE),
        lambda host, _: torch.empty(3, device=DEVICE).copy_(host),
        lambda host, _: torch.tensor(host.tolist(), device=DEVICE),
        lambda host, _: torch.as_tensor(host.numpy(), device=DEVICE),
        lambda host, there: torch._foreach_copy_([there], [host]),
        lambda host, there: there[host.long()],
    ],
)
def test_copies_to_the_device_are_recorded_once(log: Log, upload: Callable[[Tensor, Tensor], Any]) -> None:
    upload(torch.ones(3), put(torch.zeros(3)))
    assert log.uploads == [(3,)]
    assert (log.copies, log.syncs) == ([], 0)


def test_copies_on_the_device_are_free(log: Log) -> None:
    x = put(torch.ones(3))
    x.to(torch.float64).clone()
    x.copy_(put(torch.zeros(3)))
    assert (log.copies, log.uploads, log.syncs) == ([], [], 0)


def test_bitwise_operations_do_not_write_floats_as_on_cuda() -> None:
    bits = put(torch.ones(3, dtype=torch.int32))
    torch.bitwise_right_shift(bits, 1, out=torch.empty_like(bits, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="not implemented for"):
        torch.bitwise_right_shift(bits, 1, out=torch.empty_like(bits, dtype=torch.float32))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool(x.any()),
        lambda x: 1 if x.isfinite().all() else 0,
        lambda x: f"{x.sum():.3f}",
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.bincount(x.long(), minlength=4),
        lambda x: torch.histc(x, 4),
    ],
)
def test_waiting_for_data_is_a_sync(log: Log, wait: Callable[[Tensor], Any]) -> None:
    wait(put(torch.tensor([1.0, 0.0, 2.0])))
    assert log.syncs == 1
    assert log.copies == []


def test_reductions_do_not_sync(log: Log) -> None:
    x = put(torch.randn(4, 5))
    x.aminmax()
    torch.linalg.vector_norm(x, dtype=torch.float64)
    torch.var_mean(x)
    x.isfinite().logical_not().sum(dtype=torch.float64)
    torch.where(x.isfinite(), x, 0.0).sum(dtype=torch.float64)
    torch.bucketize(x, torch.tensor([0.0, 1.0], device=DEVICE))
    torch.histc(x, 4, -1, 1)
    x[torch.tensor([0, 1], device=DEVICE)]
    assert (log.copies, log.syncs) == ([], 0)
    assert log.ops["aten.aminmax.default"] == 1


def test_host_scalars_are_not_device_syncs(log: Log) -> None:
    assert torch.tensor(2.0).item() == 2.0
    assert log.syncs == 0


def test_log_stops_and_resets() -> None:
    x = put(torch.ones(2))
    with Log() as outer:
        with Log() as inner:
            x.cpu()
        x.sum().item()
        assert inner.copies == outer.copies == [(2,)]
        assert (inner.syncs, outer.syncs) == (0, 1)
        outer.reset()
        assert (outer.copies, outer.syncs, sum(outer.ops.values())) == ([], 0, 0)
    x.cpu()
    assert outer.copies == []


# --- The simulated device: how tensors behave -----------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.empty(2, 3, device=device).fill_(7),
        lambda device: torch.zeros(2, 3, dtype=torch.int64, device=device),
        lambda device: torch.ones((2,), device=device),
        lambda device: torch.full((2, 2), torch.inf, device=device),
        lambda device: torch.arange(5, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tensor([1.0, 2.0], device=device),
        lambda device: torch.tensor(3, device=device),
        lambda device: torch.randn(3, device=device),
        lambda device: torch.randint(0, 9, (3,), device=device),
        lambda device: torch.zeros_like(torch.ones(2), device=device),
        lambda device: torch.ones(2, device=device).new_full((3,), 2.0),
        lambda device: torch.empty_strided((2, 3), (1, 2), device=device).zero_(),
        lambda device: torch.empty(1, 2, 3, 3, device=device, memory_format=torch.channels_last).zero_(),
    ],
)
@pytest.mark.parametrize("device", [DEVICE, "fakegpu"])
def test_factories(make: Callable[[Any], Tensor], device: Any) -> None:
    torch.manual_seed(0)
    expected = make("cpu")
    torch.manual_seed(0)
    made = make(device)
    assert isinstance(made, FakeDeviceTensor)
    assert made.device == DEVICE
    assert made.stride() == expected.stride()
    assert torch.equal(made.cpu(), expected)


def test_allocations_are_counted(log: Log) -> None:
    torch.zeros(2, device=DEVICE)
    assert log.ops["aten.empty.memory_format"] == 1


def test_module_built_on_the_device() -> None:
    layer = nn.Linear(3, 2, device=DEVICE)
    assert layer(torch.ones(1, 3, device=DEVICE)).device == DEVICE
    assert all(isinstance(p, FakeDeviceTensor) and isinstance(p, nn.Parameter) for p in layer.parameters())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:3],
        lambda x: x[:, ::2],
        lambda x: x.view(2, 12),
        lambda x: x.view(torch.int32),
        lambda x: x.select(0, 2),
        lambda x: x[1, 2],
        lambda x: x.t(),
        lambda x: x.split(2)[1],
        lambda x: x.chunk(2, dim=1)[0],
        lambda x: x.unbind()[3],
        lambda x: x.narrow(1, 1, 3).unsqueeze(0),
        lambda x: x.detach(),
        lambda x: x.data[0],
        lambda x: x.flatten()[5:9].view(2, 2),
    ],
)
def test_views_share_their_data(view: Callable[[Tensor], Tensor]) -> None:
    expected = torch.randn(4, 6)
    x = put(expected)
    assert view(x).shape == view(expected).shape
    assert view(x).stride() == view(expected).stride()
    assert view(x).untyped_storage()._cdata == x.untyped_storage()._cdata
    view(expected).fill_(7)
    view(x).fill_(7)
    assert torch.equal(x.cpu(), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, to: x.add_(1.0),
        lambda x, to: x.zero_(),
        lambda x, to: x.copy_(to(torch.arange(4.0))),
        lambda x, to: x.mul_(to(torch.arange(4.0))),
        lambda x, to: x.scatter_add_(0, to(torch.tensor([0, 0, 3])), to(torch.ones(3))),
        lambda x, to: x.index_add_(0, to(torch.tensor([1, 1])), to(torch.ones(2))),
        lambda x, to: torch.add(x, 1.0, out=x),
        lambda x, to: torch.sub(to(torch.ones(4)), 3.0, out=x),
    ],
)
def test_in_place_operations_on_views(change: Callable[[Tensor, Any], Tensor]) -> None:
    expected = torch.arange(12.0).view(3, 4)
    x = put(expected)
    row = x[1]
    change(expected[1], lambda tensor: tensor)
    assert change(row, put) is row
    assert torch.equal(x.cpu(), expected)
    assert torch.equal(row.cpu(), expected[1])


def test_assigning_to_items() -> None:
    x = torch.zeros(3, 4, device=DEVICE)
    x[0] = 1.0
    x[1, 2] = 5
    x[2] = put(torch.arange(4.0))
    x[:, 3] += 1
    x[x >= 4] = -1.0
    assert x.cpu().tolist() == [[1, 1, 1, 2], [0, 0, -1, 1], [0, 1, 2, -1]]


@pytest.mark.parametrize(
    "several",
    [
        lambda x: x.aminmax(),
        lambda x: torch.var_mean(x, correction=0),
        lambda x: x.chunk(2),
        lambda x: x.unbind(),
        lambda x: x.sort(dim=1),
        lambda x: x.topk(2),
        torch.frexp,
        lambda x: torch._foreach_norm([x, x[0]]),
        lambda x: torch._foreach_mul([x, x[0]], 2.0),
    ],
)
def test_operations_with_several_results(several: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4, 6)
    for result, expected in zip(several(put(x)), several(x), strict=True):
        assert isinstance(result, FakeDeviceTensor)
        assert torch.equal(result.cpu(), expected)


def test_lists_changed_in_place() -> None:
    first, second = put(torch.ones(2)), put(torch.ones(3))
    torch._foreach_add_([first, second], [put(torch.ones(2)), put(torch.ones(3))])
    torch._foreach_mul_([first, second], 3.0)
    torch._foreach_copy_([first], [put(torch.zeros(2))])
    assert (first.tolist(), second.tolist()) == ([0, 0], [6, 6, 6])


def test_results_written_into_given_tensors() -> None:
    low, high = torch.empty((), device=DEVICE), torch.empty((), device=DEVICE)
    given = torch.aminmax(put(torch.tensor([3.0, -1.0])), out=(low, high))
    assert given[0] is low
    assert (low.item(), high.item()) == (-1.0, 3.0)
    grown = torch.empty(0, device=DEVICE)
    torch.add(put(torch.ones(2)), 1.0, out=grown)
    assert grown.shape == (2,)
    assert grown.tolist() == [2.0, 2.0]


def test_shape_changed_in_place() -> None:
    x = put(torch.arange(6.0).view(2, 3))
    assert x.t_() is x
    assert x.unsqueeze_(0).shape == (1, 3, 2)
    assert x.sum(0).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.isfinite(),
        lambda x: torch.where(x.isnan(), 0.0, x),
        lambda x: x.nan_to_num().sum(dtype=torch.float64),
        lambda x: x.view(torch.int32) >> 22,
        lambda x: (x.view(torch.int32) & 0x7FFFFFFF) << 1,
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x.expand(2, *x.shape).sum(0),
        lambda x: torch.cat([x, x]).view(-1),
        lambda x: torch.stack([x[0].sum(), x[1].max()]),
        lambda x: torch.zeros(9, dtype=torch.int64, device=x.device).index_add_(
            0, x.isnan().long().flatten(), torch.ones_like(x, dtype=torch.int64).flatten()
        ),
    ],
)
def test_values_are_those_of_the_cpu(compute: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[1.5, -0.0, torch.inf], [torch.nan, 1e-30, -7.0]])
    result = compute(put(x))
    assert isinstance(result, FakeDeviceTensor)
    assert zoo.raw(result) == zoo.raw(compute(x))


def test_mixing_devices_raises() -> None:
    x = put(torch.ones(2))
    with pytest.raises(RuntimeError, match="expected all tensors on fakegpu:0"):
        x + torch.ones(2)
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_buffer_written_in_inference_mode() -> None:
    rows = torch.zeros(2, 3, device=DEVICE)
    with torch.inference_mode():
        doubled = put(torch.ones(3)).mul(2.0)
        rows[1].copy_(doubled)
    assert doubled.is_inference()
    rows[0].add_(1.0)
    assert rows.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_copies_are_independent() -> None:
    model = to_device(nn.Linear(2, 2))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.zero_()
    assert isinstance(copied.weight, FakeDeviceTensor)
    assert model.weight.abs().sum().item() > 0


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="strided"):
        put(torch.eye(2).to_sparse())


def test_assigning_data_moves_the_values_too() -> None:
    parameter = nn.Parameter(put(torch.zeros(2)))
    parameter.data = put(torch.ones(3))
    assert parameter.shape == (3,)
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_tied_parameters_stay_tied() -> None:
    model: Any = to_device(ZOO["tied_weights"].build())
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, FakeDeviceTensor)


# --- The simulated device: training ---------------------------------------------------------------


def _on_device(case: zoo.Case) -> zoo.Case:
    return zoo.moved(case, to_device, put)


# The others pick other kernels by device (attention, recurrent cells), or need sparse gradients.
_SAME_KERNELS = sorted(
    set(ZOO) - {"lstm", "gru_loop", "sparse_embedding", "autocast"} - {"vit", "albert", "llama", "mamba", "mixtral"}
)


@pytest.mark.parametrize("name", _SAME_KERNELS)
def test_training_is_bitwise_that_of_the_cpu(name: str) -> None:
    assert zoo.train(_on_device(ZOO[name]), 2) == zoo.train(ZOO[name], 2)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
        lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
        lambda parameters: AdamW(parameters, lr=1e-2, foreach=False),
        lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
    ],
    ids=["sgd", "sgd_foreach", "adamw", "adamw_foreach"],
)
def test_optimizers_are_bitwise_those_of_the_cpu(name: str, optimizer: zoo.OptimizerFactory, log: Log) -> None:
    expected = zoo.train(ZOO[name], 3, optimizer=optimizer)
    assert log.ops.total() == 0
    assert zoo.train(_on_device(ZOO[name]), 3, optimizer=optimizer) == expected
    assert log.syncs == 0


def test_layers_run_forward_and_backward() -> None:
    def run(place: Callable[[Any], Any]) -> list[bytes]:
        torch.manual_seed(0)
        embedding = place(nn.Embedding(10, 6))
        body = place(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)))
        hidden = body(embedding(place(torch.randint(0, 10, (8,)))))
        nn.CrossEntropyLoss()(hidden, place(torch.randint(0, 6, (8,)))).backward()
        return [zoo.raw(p.grad) for p in [*embedding.parameters(), *body.parameters()]]

    def place(thing: Any) -> Any:
        return put(thing) if isinstance(thing, Tensor) else to_device(thing)

    assert run(place) == run(lambda thing: thing)


def test_hooks_see_device_tensors(log: Log) -> None:
    seen: list[Tensor] = []
    model = to_device(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)))
    for module in model:
        module.register_forward_hook(lambda _m, _a, output: output.register_hook(seen.append) and None)
    model(put(torch.ones(2, 4))).sum().backward()
    assert len(seen) == 3
    assert all(isinstance(gradient, FakeDeviceTensor) for gradient in seen)
    assert (log.copies, log.syncs) == ([], 0)


def test_module_moves_back_to_the_cpu(log: Log) -> None:
    model = to_device(nn.Linear(3, 2))
    model.cpu()
    assert not any(isinstance(parameter, FakeDeviceTensor) for parameter in model.parameters())
    assert sorted(log.copies) == [(2,), (2, 3)]


def test_device_is_a_registered_backend() -> None:
    assert fake_device.DEVICE.type == "fakegpu"
    assert torch.get_device_module(DEVICE).is_available()
