"""The whole measurement of one workload: plans its rounds, times them, counts what can be counted.

Nothing is printed: whoever asks is told through two functions and gets a `Result`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tbhooks.api.watch import Watch, watch
from tbhooks.cli.bench import cuda_counters, timing
from tbhooks.cli.bench.timing import HostTimer, Progress, Timer, Timing, Trainee, bare, watched
from tbhooks.cli.bench.workload import Workload
from tbhooks.data.errors import TbhooksError, check_integer

BARE, UNLOGGED, SCALARS, HISTOGRAMS = "bare", "watched, not logged", "logged, scalars", "logged, histograms"
LOGGED: dict[str, dict[str, Any]] = {SCALARS: {"histograms": False}, HISTOGRAMS: {"histograms": 1}}

# What the timed rounds may take if nobody says how many steps, and how many rounds tell anything at all.
BUDGET_S = 45.0
FEWEST_ROUNDS, MOST_ROUNDS = 5, 60
# A turn this long is not lost in the clock and its own beginning and end.
TURN_S = 0.1
MOST_STEPS_A_TURN = 20
# These share the wait for the last one's writing, which in training hides behind the next steps; if there is time.
SHARING_STEPS, ENOUGH_ROUNDS = 3, 10
# Counting runs some more steps under torch's profiler.
COUNTING_STEPS = 12

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What watching costs one model on one machine."""

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
    """The most memory a logged step held beyond a bare one, by way of watching."""
    copies: int | None
    """From the device to the host in a logged step; None where the device is the host."""
    waits: str | None
    """Whether a logged step waits for the device; None where the device is the host."""
    notes: tuple[str, ...]

    def average(self, name: str) -> float:
        """Computed: one logged step and every - 1 unlogged ones, over bare ones. Noise is not counted as a cost."""
        unlogged = self.timings[UNLOGGED]
        between = 1.0 if unlogged.is_noise else unlogged.ratio
        return (self.timings[name].ratio + (self.every - 1) * between) / self.every

    def microseconds_a_site(self, name: str) -> float:
        """What a logged step takes longer, divided by what it reads."""
        timed = self.timings[name]
        return 1e3 * (timed.ratio - 1) * self.timings[BARE].milliseconds / max(self.sites, 1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = dataclasses.asdict(self)
        for name, timed in self.timings.items():
            plain["timings"][name] |= {"spread": timed.spread, "within_noise": timed.is_noise}
        plain["average"] = {name: self.average(name) for name in LOGGED}
        plain["microseconds_a_site"] = {name: self.microseconds_a_site(name) for name in LOGGED}
        return plain


@dataclass(frozen=True)
class Plan:
    """How long a turn is, and how many there are."""

    rounds: int
    steps: int
    seconds: float


def plan(bare_s: float, round_s: float, steps: int | None) -> Plan:
    """From about how long a bare step takes, and a step of everybody; `steps` is how many each is to be timed for."""
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
    log_once: Tell = lambda _: None,
    progress: Progress = lambda _done, _of: None,
) -> Result:
    """Trains a copy of the workload's model, bare and watched in turns; `tell` hears beforehand how long it takes."""
    every = check_integer("every", every)
    if steps is not None:
        check_integer("steps", steps, least=FEWEST_ROUNDS)
    device = next(workload.model.parameters()).device
    timer: Timer = cuda_counters.CudaTimer(device) if device.type == "cuda" else HostTimer()
    with _explained(workload), tempfile.TemporaryDirectory() as directory, _trainees(workload, Path(directory)) as all_:
        guesses = {trainee.name: timing.seconds_a_step(trainee, timer) for trainee in all_.values()}
        planned = plan(guesses[BARE], sum(guesses.values()), steps)
        log_once(
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
            timings={name: timing.compared(trainee, all_[BARE]) for name, trainee in all_.items()},
            extra_bytes=extra_bytes(workload, device),
            copies=copies(all_[BARE], all_[HISTOGRAMS], cuda_counters.copies_from_cuda) if on_cuda else None,
            waits=waits(all_[BARE], all_[HISTOGRAMS], cuda_counters.no_waiting_for_cuda) if on_cuda else None,
            notes=tuple(_notes(watching)),
        )  # fmt: skip


@contextlib.contextmanager
def _trainees(workload: Workload, directory: Path) -> Iterator[dict[str, Trainee]]:
    ways = {BARE: bare, UNLOGGED: watched(every=timing.NEVER)}
    ways |= {name: watched(every=1, **options) for name, options in LOGGED.items()}
    made: dict[str, Trainee] = {}
    model = workload.copied()
    optimizer = timing.make_optimizer(model)
    try:
        for name, observe in ways.items():
            where = directory / str(len(made))
            made[name] = Trainee(name, model, workload.loss, observe, where, shared=optimizer)
        yield made
    finally:
        for trainee in made.values():
            trainee.close()


@contextlib.contextmanager
def _explained(workload: Workload) -> Iterator[None]:
    """A model that trains once may still fail later."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise TbhooksError(
            f"out of memory: a copy of {workload.name} is trained, with AdamW's two numbers a weight; a smaller batch "
            "or fewer layers tell as much"
        ) from problem
    except RuntimeError as problem:
        if isinstance(problem, TbhooksError):
            raise
        raise TbhooksError(f"a step of {workload.name} failed: {' '.join(str(problem).split())[:300]}") from problem


def extra_bytes(workload: Workload, device: torch.device) -> dict[str, int]:
    """The peak of two logged steps with their watch, over that of two bare ones; what is kept for later included."""

    def peak(options: dict[str, Any] | None) -> int:
        model = workload.copied()
        trainee = Trainee(BARE, model, workload.loss, bare, Path())
        trainee.steps(1)  # AdamW's state is made in the first step
        watching: list[Watch] = []

        def run() -> None:
            if options is not None:
                watching.append(watch(model, every=1, **options))
            trainee.steps(2)

        try:
            return cuda_counters.peak_bytes(run, device)
        finally:
            for one in watching:
                one.close()

    alone = peak(None)
    return {name: peak(options) - alone for name, options in LOGGED.items()}


def copies(alone: Trainee, logged: Trainee, count: Callable[[cuda_counters.Run], int]) -> int:
    """How many more copies to the host a logged step makes than a bare one."""
    with logged.observed():
        logged.steps(1)
        watched = count(lambda: logged.steps(1))
    return watched - count(lambda: alone.steps(1))


def waits(alone: Trainee, logged: Trainee, forbidding: cuda_counters.Forbidding) -> str:
    """Whether a logged step waits for the device."""
    with logged.observed():
        logged.steps(1)
        watching = logged.watching
        assert watching is not None
        return cuda_counters.waits(
            lambda: alone.steps(1), lambda: logged.steps(1), lambda: watching.stats.errors, forbidding
        )  # fmt: skip


def _kernel(watching: Watch, device: torch.device) -> str:
    """What reduces tensors there; the C kernel reads the host's memory only."""
    name = watching.stats.kernel
    return "torch" if device.type != "cpu" and name == "C" else name


def _notes(watching: Watch) -> Iterator[str]:
    """What makes the numbers mean less than they seem to."""
    stats = watching.stats
    if stats.errors:
        yield f"{stats.errors} errors inside the watch, so not everything was read: {stats.messages[-1]}"
    if stats.dropped:
        yield f"{stats.dropped} logged steps were not written: writing is slower than training here"
    if stats.unseen:
        first, why = next(iter(stats.unseen.items()))
        more = f", and {len(stats.unseen) - 1} more" if len(stats.unseen) > 1 else ""
        yield f"not seen: {first} ({why}){more}"
