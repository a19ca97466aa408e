"""What the ranks of the tests with DeepSpeed run: their frames, and what DeepSpeed's own accessors return."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tbhooks

STEPS, EVERY, MICRO = 5, 2, 2
RATE, DECAY, EPSILON = 1e-2, 0.1, 2e-3


def make_model() -> nn.Sequential:
    """Sizes that no number of ranks divides, and a frozen layer."""
    torch.manual_seed(0)
    layers = OrderedDict(up=nn.Linear(6, 13), act=nn.Tanh(), down=nn.Linear(13, 5), fixed=nn.Linear(5, 3))
    model = nn.Sequential(layers)
    model.fixed.requires_grad_(False)
    return model


def batch(step: int, rank: int, part: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randn(4, 6, generator=random)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def groups(model: nn.Module, several: bool) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not several:
        return [{"params": trained}]
    return [{"params": trained[:1]}, {"params": trained[1:], "lr": RATE / 2}]


def make_engine(stage: int, several: bool, dtype: str, **zero: Any) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    model = make_model()
    optimizer = torch.optim.AdamW(groups(model, several), lr=RATE, weight_decay=DECAY, eps=EPSILON)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO, "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True, "steps_per_print": 1000,
    }  # fmt: skip
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(
    rank: int, stage: int, several: bool = False, dtype: str = "float32", ranks: str = "merge", watched: bool = True,
    **zero: Any,
) -> Any:  # fmt: skip
    """Returns the frames, the watch's report, and of each logged step the weights before and after as DeepSpeed's
    accessors return them.
    """
    engine = make_engine(stage, several, dtype, **zero)
    import deepspeed

    target = engine if several else engine.module
    w = tbhooks.watch(target, None, EVERY, ranks=ranks, rules=()).optimizer_state() if watched else None
    truth: list[dict[str, Any]] = []
    for step in range(STEPS):
        seen: dict[str, Any] = {}
        for part in range(MICRO):
            if part == MICRO - 1:
                seen["before"] = _full(engine, deepspeed.utils.safe_get_full_fp32_param)
            x = batch(step, rank, part).to(engine.device)
            engine.backward(loss_of(engine(x.bfloat16() if dtype == "bfloat16" else x)))
            if part == MICRO - 1:
                seen["gradient"] = _full(engine, deepspeed.utils.safe_get_full_grad)
            engine.step()
        seen["after"] = _full(engine, deepspeed.utils.safe_get_full_fp32_param)
        seen["norm"] = float(engine.get_global_grad_norm())
        # With several groups, DeepSpeed 0.19.8 finds the state of the first one only, and raises for others.
        for name in () if several and stage < 3 else ("exp_avg", "exp_avg_sq"):
            seen[name] = _full(engine, lambda p, name=name: deepspeed.utils.safe_get_full_optimizer_state(p, name))
        truth.append(seen)
    frames, report = [], None
    if w is not None:
        w.flush()
        frames, report = list(w.history), w.stats
        w.close()
    weights = [part.tobytes() for part in truth[-1]["after"].values()]
    unseen = dict(report.unseen) if report is not None else {}
    messages = list(report.messages) if report is not None else []
    return frames, report.errors if report is not None else 0, unseen, messages, truth, weights


def _full(engine: Any, accessor: Any) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = accessor(parameter).detach().double().cpu().numpy().copy()
    return found
