"""The measurement of one workload: plans rounds, times them, and counts bytes, copies and synchronizations.

Nothing is printed; progress goes to two callbacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tbhooks.api.watch import Watch, watch
from tbhooks.cli.bench import cost_model, cuda_counters, timing
from tbhooks.cli.bench.cost_model import Cost
from tbhooks.cli.bench.timing import HostTimer, Progress, Timer, Timing, Variant, bare, watched
from tbhooks.cli.bench.workload import Workload
from tbhooks.data.errors import TbhooksError, check_integer

BARE, UNLOGGED, SCALARS, HISTOGRAMS = "bare", "watched, not logged", "logged, scalars", "logged, histograms"
LOGGED: dict[str, dict[str, Any]] = {SCALARS: {"histograms": False}, HISTOGRAMS: {"histograms": 1}}

# How long the timed rounds may take if the number of steps is not given, and the limits of their number.
BUDGET_S = 45.0
FEWEST_ROUNDS, MOST_ROUNDS = 5, 60
# The least duration of a turn, so that the clock and the start of a turn do not matter.
TURN_S = 0.1
MOST_STEPS_A_TURN = 20
# So many steps share the wait for writing at the end of a turn, which training would overlap; if there is time.
SHARING_STEPS, ENOUGH_ROUNDS = 3, 10
# The counts need some more steps under torch's profiler.
COUNTING_STEPS = 12

Log = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """The overhead of monitoring one model on one machine."""

    model: str
    parameters: int
    device: str
    threads: int
    torch: str
    kernel: str
    every: int
    rounds: int
    steps_a_turn: int
    sites: int
    timings: dict[str, Timing]
    extra_bytes: dict[str, int]
    """The extra peak memory of a logged step, by variant."""
    copies: int | None
    """Device-to-host copies per logged step; None on the CPU."""
    waits: str | None
    """Whether a logged step synchronizes with the device; None on the CPU."""
    notes: tuple[str, ...]
    costs: dict[str, Cost] = field(default_factory=dict)
    """The cost of a byte and of a site in a logged step, by variant; empty for models on devices."""

    def average(self, name: str) -> float:
        """The computed average of one logged step and every - 1 unlogged ones, over bare ones; noise counts as 1."""
        unlogged = self.timings[UNLOGGED]
        between = 1.0 if unlogged.is_noise else unlogged.ratio
        return (self.timings[name].ratio + (self.every - 1) * between) / self.every

    def microseconds_a_site(self, name: str) -> float:
        """The extra time of a logged step per site."""
        timed = self.timings[name]
        return 1e3 * (timed.ratio - 1) * self.timings[BARE].milliseconds / max(self.sites, 1)

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived numbers as JSON values."""
        plain = dataclasses.asdict(self)
        for name, timed in self.timings.items():
            plain["timings"][name] |= {"spread": timed.spread, "within_noise": timed.is_noise}
        plain["average"] = {name: self.average(name) for name in LOGGED}
        plain["microseconds_a_site"] = {name: self.microseconds_a_site(name) for name in LOGGED}
        return plain


@dataclass(frozen=True)
class Plan:
    """The number of rounds, the steps per turn, and the expected duration."""

    rounds: int
    steps: int
    seconds: float


def plan(bare_s: float, round_s: float, steps: int | None) -> Plan:
    """Plans from estimates of a bare step and of a step of all variants; `steps` is the number to time per variant."""
    wanted = check_integer("steps", steps, least=FEWEST_ROUNDS) if steps is not None else None
    longest = MOST_STEPS_A_TURN if wanted is None else min(MOST_STEPS_A_TURN, wanted // FEWEST_ROUNDS)
    sharing = SHARING_STEPS if wanted is not None else int(BUDGET_S / (ENOUGH_ROUNDS * round_s))
    turn = min(longest, max(1, min(SHARING_STEPS, sharing), round(TURN_S / bare_s)))
    fitting = BUDGET_S / (round_s * turn) if wanted is None else wanted / turn
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS if wanted is None else round(fitting), round(fitting)))
    return Plan(rounds, turn, round_s * (rounds * turn + COUNTING_STEPS))


