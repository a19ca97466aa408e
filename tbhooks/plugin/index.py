"""The index of a log directory from TensorBoard's list of tags: our runs, kinds, sites and newest steps.

No tensor is read here. A tag with invalid metadata is left out: event files may come from anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from tensorboard.compat.proto import summary_pb2

from tbhooks.data.artifacts.flights import FLIGHT
from tbhooks.data.artifacts.vectors import EXPERTS, HEADS
from tbhooks.data.frame import CHANNEL, EVALUATION, METRIC, RECORDED_KINDS, Site
from tbhooks.data.roles import GAIN, predecessors
from tbhooks.data.stats import QUANTILES, STATS
from tbhooks.runs.stored_frames import Layout
from tbhooks.sinks.tensorboard import OUTCOME_TAG, PLUGIN
from tbhooks.sinks.tensorboard.findings import DATA_TAG
from tbhooks.sinks.tensorboard.samples import DATA_TAG as SAMPLES_TAG

KINDS = (*RECORDED_KINDS, *(EVALUATION + kind for kind in RECORDED_KINDS), CHANNEL + "activation", CHANNEL + "weight",
         CHANNEL + EXPERTS, CHANNEL + HEADS, FLIGHT)  # fmt: skip
"""The kinds that are known by name, in display order."""
_PREFIX = re.compile(r"[a-z_]+")
_TAG = re.compile(rf"{PLUGIN}/(?P<kind>[a-z_.]+?)(?P<buckets>\.buckets)?(?:\.(?P<generation>[1-9]\d{{0,8}}))?")
_HAS_RATIO = "update"
ELEMENT = "element."
"""The prefix of the kind of metrics that have several numbers a site: heads, experts, channels."""


def is_kind(name: str) -> bool:
    """Whether this can be a kind: one of ours, or one of parts of a tensor with another prefix: `head.activation`."""
    prefix, dot, kind = name.removeprefix(ELEMENT).rpartition(".")
    return name.removeprefix(ELEMENT) in KINDS or (
        bool(dot) and kind in RECORDED_KINDS and _PREFIX.fullmatch(prefix) is not None
    )


def _in_display_order(kinds: Iterable[str]) -> list[str]:
    return sorted(kinds, key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind))


@dataclass(frozen=True, slots=True)
class Tag:
    """One tag of frame tensors or findings, with the step and time of its newest value."""

    name: str
    last_step: int
    last_time: float
    sites: tuple[Site, ...] = ()
    sampled: Mapping[str, float] = field(default_factory=dict)
    """The sites that are estimates from a sample, and the fraction of the elements that was read."""


@dataclass(frozen=True)
class Kind:
    """One kind of a run: its tags of rows and of buckets, each from the first to the newest generation."""

    name: str
    rows: tuple[Tag, ...]
    buckets: tuple[Tag, ...]
    metrics: Metrics | None = None
    """The numbers of single sites that are no statistics of rows."""

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """In the order of their first appearance; a later generation extends the list of the earlier one."""
        if self.metrics is not None and self.metrics.elements:
            return self.metrics.elements
        if all(tag.sites == self.rows[-1].sites[: len(tag.sites)] for tag in self.rows):
            return self.rows[-1].sites
        return tuple(dict.fromkeys(site for tag in self.rows for site in tag.sites))

    @cached_property
    def position(self) -> dict[tuple[str, str], int]:
        """The row of a site in the matrix, by path and index."""
        return {(site.path, site.index): i for i, site in enumerate(self.sites)}

    @cached_property
    def before(self) -> Mapping[int, int]:
        """Of gradients: for the position of a site that of the one before it in its role, for its gain."""
        return predecessors([site.name for site in self.sites]) if self.name == "gradient" else {}

    @property
    def last_step(self) -> int:
        return max(tag.last_step for tag in self.rows)

    @property
    def sampled(self) -> Mapping[str, float]:
        """The sites whose newest values are estimates from a sample, and the fraction of the elements that was read."""
        return self.rows[-1].sampled

    @property
    def stats(self) -> list[str]:
        """The available stats. A dump of the flight recorder has one number for each gradient."""
        if self.name == FLIGHT:
            return ["norm"]
        if self.metrics is not None and self.metrics.elements:
            return list(self.metrics.numbers)
        of_rows = [name for name in STATS if name != "ratio" or self.name == _HAS_RATIO]
        of_rows += [GAIN] if self.before else []
        return of_rows + (list(QUANTILES) if self.buckets else []) + list(self.metrics.numbers if self.metrics else ())


@dataclass(frozen=True)
class Metrics:
    """The numbers of single sites of one kind, such as metrics of the user."""

    stored: Kind
    """The kind that has one row for each number."""
    numbers: Mapping[str, Mapping[int, int]]
    """By the name of the stat: for the position of a site, that of its number among the rows."""
    elements: tuple[Site, ...] = ()
    """The sites, if they are not those of the kind itself."""

    @classmethod
    def split(cls, stored: Kind, base: Kind | None) -> tuple[Metrics, Metrics]:
        """The numbers of the sites of `base`; and all others, which are one of several numbers of a site."""
        positions = {} if base is None else {site.name: i for i, site in enumerate(base.sites)}
        own: dict[str, dict[int, int]] = {}
        other: dict[str, dict[int, int]] = {}
        elements: dict[Site, int] = {}
        for i, site in enumerate(stored.sites):
            stat, _, name = site.path.partition("/")
            if not site.index and name in positions:
                own.setdefault(stat, {})[positions[name]] = i
            else:
                element = Site(name, ELEMENT + stored.name.removeprefix(METRIC), site.index)
                other.setdefault(stat, {})[elements.setdefault(element, len(elements))] = i
        return cls(stored, own), cls(stored, other, tuple(elements))


@dataclass(frozen=True)
class RunIndex:
    """Our kinds and findings of one run."""

    name: str
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    findings: Tag | None = None
    samples: Tag | None = None
    outcome: Tag | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the watch was closed, and nothing was written after that."""
        return self.outcome is not None and self.outcome.last_time >= self.last_time

    @property
    def _tags(self) -> list[Tag]:
        own = [tag for kind in self.kinds.values() for tag in (*kind.rows, *kind.buckets)]
        return own + ([self.findings] if self.findings is not None else [])

    @property
    def last_step(self) -> int:
        return max(tag.last_step for tag in self._tags)

    @property
    def last_time(self) -> float:
        return max(tag.last_time for tag in self._tags)


