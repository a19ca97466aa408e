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

INVENTED = re.compile(
    r"onlooker|exhibit|patient|\btold\b|look_on|put_on|take_off|hand_over|Unkept|wishes", re.IGNORECASE
)
"""Words that meant something only to those who wrote them: for modules, hooks, steps and messages."""


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


def test_names_docstrings_and_comments_have_no_words_of_our_own() -> None:
    sources = [file for end in ("py", "c", "js") for file in (ROOT / "tbhooks").rglob(f"*.{end}")]
    found = [f"{file.relative_to(ROOT)}: {m[0]}" for file in sources for m in INVENTED.finditer(file.read_text())]
    assert len(sources) > 300
    assert found == []