def measure(
    workload: Workload,
    every: int = 100,
    steps: int | None = None,
    log: Log = lambda _: None,
    progress: Progress = lambda _done, _of: None,
) -> Result:
    """Trains a copy of the workload's model in turns, bare and watched; `log` is called with the expected duration.

    Raises TbhooksError if a step fails, and ArgumentError for a wrong `every` or `steps`.
    """
    every = check_integer("every", every)
    if steps is not None:
        check_integer("steps", steps, least=FEWEST_ROUNDS)
    device = next(workload.model.parameters()).device
    timer: Timer = cuda_counters.CudaTimer(device) if device.type == "cuda" else HostTimer()
    with (
        _with_readable_errors(workload),
        tempfile.TemporaryDirectory() as directory,
        _variants(workload, Path(directory)) as all_,
    ):
        guesses = {variant.name: timing.seconds_a_step(variant, timer) for variant in all_.values()}
        planned = plan(guesses[BARE], sum(guesses.values()), steps)
        log(
            f"{planned.rounds} rounds of {planned.steps} steps in each of {len(all_)} ways: "
            f"about {planned.seconds:.0f} s"
        )
        timing.run_rounds(list(all_.values()), planned.rounds, planned.steps, timer, progress)
        watching = all_[HISTOGRAMS].watching
        assert watching is not None
        on_cuda = device.type == "cuda"
        return Result(
            model=workload.name, parameters=workload.parameters, device=str(device), threads=torch.get_num_threads(),
            torch=torch.__version__, kernel=_kernel(watching, device), every=every, rounds=planned.rounds,
            steps_a_turn=planned.steps, sites=0 if watching.latest is None else len(watching.latest.sites),
            timings={name: timing.compared(variant, all_[BARE]) for name, variant in all_.items()},
            extra_bytes=extra_bytes(workload, device),
            copies=copies(all_[BARE], all_[HISTOGRAMS], cuda_counters.copies_from_cuda) if on_cuda else None,
            waits=waits(all_[BARE], all_[HISTOGRAMS], cuda_counters.no_waiting_for_cuda) if on_cuda else None,
            notes=tuple(_notes(watching)),
            costs={} if device.type != "cpu" else {name: cost_model.measure(name == HISTOGRAMS) for name in LOGGED},
        )  # fmt: skip


@contextlib.contextmanager
def _variants(workload: Workload, directory: Path) -> Iterator[dict[str, Variant]]:
    ways = {BARE: bare, UNLOGGED: watched(every=timing.NEVER)}
    ways |= {name: watched(every=1, **options) for name, options in LOGGED.items()}
    made: dict[str, Variant] = {}
    model = workload.copied()
    optimizer = timing.make_optimizer(model)
    try:
        for name, observe in ways.items():
            where = directory / str(len(made))
            made[name] = Variant(name, model, workload.loss, observe, where, shared=optimizer)
        yield made
    finally:
        for variant in made.values():
            variant.close()


@contextlib.contextmanager
def _with_readable_errors(workload: Workload) -> Iterator[None]:
    """Turns errors of torch in a training step into a TbhooksError."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise TbhooksError(
            f"out of memory: a copy of {workload.name} is trained with AdamW, which keeps two numbers per weight; "
            "use a smaller batch or fewer layers"
        ) from problem
    except RuntimeError as problem:
        if isinstance(problem, TbhooksError):
            raise
        raise TbhooksError(f"a step of {workload.name} failed: {' '.join(str(problem).split())[:300]}") from problem


def extra_bytes(workload: Workload, device: torch.device) -> dict[str, int]:
    """The peak memory of two logged steps, less that of two bare ones."""

    def peak(options: dict[str, Any] | None) -> int:
        model = workload.copied()
        variant = Variant(BARE, model, workload.loss, bare, Path())
        variant.steps(1)  # AdamW's state is made in the first step
        watching: list[Watch] = []

        def run() -> None:
            if options is not None:
                watching.append(watch(model, every=1, **options))
            variant.steps(2)

        try:
            return cuda_counters.peak_bytes(run, device)
        finally:
            for one in watching:
                one.close()

    alone = peak(None)
    return {name: peak(options) - alone for name, options in LOGGED.items()}


def copies(alone: Variant, logged: Variant, count: Callable[[cuda_counters.Run], int]) -> int:
    """The number of device-to-host copies of a logged step, less those of a bare one."""
    with logged.monitored():
        logged.steps(1)
        watched = count(lambda: logged.steps(1))
    return watched - count(lambda: alone.steps(1))


def waits(alone: Variant, logged: Variant, forbidding: cuda_counters.Forbidding) -> str:
    """Whether a logged step synchronizes with the device."""
    with logged.monitored():
        logged.steps(1)
        watching = logged.watching
        assert watching is not None
        return cuda_counters.waits(
            lambda: alone.steps(1), lambda: logged.steps(1), lambda: watching.stats.errors, forbidding
        )  # fmt: skip


def _kernel(watching: Watch, device: torch.device) -> str:
    """The kernel that reduces tensors on this device; the C kernel is for the CPU only."""
    name = watching.stats.kernel
    return "torch" if device.type != "cpu" and name == "C" else name


def _notes(watching: Watch) -> Iterator[str]:
    """Problems that make the numbers less meaningful."""
    stats = watching.stats
    if stats.errors:
        yield f"{stats.errors} errors inside tbhooks, so not everything was read: {stats.messages[-1]}"
    if stats.dropped:
        yield f"{stats.dropped} logged steps were not written: writing is slower than training here"
    if stats.unseen:
        first, why = next(iter(stats.unseen.items()))
        more = f", and {len(stats.unseen) - 1} more" if len(stats.unseen) > 1 else ""
        yield f"skipped: {first} ({why}){more}"
