"""Issues of mixtures of experts: routers that use few of their experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tbhooks.data.artifacts.vectors import EXPERTS
from tbhooks.data.frame import Frame, Site
from tbhooks.data.stats import Floats
from tbhooks.rules.rule import RuleHit, rule
from tbhooks.rules.run_view import RunView

_REMEDY = (
    "Add a load-balancing loss or raise its coefficient (transformers: output_router_logits=True and "
    "router_aux_loss_coef), or reduce the learning rate of the router"
)

# What is plain at once is reported after so many frames.
FEWEST_FRAMES = 3
# An expert without a token since step 0 is reported when even shares would have given it so many.
TOKENS_FROM_START = 64


@rule
def expert_collapse(
    view: RunView, *, entropy: float = 0.6, severe: float = 0.37, steps: int = 500, frames: int = 5,
    min_tokens: int = 2000,
) -> Iterator[RuleHit]:  # fmt: skip
    """A router sends nearly all tokens to a few of its experts, or none to one of them.

    Needs `w.experts()`. Reported as an error when the entropy of the experts' shares was below `severe` of the uniform
    distribution's in three frames in a row, or below `entropy` in every frame of the last `steps` steps, at least
    `frames` of them. Reported as a warning when an expert got no token in any of them, although even shares would have
    given it at least `min_tokens`; after three frames, if it has got none since step 0. Routers often leave experts
    without tokens early in training, and use them later: that is not reported.
    The entropy of two of eight experts is 0.33, that of normal routers early in training above 0.44, later above 0.7.
    Try a load-balancing loss or a larger coefficient, or a lower learning rate of the router.
    """
    collapsed, dead = [], []
    for path in view.frame.routers:
        since = _collapsed_since(view, path, entropy, severe, steps, frames)
        starved = _starved(view, path, steps, frames, min_tokens) if since is None else None
        collapsed += [(path, since)] if since is not None else []
        dead += [(path, *starved)] if starved is not None else []
    if collapsed:
        path, since = collapsed[0]
        reading = view.frame[path, EXPERTS]
        yield RuleHit(
            Site(path, EXPERTS),
            f"Experts collapsed: {path} sends {_most(reading.tokens)} (entropy {reading.entropy:.2g})",
            _REMEDY,
            "error",
            {"entropy": reading.entropy, "max_load": reading.max_load, "tokens": reading.tokens[:64].tolist(),
             "excess": entropy / max(reading.entropy, 1e-9)},
            since=since,
            others=len(collapsed) - 1,
        )  # fmt: skip
    if dead:
        path, since, tokens = dead[0]
        none = np.flatnonzero(tokens == 0)
        yield RuleHit(
            Site(path, EXPERTS),
            f"Dead experts: {len(none)} of {len(tokens)} experts of {path} got no token",
            _REMEDY,
            evidence={"dead": none[:64].tolist(), "even_share": float(np.mean(tokens)),
                      "excess": float(np.mean(tokens)) / min_tokens},
            since=since,
            others=len(dead) - 1,
        )  # fmt: skip


def _collapsed_since(
    view: RunView, path: str, entropy: float, severe: float, steps: int, frames: int
) -> int | None:  # fmt: skip
    """The step since which the entropy has been low, if that is long enough ago."""
    is_severe = True
    for count, frame in enumerate(_newest_first(view, path), 1):
        found = frame[path, EXPERTS].entropy
        is_severe = is_severe and found < severe
        if not found < entropy:
            return None
        is_long = count >= frames and view.frame.step - frame.step >= steps
        if is_long or (count == FEWEST_FRAMES and is_severe):
            return frame.step
    return None


def _starved(view: RunView, path: str, steps: int, frames: int, min_tokens: int) -> tuple[int, Floats] | None:
    """A step long enough ago, and the tokens of each expert since then, if some expert got none."""
    tokens = np.zeros_like(view.frame[path, EXPERTS].tokens)
    for count, frame in enumerate(_newest_first(view, path), 1):
        more = frame[path, EXPERTS].tokens
        if more.shape != tokens.shape:
            return None
        tokens = tokens + more
        if tokens.all():
            return None
        is_long = count >= frames and view.frame.step - frame.step >= steps and tokens.mean() >= min_tokens
        # A new router uses all experts: one that has got no token since step 0 is not merely neglected for a while.
        is_from_start = count >= FEWEST_FRAMES and frame.step == 0 and tokens.mean() >= TOKENS_FROM_START
        if is_long or is_from_start:
            return frame.step, tokens
    return None


def _newest_first(view: RunView, path: str) -> Iterator[Frame]:
    return (frame for frame in reversed(view.frames) if (path, EXPERTS) in frame)


def _most(tokens: Floats) -> str:
    """How many experts get nine tenths of the choices, and their share."""
    shares = np.sort(tokens)[::-1] / tokens.sum()
    count = int(np.searchsorted(np.cumsum(shares), 0.9) + 1)
    return f"{shares[:count].sum():.0%} of its tokens to {count} of {len(tokens)} experts"
