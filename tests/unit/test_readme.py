"""What the README, the docs and the docstrings say is true: tables are as measured, examples run, links work."""

from __future__ import annotations

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import tbhooks
from tests.support import docs
from tests.support.slow import cases

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = {page.name: page for page in PAGES if docs.blocks(page)}


def test_the_tables_are_those_the_benchmarks_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    readme = importlib.import_module("readme")
    for page in readme.PAGES:
        text = page.read_text()
        assert "made by benchmarks/readme.py" in text
        assert readme.filled(text) == text, page.name


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("name", ["tbhooks.api.watch", "tbhooks.api.peek"])
def test_the_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).attempted > 0
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize(
    "page", cases(WITH_CODE, always=WITH_CODE.keys() - {"frameworks.md"}, reason="imports three frameworks")
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    docs.run(page)


def test_every_option_of_watch_is_in_the_readme() -> None:
    import inspect

    for name in inspect.signature(tbhooks.watch).parameters:
        assert re.search(rf"\b{name}\b", README), name


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "tbhooks/__init__.py"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released, date = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", changelog, flags=re.MULTILINE)[0]
    assert (citation["version"], released) == (tbhooks.__version__, tbhooks.__version__)
    assert citation["date-released"] == date
