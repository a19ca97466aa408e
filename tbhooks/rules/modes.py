"""Training in a mode that is not meant for it."""

from __future__ import annotations

from collections.abc import Iterator

from tbhooks.data.frame import EVALUATION_SINCE
from tbhooks.rules.rule import RuleHit, rule
from tbhooks.rules.run_view import RunView


@rule
def evaluation_mode(view: RunView) -> Iterator[RuleHit]:
    """The model is trained in evaluation mode, after it was in training mode: model.train() was probably forgotten.

    Dropout then does nothing, and BatchNorm neither uses nor updates the statistics of the batch. Speaks when a
    backward went through a forward of the whole model in evaluation mode and the optimizer stepped. Silent about
    parts in evaluation mode (frozen BatchNorm), and about models that were never in training mode.
    Try model.train() after each evaluation.
    """
    since = view.frame.scalars.get(EVALUATION_SINCE)
    if since is not None:
        yield RuleHit(
            None,
            f"the model is trained in evaluation mode since step {int(since)}",
            "model.train() after each evaluation",
            evidence={"since": int(since)},
        )
