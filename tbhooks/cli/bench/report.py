"""A measurement as text: a table, counts, and one line of advice.

A difference smaller than its spread is called noise, never a cost or a gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tbhooks.cli.bench.runner import BARE, HISTOGRAMS, LOGGED, UNLOGGED, Result
from tbhooks.cli.bench.timing import Timing

# The overhead that needs no advice: one step in a hundred.
ACCEPTABLE = 0.01
_KERNELS = {"C": "the C kernel", "torch": "torch operations", "Triton": "a Triton kernel"}


def text(result: Result) -> str:
    """The whole measurement for a terminal."""
    return "\n".join([*_heading(result), "", _table(result), "", *_counted(result), "", advice(result)])


def _heading(result: Result) -> list[str]:
    threads = f", {result.threads} thread{'s' * (result.threads != 1)}" if result.device == "cpu" else ""
    parameters = f"{result.parameters / 1e6:.2f} M parameters, AdamW, on {result.device}{threads}"
    return [result.model, f"{parameters}, torch {result.torch}; {result.rounds} rounds of {result.steps_a_turn} steps"]


def _table(result: Result) -> str:
    average = f"average at every={result.every}"
    lines = [["", "ms/step", "/ bare", "middle half of rounds", average, "extra peak memory", ""]]
    lines += [_line(result, name, timed) for name, timed in result.timings.items()]
    return aligned(lines)


def _line(result: Result, name: str, timed: Timing) -> list[str]:
    logged = name in LOGGED
    return [
        name,
        f"{timed.milliseconds:.3g}",
        f"{timed.ratio:.3f}",
        f"{timed.lower:.3f} to {timed.upper:.3f}",
        f"{result.average(name):.4f}" if logged else "",
        _bytes(result.extra_bytes[name]) if logged else "",
        "within the noise" if timed.is_noise and name != BARE else "",
    ]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Text in columns; the first and the last are aligned left, the others right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _counted(result: Result) -> list[str]:
    timed = result.timings[HISTOGRAMS]
    each = "within the noise" if timed.is_noise else f"{result.microseconds_a_site(HISTOGRAMS):.3g} microseconds"
    copies = "none, the model is on the CPU" if result.copies is None else f"{result.copies}"
    lines = [
        f"sites read in a logged step: {result.sites}, by {_KERNELS.get(result.kernel, result.kernel)}",
        f"time per site with histograms: {each}",
        f"device-to-host copies per logged step: {copies}",
    ]
    for name, cost in result.costs.items():
        byte, site = 1e11 * cost.seconds_a_byte, 1e6 * cost.seconds_a_site
        lines.append(
            f"{name}, on this machine: {byte:.2g} ms for every 100 MB it reads, and {site:.2g} microseconds a site"
        )
    if result.waits is not None:
        lines.append(f"logged step without any synchronization with the device: {result.waits}")
    lines += [
        "Times include writing to TensorBoard. Averages are computed, not measured:",
        f"(logged + {result.every - 1} x not logged) / {result.every}, where noise counts as no cost.",
    ]
    return lines + [f"note: {note}" for note in result.notes]


def advice(result: Result) -> str:
    """One line: the overhead, and what to change if it is large."""
    logged, unlogged = result.timings[HISTOGRAMS], result.timings[UNLOGGED]
    if logged.is_noise:
        at_most = max(logged.upper - 1, 0) / result.every
        return (
            f"The cost of a logged step is within the noise of this machine; at every={result.every} training is at "
            f"most about {_percent(at_most)} slower. More --steps or an idle machine give a better estimate."
        )
    slower = result.average(HISTOGRAMS) - 1
    if slower <= 0:
        return (
            "Steps with monitoring were faster than those without, so the machine was busy. "
            "Measure again with more --steps."
        )
    overhead = f"At every={result.every} training is {_percent(slower)} slower."
    if slower <= ACCEPTABLE:
        return overhead
    if not unlogged.is_noise and unlogged.ratio - 1 > ACCEPTABLE:
        return f"{overhead} Steps that are not logged already cost {_percent(unlogged.ratio - 1)}, which is unexpected."
    enough = _round_up((logged.ratio - 1) / ACCEPTABLE)
    return f"{overhead} With every={enough} it would be about {_percent((logged.ratio - 1) / enough)}."


def _round_up(number: float) -> int:
    """Rounds up to one significant digit."""
    unit = 10.0 ** math.floor(math.log10(max(number, 1)))
    return int(math.ceil(number / unit) * unit)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction >= 1e-5 else "less than 0.001 %"


def _bytes(number: int) -> str:
    return f"{number / 1e6:+.2f} MB"
