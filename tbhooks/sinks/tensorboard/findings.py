"""Findings in event files: as markdown for TensorBoard's TEXT tab, and as JSON that is read back.

Names and messages are escaped, so that TensorBoard does not interpret them as markdown.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from tensorboard.compat.proto import summary_pb2

from tbhooks.data.frame import Finding, Site
from tbhooks.data.jsonable import parse_number, to_jsonable
from tbhooks.sinks.tensorboard.protobuf import plugin_metadata, strings

DATA_TAG = "tbhooks/findings"
TEXT_TAG = "tbhooks/findings/text_summary"
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class FindingWriter:
    """Adds a frame's findings to its event: always as JSON, and as text only once for each rule and site."""

    def __init__(self) -> None:
        self.written: frozenset[tuple[str, Site | None]] = frozenset()
        """The rules and sites whose text has been written."""

    def add(self, findings: Sequence[Finding], summary: summary_pb2.Summary) -> None:
        if not findings:
            return
        summary.value.add(tag=DATA_TAG, tensor=strings([encode(findings)]), metadata=plugin_metadata("tbhooks"))
        new = {(finding.rule, finding.site): finding for finding in reversed(findings)}
        fresh = [finding for key, finding in reversed(new.items()) if key not in self.written]
        self.written |= new.keys()
        if fresh:
            text = "\n\n".join(map(markdown, fresh)).encode(errors="replace")
            summary.value.add(tag=TEXT_TAG, tensor=strings([text]), metadata=plugin_metadata("text"))


def markdown(finding: Finding) -> str:
    """A finding as one paragraph of markdown."""
    return f"**{plain_text(finding.severity)}**, step {finding.step}: {plain_text(finding.message)}"


def plain_text(text: str) -> str:
    """A text that TensorBoard shows as it is, and does not interpret as markdown."""
    # HTML entities are made last: a backslash before "&lt;" would be visible.
    return html.escape(_MARKDOWN.sub(r"\\\1", _CONTROL.sub(" ", text)), quote=False)


def encode(findings: Sequence[Finding]) -> bytes:
    """Findings as JSON; NaN and infinities are strings, as in the JSONL sink."""
    return json.dumps([to_jsonable(finding.to_dict()) for finding in findings], allow_nan=False).encode()


def decode(content: bytes) -> tuple[Finding, ...]:
    """Findings from JSON; raises ValueError for anything else."""
    try:
        return tuple(_finding(data) for data in json.loads(content))
    except (LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"not a list of findings: {problem!r}") from problem


def _finding(data: Any) -> Finding:
    evidence = {key: parse_number(x) for key, x in data["evidence"].items()}
    finding = Finding.from_dict({**data, "evidence": evidence})
    site = finding.site
    texts = (finding.rule, finding.message, finding.doc, *((site.path, site.kind, site.index) if site else ()))
    if not all(isinstance(text, str) for text in texts) or not isinstance(finding.step, int):
        raise TypeError("a field of the wrong type")
    if finding.severity not in ("info", "warning", "error"):
        raise TypeError(f"severity {finding.severity!r}")
    return finding
