"""The kernel against the float64 reference, in each of the versions this CPU can run."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tbhooks
from tbhooks.data import stats
from tbhooks.data.stats import WIDTH
from tbhooks.reduction import cpu, histogram, torch_rows
from tbhooks.reduction.histogram import SLOTS
from tests.support import reference
from tests.support.slow import slow
from tests.support.tensors import assert_same_shape, reader

if shutil.which("cc") is None or cpu.library is None:
    pytest.skip("needs a C compiler and the kernel built with it", allow_module_level=True)

FLAGS = ("-O3", "-fopenmp-simd", "-fPIC", "-shared")
SOURCES = Path(__file__).parent / "kernel"
BUILT = Path(tempfile.mkdtemp(prefix="tbhooks-kernel-"))


@functools.cache
def compiled(source: str, *flags: str) -> Path:
    out = BUILT / source.removesuffix(".c")
    subprocess.run(["cc", *flags, str(SOURCES / source), "-lm", "-o", str(out)], check=True, timeout=120)
    return out


@functools.cache
def library() -> ctypes.CDLL:
    """Every version of the kernel there is, built on first use: not while tests are collected."""
    return ctypes.CDLL(str(compiled("versions.c", *FLAGS)))


CPU = set(next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split())
NEEDS = {"baseline": "sse2", "avx2": "avx2", "avx512": "avx512vl"}
VERSIONS = [version for version, flag in NEEDS.items() if flag in CPU]
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
SIZES = (0, 1, 2, 7, 15, 16, 17, 33, 511, 513, 2047, 2048, 2049, 4100)


def run(version: str, x: Tensor, before: Tensor | None = None) -> tuple[Any, Any]:
    row, counts = torch.full((WIDTH,), 9.0, dtype=torch.float64), torch.ones(SLOTS, dtype=torch.int32)
    if version == "wrapper":
        minus = cpu.NULL if before is None else before.data_ptr()
        cpu.reduce_all([cpu.job(x, row.data_ptr(), counts.data_ptr(), minus)])
    else:
        call = getattr(library(), f"test_{version}")
        call.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        minus = None if before is None else before.data_ptr()
        assert call(x.data_ptr(), minus, x.numel(), DTYPES[x.dtype], row.data_ptr(), counts.data_ptr()) == 0
    return row.numpy(), counts.numpy() - 1


class Expected:
    """What the reference computes of a tensor, once for every version of the kernel."""

    def __init__(self, x: Tensor) -> None:
        values = reference.to_numpy(x)
        self.dtype, self.stats, self.buckets = x.dtype, reference.stats(values), reference.bucket_counts(values)
        self.size, self.finite = values.size, int(np.isfinite(values).sum())
        self.zeros = np.count_nonzero(values == 0)

    def check(self, row: Any, counts: Any, rel: float = 1e-9) -> None:
        """`rel` of the standard deviation; of the mean, relative to the largest magnitude it was summed from."""
        expected = self.stats
        assert row[stats.COUNT] == self.size
        assert row[stats.BASE] == 0
        assert row[stats.NANS] == expected["nan_count"]
        assert row[stats.INFS] == expected["inf_count"]
        assert row[stats.ZEROS] == self.zeros
        assert np.array_equal(counts[:-1], self.buckets)
        assert counts[-1] == self.size - self.finite
        if not self.finite:
            assert row[stats.MEAN] == row[stats.M2] == row[stats.M3] == row[stats.M4] == 0
            assert row[stats.MIN] == math.inf
            assert row[stats.MAX] == -math.inf
            return
        assert row[stats.MIN] == expected["min"]
        assert row[stats.MAX] == expected["max"]
        assert abs(row[stats.MEAN] - expected["mean"]) <= 1e-13 * expected["abs_max"]
        assert_same_shape(reader(row), expected, rel)
        std = math.sqrt(row[stats.M2] / self.finite)
        if expected["std"] > 1e152 and std == math.inf:  # m2 itself is beyond double
            return
        # Squares of doubles below 1e-154 are denormal; and the reference's mean of equal numbers has an error.
        noise = 1e-150 if self.dtype == torch.float64 else 0.0
        assert math.isclose(std, expected["std"], rel_tol=rel, abs_tol=noise + 4e-16 * expected["abs_max"])


def check(x: Tensor, row: Any, counts: Any, rel: float = 1e-9) -> None:
    Expected(x).check(row, counts, rel)


@contextlib.contextmanager
def named(version: str, n: int) -> Iterator[None]:
    """Says of which version a failure is."""
    try:
        yield
    except AssertionError as problem:
        problem.add_note(f"{version}, {n} elements")
        raise


def normal(n: int, mean: float, std: float) -> Tensor:
    return mean + std * torch.randn(n, dtype=torch.float64)


def outlier(n: int) -> Tensor:
    x = normal(n, 0, 1e-3)
    x[: min(n, 1)] = 1e20
    return x.roll(n // 2)


def mixed(n: int) -> Tensor:
    x = normal(n, 1, 1)
    x[::3], x[1::7], x[2::11], x[3::5] = math.nan, math.inf, -math.inf, 0.0
    return x


def with_negative_zeros(n: int) -> Tensor:
    x = normal(n, 0, 1).relu()
    x[::2] *= -1
    return x


NASTY: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda n: normal(n, 0, 1),
    "large mean": lambda n: normal(n, 1e4, 1e-2),
    "huge mean": lambda n: normal(n, -1e7, 1.0),
    "drift": lambda n: torch.linspace(-1e4, 1e4, n, dtype=torch.float64) + normal(n, 0, 1e-3),
    "step": lambda n: torch.arange(n).ge(n // 2).double() * 1e6 + normal(n, 0, 1e-2),
    "denormal": lambda n: normal(n, 0, 1e-40),
    "half denormal": lambda n: normal(n, 0, 1e-6),
    "equal": lambda n: torch.full((n,), 0.1, dtype=torch.float64),
    "zeros": lambda n: torch.zeros(n, dtype=torch.float64),
    "signed zeros": with_negative_zeros,
    "outlier": outlier,
    "outlier first": lambda n: outlier(n).roll(-(n // 2)),
    "mixed": mixed,
    "nan first": lambda n: torch.cat(
        [torch.full((min(n, 1),), math.nan, dtype=torch.float64), normal(max(n - 1, 0), 1e4, 1e-2)]
    ),
    "all nan": lambda n: torch.full((n,), math.nan, dtype=torch.float64),
    "all inf": lambda n: torch.full((n,), -math.inf, dtype=torch.float64),
    "edges": lambda n: torch.tensor(
        np.resize(np.concatenate([reference.EDGES, -reference.EDGES, np.nextafter(reference.EDGES, 0)]), n)
    ),
    "widest": lambda n: torch.randn(n, dtype=torch.float64).sign() * torch.logspace(-45, 38, n, dtype=torch.float64),
    "huge": lambda n: normal(n, 0, 1) * 1e300,
    "near the largest": lambda n: torch.randn(n, dtype=torch.float64).sign() * 1.7e308,
    "largest": lambda n: torch.full((n,), sys.float_info.max, dtype=torch.float64),
    "tiny": lambda n: normal(n, 0, 1) * 1e-310,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NASTY)
def test_the_row_and_the_counts_equal_the_reference(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for n in SIZES:
        x = NASTY[kind](n).to(dtype)
        expected = Expected(x)
        for version in (*VERSIONS, "wrapper"):
            with named(version, n):
                expected.check(*run(version, x))


def scaled_blocks(n: int, exponents: Any) -> Tensor:
    """Normal numbers; those of the i-th 2048 are multiplied by 2 ** exponents[i], over and over."""
    return normal(n, 0, 1) * 2.0 ** torch.tensor(np.resize(np.repeat(exponents, 2048), n), dtype=torch.float64)


# How a block of a large array is counted depends on how far its magnitudes are apart, and from those before.
LARGE: dict[str, Callable[[int], Tensor]] = {
    **NASTY,
    "growing": lambda n: scaled_blocks(n, range(-20, 20, 3)),
    "shrinking": lambda n: scaled_blocks(n, range(10, -20, -3)),
    "small among large": lambda n: normal(n, 0, 1) * 10.0 ** -(10 * torch.rand(n, dtype=torch.float64) ** 8),
    "wide": lambda n: normal(n, 0, 1) * 10.0 ** -(8 * torch.rand(n, dtype=torch.float64)),
    "some wide": lambda n: torch.where(torch.arange(n) // 2048 % 3 == 1, LARGE["wide"](n), NASTY["normal"](n)),
    "some not finite": lambda n: torch.where(torch.arange(n) % 5000 == 0, math.nan, NASTY["normal"](n)),
}


def check_counts(x: Tensor) -> None:
    expected = reference.bucket_counts(reference.to_numpy(x))
    for version in (*VERSIONS, "wrapper"):
        with named(version, x.numel()):
            assert np.array_equal(run(version, x)[1][:-1], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LARGE)
def test_large_arrays_are_counted_exactly(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    for n in (4_096, 5_001, 16_384, 20_003):
        check_counts(LARGE[kind](n).to(dtype))


@pytest.mark.parametrize("kind", ["normal", "zeros", "equal", "small among large", "wide", "signed zeros"])
def test_counts_may_be_more_than_16_bits_hold(kind: str) -> None:
    torch.manual_seed(3)
    check_counts(LARGE[kind](300_003).float())


def test_arrays_of_one_call_are_counted_apart() -> None:
    torch.manual_seed(4)
    sizes = (20_000, 5, 3_000, 4_096, 16_384, 400, 200_000, 2_048)
    tensors = [LARGE[kind](n).float() for kind in ("normal", "wide", "zeros") for n in sizes]
    rows = torch.zeros(len(tensors), WIDTH, dtype=torch.float64)
    counts = torch.zeros(len(tensors), SLOTS, dtype=torch.int32)
    cpu.reduce_all([cpu.job(x, r.data_ptr(), c.data_ptr()) for x, r, c in zip(tensors, rows, counts, strict=True)])
    for x, counted in zip(tensors, counts.numpy(), strict=True):
        assert np.array_equal(counted[:-1], reference.bucket_counts(reference.to_numpy(x)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NASTY)
def test_differences_need_no_temporary(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for n in SIZES:
        x, before = NASTY[kind](n).to(dtype), NASTY["normal"](n).to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected, of_equals = Expected(x.to(wide) - before.to(wide)), Expected(x.to(wide) - x.to(wide))
        for version in VERSIONS:
            with named(version, n):
                expected.check(*run(version, x, before))
                of_equals.check(*run(version, x, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_half_there_is(dtype: torch.dtype) -> None:
    """All 65536 halves; for float and double, all of their keys with random lower bits."""
    bits = torch.arange(1 << 16)
    if dtype in (torch.bfloat16, torch.float16):
        x = bits.to(torch.uint16).view(dtype)
    elif dtype == torch.float32:
        x = ((bits << 16) | torch.randint(0, 1 << 16, bits.shape)).to(torch.uint32).view(dtype)
    else:
        x = ((bits - (1 << 15) << 48) | torch.randint(0, 1 << 48, bits.shape)).view(dtype)
    expected = Expected(x)
    for version in VERSIONS:
        with named(version, x.numel()):
            expected.check(*run(version, x))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [1, 2, 3, 4, 5, 7])
def test_data_need_no_alignment(shift: int, dtype: torch.dtype, version: str) -> None:
    x = normal(5000, 1e2, 1.0).to(dtype)
    memory = np.zeros(5000 * x.element_size() + 16, dtype=np.uint8)
    memory[shift : shift + 5000 * x.element_size()] = x.view(torch.uint8).numpy()
    row, counts = torch.empty(WIDTH, dtype=torch.float64), torch.zeros(SLOTS, dtype=torch.int32)
    call = getattr(library(), f"test_{version}")
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    call(memory.ctypes.data + shift, None, 5000, DTYPES[dtype], row.data_ptr(), counts.data_ptr())
    check(x, row.numpy(), counts.numpy())


floats = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, 1.0, 1e4, 1e4 + 1e-2, 1e20, math.nan, math.inf, -math.inf, 2.0**-64, 1.5]
)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(floats, max_size=70),
    tail=st.integers(0, 3000),
    offset=st.integers(0, 5),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_any_values(version: str, values: list[float], tail: int, offset: int, dtype: torch.dtype) -> None:
    """Any values, the last repeated, and a slice of them that starts anywhere."""
    x = torch.tensor(values + values[-1:] * tail, dtype=torch.float64).to(dtype)[offset:]
    check(x, *run(version, x))


@settings(max_examples=150, deadline=None)
@given(values=st.lists(st.floats(), max_size=40), before=st.lists(st.floats(), max_size=40))
def test_any_doubles(values: list[float], before: list[float]) -> None:
    n = min(len(values), len(before))
    x, y = torch.tensor(values[:n], dtype=torch.float64), torch.tensor(before[:n], dtype=torch.float64)
    for version in VERSIONS:
        check(x, *run(version, x))
        check(x - y, *run(version, x, y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "large mean", "mixed", "denormal", "outlier"])
def test_torch_operations_mean_the_same(kind: str, dtype: torch.dtype) -> None:
    """The row and the counts that the package computes with torch."""
    x = NASTY[kind](5000).to(dtype)
    row, counts = run("wrapper", x)
    expected, buckets_expected = (
        torch.zeros(WIDTH, dtype=torch.float64),
        torch.zeros(histogram.SLOTS, dtype=torch.int64),
    )
    torch_rows.write_row(x, expected)
    histogram.add_counts(x, buckets_expected)
    assert np.array_equal(counts, buckets_expected.numpy())
    np.testing.assert_allclose(row, expected.numpy(), rtol=1e-9, atol=1e-12)


def test_errors_do_not_grow_with_millions() -> None:
    """Errors stay where they are after thousands of blocks."""
    torch.manual_seed(2)
    for mean, std in ((1e4, 1e-2), (0.0, 1.0), (300.0, 1e-2)):
        x = torch.randn(3_000_001).mul_(std).add_(mean)
        values = x.double()
        row, _ = run("wrapper", x)
        assert math.isclose(row[stats.MEAN], values.mean().item(), rel_tol=1e-13, abs_tol=1e-13 * std)
        away = values - values.mean()
        away -= away.mean()  # the mean of numbers far from zero is rounded
        assert math.isclose(row[stats.M2], away.square().sum().item(), rel_tol=1e-11)
        assert math.isclose(row[stats.M4], away.pow(4).sum().item(), rel_tol=1e-11)
        assert abs(row[stats.M3] - away.pow(3).sum().item()) < 1e-10 * row[stats.M4] / std


def test_flushing_denormals_loses_no_half() -> None:
    """Half denormals are ordinary floats: flushing float denormals must not lose them."""
    torch.set_flush_denormal(True)
    try:
        x = (torch.arange(1, 1024).to(torch.int16)).view(torch.float16)
        row, counts = run("wrapper", x)
    finally:
        torch.set_flush_denormal(False)
    check(x, row, counts)


def test_bad_arguments_change_nothing() -> None:
    row = torch.full((WIDTH,), 7.0, dtype=torch.float64)
    call = library().test_baseline
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    assert call(row.data_ptr(), None, 1, 4, row.data_ptr(), None) == -1
    assert call(row.data_ptr(), None, -1, 0, row.data_ptr(), None) == -1
    assert (row == 7).all()


@pytest.mark.parametrize(
    "sanitizer",
    ["address,undefined", pytest.param("thread", marks=slow("a minute under the sanitizer"))],
)
def test_no_access_out_of_bounds_no_undefined_behaviour_no_race(sanitizer: str) -> None:
    """Exact-size heap blocks of random and edge data, and many arrays in several threads, under the sanitizers."""
    flags = ("-O1", "-g", "-fopenmp-simd", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread")
    try:
        program = compiled("sanitize.c", *flags)
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no such sanitizer")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=200, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run under this kernel's address randomisation")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_change_nothing_to_the_bit() -> None:
    """Torch's own OpenMP threads, where torch has them."""
    tensors = [torch.randn(n, dtype=torch.float64).to(d) for n in (3, 700, 70_000, 1_000_001) for d in DTYPES]
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows_, counts = np.zeros((len(tensors), WIDTH)), np.zeros((len(tensors), SLOTS), dtype=np.int32)
        cpu.reduce_all(
            [cpu.job(x, r.ctypes.data, c.ctypes.data) for x, r, c in zip(tensors, rows_, counts, strict=True)]
        )
        found.append((rows_.tobytes(), counts.tobytes()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("two_threads")
def test_the_threads_are_those_torch_has_already() -> None:
    if cpu._threads_of_torch() is None:
        pytest.skip("torch uses another OpenMP library here")
    x, row = torch.randn(1 << 20), torch.zeros(WIDTH, dtype=torch.float64)
    torch.mm(torch.randn(512, 512), torch.randn(512, 512))
    x.exp_()  # has torch start its threads
    before = len(list(Path("/proc/self/task").iterdir()))
    cpu.reduce(x, row.data_ptr(), cpu.NULL)
    assert len(list(Path("/proc/self/task").iterdir())) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_is_made_while_reading(dtype: torch.dtype) -> None:
    for n, offset in ((10_007, 0), (300_001, 0), (300_001, 1)):  # longer ones are written past the cache, if aligned
        x, row = torch.randn(n).to(dtype), torch.zeros(WIDTH, dtype=torch.float64)
        block = torch.zeros(n + offset + 8, dtype=dtype)
        copy = block[offset : offset + n]
        cpu.reduce_all([cpu.job(x, row.data_ptr(), cpu.NULL, cpu.NULL, copy.data_ptr())])
        assert torch.equal(x, copy)
        assert row[stats.COUNT] == n
        assert not block[:offset].any()
        assert not block[offset + n :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_units_with_anything_but_zeros_are_alive(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 37, 3, 3).relu_().to(dtype)
    x[:, 7], x[:, 30], x[4, 31] = 0.0, -0.0, math.nan
    x[:4, 31] = 0.0
    alive = torch.zeros(37)
    cpu.find_alive(x, 1, alive)
    assert torch.equal(alive, (x != 0).any(3).any(2).any(0).float())
    assert alive.sum() == 35
    cpu.find_alive(torch.ones_like(x), 1, alive)
    assert alive.all()


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
@pytest.mark.parametrize(
    ("dtype", "with_buckets", "most"),
    [
        (0, 1, 7.1),
        (2, 0, 4.0),
        pytest.param(0, 0, 3.1, marks=slow("fewer instructions of the same loop")),
        pytest.param(1, 0, 4.5, marks=slow("float64 takes the same loop")),
    ],
)
def test_instructions_for_each_element(dtype: int, with_buckets: int, most: float) -> None:
    """Counted, not timed: the same on a busy machine. A quarter above what it takes today."""
    program = compiled("callgrind.c", "-O3", "-fopenmp-simd")
    out = BUILT / f"callgrind-{dtype}-{with_buckets}"
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--toggle-collect=tbhooks_reduce"]
    subprocess.run(
        [*command, str(program), str(dtype), str(with_buckets)], capture_output=True, timeout=200, check=True
    )
    total = next(line for line in out.read_text().splitlines() if line.startswith(("summary:", "totals:")))
    assert 1 < int(total.split()[1]) / (1 << 20) < most


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    assert cpu._load(tmp_path / "missing.so") == (None, "")
    (tmp_path / "broken.so").write_bytes(b"not a library")
    library, why = cpu._load(tmp_path / "broken.so")
    assert library is None
    assert why.startswith(f"{tmp_path / 'broken.so'} cannot be loaded: ")
    source, old = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("int tbhooks_abi(void) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(old)], check=True)
    assert cpu._load(old) == (None, f"{old} is of version 0, and this tbhooks needs version {cpu.ABI}")


def test_a_library_that_is_left_from_another_version_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "_kernel.so").write_bytes(b"not a library")
    library, why = cpu._load(tmp_path / "_kernel.so")
    monkeypatch.setattr(cpu, "library", library)
    monkeypatch.setattr(cpu, "failure", why)
    with caplog.at_level("WARNING", logger="tbhooks"), tbhooks.watch(torch.nn.Linear(2, 1)) as w:
        assert w.stats.kernel == f"torch: {why}"
        assert [record.message for record in caplog.records] == list(w.stats.messages)
    (message,) = w.stats.messages
    assert why in message
    assert "torch operations" in message


@pytest.mark.usefixtures("two_threads")
def test_no_thread_of_torch_ends_because_of_it() -> None:
    """A pool asked for fewer threads than it has ends the others; new ones may round otherwise."""
    if cpu._threads_of_torch() is None:
        pytest.skip("torch uses another OpenMP library here")
    torch.set_num_threads(4)
    x, row = torch.randn(1 << 20), torch.zeros(WIDTH, dtype=torch.float64)
    x.exp_()
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    cpu.reduce(x[: 1 << 17], row.data_ptr(), cpu.NULL)
    x.exp_()
    assert before <= {task.name for task in Path("/proc/self/task").iterdir()}


def test_no_threads_are_started_for_many_small_tensors() -> None:
    """Torch would not have started them, and a forked child of a process with threads may hang."""
    program = """
import torch
from pathlib import Path
from tbhooks.reduction import cpu as kernel
torch.set_num_threads(4)
tensors = [torch.ones(4096) for _ in range(100)]
rows = torch.zeros(100, 11, dtype=torch.float64)
before = len(list(Path("/proc/self/task").iterdir()))
kernel.reduce_all([kernel.job(x, row.data_ptr(), 0) for x, row in zip(tensors, rows)])
print(len(list(Path("/proc/self/task").iterdir())) - before, int(rows[:, 0].sum()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["0", "409600"]


def test_what_has_no_memory_is_not_read() -> None:
    zeros = torch._efficientzerotensor(10)
    assert not cpu.can_read(zeros)
    assert not cpu.can_read(zeros[2:])
    whole = torch.randn(10)
    part = whole[2:]
    assert cpu.can_read(part)
    whole.untyped_storage().resize_(0)
    assert not cpu.can_read(whole)
    assert not cpu.can_read(part)
