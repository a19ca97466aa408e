"""What users read is in the words of the field: phrases that users did not understand do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/*.md", "notebooks/*.ipynb", "README.md", "tbhooks/**/*.js", "tbhooks/**/*.html", "tbhooks/**/*.css")
UNCLEAR = re.compile(
    r"rewrites the weights|a tenth of this or less|hardly moves|fade on their way|times its usual|more places like"
    r"|should you train|names the module it begins|keeps the size of its inputs|have become alike|a look at the batch"
    r"|nothing before it says|frames of training|they part at|one line a finding|as it is, watched|what is looked for"
    r"|a whole number of at least|there is '|never called as a module|pictures show real|places agree"
    r"|illness|\bsick\b|\bhealthy\b|\bpatient\b|\ba (?:row|column|line) a \w|this frame\b|no frames?\b",
    re.IGNORECASE,
)


def texts() -> Iterator[tuple[str, str]]:
    """The pages, and the strings of the package that are neither docstrings nor names."""
    for pattern in PAGES:
        for file in sorted(ROOT.glob(pattern)):
            yield str(file.relative_to(ROOT)), file.read_text()
    for file in sorted((ROOT / "tbhooks").rglob("*.py")):
        tree = ast.parse(file.read_text())
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


def test_phrases_that_users_did_not_understand_do_not_come_back() -> None:
    found = [f"{where}: {match[0]}" for where, text in texts() for match in UNCLEAR.finditer(text)]
    assert found == []


@pytest.mark.parametrize("text", ["a sick model", "One line a finding", "no frames of training", "a row a layer"])
def test_such_phrases_are_recognised(text: str) -> None:
    assert UNCLEAR.search(text)
