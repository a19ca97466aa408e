"""`tbhooks report`, `check` and `rules`: what they say, in what order, how wide, and with which exit code."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks import rules, runs
from tbhooks.cli import commands
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.runs import compare, report_data
from tbhooks.views import report_text
from tests.support.frames import make_frame, training_frame, write_run
from tests.support.processes import without_torch_log

HOSTILE = "</script><script>alert(1)</script>\x1b[31mred\x1b]0;title\x07\nnext\r**b**\u202e"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tbhooks", *map(str, arguments)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=alone)


def said(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same without a process of its own, where only the words matter."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in environment.items():
            patch.setenv(name, value)
        code = commands.main([*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def finding(severity: Any = "error", step: int = 1, name: str = "b", rule: str = "non_finite") -> Finding:
    return Finding(step, Site(name, "activation"), rule, severity, f"{rule} in {name} since {step}", {"n": 1})


@pytest.fixture
def flagged(tmp_path: Path) -> Path:
    given = [
        training_frame(0),
        training_frame(
            1, findings=[finding("warning", 1, "c", "dead_units"), finding("info", 1, "a", "low_precision")]
        ),
        training_frame(2, findings=[finding("error", 2)]),
    ]
    return write_run(tmp_path / "flagged", *given)


# --- report -------------------------------------------------------------------------------------------


def test_the_report_shows_scalars_layers_in_order_findings_by_severity_and_where_to_look(flagged: Path) -> None:
    done = said("report", flagged)
    assert done.returncode == 0, done.stderr
    assert without_torch_log(done.stderr) == ""
    lines = done.stdout.splitlines()
    assert "3 logged steps, 0 to 2" in lines[0]
    first = [line.split()[0] for line in lines if line]
    order = ["scalar", "train/loss", "train.lr/0", "module", "b", "a", "c", "*", "parameter", "a.weight", "findings"]
    places = [first.index(word) for word in order]
    assert places == sorted(places)
    printed = [line.split(",")[0].strip() for line in lines if re.match(r"  (error|warning|info), ", line)]
    assert printed == ["error", "warning", "info"]
    assert f"tensorboard --logdir {flagged}" in done.stdout
    assert f"tbhooks report {flagged} --html" in done.stdout


def test_the_last_value_and_its_trend_are_those_of_the_frames(flagged: Path) -> None:
    read = runs.read(flagged)
    std = read.frames[-1]["b", "activation"].std
    (line,) = [line for line in said("report", flagged).stdout.splitlines() if line.startswith("b *")]
    assert f"{std:.3g}" in line.split()
    grid = report_data.run_grids(read)[0]
    assert (grid.kind, grid.stat, grid.names) == ("activation", "std", ("b", "a", "c"))
    assert grid.values[0, -1] == pytest.approx(std)


def test_gradients_stand_in_the_order_of_the_forward_pass(flagged: Path) -> None:
    (grid,) = [grid for grid in report_data.run_grids(runs.read(flagged)) if grid.kind == "gradient"]
    assert grid.names == ("b", "a", "c")
    frame = runs.read(flagged).frames[1]
    assert grid.values[:, 1].tolist() == pytest.approx([frame[name, "gradient"].norm for name in "bac"])


LONG = [f"encoder.layers.{i}.self_attention.projection" for i in range(3)]


def with_names(directory: Path, names: list[str], steps: int = 40) -> Path:
    given = [make_frame(k, {Site(name, "activation"): [1.0, k] for name in names}) for k in range(steps)]
    return write_run(directory, *given)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_on_a_terminal_are_no_wider_than_it_is(tmp_path: Path, width: int) -> None:
    read = runs.read(with_names(tmp_path, LONG))
    table = report_text.plain(report_text.run_report(read, width), width).split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= width
    for i, line in enumerate(table[1:4]):
        assert re.match(rf"(encoder\.layers\.|…){i}\.self.*tion ", line)
    assert table[4:] == ([] if width > 60 else ["  … stands for encoder.layers."])


@pytest.mark.parametrize("width", [40, 80])
def test_names_are_whole_in_a_pipe_however_narrow_the_terminal_is(tmp_path: Path, width: int) -> None:
    tag = "train/" + "loss_of_the_auxiliary_head." * 5
    frame = make_frame(40, {}, scalars={tag: 1.0}, findings=[finding(name=".".join(LONG))])
    where = with_names(tmp_path, LONG)
    write_run(where, frame)
    words = said("report", where, COLUMNS=str(width)).stdout.split()
    assert {*LONG, tag, ".".join(LONG)} <= set(words)


LORA = [
    "(root)",
    *(
        f"base_model.model.model.layers.{layer}.{part}.{projection}_proj.{what}.default"
        for layer in (0, 1, 10, 11)
        for part, projection in (("self_attn", "q"), ("self_attn", "k"), ("mlp", "up"), ("mlp", "down"))
        for what in ("lora_A", "lora_B", "lora_dropout")
    ),
]


@pytest.mark.parametrize("width", [20, 60, 72, 80, 100])
@pytest.mark.parametrize("laid_out", ["plain", "styled"])
def test_no_two_names_are_cut_to_the_same_text(tmp_path: Path, width: int, laid_out: str) -> None:
    """Even if the table is wider than the terminal then; the finding's mark makes no difference."""
    frame = make_frame(0, {Site(name, "activation"): [1.0] for name in LORA}, findings=[finding(name=LORA[5])])
    sections = report_text.run_report(runs.read(write_run(tmp_path, frame)), width)
    if laid_out == "plain":
        shown = report_text.plain(sections, width)
    else:
        pytest.importorskip("rich")
        shown = re.sub(r"\x1b\[[0-9;]*m", "", report_text.styled(sections, width, colour=False))
    table = shown.split("\n\n")[1].splitlines()[1 : len(LORA) + 1]
    names = [line.split()[0] for line in table]
    assert len(set(names)) == len(LORA)
    assert [name.rpartition("…")[2] for name in names] == [
        whole[-len(name.rpartition("…")[2]) :] for name, whole in zip(names, LORA, strict=True)
    ]
    assert [i for i, line in enumerate(table) if line.split()[1] == "*"] == [5]


