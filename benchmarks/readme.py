"""Puts the measured tables into README.md, between their marks; nothing there is typed by hand.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"


Results = dict[str, dict[str, dict[str, float]]]


def overhead_table(names: dict[str, str], results: Results) -> str:
    """A column a model, a row a way of watching it."""
    rows = list(dict.fromkeys(row for result in results.values() for row in result))
    lines = [["step time / bare step", *(names[key] for key in results)], ["---"] * (len(results) + 1)]
    lines += [[row, *(cell(result.get(row)) for result in results.values())] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def writing_lines(seconds: dict[str, float], size: dict[str, float]) -> str:
    """What writing costs and weighs, in two sentences."""
    return (
        f"Writing 1000 scalars and 300 histograms takes {1e3 * seconds['tbhooks']:.0f} ms of a background thread, "
        f"against {1e3 * seconds['stock calls']:.0f} ms with `add_scalar` and `add_histogram_raw`.\n"
        f"Ten statistics of 500 layers weigh {size['tbhooks'] / 1e3:.0f} kB a step, "
        f"against {size['one tag a number'] / 1e3:.0f} kB as one tag a number."
    )


def overhead() -> str:
    """What the two benchmarks measured last."""
    steps, writing = (json.loads((HERE / "results" / f"{name}.json").read_text()) for name in ("overhead", "writing"))
    table = overhead_table(steps["names"], steps["results"])
    return f"{table}\n\n{writing_lines(writing['seconds'], writing['bytes'])}"


def cell(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['ratio']:.2f} ± {value['spread'] / 2:.2f}"


def filled(text: str) -> str:
    """The README with its tables as measured."""
    pattern = r"(<!-- overhead: [^>]*-->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}\n{overhead()}\n\n{found[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
