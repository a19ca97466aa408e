"""`Frame`, all statistics of one step; `Reading`, those of one site in it; `Finding`, a problem of the model.

Frames are what capture passes to delivery. They are immutable, in host memory, and need neither torch nor the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from tbhooks.data import checksums as bits
from tbhooks.data import ranks as spread
from tbhooks.data import stats
from tbhooks.data.artifacts import Artifact
from tbhooks.data.artifacts.samples import NO_SAMPLES, Samples
from tbhooks.data.artifacts.vectors import EXPERTS, TOKENS
from tbhooks.data.checksums import Checksums
from tbhooks.data.display import Names, display, mimebundle
from tbhooks.data.errors import ArgumentError, UnknownSiteError, nearest
from tbhooks.data.ranks import Spread
from tbhooks.data.sites import EVALUATION, INSIDE_ATTENTION, Site, Sites
from tbhooks.data.stats import BUCKETS, COLUMNS, STAT_NAMES, Counts, Floats

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = [
    "ALL_KINDS", "AS_SCALARS", "BELOW_EPSILON", "CHANNEL", "CRITICAL_BATCH", "EVALUATION", "EVALUATION_SINCE",
    "GRADIENT_COSINE", "GRADIENT_NORM", "INSIDE_ATTENTION", "KINDS", "METRIC", "MISSING_GRADIENT", "MORE_STATS",
    "NOISE_PARTS", "NOISE_SCALE", "NONFINITE_SINCE", "OPTIMIZER_KINDS", "OPTIMIZER_PARTS", "OPTIONAL_KINDS",
    "RAW_GRADIENT_NORM", "RECORDED_KINDS", "REPLICA_DRIFT", "ROOT", "SAMPLED", "SCALE", "SKIPPED", "Finding",
    "Frame", "Reading", "Severity", "Site", "Sites",
]  # fmt: skip

Result = TypeVar("Result")
Severity = Literal["info", "warning", "error"]
KINDS = ("activation", "gradient", "weight", "weight_gradient", "update")
OPTIONAL_KINDS = ("input", "functional")
ALL_KINDS = KINDS + OPTIONAL_KINDS
"""What `kinds` of `watch` takes."""
OPTIMIZER_KINDS = ("first_moment", "second_moment", "normalized_gradient", "proposed_update")
"""What `Watch.optimizer_state` adds."""
OPTIMIZER_PARTS = ("momentum_product", "below_epsilon")
"""What is captured with these kinds, and only shown as the scalars that follow from it."""
RECORDED_KINDS = ALL_KINDS + OPTIMIZER_KINDS
"""All kinds of training steps that have statistics."""
CHANNEL = "channel."
"""The prefix of the kind of statistics of single channels."""
ROOT = "(root)"
GRADIENT_NORM = "train.grad_norm"
RAW_GRADIENT_NORM = "train.grad_norm_raw"
SCALE = "train.scale"
NOISE_SCALE, CRITICAL_BATCH = "train.noise_scale", "train.critical_batch"
NOISE_PARTS = ("noise.trace", "noise.signal", "noise.sum", "noise.count")
"""What the noise scale is computed from, after ranks are merged; not part of a frame."""
SKIPPED = "train.skipped"
NONFINITE_SINCE = "train.nonfinite_since"
MISSING_GRADIENT = "weight_gradient.missing/"
"""The tag prefix of a parameter that requires a gradient and had none when its optimizer stepped."""
SAMPLED = "update.sampled/"
"""The tag prefix of a parameter whose update was computed from a sample; the value is the fraction of elements read."""
REPLICA_DRIFT = ".replica_drift/"
"""In the tag of a parameter whose replicas are not equal on all ranks, as `weight.replica_drift/fc.weight`; the value
is the lowest rank that differs from most.
"""
EVALUATION_SINCE = "train.evaluation_since"
GRADIENT_COSINE, BELOW_EPSILON = "gradient_cosine", "below_epsilon_fraction"
METRIC = "metric."
"""The tag prefix of a metric of the user."""
AS_SCALARS = (
    "dead_fraction", "write_ratio", GRADIENT_COSINE, BELOW_EPSILON, "max_load", "margin", "drop_rate", "entropy",
)  # fmt: skip
"""Statistics that are written as scalars, with tags such as `activation.dead_fraction/relu`."""
MORE_STATS = tuple(dict.fromkeys((*INSIDE_ATTENTION, *AS_SCALARS)))
"""Statistics that only some sites have."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a rule found. The message says what it is, where, since when, and what to do."""

    step: int
    site: Site | None
    """The site that is affected most, or None for the whole run."""
    rule: str
    """The name of the rule, such as "dead_units"."""
    severity: Severity
    """"info", "warning" or "error"."""
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind it, by name."""
    doc: str = ""
    """The section of the documentation about the rule, such as `docs/rules.md#dead_units`; empty for your own rules."""

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values. `Finding.from_dict` reads them back."""
        site = None if self.site is None else [self.site.path, self.site.kind, self.site.index]
        return {
            "step": self.step, "site": site, "rule": self.rule, "severity": self.severity,
            "message": self.message, "evidence": dict(self.evidence), **({"doc": self.doc} if self.doc else {}),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """The finding that `to_dict` wrote."""
        site = None if data["site"] is None else Site(*data["site"])
        return cls(data["step"], site, data["rule"], data["severity"], data["message"], data["evidence"],
                   data.get("doc", ""))  # fmt: skip

    def _repr_mimebundle_(self, include: Names = None, exclude: Names = None) -> dict[str, str]:
        bundle: dict[str, str] = display("findings", [self], include, exclude)
        return bundle


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The statistics of one site in one frame, as attributes: `frame["fc", "gradient"].norm`.

    The names are `count mean std norm rms min max abs_max zero_fraction nan_count inf_count`, `skewness` and `kurtosis`
    (0 and 3 for a normal distribution, NaN if all elements are equal), `ratio` (of an update to the weight), the
    quantiles `p01 p25 p50 p75 p99` (NaN without histograms), `dead_fraction` of ReLU units, and `entropy`, `max_logit`
    and `first_token` (the weight of the first key) of attention. A statistic that the site does not have is NaN; an
    unknown name raises an `AttributeError`.

    Of a router, `frame["layers.0.gate", "experts"]`, the statistics are those of `tokens`, the tokens of each expert;
    further ones are `entropy`, `max_load`, `dead_fraction`, `margin` and `drop_rate`.
    """

    site: Site
    row: Floats
    counts: Counts
    between: Floats = field(default_factory=lambda: spread.empty(1)[0])
    more: Mapping[str, float] = field(default_factory=dict)
    """The statistics that only some sites have: `dead_fraction`, `entropy`, `max_logit`."""
    sampled_fraction: float = 1.0
    """The fraction of the elements that was read; less than 1 if `is_sampled`."""
    checksum: int | None = None
    """The checksum of the tensor's bits, if `Watch.checksums` was called; for an update, of the weight after it."""
    vectors: Mapping[str, Floats] = field(default_factory=dict)
    """Statistics of each head of attention (`entropy`, `max_logit`, `first_token`), or of each expert (`tokens`)."""

    def __getattr__(self, name: str) -> float:
        if name in MORE_STATS:
            return self.more.get(name, float("nan"))
        if name not in STAT_NAMES:
            raise AttributeError(f"no stat {name!r}: {nearest(name, (*STAT_NAMES, *MORE_STATS))}")
        if name == "ratio" and self.site.kind != "update":
            return float("nan")  # only an update has a weight as its reference
        return float(stats.stat(name, self.row[None], self.counts[None])[0])

    @property
    def tokens(self) -> Floats:
        """The number of tokens that the router sent to each expert; empty for what is not a router."""
        return self.vectors.get("tokens", np.zeros(0))

    @property
    def is_sampled(self) -> bool:
        """Whether the statistics were estimated from a sample of the elements, as updates are for which the device has
        too little free memory. The norm and counts are scaled to the whole tensor; `min` and `max` are of the sample.
        """
        return self.sampled_fraction < 1.0

    def spread(self, stat: str) -> Spread:
        """Minimum, maximum and median of a statistic over the ranks, and the ranks that have them (`ranks="merge"`)."""
        return spread.read(self.between, stat)

    def underflow_fraction(self, dtype: object) -> float:
        """The fraction of elements that would underflow to zero in `dtype` ("float16", torch.float8_e5m2, ...)."""
        return float(stats.underflow_fraction(self.row[None], self.counts[None], dtype)[0])

    def overflow_fraction(self, dtype: object) -> float:
        """The fraction of finite elements that would overflow in `dtype`."""
        return float(stats.overflow_fraction(self.row[None], self.counts[None], dtype)[0])

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *STAT_NAMES, *MORE_STATS]

    def __repr__(self) -> str:
        names = ("count", "mean", "std", "norm", "min", "max", "zero_fraction", "nan_count", "inf_count")
        return f"{self.site}: " + " ".join(f"{name}={getattr(self, name):.6g}" for name in names)


