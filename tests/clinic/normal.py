"""Trainings without issues: every warning of a rule is a false alarm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from tbhooks.data.frame import KINDS
from tests.clinic.training import (
    LENGTH,
    VOCABULARY,
    Case,
    Training,
    Transformer,
    adam,
    classify,
    cnn,
    images,
    mlp,
    predict,
    sgd,
    stepper,
    tokens,
    vectors,
)

_WORDS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def _plain(model: nn.Module, loss_of: Callable[[int], Tensor], lr: float = 1e-3, **how: Any) -> Training:
    return Training(model, stepper(adam(model, lr), loss_of), **how)


def plain_cnn() -> Training:
    model = cnn()
    return _plain(model, classify(model, images), steps=200)


def mlp_adamw() -> Training:
    model = mlp()
    return _plain(model, classify(model), steps=200, optimizer_state=True)


def mlp_without_care() -> Training:
    """Raw pixels from 0 to 16, SGD with momentum, no weight decay."""
    model = mlp((64, 128, 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    return Training(model, stepper(optimizer, classify(model, scale=4.0)), steps=150)


def tanh_mlp() -> Training:
    model = mlp((64, 64, 64, 64, 10), nn.Tanh)
    return _plain(model, classify(model), 3e-3, steps=150)


def sigmoid_mlp() -> Training:
    model = mlp((64, 64, 10), nn.Sigmoid)
    return _plain(model, classify(model), 1e-2, steps=150)


def resnet() -> Training:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10
    )
    model = ResNetForImageClassification(config)

    def loss_of(number: int) -> Tensor:
        inputs, labels = images()
        return model(F.interpolate(inputs, scale_factor=4), labels=labels).loss

    return _plain(model, loss_of)


def vit() -> Training:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(**_SIZES, image_size=8, patch_size=2, num_channels=1, num_labels=10))

    def loss_of(number: int) -> Tensor:
        inputs, labels = images()
        return model(inputs, labels=labels).loss

    return _plain(model, loss_of)


def _language(model: nn.Module) -> Callable[[int], Tensor]:
    def loss_of(number: int) -> Tensor:
        chosen = tokens()
        return model(input_ids=chosen, labels=chosen).loss

    return loss_of


def gpt2() -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**_WORDS, n_embd=32, n_layer=3, n_head=2, n_positions=LENGTH))
    return _plain(model, _language(model), kinds=(*KINDS, "functional"), optimizer_state=True)


def bert() -> Training:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**_WORDS, **_SIZES, max_position_embeddings=LENGTH))

    def loss_of(number: int) -> Tensor:
        chosen = tokens()
        hidden = torch.rand(chosen.shape) < 0.2
        return model(input_ids=chosen.masked_fill(hidden, 1), labels=chosen.masked_fill(~hidden, -100)).loss

    return _plain(model, loss_of, kinds=(*KINDS, "functional"))


def _mixtral(experts: int, **options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_WORDS, **_SIZES, num_key_value_heads=1, num_local_experts=experts, **options)
    return MixtralForCausalLM(config)


def mixtral() -> Training:
    """An expert of its second router gets no token from step 30 to 70."""
    model = _mixtral(4, output_router_logits=True)
    return _plain(model, _language(model), experts=True, steps=600, optimizer_state=True)


def mixtral_of_eight() -> Training:
    """An expert of its second router gets no token from step 30 to 200, and few later."""
    model = _mixtral(8, output_router_logits=True)
    return _plain(model, _language(model), experts=True, steps=600)


def qwen_moe() -> Training:
    """Single experts get no token for up to 200 steps."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_WORDS, **_SIZES, num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, output_router_logits=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    return _plain(model, _language(model), experts=True, steps=600)


def fresh_mixtral() -> Training:
    """The first steps of a router that nothing balances yet."""
    model = _mixtral(8)
    return _plain(model, _language(model), experts=True, steps=30)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(48, VOCABULARY)
        self.recurrent = kind(32, 48, batch_first=True, **options)

    def forward(self, chosen: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(chosen))[0])


