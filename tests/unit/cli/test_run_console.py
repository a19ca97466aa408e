"""What `tbhooks run` says while a script runs: whole lines, few of them, beside progress bars."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from tbhooks.cli.run import console
from tbhooks.cli.run.console import MOST_LINES, Terminal
from tbhooks.data.self_report import logger


@pytest.fixture
def handler() -> Iterator[Terminal]:
    handler = Terminal()
    handler.start()
    yield handler
    handler.stop()


def test_what_is_logged_is_a_line_of_ours_and_nobody_elses(
    handler: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    theirs = logging.StreamHandler(io.StringIO())
    root.addHandler(theirs)
    try:
        logger.warning("dead_units: %s", "all\nof them")
        logger.info("not worth a line")
        assert capsys.readouterr().err == "tbhooks: dead_units: all\ntbhooks: of them\n"
        assert theirs.stream.getvalue() == ""  # or it would be shown twice
        handler.stop()
        logger.warning("later")
        assert capsys.readouterr().err == ""
        assert theirs.stream.getvalue() == "later\n"
    finally:
        root.removeHandler(theirs)


def test_lines_that_are_too_many_are_counted(
    handler: Terminal, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    for number in range(MOST_LINES + 5):
        logger.warning("line %d", number)
    assert len(capsys.readouterr().err.splitlines()) == MOST_LINES
    assert handler.left_out == 5
    now += console.WINDOW_S
    logger.warning("a minute later")
    assert capsys.readouterr().err == "tbhooks: a minute later\n"


@pytest.mark.usefixtures("handler")
def test_a_progress_bar_is_not_torn(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm(total=4, file=sys.stderr, mininterval=0) as bar:
        bar.update(2)
        logger.warning("in between")
        bar.update(2)
    lines = capsys.readouterr().err.split("\n")
    said = [line for line in lines if "in between" in line]
    assert [line.split("\r")[-1] for line in said] == ["tbhooks: in between"]
    assert "4/4" in lines[1]


@pytest.mark.usefixtures("handler")
def test_a_forked_child_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.os, "getpid", lambda: -1)
    logger.warning("from a child")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "none"])
def test_a_stderr_that_is_gone_is_no_trouble(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    Terminal().emit(logging.LogRecord("tbhooks", logging.WARNING, "", 0, "said", (), None))


def test_a_stderr_of_the_scripts_that_fails_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise LookupError("of the script's own")

    monkeypatch.setattr(sys, "stderr", Broken())
    Terminal().emit(logging.LogRecord("tbhooks", logging.WARNING, "", 0, "said", (), None))


RICH = """
import logging, time
from rich.progress import Progress
with Progress() as progress:
    task = progress.add_task("training", total=4)
    for step in range(4):
        progress.update(task, advance=1)
        logging.getLogger("tbhooks").warning("line %d", step)
        time.sleep(0.15)
"""


def test_a_live_display_of_rich_makes_room(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    (tmp_path / "script.py").write_text(RICH)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tbhooks", "run", "script.py"], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # how a terminal ends
            break
        shown += read
        if not read:
            break
    assert process.wait(timeout=30) == 0
    os.close(ours)
    for step in range(4):
        # At the beginning of a line that was wiped clean, and with nothing behind it.
        before, _, after = shown.partition(f"tbhooks: line {step}".encode())
        assert before.endswith((b"\x1b[2K", b"\r", b"\n"))
        assert after.lstrip(b" ").startswith(b"\r\n")
