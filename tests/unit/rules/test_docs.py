"""docs/rules.md is complete and states the thresholds of the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tbhooks.data.history import History
from tbhooks.rules import RULES, SHIPPED, choose
from tbhooks.rules.rule import DOC, ShippedRule
from tests.support.frames import make_frame

FILE = Path(__file__).parents[3] / DOC


@cache
def sections() -> dict[str, str]:
    _, *parts = re.split(r"^## ", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts}


def test_every_shipped_rule_has_its_section_and_there_is_no_other() -> None:
    assert list(sections()) == [rule.name for rule in SHIPPED]


@pytest.mark.parametrize("rule", SHIPPED, ids=lambda rule: rule.name)
def test_a_section_has_formula_example_and_how_to_switch_it_off(rule: ShippedRule) -> None:
    text = sections()[rule.name]
    assert all(f"**{word}.**" in text for word in ("Formula", "Example", "Switch off"))
    assert f'"-{rule.name}"' in text
    assert rule not in choose(["default", f"-{rule.name}"])
    assert len(choose(["default", f"-{rule.name}"])) == len(RULES) - 1


@pytest.mark.parametrize("rule", SHIPPED, ids=lambda rule: rule.name)
def test_the_thresholds_of_a_section_are_those_of_the_code(rule: ShippedRule) -> None:
    stated = dict(re.findall(r"^\| `(\w+)` \| `(.+)` \|$", sections()[rule.name], flags=re.MULTILINE))
    assert stated == {name: repr(value) for name, value in rule.thresholds.items()}
    assert all(f"`{name}`" in sections()[rule.name].partition("| threshold")[0] or name in sections()[rule.name]
               for name in rule.thresholds)  # fmt: skip


def test_the_code_of_the_page_runs() -> None:
    for code in re.findall(r"```python\n(.*?)```", FILE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(code, DOC, "exec"), {})


def test_a_finding_points_to_its_section() -> None:
    history = History()
    history.append(make_frame(0, scalars={"train/loss": float("nan")}))
    (finding,) = RULES["non_finite"](history)
    file, _, anchor = finding.doc.partition("#")
    assert (file, anchor in sections()) == (DOC, True)
    assert type(finding).from_dict(finding.to_dict()) == finding
