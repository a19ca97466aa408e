"""The vocabulary: where a number was taken (Site), all numbers of one step (Frame), what is wrong (Finding).

Frames are the only thing capture hands to delivery. They are immutable, live on the CPU and need
neither torch nor the model they came from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tbhooks.data import rank_spread as spread
from tbhooks.data import stats
from tbhooks.data.artifacts import Artifact
from tbhooks.data.errors import ArgumentError, UnknownSiteError, nearest
from tbhooks.data.rank_spread import Spread
from tbhooks.data.stats import BUCKETS, COLUMNS, STAT_NAMES, Counts, Floats

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Severity = Literal["info", "warning", "error"]
KINDS = ("activation", "gradient", "weight", "weight_gradient", "update")
OPTIONAL_KINDS = ("input", "functional")
ALL_KINDS = KINDS + OPTIONAL_KINDS
EVALUATION = "eval."
"""What comes before the kind of everything read in an evaluation pass."""
CHANNEL = "channel."
"""What comes before the kind where numbers are of single channels."""
ROOT = "(root)"
GRADIENT_NORM = "train.grad_norm"
RAW_GRADIENT_NORM = "train.grad_norm_raw"
SCALE = "train.scale"
SKIPPED = "train.skipped"
NONFINITE_SINCE = "train.nonfinite_since"
MISSING_GRADIENT = "weight_gradient.missing/"
"""Before the path of a parameter that requires a gradient and had none when an optimizer that holds it stepped."""
EVALUATION_SINCE = "train.evaluation_since"
# What attention shows besides its output, each at a site of its own: `attention:softmax.entropy`.
# The statistic that sums it up is one of the attention's own, too.
INSIDE_ATTENTION = {"entropy": ("entropy", "mean"), "max_logit": ("logits", "max")}
MORE_STATS = (*INSIDE_ATTENTION, "dead_fraction")
"""What only some sites have, besides the statistics of every row."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a number was taken: a module's or parameter's path, the kind, and which of several outputs."""

    path: str
    kind: str
    index: str = ""

    @property
    def name(self) -> str:
        return self.path + self.index

    @property
    def plain_kind(self) -> str:
        """The kind without the mark of an evaluation pass."""
        return self.kind.removeprefix(EVALUATION)

    @property
    def attention_stat(self) -> tuple[str, str, Site] | None:
        """For something inside attention: what sums it up, by which of its own stats, and the attention's site."""
        if self.plain_kind == "functional":
            for name, (part, stat) in INSIDE_ATTENTION.items():
                if self.path.endswith(f".{part}"):
                    return name, stat, Site(self.path.removesuffix(f".{part}"), self.kind, self.index)
        return None

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with the model: what, where, since when, what to try."""

    step: int
    site: Site | None
    rule: str
    severity: Severity
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        site = None if self.site is None else [self.site.path, self.site.kind, self.site.index]
        return {
            "step": self.step, "site": site, "rule": self.rule, "severity": self.severity,
            "message": self.message, "evidence": dict(self.evidence),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        site = None if data["site"] is None else Site(*data["site"])
        return cls(data["step"], site, data["rule"], data["severity"], data["message"], data["evidence"])

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        bundle: dict[str, str] = display("findings", [self], include, exclude)
        return bundle


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The statistics of one site in one frame, each an attribute: `reading.std`, `reading.p50`."""

    site: Site
    row: Floats
    counts: Counts
    between: Floats = field(default_factory=lambda: spread.empty(1)[0])
    more: Mapping[str, float] = field(default_factory=dict)
    """`entropy` and `max_logit` of attention, `dead_fraction` of rectified units; NaN for anything else."""

    def __getattr__(self, name: str) -> float:
        if name in MORE_STATS:
            return self.more.get(name, float("nan"))
        if name not in STAT_NAMES:
            raise AttributeError(f"no stat {name!r}: {nearest(name, (*STAT_NAMES, *MORE_STATS))}")
        if name == "ratio" and self.site.kind != "update":
            return float("nan")  # only an update has something it is measured against
        return float(stats.stat(name, self.row[None], self.counts[None])[0])

    def spread(self, stat: str) -> Spread:
        """A statistic over the ranks of the job: least, most, who has them, median. With `ranks="merge"`."""
        return spread.read(self.between, stat)

    def underflow_fraction(self, dtype: object) -> float:
        """Share of the elements that would become zero in `dtype` ("float16", torch.float8_e5m2, ...)."""
        return float(stats.underflow_fraction(self.row[None], self.counts[None], dtype)[0])

    def overflow_fraction(self, dtype: object) -> float:
        """Share of the elements that are finite and lie beyond the range of `dtype`."""
        return float(stats.overflow_fraction(self.row[None], self.counts[None], dtype)[0])

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *STAT_NAMES, *MORE_STATS]

    def __repr__(self) -> str:
        shown = ("count", "mean", "std", "norm", "min", "max", "zero_fraction", "nan_count", "inf_count")
        return f"{self.site}: " + " ".join(f"{name}={getattr(self, name):.6g}" for name in shown)


