"""Runs the checks of the self-test one after the other. Nothing is printed; progress goes to a callback."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection

import torch

from tbhooks.cli.selftest import correctness, parallel, speed
from tbhooks.cli.selftest.check import Check, Failed, NotPossible, Setup
from tbhooks.cli.selftest.report import Report, Result
from tbhooks.data.errors import check_names
from tbhooks.data.self_report import describe_exception, logger

CHECKS: dict[str, Check] = {
    "environment": correctness.environment,
    "kernels": correctness.kernels_compile,
    "waits": correctness.no_waits,
    "copies": correctness.copies,
    "numbers": correctness.numbers,
    "bits": correctness.bits,
    "bandwidth": speed.bandwidth,
    "overhead": speed.overhead,
    "compile": parallel.compiled,
    "devices": parallel.devices,
    "processes": parallel.processes,
    "memory": correctness.memory,
}
"""The checks by name, in the order in which they run."""


def run(
    device: torch.device,
    quick: bool = False,
    log: Callable[[str], None] = lambda _: None,
    only: Collection[str] | None = None,
) -> Report:
    """Runs the checks on a device, all of them or `only` some; `log` is called with what is done at the moment.

    Raises ArgumentError for an unknown name in `only`.
    """
    check_names("check", only or (), CHECKS)
    names = [name for name in CHECKS if only is None or name in only]
    results = []
    level, logger.level = logger.level, logging.CRITICAL  # a check reports what the log would say
    try:
        for number, name in enumerate(names, 1):
            prefix = f"{number} of {len(names)}, {name}"
            log(prefix)
            setup = Setup(device, quick, lambda what, prefix=prefix: log(f"{prefix}: {what}"))  # type: ignore[misc]
            results.append(_result(name, CHECKS[name], setup))
    finally:
        logger.level = level
    return Report(str(device), quick, correctness.environment(Setup(device)).detail, results)


def _result(name: str, check: Check, setup: Setup) -> Result:
    started = time.perf_counter()
    try:
        passed = check(setup)
        result = Result(name, "pass", passed.detail, 0.0, passed.numbers)
    except NotPossible as why:
        result = Result(name, "not possible here", str(why), 0.0)
    except Failed as problem:
        result = Result(name, "fail", str(problem), 0.0)
    except Exception as problem:  # whatever a driver, a compiler or a kernel raises is a result
        result = Result(name, "fail", describe_exception(problem), 0.0)
    return dataclasses.replace(result, seconds=round(time.perf_counter() - started, 3))