@dataclass(frozen=True, eq=False)
class Frame:
    """Everything captured in one logged step. Immutable, and shows itself as a table in notebooks.

    `frame[path, kind]` is the `Reading` of a site, and raises an `UnknownSiteError` if there is none:

    Examples:
        >>> w.latest["encoder.0", "activation"].std  # doctest: +SKIP
        >>> w.latest["encoder.0.weight", "weight_gradient"].norm  # doctest: +SKIP

    """

    step: int
    time: float
    """When the step ended, in seconds since the epoch."""
    rank: int
    sites: Sites
    """In execution order: a tuple, of whatever kind is given."""
    values: Floats
    """One row per site, with the columns `tbhooks.stats.COLUMNS`; those without the last two get NaN there."""
    buckets: Counts
    """One histogram per site; without columns on a step without histograms."""
    findings: tuple[Finding, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    """By TensorBoard tag, such as `train/loss` or `train.lr/0`."""
    spreads: Floats = field(default_factory=lambda: spread.empty(0))
    """How far ranks differ, if they were merged: `frame["fc", "gradient"].spread("norm")`."""
    artifacts: tuple[Artifact, ...] = ()
    """Images, graphs and other things in addition to statistics. They are not kept after writing."""
    samples: Samples = NO_SAMPLES
    """The samples with the largest values, and the mean of each group, if `Watch.samples` was called."""
    checksums: Checksums = field(default_factory=lambda: bits.empty(0))
    """For each site the checksum of its bits and the number of its type, if `Watch.checksums` was called; else empty.
    """
    vectors: Mapping[str, Floats] = field(default_factory=dict)
    """Numbers of each expert or head, by a tag such as `experts.tokens/layers.0.gate`."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """The kind of each metric of the user, by the part of its tags before the slash, such as `metric.logsumexp`."""

    def __post_init__(self) -> None:
        n = len(self.sites)
        if type(self.sites) is not Sites:
            object.__setattr__(self, "sites", Sites(self.sites))
        if not self.spreads.size:
            object.__setattr__(self, "spreads", spread.empty(n))
        object.__setattr__(self, "values", stats.widened(self.values))
        if self.values.shape != (n, len(COLUMNS)) or self.buckets.shape not in ((n, 0), (n, BUCKETS)):
            raise ArgumentError(
                f"a frame of {n} sites needs values of shape {(n, len(COLUMNS))} and buckets of shape {(n, BUCKETS)} "
                f"or {(n, 0)}, got {self.values.shape} and {self.buckets.shape}"
            )
        if len(self.checksums) not in (0, n):
            raise ArgumentError(f"a frame of {n} sites needs as many checksums, or none, got {len(self.checksums)}")
        self.values.flags.writeable = False
        self.buckets.flags.writeable = False
        if not isinstance(self.scalars, MappingProxyType):  # that of another frame, of which this is a copy
            object.__setattr__(self, "scalars", MappingProxyType(dict(self.scalars)))

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_derived"}
        return {**state, "scalars": dict(self.scalars)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def _index(self) -> Mapping[tuple[str, str], int]:
        return self.sites.position_of

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}

    def derived(self, function: Callable[[Frame], Result]) -> Result:
        """What a function returns for this frame; it is called once, and must not depend on anything else."""
        if function not in self._derived:
            self._derived[function] = function(self)
        result: Result = self._derived[function]
        return result

    def __getitem__(self, key: tuple[str, str]) -> Reading:
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key)):
            raise ArgumentError(f'a frame is indexed by frame["path", "kind"], got {key!r}')
        path, kind = key
        if kind == EXPERTS and TOKENS + path in self.vectors:
            return self._router(Site(path, kind))
        if key not in self._index:
            kinds = [s.kind for s in self.sites if s.name == path]
            if kinds:
                raise UnknownSiteError(f"no {kind} of {path!r} at step {self.step}: {nearest(str(kind), kinds)}")
            hint = nearest(str(path), [s.name for s in self.sites if s.kind == kind] or [s.name for s in self.sites])
            raise UnknownSiteError(f"no {kind} of {path!r} at step {self.step}: {hint}")
        i = self._index[key]
        site = self.sites[i]
        fraction = self.scalars.get(SAMPLED + site.name, 1.0) if site.kind == "update" else 1.0
        total, dtype = self.checksums[i].tolist() if len(self.checksums) else (0, 0)
        checksum = total if dtype else None
        more, vectors = self._more(site), self._vectors(site)
        return Reading(site, self.values[i], self.buckets[i], self.spreads[i], more, fraction, checksum, vectors)

    def _router(self, site: Site) -> Reading:
        vectors = self._vectors(site)
        counts = np.zeros(self.buckets.shape[1], dtype=np.int64)
        return Reading(site, stats.row_of(vectors["tokens"]), counts, more=self._more(site), vectors=vectors)

    def _vectors(self, site: Site) -> dict[str, Floats]:
        tags = {name: f"{site.kind}.{name}/{site.name}" for name in ("tokens", *INSIDE_ATTENTION)}
        return {name: self.vectors[tag] for name, tag in tags.items() if tag in self.vectors}

    def _more(self, site: Site) -> dict[str, float]:
        tags = {name: f"{site.kind}.{name}/{site.name}" for name in AS_SCALARS}
        more = {name: self.scalars[tag] for name, tag in tags.items() if tag in self.scalars}
        if site.plain_kind != "functional" or site.attention_stat is not None:
            return more
        for name, (part, stat) in INSIDE_ATTENTION.items():
            key = (f"{site.path}.{part}{site.index}", site.kind)
            if key in self._index:
                more[name] = getattr(self[key], stat)
        return more

    @property
    def has_numbers(self) -> bool:
        """Whether it contains more than artifacts, which not every sink supports."""
        return bool(self.sites or self.scalars or self.findings or self.samples)

    @property
    def routers(self) -> tuple[str, ...]:
        """The paths of the routers whose experts were counted."""
        return tuple(tag.removeprefix(TOKENS) for tag in self.vectors if tag.startswith(TOKENS))

    @property
    def is_evaluation(self) -> bool:
        """Whether it was captured in evaluation passes, after the training step with the same number."""
        return self.sites.are_of_evaluation

    def without_phase(self) -> Frame:
        """The frame of an evaluation with the kinds and tags of a training step, for a writer of its own."""
        return replace(
            self,
            sites=self.sites.derived(_without_phase),
            scalars={tag.removeprefix(EVALUATION): value for tag, value in self.scalars.items()},
            metrics={tag.removeprefix(EVALUATION): kind.removeprefix(EVALUATION) for tag, kind in self.metrics.items()},
        )

    def __contains__(self, key: object) -> bool:
        is_router = isinstance(key, tuple) and key[1:] == (EXPERTS,) and key[0] in self.routers
        return is_router or key in self._index

    def position(self, name: str, kind: str) -> int | None:
        """The index of a site in `sites`, `values` and `buckets`; None if the frame has no such site."""
        return self._index.get((name, kind))

    def stat(self, name: str) -> Floats:
        """One statistic of every site, in the order of `sites`. Raises an `ArgumentError` for an unknown name."""
        return stats.stat(name, self.values, self.buckets)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, without artifacts. `Frame.from_dict` reads them back."""
        return {
            "step": self.step, "time": self.time, "rank": self.rank,
            "sites": [[s.path, s.kind, s.index] for s in self.sites],
            "values": self.values.tolist(),
            "buckets": _used_buckets(self.buckets) if self.buckets.shape[1] else None,
            "findings": [finding.to_dict() for finding in self.findings],
            "scalars": dict(self.scalars),
            **({"spreads": self.spreads.tolist()} if self.spreads.size else {}),
            **({"samples": self.samples.to_dict()} if self.samples else {}),
            **({"checksums": self.checksums.tolist()} if self.checksums.any() else {}),
            **({"vectors": {tag: vector.tolist() for tag, vector in self.vectors.items()}} if self.vectors else {}),
            **({"metrics": dict(self.metrics)} if self.metrics else {}),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Frame:
        """The frame that `to_dict` wrote."""
        n = len(data["sites"])
        values = np.array(data["values"], dtype=np.float64).reshape(n, -1) if n else stats.empty_rows(0)
        buckets = np.zeros((n, 0 if data["buckets"] is None else BUCKETS), dtype=np.int64)
        for row, counts in zip(buckets, data["buckets"] or (), strict=False):
            for bucket, count in counts.items():
                row[int(bucket)] = count
        return cls(
            step=data["step"], time=data["time"], rank=data["rank"],
            sites=Sites(Site(*site) for site in data["sites"]),
            values=values,
            buckets=buckets,
            findings=tuple(Finding.from_dict(finding) for finding in data["findings"]),
            scalars=data["scalars"],
            spreads=np.array(data["spreads"], dtype=np.float64) if "spreads" in data else spread.empty(n),
            samples=Samples.from_dict(data["samples"]) if "samples" in data else NO_SAMPLES,
            checksums=bits.of_rows(data.get("checksums", ())),
            vectors={tag: np.array(vector, dtype=np.float64) for tag, vector in data.get("vectors", {}).items()},
            metrics={str(tag): str(kind) for tag, kind in data.get("metrics", {}).items()},
        )  # fmt: skip

    def compare(self, other: Frame) -> Any:
        """Compares this frame with another one. Returns a `FrameComparison`; its `changes` begin with the largest."""
        return display("compare", self, other)

    def figure(self, width: float = 7.0) -> Figure:
        """Returns a matplotlib figure of activations, gradient norms and zeros by layer. Needs `tbhooks[plot]`."""
        figure: Figure = display("figure", self, width)
        return figure

    def ridgeline(self, kind: str = "activation", width: float = 7.0) -> Figure:
        """Returns a matplotlib figure of the histograms of one kind, one line per layer. Needs `tbhooks[plot]`."""
        figure: Figure = display("ridgeline", self, kind, width)
        return figure

    def to_pandas(self) -> pd.DataFrame:
        """Returns a DataFrame with one row per site: `step path index kind`, all statistics, and outputs of `peek`."""
        return display("dataframe", [self])

    _repr_mimebundle_ = mimebundle("frame")

    def __str__(self) -> str:
        return str(display("frame_text", self))

    def __repr__(self) -> str:
        kinds = dict.fromkeys((*(() if self.is_evaluation else KINDS), *(site.kind for site in self.sites)))
        counts = ", ".join(f"{sum(s.kind == kind for s in self.sites)} {kind}" for kind in kinds)
        return f"Frame(step={self.step}, {counts}, {len(self.findings)} findings)"


def _without_phase(sites: Sites) -> Sites:
    return Sites(replace(site, kind=site.plain_kind) for site in sites)


def _used_buckets(buckets: Counts) -> list[dict[int, int]]:
    """For each site the counts of the buckets that are not empty."""
    rows, columns = np.nonzero(buckets)
    pairs = iter(zip(columns.tolist(), buckets[rows, columns].tolist(), strict=True))
    return [dict(islice(pairs, count)) for count in np.bincount(rows, minlength=len(buckets)).tolist()]
