"""What is said when a script has ended: where its run is, what was found in it, how to look; or why there is none."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from tbhooks.remote import is_remote

if TYPE_CHECKING:
    from tbhooks.frame import Finding
    from tbhooks.handle import Watch
    from tbhooks.running.destinations import Destination

# More findings than this are better read in a report.
MOST_FINDINGS = 10


def told(watched: list[tuple[Watch, Destination]], why_nothing: str) -> str:
    """Nothing where this process is not the first of its job."""
    if any(watching._place.rank != 0 for watching, _ in watched):
        return ""
    written = [(watching, destination) for watching, destination in watched if destination.directories]
    if not written:
        return f"nothing was logged: {why_nothing}"
    lines = [line for watching, destination in written for line in _of_one(watching, destination)]
    return "\n".join([*lines, _how_to_look([path for _, destination in written for path in destination.directories])])


def _of_one(watching: Watch, destination: Destination) -> list[str]:
    from tbhooks.findings import by_severity  # noqa: PLC0415  loads NumPy, which is there by then

    stats, findings = watching.stats, by_severity(watching.findings)
    found = f"{len(findings)} {'finding' if len(findings) == 1 else 'findings'}" if findings else "nothing found wrong"
    begun = max(stats.steps, stats.logged)  # the last one may have been cut short
    where = ", ".join(map(_short, destination.directories))
    lines = [f"{where}: {stats.logged} of {begun} steps logged, {found}"]
    lines += [f"  {_line(finding)}" for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        lines.append(f"  and {len(findings) - MOST_FINDINGS} more")
    if stats.dropped or stats.errors:
        lines.append(f"  {stats.dropped} logged steps were dropped, {stats.errors} errors of tbhooks itself")
    return lines


def _line(finding: Finding) -> str:
    from tbhooks.render import printable  # noqa: PLC0415  loads NumPy, which is there by then

    return printable(f"{finding.severity}: step {finding.step}: {finding.rule}: {finding.message}")


def _how_to_look(directories: list[str]) -> str:
    """Runs that are elsewhere are for TensorBoard alone; nothing here reads them."""
    here = [path for path in directories if not is_remote(path)]
    elsewhere = [path for path in directories if is_remote(path)]
    together = [*([_short(os.path.commonpath(here))] if here else []), *dict.fromkeys(elsewhere)]
    look = [f"tensorboard --logdir {shlex.quote(path)}" for path in together]
    report = [f"tbhooks report {shlex.quote(_short(path))}" for path in here[:1]]
    return f"to look: {', or '.join([*look, *report])}"


def _short(path: str) -> str:
    """Relative to here if it lies below."""
    try:
        here = path if is_remote(path) else os.path.relpath(path)
    except (OSError, ValueError):  # here is gone, or on another drive
        return path
    return path if here.startswith(os.pardir) else here
