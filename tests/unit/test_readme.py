"""What the README and the docstrings say is true: tables are as measured, examples run, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import tbhooks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_tables_are_those_the_benchmarks_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert importlib.import_module("readme").filled(README) == README


@pytest.mark.parametrize("name", ["tbhooks.api.watch", "tbhooks.api.peek"])
def test_the_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).attempted > 0
    assert doctest.testmod(module).failed == 0


def test_links_to_files_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_option_of_watch_is_in_the_readme() -> None:
    import inspect

    for name in inspect.signature(tbhooks.watch).parameters:
        assert re.search(rf"\b{name}\b", README), name


def test_the_version_is_the_same_everywhere() -> None:
    assert f'version = "{tbhooks.__version__}"' in (ROOT / "pyproject.toml").read_text()
