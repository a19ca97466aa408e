"""Small mixtures of experts: transformers' from tiny configurations, and one whose router can return anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 64, 32
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "eos_token_id": None,
}  # fmt: skip
_LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_MLP = {"moe_intermediate_size": 16}

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, **_MLP},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, **_MLP},
    "DeepseekV2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "DeepseekV3": _LATENT,
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}
"""Options of each configuration, beside the common sizes."""


def build(name: str, **options: Any) -> nn.Module:
    """A model of transformers with two layers."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **TRANSFORMERS[name], **options})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape or (2, 16))


class Experts(nn.Module):
    """Weights with one slice per expert, called with the choices as transformers does."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.einsum("td,edh->teh", x, self.weight)
        picked = outputs.gather(1, chosen.clamp(0, self.num_experts - 1).unsqueeze(-1).expand(-1, -1, x.size(-1)))
        return (picked * weights.unsqueeze(-1)).sum(1)


Returned = Callable[[Tensor, int], Any]
"""What a router returns, from its logits and the number of choices per token."""


class Router(nn.Module):
    def __init__(self, experts: int, width: int, top_k: int, returned: Returned) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width))
        self.experts_per_token, self._returned = top_k, returned

    def forward(self, x: Tensor) -> Any:
        return self._returned(F.linear(x, self.weight), self.experts_per_token)


class Block(nn.Module):
    """A mixture of experts whose router is a plain linear layer, or one that returns what `returned` makes."""

    def __init__(self, experts: int = 6, top_k: int = 2, width: int = 8, returned: Returned | None = None) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts) if returned is None else Router(experts, width, top_k, returned)
        self.experts = Experts(experts, width)
        self.logits: list[Tensor] = []
        """What the router computed in each forward, kept by a hook of the test."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.gate(x)
        logits = found if isinstance(found, Tensor) else found[0]
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        return x + self.experts(x, chosen, weights)


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
