"""The models everything is measured on: real architectures from small configurations, no download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and one training step's loss on it."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    steps_a_turn: int
    """Enough that the wait for the last step's writing at a turn's end is shared by several."""


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=6, n_head=6, n_embd=384, vocab_size=4096, n_positions=256, use_cache=False)
    )


def _resnet18() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config)


def chain(layers: int, width: int = 8) -> nn.Module:
    """Layers so small that only their number costs anything."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


_TOKENS = torch.randint(4096, (8, 128), generator=torch.Generator().manual_seed(0))
_IMAGES = torch.randn(16, 3, 96, 96, generator=torch.Generator().manual_seed(0))
_LABELS = torch.randint(10, (16,), generator=torch.Generator().manual_seed(0))
_ROWS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def chain_loss(model: nn.Module) -> Tensor:
    """Of a `chain` of width 8."""
    return model(_ROWS).square().mean()


WORKLOADS = {
    "gpt2": Workload("GPT-2, 6 layers, 8x128 tokens", _gpt2, lambda m: m(input_ids=_TOKENS, labels=_TOKENS).loss, 3),
    "resnet": Workload("ResNet-18, 16x96x96", _resnet18, lambda m: m(pixel_values=_IMAGES, labels=_LABELS).loss, 3),
    "mlp500": Workload("MLP of 500 tiny layers", lambda: chain(500), chain_loss, 5),
}
