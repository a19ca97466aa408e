"""Everything that a look at a model could change, and a peek after which nothing has changed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tbhooks.api.peek import peek
from tbhooks.data.peek_result import Peeked
from tests.support import zoo


def state(model: nn.Module, *tensors: Tensor) -> dict[str, Any]:
    """Everything a pass could change, in bits and by identity."""
    model_tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = {**model_tensors, **{f"given {i}": tensor for i, tensor in enumerate(tensors)}}
    return {
        "bits": {name: zoo.raw(tensor) for name, tensor in leaves.items()},
        "objects": {name: (id(tensor), tensor.data_ptr()) for name, tensor in leaves.items()},
        "versions": {name: tensor._version for name, tensor in leaves.items()},
        "requires_grad": {name: tensor.requires_grad for name, tensor in leaves.items()},
        "gradients": {
            name: None if not t.is_leaf or t.grad is None else (id(t.grad), zoo.raw(t.grad), t.grad._version)
            for name, t in leaves.items()
        },
        "training": [module.training for module in model.modules()],
        "attributes": [{name: id(value) for name, value in vars(module).items()} for module in model.modules()],
        "hooks": [_hooks(module) for module in model.modules()],
        "tensor hooks": {
            name: [list(table or ()) for table in (t._backward_hooks, t._post_accumulate_grad_hooks) if t.is_leaf]
            for name, t in leaves.items()
        },
        "random": (zoo.raw(torch.get_rng_state()), random.getstate(), repr(np.random.get_state())),
        "modes": (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.get_default_dtype(),
        ),
    }  # fmt: skip


def _hooks(module: nn.Module) -> list[Any]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [list(getattr(module, name).items()) for name in tables]


def peek_unseen(model: nn.Module, *args: Any, watch_tensors: tuple[Tensor, ...] = (), **options: Any) -> Peeked:
    """A peek, after which everything is as it was; to the last bit."""
    before = state(model, *watch_tensors)
    frame = peek(model, *args, **options)
    after = state(model, *watch_tensors)
    for what in before:
        assert after[what] == before[what], what
    return frame
