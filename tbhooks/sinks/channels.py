"""Numbers of single channels: a tensor a kind and step, as frames have, and stock histograms where asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tensorboard.compat.proto import summary_pb2

from tbhooks.exhibits import Channels, Exhibit
from tbhooks.frame import CHANNEL, Frame, Site
from tbhooks.sinks.histograms import SiteHistograms
from tbhooks.sinks.places import places_of
from tbhooks.sinks.tensors import Layout

# Stock histograms of one layer: each is a tag of its own, and TensorBoard grows slow with thousands of those.
MOST_HISTOGRAMS = 64


def joined(exhibits: Iterable[Exhibit]) -> Iterator[Exhibit]:
    """Those of one kind together, each channel once: an event has one value a tag."""
    kinds: dict[str, list[Channels]] = {}
    for exhibit in exhibits:
        if isinstance(exhibit, Channels):
            kinds.setdefault(exhibit.kind, []).append(exhibit)
        else:
            yield exhibit
    yield from map(_join, kinds.values())


def _join(several: list[Channels]) -> Channels:
    if len(several) == 1:
        return several[0]
    names = [name for one in several for name in one.names]
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    rows = sorted(first.values())
    values, counts = (
        np.concatenate(arrays)[rows] for arrays in zip(*((o.values, o.counts) for o in several), strict=True)
    )
    drawn = frozenset[str]().union(*(one.drawn for one in several))
    return Channels(several[0].kind, tuple(names[i] for i in rows), values, counts, drawn)


def write(channels: Channels, summary: summary_pb2.Summary, run: Any) -> None:
    """Into the step's event; TensorBoard's TBHOOKS tab shows it as a map of channels by steps."""
    kind = CHANNEL + channels.kind
    layout = run.layouts.setdefault(kind, Layout(kind))
    frame = Frame(run.step, run.time, 0, _sites(channels, kind), channels.values, channels.counts)
    layout.add(frame, places_of(range(len(frame.sites))), layout.places(frame.sites), summary)
    if channels.drawn and channels.counts.shape[1]:
        summary.MergeFromString(_histograms(channels, frame))


def _sites(channels: Channels, kind: str) -> tuple[Site, ...]:
    return tuple(Site(path, kind, index) for path, index in channels.names)


def _histograms(channels: Channels, frame: Frame) -> bytes:
    so_far: Counter[str] = Counter()
    rows = []
    for i, (path, _) in enumerate(channels.names):
        if path in channels.drawn and so_far[path] < MOST_HISTOGRAMS:
            so_far[path] += 1
            rows.append(i)
    sites = tuple(Site(channels.names[i][0], channels.kind, channels.names[i][1]) for i in rows)
    return SiteHistograms(sites).encoded(
        Frame(frame.step, frame.time, 0, sites, frame.values[rows], frame.buckets[rows])
    )
