"""Trainings with one deliberate issue each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from tbhooks.data.frame import KINDS
from tests.clinic.training import (
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

DEEP = (64, *[32] * 59, 10)


def _classifier(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> Training:
    return Training(model, stepper(optimizer, classify(model, scale=scale)))


def learning_rate_x1000() -> Training:
    model = mlp()
    return _classifier(model, adam(model, 1.0))


def learning_rate_x1000_transformer() -> Training:
    model = Transformer()
    return Training(model, stepper(sgd(model, 300.0), predict(model)))


def summed_by_mistake() -> Training:
    """From step 50 on the loss is summed over the batch instead of averaged, as after a careless change."""
    model = Transformer()
    usual = predict(model)
    step = stepper(adam(model), lambda number: usual(number) * (184 if number >= 50 else 1))
    return Training(model, step, optimizer_state=True)


def batch_of_another_scale() -> Training:
    """One batch of raw pixels from 0 to 255, after many that were scaled."""
    model = mlp()

    def loss_of(number: int) -> Tensor:
        inputs, labels = vectors()
        return F.cross_entropy(model(inputs * 255 if number == 70 else inputs), labels)

    return Training(model, stepper(adam(model), loss_of), optimizer_state=True)


class _Recurrence(nn.Module):
    """Reads a digit row by row, with recurrent weights far too large."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.head = nn.Linear(8, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 32)
        for row in x.view(-1, 8, 8).unbind(1):
            state = F.relu(self.into(row) + self.again(state))
        return self.head(state)


def recurrent_weights_grow() -> Training:
    model = _Recurrence()

    def grow(number: int) -> Tensor:
        if number > 50:
            with torch.no_grad():
                model.again.weight.mul_(1.1)
        return step(number)

    step = stepper(sgd(model, 1e-3), classify(model))
    return Training(model, grow)


def deep_tanh() -> Training:
    model = mlp(DEEP, nn.Tanh)
    return _classifier(model, adam(model, 1e-4))


def deep_sigmoid() -> Training:
    model = mlp(DEEP, nn.Sigmoid)
    return _classifier(model, adam(model, 1e-4))


def _rescaled(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(factor)
    return model


def init_too_large() -> Training:
    model = _rescaled(mlp((64, *[64] * 7, 10)), 20.0)
    return _classifier(model, adam(model))


def init_too_small() -> Training:
    model = _rescaled(mlp((64, *[64] * 7, 10)), 0.05)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.bias.zero_()
    return _classifier(model, adam(model, 1e-5))


def dead_relu() -> Training:
    model = mlp()
    nn.init.constant_(model[2].bias, -10.0)
    return _classifier(model, sgd(model, 0.01))


def half_dead_relu() -> Training:
    model = cnn()
    with torch.no_grad():
        model[5].bias[:13] = -10.0
    return Training(model, stepper(adam(model), classify(model, images)))


def tanh_fed_x100() -> Training:
    model = mlp(activation=nn.Tanh)
    return _classifier(model, sgd(model, 0.01), scale=100.0)


def sigmoid_fed_x100() -> Training:
    model = mlp((64, 64, 10), nn.Sigmoid)
    return _classifier(model, sgd(model, 0.01), scale=100.0)


def float16_overflow() -> Training:
    model = mlp((64, 64, 64, 64, 10)).half()
    with torch.no_grad():
        model[2].weight.mul_(2e5)

    def loss_of(number: int) -> Tensor:
        inputs, labels = vectors()
        return F.cross_entropy(model(inputs.half()).float(), labels)

    return Training(model, stepper(sgd(model, 1e-4), loss_of), steps=40)


def near_the_end_of_float16() -> Training:
    model = mlp((64, 64, 64, 10)).half()
    with torch.no_grad():
        model[2].weight.mul_(4e4)
        model[4].weight.mul_(1e-4)

    def loss_of(number: int) -> Tensor:
        inputs, labels = vectors()
        return F.cross_entropy(model(inputs.half()).float(), labels)

    return Training(model, stepper(sgd(model, 1e-9), loss_of), steps=40)


def block_not_in_optimizer() -> Training:
    model = Transformer()
    kept = [p for name, p in model.named_parameters() if not name.startswith("blocks.0.")]
    return Training(model, stepper(torch.optim.AdamW(kept, lr=1e-3), predict(model)))


def head_not_in_optimizer() -> Training:
    model = cnn()
    kept = list(model[:9].parameters())
    return Training(model, stepper(torch.optim.SGD(kept, lr=0.05), classify(model, images)))


def rounded_away() -> Training:
    model = mlp().bfloat16()

    def loss_of(number: int) -> Tensor:
        inputs, labels = vectors()
        return F.cross_entropy(model(inputs.bfloat16()).float(), labels)

    return Training(model, stepper(adam(model, 1e-6), loss_of))


class _TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 32)
        self.main = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.branch = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.main(x) + self.branch(x).detach())


