"""The files in .github are valid, and name commands, versions and jobs that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import groups

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / ".github").rglob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_a_mapping_without_repeated_keys(path: Path) -> None:
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> Any:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), (path.name, keys)
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    assert isinstance(yaml.load(path.read_text(encoding="utf-8"), Strict), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_time_limits_and_commands_that_exist(path: Path) -> None:
    workflow = read(path)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}
    assert "on" in workflow or True in workflow  # YAML 1.1 reads "on" as true
    for name, job in workflow["jobs"].items():
        assert "runs-on" in job
        assert "timeout-minutes" in job or name == "publish"
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert "@" in step.get("uses", "@")
            assert set(re.findall(r"\bmake ([\w-]+)", step.get("run", ""))) <= targets


def test_the_matrix_has_the_oldest_supported_versions_and_other_systems() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rows = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["matrix"]["strategy"]["matrix"]["include"]
    (torch,) = re.findall(r'"torch>=([\d.]+)"', project)
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    assert (f"{torch}.0", python) in {(row["torch"], row["python"]) for row in rows}
    assert {row["group"] for row in rows} <= set(groups.GROUPS)
    assert {row["os"].partition("-")[0] for row in rows} == {"ubuntu", "macos", "windows"}


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            assert (name == "publish") == ("id-token" in job.get("permissions", {})), (path.name, name)