def test_long_tables_show_their_ends_and_rows_with_findings_unless_all_is_asked_for(tmp_path: Path) -> None:
    data = {Site(f"m{i:03}", "activation"): [1.0, 2.0] for i in range(200)}
    read = runs.read(write_run(tmp_path, make_frame(0, data, findings=[finding(name="m100")])))
    names = {row[0].split()[0] for section in report_text.run_report(read, 100) for row in section.rows}
    assert {"m000", "m199", "m100"} <= names
    assert "m099" not in names
    assert "139 rows in the middle are left out" in report_text.plain(report_text.run_report(read, 100), 100)
    everything = {row[0].split()[0] for s in report_text.run_report(read, 100, all_rows=True) for row in s.rows}
    assert {f"m{i:03}" for i in range(200)} <= everything


def test_nan_is_written_in_words_and_in_the_trend(tmp_path: Path) -> None:
    given = [make_frame(0, {Site("x", "activation"): [1.0, 2.0]}), make_frame(1, {Site("x", "activation"): [math.nan]})]
    shown = said("report", write_run(tmp_path, *given)).stdout
    assert "(1 NaN/Inf)" in shown
    assert "!" in shown


def test_hostile_names_reach_the_terminal_as_text(tmp_path: Path) -> None:
    bad = Finding(0, Site(HOSTILE, "activation"), HOSTILE, "error", HOSTILE, {HOSTILE: HOSTILE})
    tag = HOSTILE
    frame = make_frame(0, {Site(HOSTILE, "activation"): [1.0]}, scalars={tag: 1.0}, findings=[bad])
    where = write_run(tmp_path / "r", frame)
    for arguments in (["report", where], ["check", where], ["report", where, where], ["report", where, "--json"]):
        done = said(*arguments)
        assert not CONTROL.search(done.stdout), arguments
        assert not CONTROL.search(done.stderr), arguments
    line = said("check", where).stdout
    assert line.count("\n") == 1
    assert "\\x1b[31mred" in line


