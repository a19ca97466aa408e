"""The table of torch versions in docs/compatibility.md: `python -m tests.support.compatibility GROUP`.

Runs a group of tests (tests/support/groups.py) with the torch of this interpreter, and writes the result, with versions
and the date, as the row of that torch and group. `make test-torch VERSION=...` calls it in a venv of its own.
"""

from __future__ import annotations

import argparse
import datetime as dt
import platform
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tests.support import groups

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
HEADER = ("torch", "Python", "tests", "passed", "failed", "skipped", "date")
RULE = "|---|---|---|---|---|---|---|"


def row(result: groups.Result, group: str, today: dt.date) -> tuple[str, ...]:
    """What is written about one run."""
    counts = [str(result.counts[outcome]) for outcome in ("passed", "failed", "skipped")]
    torch = version("torch").partition("+")[0]
    return (torch, platform.python_version(), group, *counts, today.isoformat())


def with_row(text: str, new: tuple[str, ...]) -> str:
    """The page with a row added to its table; it replaces the row of the same torch and group."""
    lines = text.splitlines()
    start = lines.index(line(HEADER))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[start + 2 : end]]
    kept = [one for one in rows if (one[0], one[2]) != (new[0], new[2])]
    table = sorted([*kept, new], key=lambda one: ([int(part) for part in one[0].split(".")], one[2]))
    return "\n".join([*lines[:start], line(HEADER), RULE, *map(line, table), *lines[end:]]) + "\n"


def line(cells: tuple[str, ...]) -> str:
    """One line of the table."""
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.compatibility", description=__doc__.split("\n")[0])
    parser.add_argument("group", nargs="?", default="test", choices=list(groups.GROUPS))
    parser.add_argument("--reports", nargs="+", type=Path, help="pytest's XML reports, if the group was run in parts")
    options = parser.parse_args(arguments)
    result = groups.run(options.group) if options.reports is None else _read(options.group, options.reports)
    sys.stdout.write(f"\ntorch {version('torch')}: {result.line}\n")
    if not result.counts:  # it did not run
        return 1
    new = row(result, options.group, dt.datetime.now(dt.UTC).date())
    PAGE.write_text(with_row(PAGE.read_text(), new))
    return int(result.failed)


def _read(group: str, reports: list[Path]) -> groups.Result:
    counts = sum((groups.read(report)[0] for report in reports), Counter[str]())
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return groups.Result(f"{group}: {said}", counts["failed"] > 0, counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
