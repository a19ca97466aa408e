"""Models that call operations which are no modules, and what those return and attend to in an unwatched run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support import float64_recorder, zoo
from tests.support.reference import to_numpy

Array = NDArray[np.float64]
SDPA = "scaled_dot_product_attention"


def depth() -> int:
    """How many torch function modes are on the stack."""
    return len(_get_current_function_mode_stack())


class Tutorial(nn.Module):
    """The CNN of torch's tutorials. `keep` is called with what each operation returns."""

    def __init__(self, how: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.output, self.how = nn.Linear(16, 5), how
        self.keep: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.how) if self.how else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        x = self.keep("relu", F.relu(self.conv1(x)))
        x = self.keep("relu[1]", F.relu(self.conv2(x), inplace=True))
        x = self.keep("max_pool2d", F.max_pool2d(x, 2))
        x = self.keep("dropout", F.dropout(x.flatten(1), 0.2, self.training))
        return self.keep("log_softmax", F.log_softmax(self.output(x), -1))


CNN = replace(zoo.ZOO["cnn"], build=Tutorial, loss=lambda model, batch: F.nll_loss(model(batch[0]), batch[1]))


def kept_operations(steps: int) -> list[float64_recorder.Step]:
    """What the operations of an unwatched tutorial CNN return, and everything else the float64 recorder keeps."""
    kept: list[float64_recorder.Step] = []

    def before(model: Any) -> None:
        def keep(name: str, tensor: Tensor) -> Tensor:
            if name == "relu":
                kept.append({})
            kept[-1][f"(root):{name}", "functional"] = to_numpy(tensor).ravel().copy()
            return tensor

        model.keep = keep

    zoo.train(CNN, steps, before=before)
    return [{**step, **others} for step, others in zip(kept, float64_recorder.observe(CNN, steps), strict=True)]


def entropies(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return -(weights * np.log(weights, where=weights > 0, out=np.zeros_like(weights))).sum(-1)


class Attention:
    """Keeps the logits of every softmax and every fused attention of an unwatched run, in float64 and in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.logits: list[Array] = []
        self._softmax, self._fused = F.softmax, F.scaled_dot_product_attention
        patch.setattr(F, "softmax", self.softmax)
        patch.setattr(F, SDPA, self.fused)

    def softmax(self, x: Tensor, dim: int | None = None, **kwargs: Any) -> Tensor:
        assert dim in (-1, x.dim() - 1)
        self.logits.append(to_numpy(x).copy())
        return self._softmax(x, dim, **kwargs)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        logits = to_numpy(q) @ to_numpy(k).swapaxes(-2, -1) * (kwargs.get("scale") or q.shape[-1] ** -0.5)
        if kwargs.get("is_causal"):
            logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
        if attn_mask is not None:
            mask = to_numpy(attn_mask)
            logits = np.where(mask > 0, logits, -np.inf) if attn_mask.dtype is torch.bool else logits + mask
        self.logits.append(logits)
        return self._fused(q, k, v, attn_mask, *args, **kwargs)


def padded(model: nn.Module, batch: zoo.Batch) -> Tensor:
    mask = torch.ones_like(batch[0])
    mask[1, 5:] = 0
    return model(input_ids=batch[0], labels=batch[0], attention_mask=mask).loss


def transformer(name: str, implementation: str, loss: Any) -> zoo.Case:
    def build() -> nn.Module:
        model = zoo.ZOO[name].build()
        model.set_attn_implementation(implementation)
        return model

    return replace(zoo.ZOO[name], build=build, loss=loss)


class Multihead(nn.Module):
    def __init__(self, need_weights: bool, **masks: Tensor) -> None:
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(8, 2, batch_first=True), masks
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights, **self.options)[0]


CAUSAL = torch.full((5, 5), -math.inf).triu(1)
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True], [True, False, True, False, False]])


def multihead(need_weights: bool, **masks: Tensor) -> zoo.Case:
    return replace(zoo.ZOO["multihead"], build=lambda: Multihead(need_weights, **masks))


# Where attention is called in each layer.
LAYERS = {"gpt2": "transformer.h.{}.attn", "bert": "bert.encoder.layer.{}.attention.self"}
TRANSFORMERS = {
    f"{name}-{how}-{loss.__name__}": (
        transformer(name, how, loss),
        [f"{LAYERS[name].format(layer)}:{operation}" for layer in (0, 1)],
    )
    for name in LAYERS
    for how, operation in (("eager", "softmax"), ("sdpa", SDPA))
    for loss in (zoo.ZOO[name].loss, padded)
}
ATTENDING = TRANSFORMERS | {
    "multihead-causal": (multihead(True, attn_mask=CAUSAL), ["attention:softmax"]),
    "multihead-padded": (multihead(True, key_padding_mask=PADDING), ["attention:softmax"]),
    "multihead-fused": (multihead(False, attn_mask=CAUSAL), [f"attention:{SDPA}"]),
    "multihead-fused-padded": (multihead(False, key_padding_mask=PADDING), [f"attention:{SDPA}"]),
}  # fmt: skip


def selective(*operators: Any) -> dict[str, Any]:
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, list(operators))}


class Fused(nn.Module):
    def __init__(self, how: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.project, self.how = nn.Linear(8, 24), how

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.how) if self.how else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v) + (q @ k.transpose(-1, -2)).softmax(-1) @ v
