"""The documentation is complete: pages made at build time, tables that name what the code has, schemas of reports."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks.cli import main
from tbhooks.data import errors
from tbhooks.data.errors import TbhooksError
from tbhooks.data.frame import RECORDED_KINDS, Finding
from tbhooks.data.stats import COLUMNS, STAT_NAMES
from tbhooks.sinks.tensorboard import COLUMNS_OF_VERSION, STORED_COLUMNS, VERSION
from tests.support.frames import make_frame, make_model, train_step, write_run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def hook(name: str) -> ModuleType:
    """A module of docs/hooks, which mkdocs loads by its path."""
    spec = importlib.util.spec_from_file_location(f"docs_hooks_{name}", DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Pages that are made at build time.


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_has_every_cell_and_every_output_of_its_notebook(path: Path) -> None:
    notebooks = hook("notebooks")
    made = notebooks.read(path)
    shown = notebooks.with_outputs(made.markdown, made)
    assert made.title
    assert made.introduction
    assert "<!-- output" not in shown
    outputs = 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert "".join(cell["source"]) in made.markdown
        for output in cell.get("outputs", ()):
            outputs += 1
            data = output.get("data", {})
            kept = data.get("text/html") or data.get("image/png") or output.get("text") or data.get("text/plain")
            text = "".join(kept).strip()
            assert text in shown or html.escape(text) in shown
    assert outputs == len(made.outputs) > 0


def test_a_tutorial_escapes_what_was_printed_and_shows_errors() -> None:
    as_html = hook("notebooks")._as_html
    assert "<pre>a &lt;b&gt;</pre>" in as_html({"output_type": "stream", "text": ["a ", "<b>"]})
    failed = {"output_type": "error", "traceback": ["\x1b[31mValueError\x1b[0m: no"]}
    assert "<pre>ValueError: no</pre>" in as_html(failed)


def test_the_list_of_tutorials_has_every_notebook() -> None:
    notebooks = hook("notebooks")
    listed = notebooks.index([notebooks.read(path) for path in NOTEBOOKS])
    assert [path.stem for path in NOTEBOOKS if f"({path.stem}.md)" not in listed] == []


def test_the_reference_of_the_command_line_has_every_command_and_every_argument() -> None:
    text = hook("commands").reference()
    assert "<!-- commands: made from the parsers -->" in page("cli.md")
    verbs = re.findall(r"^## tbhooks (\w+)$", text, flags=re.MULTILINE)
    assert {"run", "report", "check", "bench", "demo", "rules", "selftest", "burst"} <= set(verbs)
    for option in ("--every N", "--logdir DIR", "--brief", "--fail-on", "RUNDIR", "--quick", "--model MODULE:FACTORY"):
        assert f"`{option}" in text, option
    assert "%(default)s" not in text
    assert "default: runs/digits" in text
    assert re.findall(r"^\| `[^|]*\| *\|$", text, flags=re.MULTILINE) == []  # an argument without a word about it


# Tables that name what the code has.


def test_every_page_is_in_the_navigation_and_in_llms_txt() -> None:
    pages = {path.name for path in DOCS.glob("*.md")}
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    made = {"security.md", "contributing.md", "changelog.md"}
    assert sorted(_leaves(config["nav"])) == sorted(pages | made)
    listed = re.findall(r"\]\((.*?\.md)\)", page("llms.txt"))
    assert sorted(listed) == sorted(pages)


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in _leaves(part)]


def test_the_page_of_environment_variables_has_those_of_the_code_and_no_other() -> None:
    sources = (*(ROOT / "tbhooks").rglob("*.py"), ROOT / "hatch_build.py")
    used = {name for path in sources for name in re.findall(r"TBHOOKS_[A-Z]+", path.read_text(encoding="utf-8"))}
    assert set(re.findall(r"TBHOOKS_[A-Z]+", page("environment.md"))) == used


def test_the_page_of_errors_has_every_exception_and_its_other_bases() -> None:
    raised = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, TbhooksError)]
    assert len(raised) == 5
    for one in raised:
        (line,) = re.findall(rf"^\| `{one.__name__}` .*$", page("errors.md"), flags=re.MULTILINE)
        bases = [base.__name__ for base in one.__bases__ if base is not TbhooksError]
        assert all(f"`{base}`" in line for base in bases), line


def test_the_page_of_the_file_format_has_the_columns_and_versions_of_the_code() -> None:
    text = page("file-format.md")
    table = text.partition("| column | meaning |")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])) == list(STORED_COLUMNS)
    versions = [int(number) for number in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)]
    assert versions == sorted(COLUMNS_OF_VERSION)
    assert versions[-1] == VERSION


def test_the_pages_of_rows_statistics_and_kinds_are_complete() -> None:
    assert [column for column in COLUMNS if f"`{column}`" not in page("rows.md")] == []
    assert [name for name in STAT_NAMES if f"`{name}`" not in page("statistics.md")] == []
    assert [kind for kind in RECORDED_KINDS if f"`{kind}`" not in page("sites.md")] == []


def test_contributing_names_files_that_exist() -> None:
    """By its own rule: paths begin in `tbhooks/`, a bare name is in the folder of the file before it in the row."""
    in_root = (
        "docs/", "tests/", "benchmarks/", "notebooks/", "mkdocs.yml", "hatch_build.py", "pyproject.toml",
        "tbhooks/__init__.py",
    )  # fmt: skip
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where to look")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    missing: list[str] = []
    for row in rows:
        folder = ROOT / "tbhooks"
        for name in re.findall(r"`([\w/.-]+(?:\.(?:py|c|js|css|md|json|yml|toml)|/))`", row):
            root = ROOT if name.startswith(in_root) else folder if "/" not in name else ROOT / "tbhooks"
            path = root / name
            missing += [] if path.exists() else [f"{name} in {row[:60]}"]
            folder = path if name.endswith("/") else path.parent
    assert len(rows) > 40
    assert not missing


def test_every_public_name_is_in_the_reference() -> None:
    text = page("reference.md")
    others = {"__version__", "integrations", "metrics", "rules", "runs", "sinks", "stats", "Rule"}
    assert [name for name in tbhooks.__all__ if name not in others and not re.search(rf"\b{name}\b", text)] == []


# Reports as JSON.


def schema(name: str) -> Any:
    made = json.loads(page(name))
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out)


def trained(directory: Path, rate: float) -> Path:
    """A run with findings, a dump of the flight recorder, checksums and an evaluation."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with tbhooks.watch(model, directory, every=2).flight_recorder(steps=8).checksums().evaluation() as w:
        for step in range(12):
            loss = train_step(model, optimizer)
            w.log({"loss": loss if step < 11 else float("nan")})
        w.dump("asked for")
        model.eval()(torch.randn(4, 4))
    return directory


