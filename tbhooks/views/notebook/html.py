"""The frame around everything a notebook shows: one style, light and dark, and the few pieces of HTML views share.

Strings out. No script, no network, no ids (a notebook shows many of these at once), and every rule of the style
is held inside `.tbhooks`. Where styles are stripped, words and numbers still say it all.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from tbhooks.drawing import model_table
from tbhooks.drawing.model_table import Layers
from tbhooks.drawing.text import printable

LONGEST_NAME = 200
_LIGHT = (
    "color-scheme:light;--ink:#1b1f24;--soft:#5b6570;--paper:#fff;--line:#d9dee3;--card:#f6f8fa;--bar:#2c718e;"
    "--other:#c2571a;--error:#b3151f;--warning:#8a5a00;--info:#0b5cad"
)
_DARK = (
    "color-scheme:dark;--ink:#e6e9ec;--soft:#9aa4ae;--paper:#111;--line:#323940;--card:#1d2125;--bar:#5cc0c8;"
    "--other:#f2955c;--error:#ff8a8f;--warning:#f2c14e;--info:#7cbcff"
)
# What a notebook says about its own theme goes before what the browser prefers.
_SAYS_LIGHT = ('[data-jp-theme-light="true"]', ".vscode-light", '[data-theme="light"]', "[theme=light]")
_SAYS_DARK = ('[data-jp-theme-light="false"]', ".vscode-dark", '[data-theme="dark"]', "[theme=dark]")
# JupyterLab styles tables with two classes and an attribute, so ours is named more often than that.
_OURS = ".tbhooks.tbhooks.tbhooks"
_RULES = (
    ("", "background:var(--paper);color:var(--ink);font:12.5px/1.45 system-ui,sans-serif;padding:.5em .7em"),
    ("p", "margin:.35em 0"),
    (".soft,.legend,caption", "color:var(--soft)"),
    ("h4", "font-size:1em;margin:1em 0 .2em"),
    ("details", "margin:.5em 0"),
    ("summary", "cursor:pointer;font-weight:600;overflow-wrap:anywhere"),
    ("ul", "margin:.3em 0;padding-left:1.4em"),
    ("li,p", "overflow-wrap:anywhere"),
    (".scroll", "overflow:auto;max-height:45em;border-bottom:1px solid var(--line)"),
    ("table", "border-collapse:collapse;margin:0;font:inherit;font-variant-numeric:tabular-nums;table-layout:auto"),
    ("tr", "background:none"),
    ("th,td", "padding:.14em .7em .14em 0;border:0;text-align:right;white-space:nowrap;vertical-align:middle"),
    ("tbody tr:hover", "background:var(--card)"),
    ("thead th", "position:sticky;top:0;background:var(--paper);color:var(--soft);box-shadow:0 1px var(--line)"),
    ("tr>:first-child", "text-align:left"),
    ("tbody th b", "white-space:nowrap"),
    ("tbody th", "font-weight:400;white-space:normal;overflow-wrap:anywhere;min-width:9em;max-width:26em"),
    ("tr>.left", "text-align:left"),
    ("td svg", "display:block"),
    ("td path", "fill:var(--bar)"),
    ("td .o", "fill:none;stroke:var(--other);stroke-width:1.3"),
    ("svg[role=img]", "width:100%;height:auto;display:block;max-width:60em"),
    ("svg text", "fill:var(--soft);font:11px system-ui,sans-serif"),
    ("svg image", "image-rendering:pixelated"),
    ("svg rect", "fill:transparent"),
    (".ramp", "width:9em;height:.8em;vertical-align:-1px;image-rendering:pixelated;display:inline;margin:0"),
    (".swatch", "display:inline-block;width:.8em;height:.8em;margin-left:1em;vertical-align:-1px"),
    (".finding", "border-left:4px solid var(--line);background:var(--card);padding:.3em .8em;margin:.4em 0"),
    *((f".finding.{level}", f"border-color:var(--{level})") for level in ("error", "warning", "info")),
    *((f".{level}>b,b.{level}", f"color:var(--{level})") for level in ("error", "warning", "info")),
)  # fmt: skip


def _style() -> str:
    themes = [
        f".tbhooks{{{_LIGHT}}}@media (prefers-color-scheme:dark){{.tbhooks{{{_DARK}}}}}",
        *(f"{','.join(f'{host} .tbhooks' for host in hosts)}{{{colours}}}"
          for hosts, colours in ((_SAYS_LIGHT, _LIGHT), (_SAYS_DARK, _DARK))),
    ]  # fmt: skip
    rules = [f"{','.join(_inside(part) for part in what.split(','))}{{{how}}}" for what, how in _RULES]
    return "".join([*themes, *rules])


def _inside(selector: str) -> str:
    return f"{_OURS} {selector}" if selector else _OURS


STYLE = _style()


def wrapped(body: str) -> str:
    """A body of HTML with the style it needs, fit for a cell's output."""
    return f'<div class="tbhooks"><style>{STYLE}</style>{body}</div>'


def text(words: str) -> str:
    """Words as HTML: nothing in them is markup, or moves what stands around them."""
    return html.escape(printable(words))


def name(path: str) -> str:
    """A path as HTML; of one longer than any module has by honest means, both ends."""
    return text(shortened(path, LONGEST_NAME))


def shortened(path: str, longest: int) -> str:
    """Names differ at both ends, so the middle goes."""
    tail = (longest - 1) // 2
    return path if len(path) <= longest else path[: longest - 1 - tail] + "…" + path[len(path) - tail :]


def plural(n: int, word: str) -> str:
    """`1 module`, `2 modules`."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; the first of a row is its name. A heading starting with "<" has its column set left."""
    css = [' class="left"' if title.startswith("<") else "" for title in header]
    head = "".join(f"<th{c}>{title.removeprefix('<')}</th>" for c, title in zip(css, header, strict=True))
    body = "".join(
        f"<tr><th>{row[0]}</th>"
        + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(css[1:], row[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, body: str, *, unfolded: bool) -> str:
    """A section that opens and closes without a script; its title is text."""
    return f"<details{' open' if unfolded else ''}><summary>{text(title)}</summary>{body}</details>"


def listed(sentences: Sequence[str]) -> str:
    """Sentences as points of a list; nothing where there are none."""
    return f"<ul>{''.join(f'<li>{text(sentence)}</li>' for sentence in sentences)}</ul>" if sentences else ""


def as_html(layers: Layers) -> str:
    """The table with its totals; of a long one both ends."""
    first, last, between = model_table.ends(model_table.cells(layers))
    gap = [[f"{between:,} more", *[""] * (len(model_table.COLUMNS) - 1)]] if between else []
    rows = [[name(cell) for cell in row] for row in (*first, *gap, *last)]
    headline = f"<p><b>{text(layers.model)}</b>: {plural(len(layers.layers), 'layer')}.</p>"
    told = "".join(f'<p class="soft">{text(sentence)}</p>' for sentence in model_table.totals(layers))
    return wrapped(headline + table([title for title, _ in model_table.COLUMNS], rows) + told)
