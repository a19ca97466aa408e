"""Numbers of each expert of a router and of each head of attention: from rows, which merge, to vectors and scalars.

One row per expert and step says which tokens were sent to it; one row per head summarizes its queries. Rows of
micro-batches and ranks are merged first. Shares and entropies are computed here, from the merged rows. NumPy only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tbhooks.data import stats
from tbhooks.data.artifacts import Channels
from tbhooks.data.sites import Site, Sites
from tbhooks.data.stats import COUNT, M2, M3, M4, MAX, MEAN, MIN, ZEROS, Floats

EXPERTS, HEADS = "experts", "heads"
"""The kinds of `Channels`; those of sites have `channel.` before it."""
TOKENS = "experts.tokens/"
"""The tag prefix of the vector with the tokens of each expert."""
MARGIN, ASSIGNED = "[margin]", "[assigned]"
"""The indices of two more rows of a router: the margins of its tokens, and which of their choices were carried out."""
HEAD_STATS = {"entropy": "entropy", "logits": "max_logit", "first_token": "first_token"}
"""What is captured of each head, and the name of its vector."""
_OF_HEAD = re.compile(rf"(?P<attention>.+)\.(?P<part>{'|'.join(HEAD_STATS)})(?P<index>\[\d+\])?")


@dataclass(frozen=True)
class Vectors:
    """The vectors of a step by tag, what follows from them as scalars, and the maps that the tab shows."""

    vectors: Mapping[str, Floats] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    channels: tuple[Channels, ...] = ()


def expert_rows(tokens: Floats, total: float, top_k: float) -> Floats:
    """A row for each expert, of a number per token: 0, or experts / top_k if the token was sent to it.

    The mean of such a row is the expert's load: 1 if tokens are spread evenly.
    """
    return two_valued_rows(tokens, np.full_like(tokens, total), len(tokens) / top_k)


def two_valued_rows(ones: Floats, total: Floats, value: float = 1.0) -> Floats:
    """Rows of numbers of which so many are `value`, and the others 0."""
    rows = stats.empty_rows(len(ones))
    share = ones / np.maximum(total, 1.0)
    spread = total * share * (1 - share)
    rows[:, COUNT], rows[:, MEAN], rows[:, ZEROS] = total, value * share, total - ones
    rows[:, M2], rows[:, M3] = spread * value**2, spread * (1 - 2 * share) * value**3
    rows[:, M4] = spread * (1 - 3 * share * (1 - share)) * value**4
    rows[:, MIN], rows[:, MAX] = np.where(ones < total, 0.0, value), np.where(ones > 0, value, 0.0)
    return rows


def finished(rows_of: Sequence[Site], values: Floats) -> Vectors:
    """The vectors of the rows of experts and heads among these, which are those of the whole step."""
    sites = rows_of if isinstance(rows_of, Sites) else Sites(rows_of)
    if sites.positions.keys().isdisjoint((f"channel.{EXPERTS}", f"channel.{HEADS}")):
        return Vectors()
    vectors: dict[str, Floats] = {}
    scalars: dict[str, float] = {}
    for path, rows in _by_path(sites, values, f"channel.{EXPERTS}"):
        tokens = np.array([row[COUNT] - row[ZEROS] for index, row in rows.items() if index[1:-1].isdecimal()])
        if len(tokens) > 1 and tokens.sum() > 0:
            vectors[TOKENS + path] = tokens
            scalars |= {f"{EXPERTS}.{name}/{path}": number for name, number in _of_router(tokens, rows).items()}
    for path, rows in _by_path(sites, values, f"channel.{HEADS}"):
        match = _OF_HEAD.fullmatch(path)
        if match is not None:
            name = HEAD_STATS[match["part"]]
            stat = "max" if name == "max_logit" else "mean"
            tag = f"functional.{name}/{match['attention']}{match['index'] or ''}"
            vectors[tag] = stats.STATS[stat](np.array(list(rows.values())))
    return Vectors(vectors, scalars, tuple(_channels(sites, values)))


def _by_path(sites: Sites, values: Floats, kind: str) -> Iterator[tuple[str, dict[str, Floats]]]:
    by_path: dict[str, dict[str, Floats]] = {}
    for i in sites.positions.get(kind, ()):
        by_path.setdefault(sites[i].path, {})[sites[i].index] = values[i]
    yield from by_path.items()


def _of_router(tokens: Floats, rows: Mapping[str, Floats]) -> dict[str, float]:
    share = tokens / tokens.sum()
    used = share[share > 0]
    numbers = {
        "entropy": float(-(used * np.log(used)).sum() / np.log(len(tokens))),
        "max_load": float(share.max() * len(tokens)),
        "dead_fraction": float((tokens == 0).mean()),
    }
    if MARGIN in rows:
        numbers["margin"] = float(rows[MARGIN][MEAN])
    if ASSIGNED in rows:
        numbers["drop_rate"] = float(rows[ASSIGNED][ZEROS] / rows[ASSIGNED][COUNT])
    return numbers


def _channels(sites: Sites, values: Floats) -> Iterator[Channels]:
    for kind in (EXPERTS, HEADS):
        positions = sites.positions.get(f"channel.{kind}", ())
        shown = [int(i) for i in positions if sites[i].index not in (MARGIN, ASSIGNED)]
        if shown:
            names = tuple((sites[i].path, sites[i].index) for i in shown)
            yield Channels(kind, names, values[shown], np.zeros((len(shown), 0), np.int64))
