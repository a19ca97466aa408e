"""Issues of the loss over the steps: spikes and divergence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tbhooks.data.frame import ROOT, Frame
from tbhooks.data.stats import Floats
from tbhooks.rules.rule import RuleHit, rule, times
from tbhooks.rules.run_view import RunView, total_gradient

RETURNED_LOSS = "loss returned by the model"
_RETURNED = (f"{ROOT}[loss]", "activation")


def losses(frame: Frame) -> list[tuple[str, float]]:
    """The user's logged scalars with "loss" in their name; if there is none, the output `loss` of the model."""
    return frame.derived(_losses)


def _losses(frame: Frame) -> list[tuple[str, float]]:
    logged = [(tag, v) for tag, v in frame.scalars.items() if tag.startswith("train/") and "loss" in tag.lower()]
    if logged or _RETURNED not in frame or frame[_RETURNED].count != 1:
        return logged
    return [(RETURNED_LOSS, frame[_RETURNED].mean)]


@dataclass(frozen=True)
class _LossOf:
    """One loss of a frame; NaN if it does not have it."""

    tag: str

    def __call__(self, frame: Frame) -> float:
        return dict(losses(frame)).get(self.tag, np.nan)


@rule
def loss_spike(view: RunView, *, factor: float = 5.0, reach: float = 2.0, least_frames: int = 5) -> Iterator[RuleHit]:
    """The loss is far above all previous values: a corrupt batch, a wrong label file, or a step that was too large.

    Reported when a logged `train/...loss...` exceeds its previous maximum by `factor` times the interquartile range of
    the last ten values, and is `reach` times as far from their median as the maximum, after `least_frames` frames.
    The maximum includes the untrained model's loss, so that an unlucky batch late in training stays below.
    Try to inspect the batch of that step, clip gradients, or go back to an earlier checkpoint.
    """
    for tag, loss in losses(view.frame):
        past = _finite(view.column(_LossOf(tag))[:-1])
        if len(past) < least_frames or not np.isfinite(loss):
            continue
        low, typical, high = np.percentile(past[-10:], (25, 50, 75))
        limit = max(past.max() + factor * (high - low), typical + reach * (past.max() - typical))
        if loss > limit:
            yield RuleHit(
                None, f"Loss spike: {tag} is {loss:.4g} (recent median {typical:.4g}, previous maximum "
                f"{past.max():.4g})",
                "Inspect the batch of this step, clip gradients, or go back to an earlier checkpoint",
                evidence={"loss": loss, "usual": float(typical), "largest": float(past.max()),
                          "excess": float((loss - typical) / max(limit - typical, 1e-30))},
            )  # fmt: skip


_RISE = 2.0
"""How far a loss must have risen where the gradients say the same."""
_PROGRESS = 0.3
"""By which share a loss must have fallen before it can be said to be lost again."""


@rule
def divergence(view: RunView, *, factor: float = 5.0, lost: float = 0.8, frames: int = 3) -> Iterator[RuleHit]:
    """The loss keeps rising above what it was: training diverges, however slowly.

    The reference is the median loss of the first five logged steps. Reported as an error when the loss is far above
    it in each of the last `frames` frames: by `factor` times, or by twice while the norm of all gradients is also
    `factor` times its own reference. Also when the loss had fallen by 30 % or more and has lost the share `lost` of
    that again, in each of the last `frames` frames. A single bad batch is a loss_spike. The losses of a GAN rise and
    fall with those of its opponent and stay below.
    Try a lower learning rate, warm-up, gradient clipping, or a checkpoint from before the onset.
    """
    for tag, loss in losses(view.frame):
        every = view.column(_LossOf(tag))
        values, early = _finite(every), _finite(np.array([_LossOf(tag)(frame) for frame in view.early(frames)]))
        if len(values) <= frames or not len(early) or not np.isfinite(loss):
            continue
        start = float(np.median(early))
        limit, what = _limit(view, values, start, factor, lost, frames)
        if (values[-frames:] > limit).all():
            since = view.frames[np.flatnonzero(np.isfinite(every))[_onset(values, limit)]].step
            yield RuleHit(
                None,
                f"Divergence: {tag} is {loss:.4g}, {what}",
                "Reduce the learning rate, use warm-up or clip gradients, and go back to a checkpoint from before "
                f"step {since}",
                "error",
                {"loss": loss, "usual": start, "least": float(values.min()),
                 "excess": float((loss - start) / max(limit - start, 1e-30)) if limit > start else 1.0},
                since,
            )  # fmt: skip


def _limit(view: RunView, values: Floats, start: float, factor: float, lost: float, frames: int) -> tuple[float, str]:
    """Above which loss the training diverges, and what that means. Of negative losses the size counts."""
    size = max(abs(start), 1e-30)
    limit = start + (factor - 1) * size
    what = (
        f"{times(float(values[-1]) / start)} its reference value ({start:.4g})"
        if start > 0
        else (f"far above its reference value ({start:.4g})")
    )
    if _gradients_grow(view, factor, frames):
        limit = start + (_RISE - 1) * size
        what += ", and the gradients grow"
    best = _best(values[:-frames])
    if start - best >= _PROGRESS * size and best + lost * (start - best) < limit:
        limit, what = best + lost * (start - best), f"after {best:.4g} at best and {start:.4g} at first"
    return limit, what


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _best(values: Floats) -> float:
    """The least median of three consecutive losses: one lucky batch is no progress."""
    if len(values) < 3:
        return float(np.max(values))
    return float(np.median(np.lib.stride_tricks.sliding_window_view(values, 3), axis=1).min())


def _gradients_grow(view: RunView, factor: float, frames: int) -> bool:
    early = [total_gradient(frame) for frame in view.early(frames)]
    recent = np.array([total_gradient(frame) for frame in view.frames[-frames:]])
    if not np.isfinite(early).any():
        return False
    return bool((recent > factor * float(np.nanmedian(early))).all())


def _onset(values: Floats, limit: float) -> int:
    """The first of the consecutive losses above the limit that reach to the newest."""
    below = np.flatnonzero(values <= limit)
    return int(below[-1]) + 1 if len(below) else 0
