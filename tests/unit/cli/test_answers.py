"""What commands answer to a new user: sentences and exit codes, the loss before noise, thresholds, whole lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tbhooks import runs
from tbhooks.cli import commands
from tbhooks.data.findings import Findings
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.data.history import History
from tbhooks.rules import SHIPPED, RuleEngine, choose
from tbhooks.runs.compare import compare
from tbhooks.views import report_text
from tests.support.frames import make_frame, write_run


def test_a_run_without_tbhooks_data_and_a_file_that_is_no_run_exit_with_2_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "plain", Frame(0, 1e9, 0, (), np.zeros((0, 9)), np.zeros((0, 0), np.int64), (), {"x": 1.0}))
    (tmp_path / "notes.txt").write_text("hello\n")
    assert commands.main(["check", str(tmp_path / "plain")]) == 2
    assert "no tbhooks data found" in capsys.readouterr().err
    assert commands.main(["report", str(tmp_path / "notes.txt")]) == 2
    assert "not an event file" in capsys.readouterr().err
    assert commands.main(["report", str(tmp_path / "plain")]) == 0
    assert "no rule has checked it" in capsys.readouterr().out


def test_a_directory_that_is_not_there_gets_a_suggestion_only_if_one_is_close(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("opt", "home", "runs-digits"):
        (tmp_path / name).mkdir()
    assert commands.main(["report", str(tmp_path / "nope")]) == 2
    assert "did you mean" not in capsys.readouterr().err
    assert commands.main(["report", str(tmp_path / "run-digits")]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_slow_divergence_fails_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = RuleEngine(choose("default"), History())
    losses = np.geomspace(3.4, 64.0, 12)
    data = {Site("fc", "activation"): [1.0, -1.0]}
    frames = [engine(make_frame(5 * i, data, scalars={"train/loss": loss})) for i, loss in enumerate(losses)]
    assert commands.main(["check", str(write_run(tmp_path, *frames))]) == 1
    assert "Divergence: train/loss is" in capsys.readouterr().out


def test_the_rules_are_listed_with_their_thresholds(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["rules"]) == 0
    listed = capsys.readouterr().out
    assert "share=0.7, frames=3" in listed
    assert all(f"{name}={value!r}" in listed for rule in SHIPPED for name, value in rule.thresholds.items())


def two_runs(tmp_path: Path) -> tuple[runs.Run, runs.Run]:
    """The second has twice the loss; a faint gradient and a few zeros differ far more in proportion."""
    made = []
    for name, loss, faint, zeros in (("a", 1.0, 1e-13, 0), ("b", 2.0, 5e-13, 1)):
        frames = []
        for step in range(12):
            data = {Site(f"l.{i}", "gradient"): [1.0 + 0.3 * (name == "b"), -1.0] for i in range(6)}
            data[Site("bias", "gradient")] = [faint, -faint]
            data[Site("out", "activation")] = [0.0] * zeros + [1.0, -1.0] * 128
            frames.append(make_frame(step, data, scalars={"train/loss": loss}, histograms=False))
        made.append(runs.read(write_run(tmp_path / name, *frames)))
    return made[0], made[1]


def test_the_loss_is_the_first_difference_and_noise_is_last(tmp_path: Path) -> None:
    found = [difference.what for difference in compare(*two_runs(tmp_path)).differences]
    assert found[0] == "train/loss"
    assert found.index("gradient.norm/l.0") < found.index("gradient.norm/bias")
    assert found.index("gradient.norm/l.0") < found.index("activation.zero_fraction/out")


def test_runs_of_unrelated_models_are_said_to_be_unrelated(tmp_path: Path) -> None:
    made = []
    for name in ("conv", "attn"):
        data = {Site(f"{name}.{i}", "activation"): [1.0, -1.0] for i in range(8)}
        made.append(runs.read(write_run(tmp_path / name, *(make_frame(step, data) for step in range(3)))))
    text = report_text.plain(report_text.comparison_report(compare(*made)), 100)
    assert "these runs look unrelated" in text
    assert not compare(*two_runs(tmp_path)).are_unrelated


def test_printed_findings_are_sentences() -> None:
    finding = Finding(3, None, "loss_spike", "warning", "Loss spike: train/loss is 9 at step 3. Inspect the batch", {})
    assert str(Findings([finding])) == (
        "warning, step 3, loss_spike: Loss spike: train/loss is 9 at step 3. Inspect the batch"
    )
    assert str(Findings()) == "no issues found"


def test_coloured_lines_keep_their_indent(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    section = report_text.Section("findings (1)", notes=["warning, step 3: " + "many words " * 30])
    coloured = report_text.styled([section], 60, colour=False).splitlines()
    plain = report_text.plain([section], 60).splitlines()
    lines = [line for line in coloured if line.strip()]
    assert len(lines) > 4
    assert [len(line) - len(line.lstrip()) for line in lines] == [
        len(line) - len(line.lstrip()) for line in plain if line.strip()
    ]
