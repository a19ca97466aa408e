"""Issues of mixtures of experts: routers that use few of their experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tbhooks.data.artifacts.vectors import EXPERTS
from tbhooks.data.frame import Site
from tbhooks.data.stats import Floats
from tbhooks.rules.rule import RuleHit, rule
from tbhooks.rules.run_view import RunView

_REMEDY = (
    "Add a load-balancing loss or raise its coefficient (transformers: output_router_logits=True and "
    "router_aux_loss_coef), or reduce the learning rate of the router"
)


@rule
def expert_collapse(
    view: RunView, *, entropy: float = 0.6, min_tokens: int = 64, frames: int = 3
) -> Iterator[RuleHit]:  # fmt: skip
    """A router sends nearly all tokens to a few of its experts, or none to one of them.

    Needs `w.experts()`. Reported as an error when the entropy of the experts' shares is below `entropy` of the
    uniform distribution's in each of the last `frames` frames; as a warning when an expert got no token in any of
    them, although even shares would have given it at least `min_tokens`. The entropy of two of eight experts is 0.33,
    that of normal routers above 0.9.
    Try a load-balancing loss or a larger coefficient, or a lower learning rate of the router.
    """
    if len(view.frames) < frames:
        return
    last = view.frames[-frames:]
    routers = [path for path in view.frame.routers if all((path, EXPERTS) in frame for frame in last)]
    readings = {path: [frame[path, EXPERTS] for frame in last] for path in routers}
    collapsed = [path for path, each in readings.items() if all(reading.entropy < entropy for reading in each)]
    tokens = {path: np.sum([reading.tokens for reading in each], 0) for path, each in readings.items()}
    others = [path for path in tokens if path not in collapsed and np.mean(tokens[path]) >= min_tokens]
    dead = [path for path in others if (tokens[path] == 0).any()]
    since = view.step(frames - 1)
    if collapsed:
        path, reading = collapsed[0], readings[collapsed[0]][-1]
        yield RuleHit(
            Site(path, EXPERTS),
            f"Experts collapsed: {path} sends {_most(reading.tokens)} (entropy {reading.entropy:.2g})",
            _REMEDY,
            "error",
            {"entropy": reading.entropy, "max_load": reading.max_load, "tokens": reading.tokens[:64].tolist(),
             "excess": entropy / max(reading.entropy, 1e-9)},
            since,
            len(collapsed) - 1,
        )  # fmt: skip
    if dead:
        path = dead[0]
        none = np.flatnonzero(tokens[path] == 0)
        yield RuleHit(
            Site(path, EXPERTS),
            f"Dead experts: {len(none)} of {len(tokens[path])} experts of {path} got no token",
            _REMEDY,
            evidence={"dead": none[:64].tolist(), "even_share": float(np.mean(tokens[path])),
                      "excess": float(np.mean(tokens[path])) / min_tokens},
            since=since,
            others=len(dead) - 1,
        )  # fmt: skip


def _most(tokens: Floats) -> str:
    """How many experts get nine tenths of the choices, and their share."""
    shares = np.sort(tokens)[::-1] / tokens.sum()
    count = int(np.searchsorted(np.cumsum(shares), 0.9) + 1)
    return f"{shares[:count].sum():.0%} of its tokens to {count} of {len(tokens)} experts"
