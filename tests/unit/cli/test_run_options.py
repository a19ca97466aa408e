"""The options of `tbhooks run` end where the script begins, and are refused before it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tbhooks import cli
from tbhooks.cli.run.options import Options, Target, parse, split
from tbhooks.data.errors import ArgumentError


@pytest.mark.parametrize(
    ("words", "ours", "target"),
    [
        ("train.py --every 3", "", Target("train.py", None, ("--every", "3"))),
        ("--every 5 train.py --every 3", "--every 5", Target("train.py", None, ("--every", "3"))),
        ("--every=5 train.py", "--every=5", Target("train.py", None, ())),
        ("--logdir d -m a.b -m c", "--logdir d", Target(None, "a.b", ("-m", "c"))),
        ("-ma.b c", "", Target(None, "a.b", ("c",))),
        ("--every 2 -- train.py -- x", "--every 2", Target("train.py", None, ("--", "x"))),
        ("--every 2", "--every 2", None),
        ("-m", "", None),
        ("", "", None),
    ],
)
def test_options_end_where_the_script_begins(words: str, ours: str, target: Target | None) -> None:
    assert split(words.split()) == (ours.split(), target)


def test_what_is_not_said_is_left_to_watch() -> None:
    assert parse(["train.py"], {}) == (Options(None, {}), Target("train.py", None, ()))


def test_options_mean_what_watch_takes() -> None:
    words = ["--every", "7", "--logdir", "d", "--kinds", "weight, update", "--include", "a.*,b", "--exclude", "c"]
    options, _ = parse([*words, "--rules", "none", "train.py"], {})
    expected = {"every": 7, "kinds": ("weight", "update"), "include": ("a.*", "b"), "exclude": ("c",), "rules": ()}
    assert options == Options("d", expected)


def test_variables_say_the_same_and_options_win() -> None:
    environment = {
        "TBHOOKS_EVERY": "7", "TBHOOKS_LOGDIR": "d", "TBHOOKS_KINDS": "weight", "TBHOOKS_INCLUDE": "a.*",
        "TBHOOKS_EXCLUDE": "b", "TBHOOKS_RULES": "dead_units", "TBHOOKS_SCREENSHOTS": "x",
    }  # fmt: skip
    said = {"every": 7, "kinds": ("weight",), "include": ("a.*",), "exclude": ("b",), "rules": ("dead_units",)}
    assert parse(["train.py"], environment)[0] == Options("d", said)
    options, _ = parse(["--every", "2", "--logdir", "e", "train.py"], environment)
    assert options == Options("e", {**said, "every": 2})
    assert parse(["train.py"], {"TBHOOKS_EVERY": ""})[0] == Options(None, {})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--every 0", "every must be an integer >= 1, got '0'"),
        ("--every often", "every must be an integer >= 1, got 'often'"),
        ("--kinds weigth", "unknown kind 'weigth': did you mean 'weight'"),
        ("--rules dead_unit", "unknown rule 'dead_unit': did you mean 'dead_units'"),
        ("--rules none,dead_units", "unknown rule 'none'"),
        ("--include ,", "expected names separated by commas, got ','"),
        ("--logdir=", "logdir must be a directory, got ''"),
        (f"--logdir {__file__}", f"logdir must be a directory, got {__file__!r}"),
        (
            "--logdir nowhere://bucket/run",
            "TensorBoard cannot write to 'nowhere://bucket/run': it has no file system for",
        ),
        ("--evry 5", "unknown option '--evry': did you mean '--every'"),
        ("--logidr=d", "unknown option '--logidr': did you mean '--logdir'"),
        ("--quiet", "unknown option '--quiet': "),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(words: str, problem: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse([*words.split(), "train.py"], {})
    assert problem in str(refused.value)


def test_of_a_variable_its_name_is_said() -> None:
    with pytest.raises(ArgumentError, match=r"^TBHOOKS_EVERY: every must be an integer >= 1, got 'often'"):
        parse(["train.py"], {"TBHOOKS_EVERY": "often"})
    assert parse(["--every", "2", "train.py"], {"TBHOOKS_EVERY": "often"})[0] == Options(None, {"every": 2})


@pytest.mark.parametrize(
    "words", ["--logdir nowhere://b/r {}", "--every 0 {}", "--evry 5 {}", "--every", "--ev 5 {}", "", "-m"]
)
def test_a_wrong_option_is_2_and_the_script_has_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    try:
        code: object = cli.main(["run", *words.format(script).split()])
    except SystemExit as ended:  # as argparse does
        code = ended.code
    assert code == 2
    assert "tbhooks run: " in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["run", "-h"]])
def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "examples:\n  tbhooks run train.py --lr 0.1" in text
    assert "exit code" in text