def read(listing: Mapping[str, Mapping[str, Any]]) -> dict[str, RunIndex]:
    """The runs with tbhooks data by name, from the data provider's list of our tensors."""
    runs = {name: _run(name, series) for name, series in listing.items()}
    return {name: run for name, run in sorted(runs.items()) if run.kinds or run.findings}


def _run(name: str, series: Mapping[str, Any]) -> RunIndex:
    # TensorBoard lists a tag shortly before its first value is available.
    filled = {tag: one for tag, one in series.items() if one.max_step is not None and one.max_wall_time is not None}
    single = [
        Tag(tag, filled[tag].max_step, filled[tag].max_wall_time) if tag in filled else None
        for tag in (DATA_TAG, SAMPLES_TAG, OUTCOME_TAG)
    ]
    return RunIndex(name, _kinds(filled), *single)


def _kinds(series: Mapping[str, Any]) -> dict[str, Kind]:
    found: dict[str, dict[bool, dict[int, Tag]]] = {}
    for name, one in series.items():
        match = _TAG.fullmatch(name)
        if match is None or not is_kind(match["kind"].removeprefix(METRIC)):
            continue
        layout = _layout(one.plugin_content)
        if layout is None or layout.kind != match["kind"] or layout.buckets != bool(match["buckets"]):
            continue
        tag = Tag(name, one.max_step, one.max_wall_time, layout.sites, layout.sampled)
        found.setdefault(layout.kind, {}).setdefault(layout.buckets, {})[int(match["generation"] or 1)] = tag
    kinds = {
        kind: Kind(kind, _by_generation(found[kind][False]), _by_generation(found[kind].get(True, {})))
        for kind in found
        if False in found[kind]
    }
    _move_metrics(kinds)
    return {kind: kinds[kind] for kind in _in_display_order(kinds)}


def _move_metrics(kinds: dict[str, Kind]) -> None:
    """Makes the stored numbers of sites statistics of their kind, or of its elements."""
    for name in [name for name in kinds if name.startswith(METRIC)]:
        stored, base = kinds.pop(name), name.removeprefix(METRIC)
        own, other = Metrics.split(stored, kinds.get(base))
        if own.numbers:
            kinds[base] = replace(kinds[base], metrics=own)
        if other.numbers:
            kinds[ELEMENT + base] = Kind(ELEMENT + base, stored.rows, (), other)


def _by_generation(tags: Mapping[int, Tag]) -> tuple[Tag, ...]:
    return tuple(tags[generation] for generation in sorted(tags))


@lru_cache(maxsize=512)
def _layout(content: bytes) -> Layout | None:
    """Parses the metadata of a tag; cached, because it is the same at every poll. None if it is invalid."""
    metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(content=content))
    try:
        layout = Layout.read(metadata)
        _check_names(layout.sites)
    except ValueError:
        return None
    return layout


def _check_names(sites: Iterable[Site]) -> None:
    """Raises ValueError for names that cannot be in a URL, and for duplicates."""
    known = set()
    for site in sites:
        site.name.encode()
        if (site.path, site.index) in known:
            raise ValueError(f"{site} is there twice")
        known.add((site.path, site.index))
