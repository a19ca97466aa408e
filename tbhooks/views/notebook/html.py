"""The style sheet and the HTML elements that the notebook views and the report page share.

There is no script, no network access and no element id (a notebook shows many of these outputs at once), and every
CSS rule applies inside `.tbhooks` only. Where a host strips styles, the text and the numbers are still complete.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from tbhooks.drawing.names import shorten, shorten_all
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
# The notebook's own theme takes precedence over the browser's preference.
_LIGHT_HOSTS = ('[data-jp-theme-light="true"]', ".vscode-light", '[data-theme="light"]', "[theme=light]")
_DARK_HOSTS = ('[data-jp-theme-light="false"]', ".vscode-dark", '[data-theme="dark"]', "[theme=dark]")
# JupyterLab styles tables with two classes and an attribute; repeating the class outranks that.
_SCOPE = ".tbhooks.tbhooks.tbhooks"
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
          for hosts, colours in ((_LIGHT_HOSTS, _LIGHT), (_DARK_HOSTS, _DARK))),
    ]  # fmt: skip
    scoped = [(",".join(f"{_SCOPE} {part}".strip() for part in what.split(",")), how) for what, how in _RULES]
    return "".join([*themes, *(f"{selectors}{{{how}}}" for selectors, how in scoped)])


STYLE = _style()


def wrap(body: str) -> str:
    """Returns HTML for a cell's output: the body together with the style it needs."""
    return f'<div class="tbhooks"><style>{STYLE}</style>{body}</div>'


def escape(text: str) -> str:
    """Escapes markup, and spells out control characters and text-direction marks."""
    return html.escape(printable(text))


def escape_name(path: str) -> str:
    """Escapes one module path, shortened if it is longer than a real one ever is."""
    return html.escape(shorten(printable(path), LONGEST_NAME))


def escape_names(paths: Sequence[str]) -> list[str]:
    """Escapes the module paths of one table or map; long ones are shortened and stay distinct."""
    return [html.escape(name) for name in shorten_all([printable(path) for path in paths], LONGEST_NAME)[0]]


def plural(n: int, word: str) -> str:
    """`1 module`, `2 modules`."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def paragraph(text: str, css: str = "soft") -> str:
    """Plain text as a paragraph of this CSS class; an empty string if there is no text."""
    mark = f' class="{css}"' if css else ""
    return f"<p{mark}>{escape(text)}</p>" if text else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already. A heading that starts with "<" has its column aligned left."""
    css = [' class="left"' if title.startswith("<") else "" for title in header]
    head = "".join(f"<th{c}>{title.removeprefix('<')}</th>" for c, title in zip(css, header, strict=True))
    body = "".join(
        f"<tr><th>{row[0]}</th>"
        + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(css[1:], row[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def details(title: str, body: str, *, is_open: bool = False) -> str:
    """A section that opens and closes without a script. The title is plain text, the body HTML."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{body}</details>"


def bullets(sentences: Sequence[str]) -> str:
    """Plain sentences as a list; an empty string if there are none."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>" if sentences else ""
