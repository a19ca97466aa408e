"""A model's layers as a table of a notebook."""

from __future__ import annotations

from tbhooks import summary
from tbhooks.notebook import page
from tbhooks.summary import Layers


def as_html(layers: Layers) -> str:
    """The table with its totals; of a long one both ends."""
    first, last, between = summary.ends(summary.cells(layers))
    gap = [[f"{between:,} more", *[""] * (len(summary.COLUMNS) - 1)]] if between else []
    rows = [[page.name(cell) for cell in row] for row in (*first, *gap, *last)]
    headline = f"<p><b>{page.text(layers.model)}</b>: {page.plural(len(layers.layers), 'layer')}.</p>"
    told = "".join(f'<p class="soft">{page.text(sentence)}</p>' for sentence in summary.totals(layers))
    return page.wrapped(headline + page.table([title for title, _ in summary.COLUMNS], rows) + told)