def test_a_loss_that_the_model_returns_is_shown_as_a_loss(tmp_path: Path) -> None:
    returned = Site("(root)", "activation", "[loss]")
    logits = Site("(root)", "activation", "[logits]")
    given = [make_frame(k, {logits: [1.0, 5.0], returned: [4.0 - k, 2.0 - k]}) for k in range(3)]
    where = write_run(tmp_path, *given)
    line = next(line for line in said("report", where).stdout.splitlines() if "loss returned by the model" in line)
    assert line.split()[5:8] == ["3", "1", "2"]
    document = json.loads(said("report", where, "--json").stdout)
    assert document["scalars"]["loss returned by the model"]["last"] == 1.0


def test_a_run_of_scalars_alone_is_reported(tmp_path: Path) -> None:
    done = said("report", write_run(tmp_path, make_frame(3, {}, scalars={"train/loss": 0.5})))
    assert done.returncode == 0
    assert "train/loss" in done.stdout
    assert "no tbhooks data found" in done.stdout


def test_problems_of_the_files_are_in_the_report(flagged: Path) -> None:
    (file,) = flagged.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    done = said("report", flagged)
    assert done.returncode == 0
    assert "the last step may be missing" in " ".join(done.stdout.split())
    assert "2 logged steps, 0 to 1" in done.stdout