def lstm() -> Training:
    model = Recurrent(num_layers=2)
    return _plain(model, predict(model), 5e-3, optimizer_state=True)


def clipped_rnn() -> Training:
    model = Recurrent(nn.RNN)
    return Training(model, stepper(sgd(model, 1.0), predict(model), clip=0.5), steps=150)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.discriminator = nn.Sequential(
            nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )


def gan() -> Training:
    model = Gan()
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(model.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step(number: int) -> Tensor:
        real = (vectors()[0] * 0.37 + 0.3) * 2 - 1
        fake = model.generator(torch.randn(len(real), 16))
        of_discriminator.zero_grad()
        on_real, on_fake = model.discriminator(real), model.discriminator(fake.detach())
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        F.softplus(-model.discriminator(fake)).mean().backward()
        of_generator.step()
        return loss

    return Training(model, step, steps=200)


def fine_tuning() -> Training:
    """All but the head and the last block frozen on purpose; the optimizer is given everything, as many do."""
    model = Transformer(depth=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.2", "norm", "head")))
    return _plain(model, predict(model))


def frozen_middle() -> Training:
    """Adapters before and after a frozen body."""
    model = mlp((64, 64, 64, 64, 10), nn.GELU)
    model[2].requires_grad_(False)
    model[4].requires_grad_(False)
    return _plain(model, classify(model))


def warm_up() -> Training:
    model = Transformer()
    optimizer = adam(model, 2e-3)
    schedule = LambdaLR(optimizer, lambda step: min(step / 80, 1.0))
    return Training(model, stepper(optimizer, predict(model), schedule=schedule), steps=120)


def decayed_cosine() -> Training:
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = CosineAnnealingLR(optimizer, T_max=150)
    return Training(model, stepper(optimizer, classify(model, images), schedule=schedule), steps=151)


def dropout_heavy() -> Training:
    model = nn.Sequential(
        nn.Dropout(0.2), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.7), nn.Linear(128, 128), nn.ReLU(),
        nn.Dropout(0.7), nn.Linear(128, 10),
    )  # fmt: skip
    return _plain(model, classify(model), steps=150)


def mixed_precision() -> Training:
    model = Transformer()

    def loss_of(number: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return predict(model)(number)

    return _plain(model, loss_of)


def batch_of_two() -> Training:
    model = mlp()
    return _plain(model, classify(model, lambda: vectors(2)), steps=200)


def evaluation_only() -> Training:
    model = cnn().eval()

    def step(number: int) -> Tensor:
        with torch.no_grad():
            inputs, labels = images()
            return F.cross_entropy(model(inputs), labels)

    return Training(model, step, steps=40, evaluated=True)


def autoencoder() -> Training:
    """Ends in a sigmoid on digits that are mostly black: bounds are where it belongs."""
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64),
        nn.Sigmoid(),
    )  # fmt: skip

    def loss_of(number: int) -> Tensor:
        pictures = (vectors()[0] * 0.37 + 0.3).clamp(0, 1).round()
        return F.binary_cross_entropy(model(pictures), pictures)

    return _plain(model, loss_of, 3e-3, steps=150)


def overfitting() -> Training:
    """Eight digits learnt by heart: gradients fall by orders of magnitude."""
    model = mlp()
    inputs, labels = vectors(8)
    return _plain(model, lambda number: F.cross_entropy(model(inputs), labels), 3e-3, steps=200)


def zero_start() -> Training:
    """Residual branches and a head that start at zero."""
    model = Transformer(depth=3)
    for block in model.blocks:
        for layer in (block.out, block.down):
            nn.init.zeros_(layer.weight)
    nn.init.zeros_(model.head.weight)
    return _plain(model, predict(model))


