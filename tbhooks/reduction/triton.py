"""Reduces CUDA tensors to rows and bucket counts with one launch and one read each, where Triton is installed.

Each program reads blocks (STRETCH elements) of a tensor and writes one partial row, with moments about the mean of
each block. The partial rows of all tensors of a step are merged by one launch at its end. Many tensors (all parameters)
are reduced by one launch, for which a table with their addresses is copied from pinned memory, without a wait.

All sums over elements are float32, of at most STRETCH numbers that are centred and scaled, so that neither a large mean
nor a large exponent costs accuracy. float64 is used for a few numbers of each block only.

There is one compiled variant for each of the three types, and one that merges. `prepare` compiles and runs them when
`watch` is called; a device that is first seen later is prepared in the background, and torch operations serve until
then. The numbers are tested with Triton's interpreter, the compiled code by its disassembly (registers, spills, width
of loads). How long it takes can only be measured on a GPU.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from tbhooks.data import stats
from tbhooks.reduction import histogram, pinned, torch_rows
from tbhooks.reduction.cpu import NULL, Address

logger = logging.getLogger("tbhooks")

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
STRETCH = 4096
# Eight warps with 128 registers a thread, which costs no spills and one instruction in a hundred: two programs run on a
# multiprocessor at a time. With four warps a thread has twice as many elements, and takes all 255 registers.
# Multiplications and additions are fused, whatever Triton's default is: not fusing them costs instructions.
FUSION = {"enable_fp_fusion": True}
OPTIONS = {"num_warps": 8, **FUSION} | ({} if torch.version.hip else {"maxnreg": 128})
# Of one tensor: several for each multiprocessor of any GPU, and few enough for one program to merge.
MOST_PROGRAMS = 512
# Of one launch for many tensors, beside one for each tensor.
MANY_PROGRAMS = 4096
# Of the table for many tensors: JOB in the kernels.
COLUMNS = 9
# Bucket counts are 32-bit integers.
LONGEST = (2**31 - 1) // STRETCH * STRETCH
# Partial rows and slots of the first step; later ones have as many as were needed.
FEWEST_PARTIALS, FEWEST_SLOTS = 1 << 14, 1 << 9

_lock = threading.Lock()
_kernels: Any = None
_ready: set[torch.device] = set()
_begun: set[torch.device] = set()
failure = ""
"""The first exception of Triton. From then on torch operations are used."""


class Job(NamedTuple):
    """A tensor to reduce, one to subtract from it, a scalar tensor to divide it by, and where row and counts go."""

    numbers: Tensor
    minus: Tensor | None
    scale: Tensor | None
    row: Address
    counts: Address


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether it is on a device that Triton has kernels for."""
    return tensor.is_cuda


def takes(tensor: Tensor) -> bool:
    """Whether these kernels reduce it: on a prepared GPU, float32 or half precision, dense in any order."""
    return (
        is_on_gpu(tensor)
        and tensor.dtype in TYPES
        and type(tensor) in (Tensor, Parameter)
        and tensor.numel() > 0
        and not tensor.is_neg()
        and (tensor.is_contiguous() or torch_rows.is_dense(tensor))
        and is_ready(tensor.device)
    )


@cache
def is_installed() -> bool:
    """Triton is a dependency of torch on Linux with CUDA."""
    return importlib.util.find_spec("triton") is not None


def name() -> str:
    """What reduces CUDA tensors here: "triton", or "torch" and why."""
    if not is_installed():
        return "torch"
    return f"torch: {failure}" if failure else "triton"


def is_ready(device: torch.device) -> bool:
    """Whether the kernels of a device are compiled. If they are not, a thread begins to compile them."""
    if device in _ready:
        return not failure
    if device not in _begun and not failure and is_installed():
        threading.Thread(target=prepare, args=(device,), name="tbhooks-triton", daemon=True).start()
    return False


def prepare_for(tensors: Iterable[Tensor]) -> None:
    """Prepares the devices of these tensors, where Triton has kernels for them."""
    for device in dict.fromkeys(tensor.device for tensor in tensors if is_on_gpu(tensor)):
        prepare(device)