@dataclass(frozen=True, eq=False)
class Frame:
    """Every number of one logged step, in execution order.

    `values[i]` is the row of `sites[i]` (columns: `tbhooks.stats.COLUMNS`) and `buckets[i]` its
    histogram; `buckets` has no columns on a step that took none. `scalars` holds what rode along,
    by its TensorBoard tag: `train/loss`, `train.lr/0`. `spreads` tells how far the ranks of a job lie apart
    (`frame["fc", "gradient"].spread("norm")`), where they were merged. `exhibits` are what was asked for besides
    numbers, such as pictures; they are written and then let go of.
    """

    step: int
    time: float
    rank: int
    sites: tuple[Site, ...]
    values: Floats
    buckets: Counts
    findings: tuple[Finding, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    spreads: Floats = field(default_factory=lambda: spread.empty(0))
    artifacts: tuple[Artifact, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.sites)
        if not self.spreads.size:
            object.__setattr__(self, "spreads", spread.empty(n))
        if self.values.shape != (n, len(COLUMNS)) or self.buckets.shape not in ((n, 0), (n, BUCKETS)):
            raise ArgumentError(
                f"a frame of {n} sites needs values of shape {(n, len(COLUMNS))} and buckets of shape {(n, BUCKETS)} "
                f"or {(n, 0)}, not {self.values.shape} and {self.buckets.shape}"
            )
        self.values.flags.writeable = False
        self.buckets.flags.writeable = False
        object.__setattr__(self, "scalars", MappingProxyType(dict(self.scalars)))

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_index"}
        return {**state, "scalars": dict(self.scalars)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @cached_property
    def _index(self) -> dict[tuple[str, str], int]:
        return {(site.name, site.kind): i for i, site in enumerate(self.sites)}

    def __getitem__(self, key: tuple[str, str]) -> Reading:
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key)):
            raise ArgumentError(f'a frame is read as frame["path", "kind"], not {key!r}')
        if key not in self._index:
            path, kind = key
            kinds = [s.kind for s in self.sites if s.name == path]
            if kinds:
                raise UnknownSiteError(f"no {kind} of {path!r} at step {self.step}: {nearest(str(kind), kinds)}")
            hint = nearest(str(path), [s.name for s in self.sites if s.kind == kind] or [s.name for s in self.sites])
            raise UnknownSiteError(f"nothing of {path!r} ({kind}) at step {self.step}: {hint}")
        return self._reading(self._index[key])

    def _reading(self, i: int) -> Reading:
        return Reading(self.sites[i], self.values[i], self.buckets[i], self.spreads[i], self._more(self.sites[i]))

    def _more(self, site: Site) -> dict[str, float]:
        dead = self.scalars.get(f"{site.kind}.dead_fraction/{site.name}")
        found = {} if dead is None else {"dead_fraction": dead}
        if site.plain_kind != "functional" or site.attention_stat is not None:
            return found
        for name, (part, stat) in INSIDE_ATTENTION.items():
            key = (f"{site.path}.{part}{site.index}", site.kind)
            if key in self._index:
                found[name] = getattr(self[key], stat)
        return found

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything in it but exhibits, which not every sink has a place for."""
        return bool(self.sites or self.scalars or self.findings)

    @property
    def is_evaluation(self) -> bool:
        """Whether it was read in evaluation passes, between the training step of its number and the next."""
        return bool(self.sites) and self.sites[0].kind.startswith(EVALUATION)

    def without_phase(self) -> Frame:
        """An evaluation's frame with the names a training step has, for a writer of its own."""
        return replace(self, sites=tuple(replace(site, kind=site.plain_kind) for site in self.sites))

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def position(self, name: str, kind: str) -> int | None:
        """The index of a site in `sites`, `values` and `buckets`; None if the frame has no such site."""
        return self._index.get((name, kind))

    def stat(self, name: str) -> Floats:
        """One statistic of every site, in the order of `sites`."""
        return stats.stat(name, self.values, self.buckets)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values; `Frame.from_dict` reads them back unchanged."""
        return {
            "step": self.step, "time": self.time, "rank": self.rank,
            "sites": [[s.path, s.kind, s.index] for s in self.sites],
            "values": self.values.tolist(),
            "buckets": [{int(b): int(row[b]) for b in np.flatnonzero(row)} for row in self.buckets]
            if self.buckets.shape[1] else None,
            "findings": [finding.to_dict() for finding in self.findings],
            "scalars": dict(self.scalars),
            **({"spreads": self.spreads.tolist()} if self.spreads.size else {}),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Frame:
        n = len(data["sites"])
        buckets = np.zeros((n, 0 if data["buckets"] is None else BUCKETS), dtype=np.int64)
        for row, counts in zip(buckets, data["buckets"] or (), strict=False):
            for bucket, count in counts.items():
                row[int(bucket)] = count
        return cls(
            step=data["step"], time=data["time"], rank=data["rank"],
            sites=tuple(Site(*site) for site in data["sites"]),
            values=np.array(data["values"], dtype=np.float64).reshape(n, len(COLUMNS)),
            buckets=buckets,
            findings=tuple(Finding.from_dict(finding) for finding in data["findings"]),
            scalars=data["scalars"],
            spreads=np.array(data["spreads"], dtype=np.float64) if "spreads" in data else spread.empty(n),
        )  # fmt: skip

    def compare(self, other: Frame) -> Any:
        """Two passes side by side, this one first: a `FrameComparison`, in its `changes` what changed most on top."""
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        return display("compare", self, other)

    def figure(self, width: float = 7.0) -> Figure:
        """The pass layer by layer: spread of the activations, gradient norms, zeros. Needs `tbhooks[plot]`."""
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        figure: Figure = display("figure", self, width)
        return figure

    def ridgeline(self, kind: str = "activation", width: float = 7.0) -> Figure:
        """The distributions of one kind, a layer a line. Needs `tbhooks[plot]` and a frame with histograms."""
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        figure: Figure = display("ridgeline", self, kind, width)
        return figure

    def to_pandas(self) -> pd.DataFrame:
        """A row a site: `step path index kind`, every statistic, and what `peek` knows of the output."""
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        return display("dataframe", [self])

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        bundle: dict[str, str] = display("frame", self, include, exclude)
        return bundle

    def __str__(self) -> str:
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        return str(display("frame_text", self))

    def __repr__(self) -> str:
        shown = dict.fromkeys((*(() if self.is_evaluation else KINDS), *(site.kind for site in self.sites)))
        kinds = ", ".join(f"{sum(s.kind == kind for s in self.sites)} {kind}" for kind in shown)
        return f"Frame(step={self.step}, {kinds}, {len(self.findings)} findings)"
