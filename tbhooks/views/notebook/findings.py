"""Findings in words: as text, as HTML, and as the short mark a row of a table carries."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tbhooks.data.findings import by_severity
from tbhooks.data.frame import Finding
from tbhooks.drawing.text import number, printable
from tbhooks.views.notebook import html

MOST_UNFOLDED = 12
_WORDS = {"error": "error", "warning": "warning", "info": "note"}


def counted(findings: Sequence[Finding]) -> str:
    """`2 errors, 1 note`; in words, too, when there is nothing."""
    told = [
        html.plural(n, word)
        for severity, word in _WORDS.items()
        if (n := sum(finding.severity == severity for finding in findings))
    ]
    return ", ".join(told) or "nothing wrong was found"


def as_text(findings: Sequence[Finding]) -> str:
    """A line a finding, the worst first."""
    lines = [f"{f.severity}, step {f.step}, {f.rule}: {f.message}" for f in by_severity(findings)]
    return "\n".join(map(printable, lines)) or "nothing wrong was found"


def as_html(findings: Sequence[Finding]) -> str:
    """A block a finding, the worst first; many are folded away."""
    blocks = [_block(finding) for finding in by_severity(findings)]
    rest = blocks[MOST_UNFOLDED:]
    more = html.folded(f"{html.plural(len(rest), 'more finding')}", "".join(rest), unfolded=False) if rest else ""
    return "".join(blocks[:MOST_UNFOLDED]) + more


def _block(finding: Finding) -> str:
    where = (
        "" if finding.site is None else f", {html.text(finding.site.kind)} of <bdi>{html.name(finding.site.name)}</bdi>"
    )
    evidence = _plain(finding.evidence)
    numbers = f'<p class="soft">{html.text(html.shortened(evidence, 400))}</p>' if evidence else ""
    return (
        f'<div class="finding {finding.severity}"><b>{finding.severity}</b> {html.text(finding.rule)} '
        f"at step {finding.step}{where}<p>{html.text(html.shortened(finding.message, 2000))}</p>{numbers}</div>"
    )


def _plain(value: object) -> str:
    """Evidence as a reader wants it; a user's rule may have put anything there."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return number(value) if isinstance(value, float) else str(value)


def marks(findings: Sequence[Finding], kinds: Collection[str]) -> dict[str, str]:
    """By the name of a place what was found there in any of the kinds, as HTML: `warning: dead units`."""
    found: dict[str, dict[str, str]] = {}
    for finding in by_severity(findings):
        if finding.site is not None and finding.site.plain_kind in kinds:
            words = f"{finding.severity}: {finding.rule.replace('_', ' ')}"
            mark = f'<b class="{finding.severity}">{html.text(words)}</b>'
            for name in (finding.site.name, *_named(finding)):
                found.setdefault(name, {}).setdefault(finding.rule, mark)
    return {name: ", ".join(told.values()) for name, told in found.items()}


def _named(finding: Finding) -> Iterator[str]:
    """The other places the evidence speaks of."""
    for value in finding.evidence.values():
        if isinstance(value, Mapping | list | tuple):
            yield from (name for name in value if isinstance(name, str))
