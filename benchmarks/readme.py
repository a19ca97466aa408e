"""Puts the measured tables into README.md and the pages in docs/, between their marks; none is typed by hand.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("cost.md", "distributed.md", "gpus.md", "large-models.md")),
)
SHORT = ("tbhooks, step not logged", "tbhooks, logged, scalars", 'wandb.watch(log="all"), no activations')
"""The rows of the README's table."""


Results = dict[str, dict[str, dict[str, float]]]


def overhead_table(names: dict[str, str], results: Results) -> str:
    """One column per model, one row per way of watching it."""
    rows = list(dict.fromkeys(row for result in results.values() for row in result))
    return _table(rows, names, results)


def _table(rows: Sequence[str], names: dict[str, str], results: Results) -> str:
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


def background_line(found: dict[str, dict[str, float]]) -> str:
    """What the background thread does with a site."""
    scalars, histograms = (found[name] for name in ("scalars", "histograms"))
    return (
        f"The background thread takes {scalars['median']:.1f} µs a site and logged step, from the copied records to "
        f"the event file with all rules, {histograms['median']:.1f} µs with histograms ({scalars['sites']:,.0f} sites)."
    )


def rows_line(ratios: dict[str, dict[str, float]]) -> str:
    """What reading costs against the least there is."""
    row, buckets = ([one[name] for one in ratios.values()] for name in ("row", "buckets"))
    sizes = list(ratios)
    return (
        f"A full row takes {min(row):.1f} to {max(row):.1f} times as long as one `x.sum()` of the same tensor "
        f"({sizes[0]} to {sizes[-1]} float32, one thread), its histogram "
        f"{min(buckets):.1f} to {max(buckets):.1f} times on top."
    )


def disk_line(disk: dict[str, Any]) -> str:
    """What a long run weighs."""
    return (
        f"The GPT-2 above weighs {disk['gpt2']['the event file'] / 1e6:.0f} "
        "MB after 100,000 steps at `every=100`, all kinds, with "
        f"histograms: {disk['logged']} logged steps were written, "
        f"{disk['trained']} of them trained and the others repeated with noise."
    )


def scaling_line(scaling: dict[str, Any]) -> str:
    """How the costs grow."""
    most = list(scaling["modules"])[-1]
    last, growth = scaling["modules"][most], scaling["exponents"]
    return (
        f"`watch()` and `close()` on {int(most):,} modules take "
        f"{last['attach_detach_ms']:.0f} ms. From 100 to {int(most):,} modules a "
        f"logged step's cost grows with their number to the power of {growth['scalars_extra_ms']:.2f}, at "
        f"{last['scalars_us_a_site']:.0f} µs a site "
        f"({last['histograms_us_a_site']:.0f} with histograms), writing included."
    )


def memory_line(memory: dict[str, Any]) -> str:
    """What a logged step needs."""
    rest = {
        way: memory["allocated_beyond_bare_mb"][way] - numbers["records_mb"] - numbers["weight_copies_mb"]
        for way, numbers in memory["resident"].items()
        if way != "bare"
    }
    copies = memory["resident"]["histograms"]["weight_copies_mb"]
    return (
        f"A logged step of that GPT-2 allocates {rest['scalars']:.2f} MB "
        f"beyond its buffers, {rest['histograms']:.2f} MB with histograms; "
        f"the buffers are {memory['resident']['histograms']['records_mb']:.1f} "
        f"MB of records and, for `update`, {copies:.0f} MB of weight copies."
    )


def tab_line(tab: dict[str, Any]) -> str:
    """How fast the tab is in a browser."""
    actions = dict(tab["milliseconds"])
    ready = actions.pop("ready")
    slowest = max(actions, key=lambda name: actions[name])
    return (
        f"In a browser, the tab with a run of {tab['modules']:,} modules and {tab['steps']:,} logged steps is ready "
        f"after {ready / 1e3:.1f} s; of {len(actions)} actions the slowest takes {actions[slowest]:.0f} ms ({slowest})."
    )