def test_output_that_cannot_show_bars_and_readers_that_go_away_are_no_errors(flagged: Path) -> None:
    done = run("report", flagged, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "?" in done.stdout
    command = f"{sys.executable} -m tbhooks report {flagged} --json | head -c 10"
    piped = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert without_torch_log(piped.stderr) == ""


def on_terminal(*arguments: str | Path, **environment: str) -> str:
    """What a person sees: standard output and standard error are a terminal."""
    outside, inside = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color", **environment}
    command = [sys.executable, "-m", "tbhooks", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=inside, stderr=inside, stdin=inside, env=environ)
    os.close(inside)
    shown = b""
    while True:
        try:
            part = os.read(outside, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(outside)
    process.wait(60)
    return shown.decode()


def test_a_terminal_gets_colours_the_same_words_and_none_with_no_color(flagged: Path) -> None:
    pytest.importorskip("rich")
    coloured = on_terminal("report", flagged, COLUMNS="110")
    assert "\x1b[1;31m" in coloured or "\x1b[1m\x1b[31m" in coloured
    plain = on_terminal("report", flagged, COLUMNS="110", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)
    words = set(re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", coloured).split())
    piped = set(said("report", flagged, COLUMNS="110").stdout.split())
    assert piped <= words


def test_without_rich_a_terminal_gets_plain_text(flagged: Path, tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise ImportError('not installed')")
    shown = on_terminal("report", flagged, PYTHONPATH=str(tmp_path))
    assert "\x1b[1m" not in shown
    assert "findings (3)" in shown


# --- --json -------------------------------------------------------------------------------------------


def test_the_document_has_its_keys_and_no_nan(tmp_path: Path) -> None:
    given = [training_frame(0), training_frame(1, loss=math.nan, findings=[finding()])]
    given.append(make_frame(2, {Site("x", "activation", "[0]"): [math.nan]}))
    done = said("report", write_run(tmp_path, *given), "--json")
    printed = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(printed) == {
        "version", "run", "steps", "evaluations", "scalars", "sites", "findings", "problems", "flights",
    }  # fmt: skip
    assert printed["steps"] == {"first": 0, "last": 2, "logged": 3}
    assert printed["scalars"]["train/loss"] == {
        "count": 2, "first": 1.0, "last": "nan", "min": 1.0, "max": 1.0, "last_step": 1,
    }  # fmt: skip
    by_site = {(site["path"], site["kind"]): site for site in printed["sites"]}
    assert by_site["x", "activation"]["index"] == "[0]"
    assert by_site["x", "activation"]["stats"]["nan_count"] == 1
    assert by_site["b", "activation"]["last_step"] == 1
    expected = runs.read(tmp_path).frames[1]["a.weight", "update"].ratio
    assert by_site["a.weight", "update"]["stats"]["ratio"] == pytest.approx(expected)
    assert "ratio" not in by_site["b", "activation"]["stats"]
    assert printed["findings"] == [finding().to_dict()]


# --- Two runs -----------------------------------------------------------------------------------------


def noisy(seed: int, part_at: int | None = None, factor: float = 3.0) -> Iterator[Frame]:
    rng = np.random.default_rng(seed)
    for step in range(60):
        gone = part_at is not None and step >= part_at
        loss = math.exp(-step / 30) * (1 + 0.05 * rng.normal()) * (factor if gone else 1.0)
        data = {Site("a", "activation"): rng.normal(size=400), Site("b", "activation"): rng.normal(size=400)}
        if gone:
            data[Site("b", "activation")] = data[Site("b", "activation")] * 20
        scalars = {"train/loss": loss, "train/noise": 1 + 0.3 * rng.normal()}
        yield make_frame(step, data, scalars=scalars, histograms=False)


def compared(tmp_path: Path, one: Any, two: Any) -> compare.Comparison:
    return compare.compare(
        runs.read(write_run(tmp_path / "one", *one)), runs.read(write_run(tmp_path / "two", *two))
    )  # fmt: skip


def test_the_same_training_with_other_batches_does_not_part(tmp_path: Path) -> None:
    found = compared(tmp_path, noisy(1), noisy(2))
    assert found.parted is None
    assert found.differences == ()
    assert found.common_steps == 60


def test_runs_part_where_they_do_and_what_differs_most_comes_first(tmp_path: Path) -> None:
    found = compared(tmp_path, noisy(1), noisy(2, part_at=37))
    assert found.parted == 37
    assert "activation.std/b" in found.what_parted
    assert "train/loss" in [difference.what for difference in found.differences]
    assert [difference.what for difference in found.differences[:2]] == ["train/loss", "activation.std/b"]
    assert found.differences[1].share == pytest.approx(0.95, abs=0.02)
    assert not [d for d in found.differences if d.what.endswith(("/a", "/noise"))]


def test_one_wild_step_is_noise_but_nan_is_not(tmp_path: Path) -> None:
    def with_loss(values: Mapping[int, float]) -> list[Frame]:
        return [make_frame(s, {}, scalars={"train/loss": values.get(s, 1.0 + 0.01 * (s % 2))}) for s in range(30)]

    assert compared(tmp_path / "wild", with_loss({}), with_loss({12: 50.0})).parted is None
    found = compared(tmp_path / "nan", with_loss({}), with_loss({29: math.nan}))
    assert found.parted == 29
    assert math.isinf(found.differences[0].share)


def test_runs_with_nothing_in_common_say_so(tmp_path: Path) -> None:
    found = compared(tmp_path, [make_frame(0, {}, scalars={"a/x": 1.0})], [make_frame(1, {}, scalars={"a/x": 1.0})])
    assert found.common_steps == 0
    assert "no logged step in common" in report_text.plain(report_text.comparison_report(found), 80)
    other = compared(
        tmp_path / "2", [make_frame(0, {}, scalars={"a/x": 1.0})], [make_frame(0, {}, scalars={"b/y": 1.0})]
    )
    assert (other.only_first, other.only_second) == (("a/x",), ("b/y",))


def test_two_directories_and_compare_say_the_same(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", *noisy(1)), write_run(tmp_path / "two", *noisy(2, part_at=20))
    by_place, by_option = said("report", one, two), said("report", one, "--compare", two)
    assert by_place.stdout == by_option.stdout
    assert "first difference at step 20:" in by_place.stdout
    printed = json.loads(said("report", one, two, "--json").stdout)
    assert printed["parted"] == 20
    assert [difference["what"] for difference in printed["differences"][:2]] == ["train/loss", "activation.std/b"]


def test_more_runs_than_are_shown_are_refused(flagged: Path, tmp_path: Path) -> None:
    for arguments in ([flagged, flagged, "--html", tmp_path / "p.html"], [flagged, flagged, "--compare", flagged]):
        done = said("report", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "run" in done.stderr
    assert not (tmp_path / "p.html").exists()


# --- check and rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worst", "fail_on", "code"),
    [
        (None, "info", 0), ("info", "info", 1), ("info", "warning", 0), ("warning", "warning", 1),
        ("warning", "error", 0), ("warning", None, 0), ("error", None, 1), ("error", "info", 1),
    ],
)  # fmt: skip
def test_the_exit_code_is_one_from_the_severity_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worst: Any, fail_on: str | None, code: int
) -> None:
    where = write_run(tmp_path, training_frame(1, findings=[] if worst is None else [finding(worst)]))
    options = [] if fail_on is None else ["--fail-on", fail_on]
    assert commands.main(["check", str(where), *options]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (worst is not None)
    if worst:
        assert lines[0] == f"{worst}: step 1: non_finite activation/b: non_finite in b since 1"


def test_exit_codes_as_the_shell_sees_them(flagged: Path, tmp_path: Path) -> None:
    found = run("check", flagged)
    assert (found.returncode, without_torch_log(found.stderr)) == (1, "")
    assert [line.split(":")[0] for line in found.stdout.splitlines()] == ["error", "warning", "info"]
    assert run("check", write_run(tmp_path / "fine", training_frame(0))).returncode == 0
    done = run("check", tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert str(tmp_path / "nowhere") in done.stderr
    for wrong in (tmp_path / "nowhere", tmp_path):
        assert run("report", wrong).returncode == 2
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "a.tfevents").write_bytes(b"no event file at all")
    done = run("check", tmp_path / "junk")
    assert (done.returncode, done.stdout) == (2, "")
    assert "not an event file" in done.stderr
    assert run("check", flagged, "--fail-on", "fatal").returncode == 2


def scalars_of_a_trainer(directory: Path) -> Path:
    """What a training framework writes beside, or instead of, what tbhooks does."""
    with SummaryWriter(str(directory)) as writer:
        writer.add_scalar("train/grad_norm", 0.5, 0)
    return directory


def test_check_looks_below_the_directory_and_names_the_run(tmp_path: Path) -> None:
    scalars_of_a_trainer(tmp_path)
    flagged = write_run(tmp_path / "tbhooks", training_frame(1, findings=[finding("error")]))
    found = said("check", tmp_path)
    assert (found.returncode, found.stderr) == (1, "")
    assert found.stdout == f"{flagged}: error: step 1: non_finite activation/b: non_finite in b since 1\n"
    assert said("check", flagged).stdout == "error: step 1: non_finite activation/b: non_finite in b since 1\n"


def test_check_reads_every_run_below(tmp_path: Path) -> None:
    write_run(tmp_path / "generator", training_frame(1))
    assert said("check", tmp_path).returncode == 0
    write_run(tmp_path / "discriminator", training_frame(1, findings=[finding("error")]))
    found = said("check", tmp_path)
    assert found.returncode == 1
    assert found.stdout.startswith(f"{tmp_path / 'discriminator'}: error: ")


def test_check_of_what_tbhooks_never_wrote_to_is_2_and_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing\n")
    for where in (scalars_of_a_trainer(tmp_path / "scalars"), tmp_path, tmp_path / "notes.txt"):
        done = said("check", where)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"tbhooks check: no tbhooks data found in {str(where)!r}")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"], ["--html", "page.html"]])
@pytest.mark.parametrize("name", ["notes.txt", "notes.jsonl", "empty.tfevents"])
def test_a_report_of_what_is_no_run_is_2_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("" if name.startswith("empty") else "not a run, but long enough for a header\n")
    done = said("report", name, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tbhooks report: no data found in {name!r}: {name}: ")
    assert not (tmp_path / "page.html").exists()
    assert said("report", write_run(tmp_path / "fine", training_frame(0)), name).returncode == 2


def test_a_report_of_a_directory_whose_frames_are_below_shows_both(tmp_path: Path) -> None:
    scalars_of_a_trainer(tmp_path)
    write_run(tmp_path / "tbhooks", training_frame(0), training_frame(1))
    shown = said("report", tmp_path)
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"{tmp_path / 'tbhooks'}: 2 logged steps, 0 to 1")
    assert "train/grad_norm" in shown.stdout
    assert "train/loss" in shown.stdout
    write_run(tmp_path / "another", training_frame(0))
    shown = said("report", tmp_path, COLUMNS="400")
    assert "no tbhooks data found" in shown.stdout
    assert f"runs with tbhooks data below it: {tmp_path / 'another'}, {tmp_path / 'tbhooks'}" in " ".join(
        shown.stdout.split()
    )


def test_a_report_of_two_runs_in_one_directory_shows_the_newest_and_says_so(tmp_path: Path) -> None:
    for second, steps in ((0, 9), (1000, 3)):
        given = [replace(training_frame(step), time=1e9 + second + step) for step in range(steps)]
        (file,) = write_run(tmp_path / "made", *given).iterdir()
        file.replace(tmp_path / f"events.out.tfevents.{second}")
    shown = said("report", tmp_path, COLUMNS="200")
    assert shown.stdout.startswith(f"{tmp_path}: 3 logged steps, 0 to 2")
    assert "2 runs were written here" in shown.stdout
    assert "2 runs were written here" in said("check", tmp_path).stderr


def test_rules_lists_every_rule_with_what_it_says_of_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(_history: Any) -> list[Finding]:
        """What it does
        in two lines.

        And more that is not for the list.
        """
        return []

    monkeypatch.setitem(rules.RULES, "mine", described)
    monkeypatch.setitem(rules.RULES, "silent", lambda _history: [])
    assert commands.main(["rules"]) == 0
    shown = capsys.readouterr().out
    assert "mine\n    What it does in two lines.\n" in shown
    assert "more that is not" not in shown
    for name in rules.RULES:
        assert re.search(rf"^{name}$", shown, re.MULTILINE)


# --- A run that was killed ----------------------------------------------------------------------------

TRAINING = """
import sys, torch, tbhooks
from torch.utils.tensorboard import SummaryWriter
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
w = tbhooks.watch(model, SummaryWriter(sys.argv[1]), every=1)
while True:
    loss = model(torch.randn(16, 4)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    w.log({"loss": loss})
"""


def test_a_training_killed_with_kill_9_is_reported_up_to_its_last_step(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path / "r")], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not (files := list((tmp_path / "r").glob("*tfevents*"))):
            time.sleep(0.1)
        while time.monotonic() < deadline and files[0].stat().st_size < 300_000:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    done = run("report", tmp_path / "r")
    assert done.returncode == 0, done.stderr
    read = runs.read(tmp_path / "r")
    assert len(read.frames) > 5
    assert [frame.step for frame in read.frames] == sorted({frame.step for frame in read.frames})
    assert all("train/loss" in frame.scalars for frame in read.frames[:-2])
    assert f"{len(read.frames)} logged steps, 0 to {read.frames[-1].step}" in done.stdout
    assert [problem for problem in read.problems if "cut short" not in problem] == []


def test_check_fails_for_a_learning_rate_that_rewrites_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    with tbhooks.watch(model, tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(16, 4)).square().mean().backward()
            optimizer.step()
    done = said("check", tmp_path / "run")
    assert done.returncode == 1
    assert "error: step 0: update_ratio" in done.stdout
