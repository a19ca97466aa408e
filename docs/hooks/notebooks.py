"""Turns a notebook that was run into a page: its text and code as Markdown, its outputs as they are stored."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_COMMENT = "<!-- output {} -->"


@dataclass(frozen=True)
class Tutorial:
    """A notebook as a page."""

    uri: str
    title: str
    introduction: str
    markdown: str
    outputs: tuple[str, ...]
    """HTML, in the order of the comments that stand for them in `markdown`."""


def read(path: Path) -> Tutorial:
    """Reads a notebook. Its first cell is its title and an introduction."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts: list[str] = []
    outputs: list[str] = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            parts.append(_COMMENT.format(len(outputs)))
            outputs.append(_as_html(output))
    where = f"`notebooks/{path.name}` in the repository is this page as a notebook."
    first, *others = "".join(cells[0]["source"]).split("\n\n")
    title = first.splitlines()[0].removeprefix("# ")
    introduction = " ".join((others[0] if others else "").split())
    text = "\n\n".join([*parts, "---", where]) + "\n"
    return Tutorial(f"tutorials/{path.stem}.md", title, introduction, text, tuple(outputs))


def index(tutorials: list[Tutorial]) -> str:
    """The page that lists all tutorials."""
    lines = [
        "# Tutorials",
        "",
        "Each page is a notebook of the repository as it was last run, with its outputs. `make notebooks` runs them.",
    ]
    for one in tutorials:
        lines += ["", f"**[{one.title}]({one.uri.removeprefix('tutorials/')})**", "", one.introduction]
    return "\n".join(lines) + "\n"


def with_outputs(page: str, tutorial: Tutorial) -> str:
    """The HTML of a page with its outputs."""
    for i, output in enumerate(tutorial.outputs):
        page = page.replace(_COMMENT.format(i), output)
    return page


def _as_html(output: dict[str, Any]) -> str:
    """The richest form of an output that a page can show without scripts."""
    data = output.get("data", {})
    if "text/html" in data:  # in a shadow root, so that styles of the page do not change it; drawn for a light page
        inner = f'<div data-theme="light">{_text(data["text/html"])}</div>'
        inner = f'<template shadowrootmode="open">{inner}</template>'
    elif "image/png" in data:
        inner = f'<img alt="drawn by the code above" src="data:image/png;base64,{_text(data["image/png"]).strip()}">'
    elif output["output_type"] == "error":
        inner = _preformatted("\n".join(output["traceback"]))
    else:
        inner = _preformatted(_text(output.get("text", data.get("text/plain", ""))))
    return f'<div class="output" data-search-exclude>{inner}</div>'


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def _preformatted(text: str) -> str:
    return f"<pre>{html.escape(_ESCAPES.sub('', text))}</pre>"
