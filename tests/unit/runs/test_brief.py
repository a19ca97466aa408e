"""`tbhooks report --brief`: at most 32 KB, the schema of the docs, errors first, and what to try for every rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tbhooks.cli import main
from tbhooks.data.frame import Finding, Site
from tbhooks.rules import SHIPPED
from tbhooks.runs import brief
from tests.support.frames import make_frame, write_run

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "brief.schema.json").read_text(encoding="utf-8"))
TYPES: dict[str, Any] = {
    "integer": int,
    "string": str,
    "number": int | float,
    "object": dict,
    "null": type(None),
    "array": list,
}


def check(value: Any, schema: dict[str, Any]) -> None:
    """The part of JSON Schema that ours uses."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    assert not kinds or any(isinstance(value, TYPES[kind]) for kind in kinds), (value, kinds)
    assert value in schema.get("enum", [value])
    assert value == schema.get("const", value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        assert set(schema.get("required", ())) <= set(value)
        assert set(value) <= set(known) or "additionalProperties" in schema or not known
        for name, each in value.items():
            check(each, known.get(name, schema.get("additionalProperties", {})))
    if isinstance(value, list):
        for each in value:
            check(each, schema.get("items", {}))


def finding(i: int, severity: Any, step: int = 0, text: str = "too large") -> Finding:
    return Finding(
        step, Site(f"layer.{i}", "activation"), "dead_units", severity, f"{text} at step {step}", {"share": 0.5}
    )


def test_the_command_prints_the_schema_with_errors_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [finding(1, "info"), finding(2, "error"), finding(3, "warning")]
    where = write_run(tmp_path, make_frame(0, findings=found, scalars={"train/loss": float("nan")}), make_frame(10))
    assert main(["report", str(where), "--brief"]) == 0
    document = json.loads(capsys.readouterr().out)
    check(document, SCHEMA)
    assert [(issue["rank"], issue["severity"]) for issue in document["issues"]] == [
        (1, "error"), (2, "warning"), (3, "info"),
    ]  # fmt: skip
    assert document["issues"][0]["site"] == "activation/layer.2"
    assert document["issues"][0]["evidence"]["share"] == 0.5
    assert document["scalars"]["train/loss"]["last"] == "nan"
    assert (document["logged_steps"], document["last_step"], document["left_out"]) == (2, 10, 0)


def test_a_run_with_many_long_findings_takes_at_most_32_kb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [finding(i, "warning", text="x" * 5000) for i in range(200)]
    where = write_run(tmp_path, make_frame(0, findings=found))
    assert main(["report", str(where), "--brief"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.encode()) <= 32 * 1024
    document = json.loads(printed)
    check(document, SCHEMA)
    assert document["left_out"] == 200 - len(document["issues"]) > 0


def test_every_rule_has_a_next_experiment() -> None:
    assert set(brief.NEXT) == {rule.name for rule in SHIPPED}


def test_two_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(write_run(tmp_path, make_frame(0)))
    assert main(["report", where, where, "--brief"]) == 2
    assert "--brief takes one run" in capsys.readouterr().err
