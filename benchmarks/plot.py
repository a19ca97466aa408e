"""Draws docs/overhead.svg from results/overhead.json: what a step takes, by model and way of watching it.

Plain SVG, readable on light and dark pages. The grey part of each bar is the bare step.

    python benchmarks/plot.py [--results FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path

HERE = Path(__file__).parent

# As they are called in the results, and in the picture; ours first.
ROWS = {
    "tbhooks, step not logged": "tbhooks, step not logged",
    "tbhooks, logged, scalars": "tbhooks, scalars",
    "tbhooks, logged, histograms": "tbhooks, histograms",
    'wandb.watch(log="all"), no activations': 'wandb.watch("all"), no activations',
    "hooks written by hand": "hooks written by hand",
}
LABELS, PANEL, GAP, NUMBER = 230, 212, 16, 46
TOP, ROW, BAR = 66, 28, 14

STYLE = """
  text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 14px; } .faint { fill: #59636e; font-size: 12px; } .number { font-size: 12px; }
  .bare { fill: #b6bec8; } .ours { fill: #0f7b6c; } .other { fill: #d1742c; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .faint { fill: #9198a1; }
    .bare { fill: #545d68; } .ours { fill: #2fb39d; } .other { fill: #e39350; }
  }
"""

Result = dict[str, dict[str, float]]


def picture(names: dict[str, str], results: dict[str, Result], threads: int) -> str:
    """A panel a model, each with a scale of its own."""
    rows = [row for row in ROWS if any(row in result for result in results.values())]
    width = LABELS + len(results) * (PANEL + GAP)
    height = TOP + len(rows) * ROW + 26
    title = "Time of a training step, as a multiple of a bare one"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        _text(0, 18, title, "title"),
    ]
    parts += [_text(0, _middle(i) + 4, ROWS[row]) for i, row in enumerate(rows)]
    for number, (key, result) in enumerate(results.items()):
        parts += _panel(LABELS + number * (PANEL + GAP), names[key], result, rows)
    said = (
        "Grey: the bare step. Every step is logged but in the first row, writing included. Each model has its own "
        f"scale. {_count(threads)}."
    )
    return "\n".join([*parts, _text(0, height - 6, said, "faint"), "</svg>"]) + "\n"


def _panel(left: float, name: str, result: Result, rows: list[str]) -> list[str]:
    unit = (PANEL - NUMBER) / max(result[row]["ratio"] for row in rows if row in result)
    parts = [_text(left, TOP - 16, name, "faint")]
    for i, row in enumerate(rows):
        if row not in result:
            parts.append(_text(left, _middle(i) + 4, "not measured", "faint"))
            continue
        ratio = result[row]["ratio"]
        kind = "ours" if row.startswith("tbhooks") else "other"
        top, bare, whole = _middle(i) - BAR / 2, unit * min(1.0, ratio), unit * ratio
        parts.append(f'<rect class="bare" x="{left:.1f}" y="{top:.1f}" width="{bare:.1f}" height="{BAR}"/>')
        if whole > bare:
            parts.append(
                f'<rect class="{kind}" x="{left + bare:.1f}" y="{top:.1f}" width="{whole - bare:.1f}" height="{BAR}"/>'
            )
        shown = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
        parts.append(_text(left + whole + 6, _middle(i) + 4, shown, "number"))
    return parts


def _middle(row: int) -> float:
    return TOP + row * ROW + ROW / 2 - 6


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(text)}</text>'


def _count(threads: int) -> str:
    return "One CPU thread" if threads == 1 else f"{threads} CPU threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "overhead.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "overhead.svg")
    options = parser.parse_args()
    figures = json.loads(options.results.read_text())
    svg = picture(figures["names"], figures["results"], figures["machine"]["cpu_threads"])
    options.out.write_text(svg, encoding="utf-8")
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
