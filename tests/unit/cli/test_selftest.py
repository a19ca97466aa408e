"""`tbhooks selftest`: the table says what passed, what failed and what this machine cannot show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tbhooks.cli import commands, selftest
from tbhooks.cli.selftest import CHECKS, Failed, NotPossible, Setup
from tbhooks.cli.selftest.check import Passed
from tbhooks.cli.selftest.correctness import judge_copies
from tbhooks.cli.selftest.report import Result
from tbhooks.data.errors import ArgumentError
from tbhooks.reduction import cpu
from tests.support.slow import slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report() -> selftest.Report:
    """All checks but those that take long."""
    quick = [name for name in CHECKS if name not in ("overhead", "compile")]
    return selftest.run(CPU, quick=True, only=quick)


def test_there_are_twelve_checks() -> None:
    assert len(CHECKS) == 12


@pytest.mark.parametrize("name", ["environment", "kernels", "waits", "numbers", "bits", "bandwidth"])
def test_a_cpu_passes_what_it_can_show(report: selftest.Report, name: str) -> None:
    (result,) = [result for result in report.results if result.name == name]
    assert result.status == "pass", result.detail


@pytest.mark.parametrize("name", ["copies", "devices", "processes", "memory"])
def test_what_needs_a_gpu_says_so(report: selftest.Report, name: str) -> None:
    (result,) = [result for result in report.results if result.name == name]
    assert result.status == "not possible here"
    assert result.detail


@pytest.mark.parametrize("name", [pytest.param("overhead", marks=slow("it times three models")), "compile"])
def test_the_longer_checks_pass_on_a_cpu(name: str) -> None:
    (result,) = selftest.run(CPU, quick=True, only=[name]).results
    assert result.status == "pass", result.detail


@slow("two processes take a while", covered_by="test_what_needs_a_gpu_says_so")
def test_two_processes_pass_on_a_cpu() -> None:
    (result,) = selftest.run(CPU, only=["processes"]).results
    assert result.status == "pass", result.detail


def test_progress_names_the_check_and_what_it_does() -> None:
    lines: list[str] = []
    selftest.run(CPU, quick=True, log=lines.append, only=["numbers"])
    assert lines[0] == "1 of 1, numbers"
    assert any("torch.bfloat16" in line for line in lines)


def test_the_line_to_paste_has_the_counts_and_the_machine(report: selftest.Report) -> None:
    line = selftest.line(report)
    assert line.startswith("tbhooks selftest on cpu, quick: 6 passed, 0 failed, 4 not possible | ")
    assert torch.__version__ in line
    assert "\n" not in line


def test_the_table_has_a_row_for_each_check(report: selftest.Report) -> None:
    table = selftest.text(report, 100)
    for result in report.results:
        assert any(line.startswith(result.name) and result.status in line for line in table.splitlines())
    assert max(map(len, table.splitlines())) <= 100


# --- What does not hold fails ---------------------------------------------------------------------


def result_of(name: str) -> Result:
    (result,) = selftest.run(CPU, quick=True, only=[name]).results
    return result


def test_wrong_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbhooks.cli.selftest import correctness

    monkeypatch.setattr(correctness, "_with_nonfinite", torch.ones)
    assert result_of("numbers").status == "pass"
    compare = correctness._compare
    monkeypatch.setattr(correctness, "_compare", lambda reading, tensor, what: compare(reading, tensor + 1, what))
    result = result_of("numbers")
    assert result.status == "fail"
    assert "NumPy has" in result.detail


def test_a_watch_that_changes_the_weights_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbhooks.cli.selftest import correctness

    original = correctness.watch

    def changing(model: torch.nn.Module, **options: object) -> object:
        with torch.no_grad():
            next(model.parameters()).add_(1e-3)
        return original(model, **options)

    monkeypatch.setattr(correctness, "watch", changing)
    assert "the weights differ" in result_of("bits").detail


def test_errors_inside_tbhooks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(cpu, "reduce", broken)
    monkeypatch.setattr(cpu, "reduce_all", broken)
    monkeypatch.setattr(cpu, "reduce_table", broken)
    result = result_of("waits")
    assert result.status == "fail"
    assert "no such kernel" in result.detail


def test_whatever_a_check_raises_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(_: Setup) -> Passed:
        raise ValueError("a driver is missing")

    def failing(_: Setup) -> Passed:
        raise Failed("it does not hold")

    def impossible(_: Setup) -> Passed:
        raise NotPossible("no such device")

    for name, check in (("bits", raising), ("waits", failing), ("copies", impossible)):
        monkeypatch.setitem(CHECKS, name, check)
    report = selftest.run(CPU, only=["bits", "waits", "copies"])
    assert [(result.name, result.status) for result in report.results] == [
        ("waits", "fail"), ("copies", "not possible here"), ("bits", "fail"),
    ]  # fmt: skip
    assert "ValueError: a driver is missing" in report.results[-1].detail
    assert "2 failed (waits, bits)" in selftest.line(report)


def test_an_unknown_check_is_named() -> None:
    with pytest.raises(ArgumentError, match="bits"):
        selftest.run(CPU, only=["bit"])


BARE = ["gemm"] * 4
COPY, TABLE = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"


def test_one_pinned_copy_a_step_and_tables_from_pinned_memory_pass() -> None:
    passed = judge_copies(BARE, [*BARE, *(COPY, TABLE, TABLE, "reduce_rows", "reduce_rows", "merge_rows") * 2], steps=2)
    assert passed.numbers == {"copies_to_host": 1, "copies_to_device": 2, "launches": 3}


@pytest.mark.parametrize(
    "wrong",
    [
        [COPY] * 3,
        ["Memcpy DtoH (Device -> Pageable)"] * 2,
        [COPY, COPY, "Memcpy HtoD (Pageable -> Device)"],
        [],
    ],
    ids=["two copies in a step", "not pinned", "a wait for an upload", "no copy"],
)
def test_other_copies_fail(wrong: list[str]) -> None:
    with pytest.raises(Failed, match="in 2 logged steps"):
        judge_copies(BARE, [*BARE, *wrong], steps=2)


# --- The command ----------------------------------------------------------------------------------


def test_the_exit_code_is_1_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def failing(_: Setup) -> Passed:
        raise Failed("it does not hold")

    for name in reversed(list(CHECKS)[2:]):  # they are put back last in, first out: in their order
        monkeypatch.delitem(CHECKS, name)
    where = tmp_path / "results.json"
    assert commands.main(["selftest", "--device", "cpu", "--quick", "--json", str(where)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith("tbhooks selftest on cpu, quick: 2 passed")
    assert "1 of 2, environment" in shown.err
    assert json.loads(where.read_text())["results"][0]["name"] == "environment"
    monkeypatch.setitem(CHECKS, "kernels", failing)
    assert commands.main(["selftest", "--device", "cpu", "--quick"]) == 1


@slow("a minute", covered_by="test_a_cpu_passes_what_it_can_show")
def test_the_whole_quick_run_passes_on_a_cpu(tmp_path: Path) -> None:
    where = tmp_path / "results.json"
    command = [sys.executable, "-m", "tbhooks", "selftest", "--device", "cpu", "--quick", "--json", str(where)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    assert "12 of 12, memory" in done.stderr
    result = json.loads(where.read_text())
    assert result["failed"] == 0
    assert [check["name"] for check in result["results"]] == list(CHECKS)
    assert done.stdout.splitlines()[-1] == result["line"]


def test_a_device_that_is_not_there_is_an_error() -> None:
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tbhooks", "selftest", "--device", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=alone)
    assert done.returncode == 2
    assert "device must be cpu, cuda or cuda:N" in done.stderr