def test_reports_of_real_runs_follow_their_schemas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    normal, diverging = trained(tmp_path / "normal", 0.1), trained(tmp_path / "diverging", 1e6)
    report = printed(capsys, "report", diverging, "--json")
    schema("report.schema.json").validate(report)
    assert report["version"] == 1
    assert report["findings"]
    assert report["flights"]
    assert report["evaluations"]
    comparison = printed(capsys, "report", normal, diverging, "--json")
    schema("comparison.schema.json").validate(comparison)
    assert comparison["version"] == 1
    assert comparison["differences"]
    assert comparison["bits"]["step"] is not None
    schema("brief.schema.json").validate(printed(capsys, "report", diverging, "--brief"))


def test_reports_of_unusual_runs_follow_their_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Finding(0, None, "mine", "info", "Something", {})
    scalars = {"train/loss": float("inf"), "update.sampled/0.weight": 0.5}
    report = printed(capsys, "report", write_run(tmp_path, make_frame(0, findings=[own], scalars=scalars)), "--json")
    schema("report.schema.json").validate(report)
    assert [site["sampled"] for site in report["sites"] if "sampled" in site] == [0.5]
    assert (report["scalars"]["train/loss"]["last"], report["findings"][0]["site"]) == ("inf", None)
    writer = SummaryWriter(tmp_path / "scalars")
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    report = printed(capsys, "report", tmp_path / "scalars", "--json")
    schema("report.schema.json").validate(report)
    assert report["steps"] is None


@pytest.mark.parametrize("change", [{"version": 2}, {"steps": 3}, {"findings": [{}]}, {"sites": None}])
def test_the_schema_of_reports_refuses_what_is_no_report(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = printed(capsys, "report", write_run(tmp_path, make_frame(0)), "--json")
    with pytest.raises(jsonschema.ValidationError):
        schema("report.schema.json").validate({**report, **change})
