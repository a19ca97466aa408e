"""Long names made short enough for a table or an axis without two of them becoming the same text."""

from __future__ import annotations

from collections.abc import Sequence


def shorten(text: str, width: int) -> str:
    """Returns `text` if it fits, else its beginning and its end with "…" between, `width` characters in all."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


def shorten_all(names: Sequence[str], width: int) -> tuple[list[str], str]:
    """Shortens names to `width`, or to the least width at which different names stay different.

    The prefix that the long names share is cut first, up to a dot or a slash; then the middle, because module paths
    differ at both ends. Returns the names in order, and the prefix that a leading "…" stands for ("" if none was cut).
    """
    long = [name for name in names if len(name) > width]
    prefix = _common_prefix(long) if len(set(long)) > 1 else ""
    shorter = [f"…{name[len(prefix) :]}" if prefix and name.startswith(prefix) else name for name in names]
    distinct, size, longest = len(set(names)), max(width, 1), max(map(len, shorter), default=0)
    if len(set(shorter)) < distinct:
        return list(names), ""
    while size < longest:
        cut = [shorten(name, size) for name in shorter]
        if len(set(cut)) == distinct:
            return cut, prefix
        size += 1 + size // 64
    return shorter, prefix


def _common_prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to and including the last dot or slash in it."""
    first, last = min(names), max(names)  # whatever these two share, all names share
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: max(first.rfind(".", 0, common), first.rfind("/", 0, common)) + 1]