def prepare(device: torch.device) -> None:
    """Compiles every variant and runs it once, unless that was done. What it raises is kept in `failure`."""
    global failure  # noqa: PLW0603 - of the process, as Triton's compiler is
    with _lock:
        if device in _begun or failure or not is_installed():
            return
        _begun.add(device)
    began = time.perf_counter()
    try:
        _try_all(device)
    except Exception as problem:  # no C compiler, a driver too old, an architecture without a code generator
        failure = f"{type(problem).__name__}: {problem}"
        return
    _ready.add(device)
    seconds = time.perf_counter() - began
    logger.info("The Triton kernels for %s were compiled or loaded in %.1f s.", device, seconds)


def _try_all(device: torch.device) -> None:
    row = torch.empty(stats.WIDTH, dtype=torch.float64, device=device)
    counts = torch.zeros(histogram.SLOTS, dtype=torch.int32, device=device)
    scratch = Scratch(device)
    for dtype in TYPES:
        one = torch.zeros(1, dtype=dtype, device=device)
        scratch.reduce_all([Job(one, None, None, row.data_ptr(), counts.data_ptr())])
    scratch.merge()


class Scratch:
    """The partial rows of one step on one device, and the slots that say to which row they belong.

    Everything is launched on the current stream. The caller has `merge` run after all other launches. `on_growth` is
    called when memory was allocated, for which other streams have to wait.
    """

    def __init__(self, device: torch.device, on_growth: Callable[[], None] = lambda: None) -> None:
        self._device, self._on_growth = device, on_growth
        self._made: list[tuple[Tensor, Tensor]] = []
        """Partial rows, and slots for them. There is one pair, until a step needs more than the one before."""
        self._slots_used: list[int] = []
        self._partials_used = 0

    def reduce(self, job: Job) -> None:
        """Reduces one tensor, in one launch."""
        numbers = job.numbers
        each, programs = _shares(_stretches(numbers), 1)
        partial, slot = self._take(programs)
        with _current(self._device):
            _launch(
                numbers.dtype, programs, NULL, numbers.data_ptr(), _address(job.minus), _address(job.scale),
                numbers.numel(), each, partial, job.counts, slot, job.row,
            )  # fmt: skip

    def reduce_all(self, jobs: Sequence[Job]) -> None:
        """Reduces many tensors, in one launch for each type, and one copy of a table from pinned memory."""
        for dtype in TYPES:
            alike = [job for job in jobs if job.numbers.dtype == dtype]
            if not alike:
                continue
            least = -(-sum(_stretches(job.numbers) for job in alike) // MANY_PROGRAMS)
            table = np.concatenate([self._rows_of_table(job, least) for job in alike])
            there = pinned.upload(torch.from_numpy(table), self._device)
            with _current(self._device):
                _launch(dtype, len(table), there.data_ptr(), *(NULL for _ in range(9)))

    def _rows_of_table(self, job: Job, least: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One row for each program that reduces a part of the tensor. The columns are those of JOB in the kernels."""
        numbers = job.numbers
        each, programs = _shares(_stretches(numbers), least)
        partial, slot = self._take(programs)
        part, i = each * STRETCH, np.arange(programs)
        table = np.zeros((programs, COLUMNS), dtype=np.int64)
        table[:, 0] = numbers.data_ptr() + i * (part * numbers.itemsize)
        table[:, 1] = 0 if job.minus is None else job.minus.data_ptr() + i * (part * numbers.itemsize)
        table[:, 2] = _address(job.scale)
        table[:, 3] = np.minimum(numbers.numel() - i * part, part)
        table[:, 4] = partial + i * (_load().PARTIALS.value * 8)
        table[:, 5] = job.counts
        table[0, 6:] = slot, job.row, programs
        return table

    def merge(self) -> None:
        """Merges the partial rows into the rows: one launch, unless this step needed more than the one before."""
        with _current(self._device):
            for (_, slots), used in zip(self._made, self._slots_used, strict=True):
                if used:
                    _load().merge_rows[(used,)](slots.data_ptr(), PROGRAMS=_power_of_two(MOST_PROGRAMS), **FUSION)

    def forget(self) -> None:
        """Begins an empty step, with memory for as much as the last one needed."""
        if len(self._made) > 1:
            partials, slots = (sum(len(made[i]) for made in self._made) for i in (0, 1))
            self._made = []
            self._grow(partials, slots)
        self._slots_used = [0 for _ in self._made]
        self._partials_used = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that launches write to."""
        return [tensor for made in self._made for tensor in made]

    def _take(self, programs: int) -> tuple[Address, Address]:
        """The addresses of as many partial rows and of a slot."""
        is_full = not self._made or (
            self._partials_used + programs > len(self._made[-1][0]) or self._slots_used[-1] >= len(self._made[-1][1])
        )
        if is_full:
            last = self._made[-1] if self._made else ((), ())
            self._grow(max(len(last[0]), programs, FEWEST_PARTIALS), max(len(last[1]), FEWEST_SLOTS))
        partials, slots = self._made[-1]
        start, slot = self._partials_used, self._slots_used[-1]
        self._partials_used += programs
        self._slots_used[-1] += 1
        return (
            partials.data_ptr() + start * partials.size(1) * partials.itemsize,
            slots.data_ptr() + slot * slots.size(1) * slots.itemsize,
        )

    def _grow(self, partials: int, slots: int) -> None:
        kernels = _load()
        with torch.inference_mode(False):
            self._made.append((
                torch.empty((partials, kernels.PARTIALS.value), dtype=torch.float64, device=self._device),
                torch.empty((slots, kernels.SLOT.value), dtype=torch.int64, device=self._device),
            ))  # fmt: skip
        self._slots_used.append(0)
        self._partials_used = 0
        self._on_growth()


def table_bytes(tensors: int) -> int:
    """The bytes of the table for so many tensors, at most."""
    return (MANY_PROGRAMS + tensors) * COLUMNS * 8


WORDS = {torch.int32: "int32", torch.int16: "int16"}
_sums_words: set[torch.device] = set()


def takes_words(words: Tensor) -> bool:
    """Whether `sum_words` takes these integers: of float32 or half precision, on a GPU that was prepared for them."""
    return words.device in _sums_words and words.dtype in WORDS and words.numel() > 0 and not failure


def prepare_words(tensor: Tensor) -> None:
    """Compiles `sum_words` for the device of a tensor, if its other kernels are ready. If that fails, torch operations
    serve.
    """
    device = tensor.device
    if not is_on_gpu(tensor) or not is_ready(device) or device in _sums_words:
        return
    try:
        for dtype in WORDS:
            sum_words(torch.zeros(1, dtype=dtype, device=device))
    except Exception as problem:
        logger.info("Checksums on %s are computed with torch operations: %s", device, problem)
        return
    _sums_words.add(device)


def sum_words(words: Tensor) -> Tensor:
    """The sum of integers and that of their squares, modulo 2**64, in two launches."""
    kernels = _load()
    each, programs = _shares(_stretches(words), 1)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    with _current(words.device):
        kernels.sum_words[(programs,)](
            words.data_ptr(), words.numel(), each, sums.data_ptr(), WORD=getattr(kernels.tl, WORDS[words.dtype]),
            STRETCH=STRETCH, **OPTIONS,
        )  # fmt: skip
    return sums


def _launch(dtype: torch.dtype, programs: int, *integers: int) -> None:
    """Launches on the current stream. If that fails, this tensor is lost, and torch operations serve from then on."""
    global failure  # noqa: PLW0603 - of the process, as Triton's compiler is
    kernels = _load()
    element = getattr(kernels.tl, TYPES[dtype])
    try:
        kernels.reduce_rows[(programs,)](*integers, DTYPE=element, STRETCH=STRETCH, **OPTIONS)
    except Exception as problem:
        failure = f"{type(problem).__name__}: {problem}"
        raise


def _stretches(numbers: Tensor) -> int:
    return -(-numbers.numel() // STRETCH)


def _shares(stretches: int, least: int) -> tuple[int, int]:
    """How many stretches each program reads, at least `least`, and how many programs there are."""
    each = max(-(-stretches // MOST_PROGRAMS), least)
    return each, -(-stretches // each)


def _address(tensor: Tensor | None) -> Address:
    return NULL if tensor is None else tensor.data_ptr()


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensor."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _load() -> Any:
    global _kernels  # noqa: PLW0603 - importing Triton takes a second, and most processes never need it
    if _kernels is None:
        from tbhooks.reduction import triton_kernels  # noqa: PLC0415

        _kernels = triton_kernels
    return _kernels
