"""What the tab says about whole runs: findings by problem and by cause, a verdict, curves, what was watched.

Pure functions. The judgement is that of `tbhooks.data.findings` and `tbhooks.runs.verdict`, as in reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tbhooks.data.findings import SEVERITIES, Issue, issues
from tbhooks.data.frame import EVALUATION, KINDS, Finding, Site
from tbhooks.data.roles import parameter_traits, roles
from tbhooks.plugin.index import Kind, RunIndex
from tbhooks.runs.verdict import Points, verdict

_SHOWN_MISSING = 5
_FATAL = ("non_finite", "divergence")
_NAMES = {
    "activation": "activations",
    "gradient": "gradients of activations",
    "weight": "weights",
    "weight_gradient": "weight gradients",
    "update": "updates",
}


def finding_entries(stored: Sequence[Finding]) -> list[dict[str, Any]]:
    """One entry per problem, the most severe first and then by onset, with the message of its worst step."""
    found = sorted(issues(stored), key=lambda issue: (SEVERITIES.index(issue.severity), issue.onset))
    return [_entry(issue) for issue in found]


def _entry(issue: Issue) -> dict[str, Any]:
    return issue.to_dict() | {"site": _site(issue.site)}


def run_state(run: RunIndex, stored: Sequence[Finding], outcome: str = "") -> str:
    """How a run ended if no more steps arrive: "failed", "finished", or "ended" if its files do not say how.

    It is also "failed" if its last step is not finite or diverging.
    """
    lasting = [issue for issue in issues(stored) if issue.rule in _FATAL and issue.severity == "error"]
    if any(issue.last.step >= run.last_step for issue in lasting):
        return "failed"
    return outcome or "ended"


def _site(site: Site | None) -> dict[str, str] | None:
    if site is None:
        return None
    return {"path": site.path, "kind": site.kind, "index": site.index, "name": site.name}


def site_entries(run: RunIndex, kind: Kind) -> list[dict[str, str]]:
    """The sites of a kind in the order of their rows, each with the name of its role."""
    names = [site.name for site in kind.sites]
    parameters = run.kinds["weight"].sites if "weight" in run.kinds else ()
    traits = parameter_traits(names, [site.path for site in parameters])
    role_of = {member: role.name for role in roles(names, traits) for member in role.members}
    return [
        {"path": site.path, "index": site.index, "name": site.name, "role": role_of[i]}
        for i, site in enumerate(kind.sites)
    ]


def run_overview(
    run: RunIndex, stored: Sequence[Finding], scalars: Mapping[str, Points], steps: Iterable[int]
) -> dict[str, Any]:
    """The card of a run: verdict with causes, what was watched and what not, its logged steps."""
    logged = list(steps)
    judged = verdict(stored, scalars, len(logged))
    verdict_data = judged.to_dict()
    for cause, entry in zip(judged.causes, verdict_data["causes"], strict=True):
        entry["issues"] = [_entry(issue) for issue in cause.issues]
    return {
        "verdict": verdict_data,
        "watched": [{"kind": kind.name, "sites": len(kind.sites)} for kind in run.kinds.values()],
        "unwatched": _unwatched(run),
        "steps": {"count": len(logged), "first": logged[0], "last": logged[-1]} if logged else {"count": 0},
    }


def _unwatched(run: RunIndex) -> list[str]:
    """What a reader may look for in vain: kinds that were not recorded, modules with weights but no activation."""
    missing = [_NAMES[kind] for kind in KINDS if kind not in run.kinds]
    if not any(name.startswith(EVALUATION) for name in run.kinds):
        missing.append("evaluation passes")
    silent = _without_activation(run)
    if silent:
        more = f" and {len(silent) - _SHOWN_MISSING} more" if len(silent) > _SHOWN_MISSING else ""
        missing.append(f"activations of {', '.join(silent[:_SHOWN_MISSING])}{more}")
    return missing


def _without_activation(run: RunIndex) -> list[str]:
    if "weight" not in run.kinds or "activation" not in run.kinds:
        return []
    seen = {site.path for site in run.kinds["activation"].sites}
    owners = dict.fromkeys(site.path.rpartition(".")[0] for site in run.kinds["weight"].sites)
    return [path for path in owners if path and path not in seen]


def scalar_entries(scalars: Mapping[str, Points]) -> list[dict[str, Any]]:
    """The scalars of a run, losses first."""
    return [
        {"tag": tag, "steps": steps.tolist(), "values": np.asarray(values, dtype=np.float64).tolist()}
        for tag, (steps, values) in scalars.items()
    ]