def overhead() -> str:
    """What the benchmarks measured last."""
    names = ("overhead", "writing", "rows", "disk", "scaling", "memory", "tab")
    figures = {name: json.loads((HERE / "results" / f"{name}.json").read_text()) for name in names}
    lines = (
        writing_lines(figures["writing"]["seconds"], figures["writing"]["bytes"]),
        background_line(figures["writing"]["background"]),
        disk_line(figures["disk"]),
        rows_line(figures["rows"]["ratios"]["float32"]),
        scaling_line(figures["scaling"]),
        memory_line(figures["memory"]),
        tab_line(figures["tab"]),
    )
    listed = "\n".join(f"- {line}" for text in lines for line in text.splitlines())
    return f"{overhead_table(figures['overhead']['names'], figures['overhead']['results'])}\n\n{listed}"


def short_table() -> str:
    """The table of the README."""
    figures = json.loads((HERE / "results" / "overhead.json").read_text())
    return _table(SHORT, figures["names"], figures["results"])


def _simulated_line(figures: dict[str, Any]) -> str:
    """What a job of 1,024 ranks exchanges in a logged step."""
    small, large = (figures[f"1024{more}"] for more in ("", ", histograms"))
    sent, first, merger = (
        [each[what] for each in (small, large)] for what in ("sent", "first_received", "merger_received")
    )
    return (
        f"Simulated in one process, for the GPT-2 above ({small['sites']} sites) on 1,024 ranks: each sends "
        f"{sent[0] / 1e3:.0f} kB a logged step ({sent[1] / 1e3:.0f} with histograms); rank 0 receives "
        f"{first[0] / 1e3:.0f} kB ({first[1] / 1e3:.0f}), however many ranks there are; each of the "
        f"{small['slices']:.0f} ({large['slices']:.0f}) ranks that merge receives at most {merger[0] / 1e6:.1f} MB "
        f"({merger[1] / 1e6:.1f}). If rank 0 merged alone, it would receive {small['all_received'] / 1e6:.0f} MB "
        f"({large['all_received'] / 1e6:.0f}). The merged numbers are equal to the bit."
    )


def ranks_lines(figures: dict[str, Any]) -> str:
    """What merging ranks costs here, and what it would send elsewhere."""
    cores = figures["machine"].split(",")[0]
    lines = []
    for world, found in figures["measured"].items():
        bare, local, merged = (1e3 * found[way] for way in ("bare", "local", "merge"))
        lines.append(
            f"{world} ranks of a small model with {found['sites']} sites share {cores} here, every step logged with "
            f"histograms: {bare:.0f} ms a step bare, {local:.0f} with rank 0 watched, {merged:.0f} merged, where all "
            f"ranks read; at `every=100` the merging adds {(merged - local) / bare / 100:.1%}."
        )
    if "simulated" in figures:
        lines.append(_simulated_line(figures["simulated"]))
    return "\n".join(f"- {line}" for line in lines)


def cell(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['ratio']:.2f} ± {value['spread'] / 2:.2f}"


def ranks() -> str:
    """What merging cost last."""
    return ranks_lines(json.loads((HERE / "results" / "ranks.json").read_text()))


def large_models() -> str:
    """What experts, heads, optimizer state and noise scale add to a logged step."""
    figures = json.loads((HERE / "results" / "large_models.json").read_text())
    ratios = figures["ratios"]
    lines = ["| every step logged | time of the training thread |", "|---|---|"]
    lines += [f"| {name} | {ratio:.2f} |" for name, ratio in ratios.items()]
    return "\n".join(lines)


def launches() -> str:
    """How many kernels were counted last."""
    return (HERE / "results" / "launches.md").read_text().rstrip()


def sampled_updates() -> str:
    """How far sampled updates were from exact ones."""
    return (HERE / "results" / "sampled_updates.md").read_text().rstrip()


TABLES = {
    "launches": (launches, "end of launches"),
    "sampled-updates": (sampled_updates, "end of sampled-updates"),
    "overhead": (overhead, "end"),
    "overhead-short": (short_table, "end of overhead-short"),
    "ranks": (ranks, "end of ranks"),
    "large-models": (large_models, "end of large-models"),
}
"""For each mark what makes the text after it, and the mark at its end."""


def filled(text: str) -> str:
    """The page with its tables as measured."""
    for name, (made, end) in TABLES.items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- {end} -->)"
        text = re.sub(pattern, lambda found, made=made: f"{found[1]}\n{made()}\n\n{found[2]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
