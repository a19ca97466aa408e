"""Findings as text, as HTML, and as the short label that a row of a table carries."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tbhooks.data.findings import by_severity
from tbhooks.data.frame import Finding
from tbhooks.drawing.names import shorten
from tbhooks.drawing.text import number, printable
from tbhooks.views.notebook import html

MOST_OPEN = 12
NONE_FOUND = "no issues found"
_WORDS = {"error": "error", "warning": "warning", "info": "note"}


def counted(findings: Sequence[Finding]) -> str:
    """`2 errors, 1 note`, or `no issues found`."""
    counts = {word: sum(f.severity == severity for f in findings) for severity, word in _WORDS.items()}
    return ", ".join(html.plural(n, word) for word, n in counts.items() if n) or NONE_FOUND


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line per finding, the most severe first."""
    return [printable(f"{f.severity}, step {f.step}, {f.rule}: {f.message}") for f in by_severity(findings)]


def as_text(findings: Sequence[Finding]) -> str:
    """One line per finding, or a line that says there are none."""
    return "\n".join(lines(findings)) or NONE_FOUND


def as_html(findings: Sequence[Finding]) -> str:
    """One block per finding, the most severe first; all but the first dozen are folded."""
    blocks = [block(finding) for finding in by_severity(findings)]
    rest = blocks[MOST_OPEN:]
    more = html.details(html.plural(len(rest), "more finding"), "".join(rest)) if rest else ""
    return "".join(blocks[:MOST_OPEN]) + more


def block(finding: Finding, anchor: str = "") -> str:
    """One finding; `anchor` is the id that a page links to it by."""
    rule, mark = html.escape(finding.rule), ""
    if anchor:
        rule, mark = f'<a href="#{anchor}">{rule}</a>', f' id="{anchor}"'
    where = ""
    if finding.site is not None:
        where = f", {html.escape(finding.site.kind)} of <bdi>{html.escape_name(finding.site.name)}</bdi>"
    return (
        f'<div class="finding {finding.severity}"{mark}><b>{finding.severity}</b> {rule} at step {finding.step}{where}'
        f"<p>{html.escape(shorten(finding.message, 2000))}</p>"
        f"{html.paragraph(shorten(_evidence(finding.evidence), 400))}</div>"
    )


def _evidence(value: object) -> str:
    """Evidence as text; a rule of the user's may have put any object there."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_evidence(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_evidence, value))
    return number(value) if isinstance(value, float) else str(value)


def row_labels(findings: Sequence[Finding], kinds: Collection[str]) -> dict[str, str]:
    """HTML labels such as `warning: dead units`, by the name of each module or parameter that has such a finding."""
    labels: dict[str, dict[str, str]] = {}
    for finding in by_severity(findings):
        if finding.site is not None and finding.site.plain_kind in kinds:
            words = f"{finding.severity}: {finding.rule.replace('_', ' ')}"
            label = f'<b class="{finding.severity}">{html.escape(words)}</b>'
            for name in (finding.site.name, *_names_in_evidence(finding)):
                labels.setdefault(name, {}).setdefault(finding.rule, label)
    return {name: ", ".join(of_name.values()) for name, of_name in labels.items()}


def _names_in_evidence(finding: Finding) -> Iterator[str]:
    for value in finding.evidence.values():
        if isinstance(value, Mapping | list | tuple):
            yield from (name for name in value if isinstance(name, str))
