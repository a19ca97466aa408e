"""The groups of tests there are, what each needs, and how it is run: `python -m tests.support.groups [GROUP ...]`.

Without names every group runs that can run on this machine. A group whose requirements are missing is skipped: nothing
is installed here. The summary at the end has a line for each group, with the reasons of what was skipped. The exit
code is 1 if anything failed, or if a group that was named cannot run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

VENV = Path(sys.prefix)
CHROMIUM = Path("/usr/bin/chromium")
# So many processes; TBHOOKS_TEST_PROCESSES=0 runs all tests in one.
PARALLEL = ("-n", os.environ.get("TBHOOKS_TEST_PROCESSES", "3"), "--dist", "loadgroup", "--no-loadscope-reorder")
TRITON = "tests/unit/reduction/test_triton.py"
COMPILED = "tests/unit/reduction/test_triton_compiled.py"
# These have groups of their own, which set up what they need.
OTHERS = (
    "--ignore=tests/browser",
    "--ignore=tests/trackers",
    "--ignore=tests/deepspeed",
    f"--ignore={TRITON}",
    f"--ignore={COMPILED}",
)
DEPEND_ON_TORCH = (
    "tests/loops",
    "tests/unit/capture",
    "tests/unit/reduction",
    "tests/unit/api",
    "tests/unit/collectors",
    "tests/distributed",
)
# Kept even if the environment says otherwise: each process of a run would compile all tests again, with pytest's
# assertions, which takes longer than to import them, and each script that a test starts would compile the package.
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
NO_TESTS = 5  # pytest's exit code


def _browser() -> str:
    if find_spec("playwright") is None:
        return "playwright is not installed (make test-browser installs it)"
    return "" if CHROMIUM.exists() else f"there is no {CHROMIUM} (apt install chromium)"


def _triton() -> str:
    there = find_spec("triton") is not None or (VENV / "triton").is_dir()
    return "" if there else "triton is not installed (make test-triton installs it)"


def _trackers() -> str:
    return "" if (VENV / "trackers").is_dir() else "the trackers are not installed (make test-trackers does)"


def _deepspeed() -> str:
    return "" if (VENV / "deepspeed").is_dir() else "DeepSpeed is not installed (make test-deepspeed does)"


@dataclass(frozen=True)
class Group:
    """Arguments for pytest, and what they need."""

    arguments: tuple[str, ...]
    missing: Callable[[], str] = lambda: ""
    """What is missing on this machine to run the group, or nothing."""
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


GROUPS: dict[str, Group] = {
    "test": Group((*PARALLEL, *OTHERS, "-m", "not slow", "--durations", "5")),
    "torch": Group((*PARALLEL, *OTHERS, "-m", "not slow", *DEPEND_ON_TORCH)),
    "slow": Group((*PARALLEL, *OTHERS, "-m", "slow")),
    "browser": Group(("tests/browser",), _browser),
    "triton": Group((TRITON,), _triton, environment={"TRITON_INTERPRET": "1", "PYTHONPATH": str(VENV / "triton")}),
    "triton-compiled": Group((COMPILED,), _triton, environment={"PYTHONPATH": str(VENV / "triton")}),
    "deepspeed": Group(("tests/deepspeed",), _deepspeed, str(VENV / "deepspeed" / "bin" / "python")),
    "trackers": Group(("tests/trackers",), _trackers, str(VENV / "trackers" / "bin" / "python")),
}


PARTS = frozenset({"torch"})
"""Groups that are parts of others: they run only if they are named."""


@dataclass
class Result:
    """How a group went, and one line about it."""

    line: str
    failed: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    """How many tests passed, failed and were skipped; empty if none ran."""


def run(name: str) -> Result:
    """Runs one group with pytest, unless something it needs is missing."""
    group = GROUPS[name]
    missing = group.missing()
    if missing:
        return Result(f"{name}: skipped, {missing}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [group.python, "-m", "pytest", *group.arguments, f"--junitxml={report}"]
        code = subprocess.run(command, env={**os.environ, **BYTECODE, **group.environment}, check=False).returncode
        counts, reasons = read(report) if report.exists() else (Counter(), Counter())
    seconds = time.monotonic() - started
    failed = code not in (0, NO_TESTS)
    line = f"{name}: {'FAILED' if failed else 'passed'} in {seconds:.0f} s"
    line += "".join(f", {count} {outcome}" for outcome, count in counts.items() if count)
    if not counts:
        line += f", pytest ended with {code} and no report"
    line += "".join(f"; {count} skipped: {reason}" for reason, count in reasons.most_common())
    return Result(line, failed, counts)


def read(report: Path) -> tuple[Counter[str], Counter[str]]:
    """How many tests ended how, and the reasons of those that were skipped, from pytest's XML report."""
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    reasons: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif skipped is None or skipped.get("type") == "pytest.xfail":
            counts["passed"] += 1
        else:
            counts["skipped"] += 1
            reasons[skipped.get("message", "")] += 1
    return counts, reasons


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.groups", description=__doc__.partition("\n")[0])
    parser.add_argument("group", nargs="*", help=f"of {', '.join(GROUPS)}; all of them if none is named")
    named = parser.parse_args(arguments).group
    if unknown := [name for name in named if name not in GROUPS]:
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    results = [run(name) for name in named or (name for name in GROUPS if name not in PARTS)]
    sys.stdout.write("\n" + "".join(f"{result.line}\n" for result in results))
    refused = [name for name in named if GROUPS[name].missing()]
    return int(bool(refused) or any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