class _Scored(nn.Module):
    """Attention over rows whose padding is hidden by the smallest number of the format; the scores are an output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        hidden = torch.arange(8) >= torch.randint(3, 9, (len(x), 1, 1))
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


class _MaskedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scored, self.value, self.head = _Scored(), nn.Linear(8, 16), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 8, 8)
        return self.head((self.scored(x).softmax(dim=-1) @ self.value(x)).flatten(1))


def masked_by_the_smallest_number() -> Training:
    model = _MaskedRows()
    return _plain(model, classify(model))


def spikes_that_are_clipped() -> Training:
    """Now and then a batch has a gradient a thousand times the usual, and the script clips, as language models do."""
    model = Transformer()
    optimizer, loss_of = adam(model), predict(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(number)
        (loss * (1000.0 if number % 60 == 50 else 1.0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(model, step, steps=120)


def frozen_stem_detached() -> Training:
    """A backbone that is frozen on purpose and run without gradients; the optimizer is given everything."""
    model = nn.Sequential(mlp((64, 64, 32)), nn.ReLU(), nn.Linear(32, 10))
    model[0].requires_grad_(False)

    def loss_of(number: int) -> Tensor:
        inputs, labels = vectors()
        with torch.no_grad():
            features = model[0](inputs)
        return F.cross_entropy(model[2](model[1](features)), labels)

    return Training(model, stepper(adam(model), loss_of))


def margin_reached() -> Training:
    """Eight digits classified with a margin: the loss and with it all gradients become exactly zero."""
    model = mlp()
    inputs, labels = vectors(8)
    return _plain(model, lambda number: F.multi_margin_loss(model(inputs), labels), 3e-3, steps=150)


def warm_up_logged_from_zero() -> Training:
    """The learning rate is zero in the first step, and every step is logged."""
    model = mlp()
    optimizer = adam(model)
    schedule = LambdaLR(optimizer, lambda step: min(step / 20, 1.0))
    return Training(model, stepper(optimizer, classify(model), schedule=schedule), steps=40, every=1)


def noisy_regression() -> Training:
    model = mlp((64, 32, 1), nn.GELU)

    def loss_of(number: int) -> Tensor:
        inputs, labels = vectors()
        return F.mse_loss(model(inputs).squeeze(1), labels * 10.0 + 20 * math.sin(number) * torch.randn(len(labels)))

    return _plain(model, loss_of, 3e-3, steps=150)


NORMAL = (
    Case("CNN", plain_cnn),
    Case("MLP, AdamW", mlp_adamw),
    Case("MLP, raw inputs, momentum", mlp_without_care),
    Case("MLP of tanh", tanh_mlp),
    Case("MLP of sigmoid", sigmoid_mlp),
    Case("ResNet", resnet),
    Case("ViT", vit),
    Case("GPT-2", gpt2),
    Case("BERT", bert),
    Case("Mixtral (MoE)", mixtral),
    Case("Mixtral of eight experts", mixtral_of_eight),
    Case("Qwen-MoE", qwen_moe),
    Case("Mixtral, freshly initialised", fresh_mixtral),
    Case("LSTM", lstm),
    Case("RNN, clipped", clipped_rnn),
    Case("GAN", gan),
    Case("fine-tuning, frozen below", fine_tuning),
    Case("frozen in the middle", frozen_middle),
    Case("warm-up from zero", warm_up),
    Case("weight decay and cosine to zero", decayed_cosine),
    Case("heavy dropout", dropout_heavy),
    Case("bfloat16 autocast", mixed_precision),
    Case("batch of two", batch_of_two),
    Case("evaluation only", evaluation_only),
    Case("autoencoder of black and white", autoencoder),
    Case("overfitting eight digits", overfitting),
    Case("branches that start at zero", zero_start),
    Case("noisy regression", noisy_regression),
    Case("masked by the smallest number", masked_by_the_smallest_number),
    Case("spikes that are clipped", spikes_that_are_clipped),
    Case("frozen backbone without gradients", frozen_stem_detached),
    Case("margin reached, loss zero", margin_reached),
    Case("warm-up from zero, every step", warm_up_logged_from_zero),
)