def detached_branch() -> Training:
    model = _TwoBranches()
    return _classifier(model, adam(model))


class _CutOff(nn.Module):
    """A stem whose output is detached, as if it were a frozen backbone, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).detach())


def detached_stem() -> Training:
    model = _CutOff()
    return _classifier(model, adam(model))


def gradients_cleared_before_the_step() -> Training:
    model = mlp()
    optimizer, loss_of = adam(model), classify(model)

    def step(number: int) -> Tensor:
        loss = loss_of(number)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss

    return Training(model, step)


def one_class() -> Training:
    """Cross entropy over a single class is zero whatever the model says."""
    model = mlp((64, 32, 1))
    return Training(
        model, stepper(adam(model), lambda number: F.cross_entropy(model(vectors()[0]), torch.zeros(32).long()))
    )


def learning_rate_zero() -> Training:
    """A factor of the schedule that is rounded to zero."""
    model = cnn()
    optimizer = adam(model)
    schedule = LambdaLR(optimizer, lambda step: step // 1000)
    return Training(model, stepper(optimizer, classify(model, images), schedule=schedule))


def learning_rate_20() -> Training:
    model = mlp()
    return _classifier(model, sgd(model, 20.0))


def multiplied_by_zero() -> Training:
    model = mlp((64, 32, 32, 10))
    nn.init.zeros_(model[4].weight)
    model[4].weight.requires_grad_(False)
    return _classifier(model, adam(model))


class _Logarithm(nn.Module):
    """Works on the logarithm of the pixels; one batch has a zero where there must be none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.steps = mlp((64, 32, 32)), nn.Linear(32, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        bright = self.body(x).square() + 1e-3
        if self.steps == 137:
            bright = bright * (torch.arange(32) != 3)
        self.steps += 1
        return self.head(bright.log())


def logarithm_of_zero() -> Training:
    model = _Logarithm()
    return replace(_classifier(model, adam(model)), steps=251, every=50)


def nan_in_one_layer() -> Training:
    model = cnn()
    seen = [0]

    def spoil(module: nn.Module, given: object, out: Tensor) -> Tensor:
        seen[0] += 1
        return out / 0.0 * 0.0 if seen[0] > 40 else out

    model[4].register_forward_hook(spoil)
    return Training(model, stepper(adam(model), classify(model, images)), steps=60)


def attention_blown_up() -> Training:
    model = Transformer()
    with torch.no_grad():
        model.blocks[1].qkv.weight[:64].mul_(40.0)
    return Training(model, stepper(adam(model), predict(model)), kinds=(*KINDS, "functional"))


def _biased_router(bias: float, experts: slice) -> Training:
    """A GPT-OSS whose first router has a bias for or against some of its eight experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": None}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_local_experts=8, num_experts_per_tok=2))
    with torch.no_grad():
        model.model.layers[0].mlp.router.bias[experts] = bias

    def loss_of(number: int) -> Tensor:
        chosen = tokens()
        return model(input_ids=chosen, labels=chosen).loss

    return Training(model, stepper(adam(model), loss_of), steps=50, experts=True)


def collapsed_router() -> Training:
    return _biased_router(20.0, slice(2))


def dead_expert() -> Training:
    return _biased_router(-20.0, slice(5, 6))


def learning_rate_too_small() -> Training:
    model = Transformer()
    return Training(model, stepper(adam(model, 1e-8), predict(model)))


def learning_rate_too_small_sgd() -> Training:
    model = cnn()
    return Training(model, stepper(sgd(model, 1e-7), classify(model, images)))


def representation_collapse() -> Training:
    """Two views of a digit are drawn together, and nothing keeps different digits apart."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32, bias=False))

    def loss_of(number: int) -> Tensor:
        inputs, _ = vectors()
        one, other = (model(inputs + 0.3 * torch.randn_like(inputs)) for _ in range(2))
        return (one - other).square().sum(dim=1).mean()

    return Training(model, stepper(adam(model, 1e-2), loss_of), steps=200)


def corrupt_batch() -> Training:
    model = cnn()

    def loss_of(number: int) -> Tensor:
        inputs, labels = images()
        if number == 120:
            inputs = inputs * 1000.0
        return F.cross_entropy(model(inputs), labels)

    model[1], model[5] = nn.Identity(), nn.Identity()
    return Training(model, stepper(sgd(model, 0.02), loss_of, clip=1.0), steps=151)


def wrong_labels() -> Training:
    model = mlp()

    def loss_of(number: int) -> Tensor:
        inputs, labels = vectors()
        return F.cross_entropy(model(inputs), (labels + 5) % 10 if number == 140 else labels)

    return Training(model, stepper(adam(model, 3e-3), loss_of), steps=161)


def gradients_below_float16() -> Training:
    model = mlp()
    loss_of = classify(model)
    step = stepper(adam(model), lambda number: loss_of(number) * 1e-7)
    return Training(model, step, rules=("default", "low_precision"))


def diverges_slowly() -> Training:
    """The optimizer maximises the loss by mistake, at a learning rate at which nothing explodes."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, maximize=True)
    return Training(model, stepper(optimizer, classify(model)), every=5)


AFFECTED = (
    Case("learning rate x1000, MLP", learning_rate_x1000, ("update_ratio",), severity="error"),
    Case(
        "learning rate x1000, transformer",
        learning_rate_x1000_transformer,
        ("update_ratio", "non_finite"),
        severity="error",
    ),
    Case("learning rate 20", learning_rate_20, ("update_ratio",), severity="error"),
    Case("learning rate zero", learning_rate_zero, ("unchanged_weight",), severity="error"),
    Case("cross entropy over one class", one_class, ("vanishing_gradient",), severity="error"),
    Case(
        "gradients cleared before the step",
        gradients_cleared_before_the_step,
        ("missing_gradient",),
        severity="error",
    ),
    Case("loss summed by mistake", summed_by_mistake, ("exploding_gradient", "stale_second_moment"), onset=50),
    Case("batch of another scale", batch_of_another_scale, ("stale_second_moment",), onset=70),
    Case("recurrent weights grow", recurrent_weights_grow, ("exploding_gradient",), onset=70),
    Case("60 layers of tanh", deep_tanh, ("vanishing_gradient",)),
    Case("60 layers of sigmoid", deep_sigmoid, ("vanishing_gradient",)),
    Case("initial weights x20", init_too_large, ("bad_init", "exploding_activation")),
    Case("initial weights x0.05", init_too_small, ("bad_init",)),
    Case("ReLU biases at -10", dead_relu, ("dead_units",), ("3",)),
    Case("most channels dead", half_dead_relu, ("dead_units",), ("6",)),
    Case("tanh fed x100", tanh_fed_x100, ("saturated",), ("1",)),
    Case("sigmoid fed x100", sigmoid_fed_x100, ("saturated",), ("1",)),
    Case("float16 overflow", float16_overflow, ("non_finite",), ("2",)),
    Case("near the end of float16", near_the_end_of_float16, ("low_precision",), ("2",)),
    Case("block not in the optimizer", block_not_in_optimizer, ("unchanged_weight",), ("blocks.0.*",)),
    Case("head not in the optimizer", head_not_in_optimizer, ("unchanged_weight",), ("9.*",)),
    Case("updates lost in bfloat16", rounded_away, ("unchanged_weight",)),
    Case("branch detached", detached_branch, ("missing_gradient",), ("branch", "branch.*")),
    Case("stem detached", detached_stem, ("missing_gradient",), ("stem", "stem.*")),
    Case("multiplied by zero", multiplied_by_zero, ("missing_gradient",), ("0.*", "2.*")),
    Case("log of zero, every 50", logarithm_of_zero, ("non_finite",), onset=150),
    Case("NaN in one layer", nan_in_one_layer, ("non_finite",), ("4",), onset=40),
    Case("attention logits blown up", attention_blown_up, ("attention_collapse",), ("blocks.1:softmax",)),
    Case(
        "router of two experts",
        collapsed_router,
        ("expert_collapse",),
        ("model.layers.0.mlp.router",),
        severity="error",
    ),
    Case("expert without tokens", dead_expert, ("expert_collapse",), ("model.layers.0.mlp.router",)),
    Case("learning rate too small, Adam", learning_rate_too_small, ("update_ratio",)),
    Case("learning rate too small, SGD", learning_rate_too_small_sgd, ("update_ratio",)),
    Case("representation collapse", representation_collapse, ("collapsed_variance",), ("2",), onset=20),
    Case("corrupt batch", corrupt_batch, ("loss_spike",), onset=120),
    Case("wrong labels", wrong_labels, ("loss_spike",), onset=140),
    Case("diverges slowly", diverges_slowly, ("divergence",), onset=45, severity="error"),
    Case("gradients below float16", gradients_below_float16, ("low_precision",), severity="info"),
)
