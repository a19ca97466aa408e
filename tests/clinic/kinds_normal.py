"""Normal trainings of further kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tbhooks.data.frame import KINDS
from tests.clinic import kinds
from tests.clinic.training import Case, Training, adam, stepper

WITH_FUNCTIONS = (*KINDS, "functional")


def plain(kind: kinds.Kind, lr: float = 1e-3, clip: float | None = None, **how: Any) -> Training:
    model, loss_of = kind
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    return Training(model, stepper(optimizer, loss_of, clip=clip), **how)


def accumulated(kind: kinds.Kind, parts: int, divisor: Callable[[int], float] | None = None, **how: Any) -> Training:
    model, loss_of = kind
    optimizer = adam(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for _ in range(parts):
            loss = loss_of(number)
            (loss / (divisor(number) if divisor else parts)).backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).mean()

    return Training(model, step, **how)


def averaged_copy() -> Training:
    """A moving average of the weights is kept and never run."""
    training = plain(kinds.diffusion(velocity=True), 2e-3, steps=150)
    average = torch.optim.swa_utils.AveragedModel(training.model)

    def step(number: int) -> Tensor:
        loss = training.step(number)
        average.update_parameters(training.model)
        return loss

    return Training(training.model, step, steps=150)


def locked_tower() -> Training:
    """The text tower is frozen on purpose."""
    model, loss_of = kinds.two_towers()
    model.text.requires_grad_(False)
    return plain((model, loss_of), 2e-3)


def quantised_later() -> Training:
    """Rounding begins after the first fifty steps, as is usual."""
    model, loss_of = kinds.quantised()
    layers = [layer for layer in model if isinstance(layer, kinds.Quantised)]
    for layer in layers:
        layer.limit = 1e6

    def later(number: int) -> Tensor:
        for layer in layers:
            layer.limit = 4.0 if number >= 50 else 1e6
        return loss_of(number)

    return plain((model, later))


KINDS_NORMAL = (
    Case("diffusion, noise", lambda: plain(kinds.diffusion(), 2e-3, steps=150)),
    Case("diffusion, velocity, averaged copy", averaged_copy),
    Case("actor and critic", lambda: plain(kinds.actor_critic(), steps=150)),
    Case("PPO", lambda: plain(kinds.actor_critic(clipped=True), clip=0.5, steps=150)),
    Case("Q-learning, slow target", lambda: plain(kinds.q_learning(), steps=150)),
    Case("two towers", lambda: plain(kinds.two_towers())),
    Case("two towers, one locked", locked_tower),
    Case("Switch", lambda: plain(kinds.switch(), experts="gate")),
    Case("quantisation-aware", lambda: plain(kinds.quantised())),
    Case("quantisation-aware after 50 steps", quantised_later),
    Case("LoRA", lambda: plain(kinds.adapted(), 5e-3, optimizer_state=True)),
    Case("LoRA with dropout", lambda: plain(kinds.adapted(dropout=0.3), 5e-3, steps=150)),
    Case("64 micro-batches", lambda: accumulated(kinds.graph(8), 64, steps=30, every=3)),
    Case("16 micro-batches of packed text", lambda: accumulated(kinds.packed(), 16, steps=40, every=4)),
    Case("packed documents", lambda: plain(kinds.packed(), kinds=WITH_FUNCTIONS)),
    Case("packed documents of two tokens", lambda: plain(kinds.packed(shortest=2), kinds=WITH_FUNCTIONS)),
    Case("graph, mean of neighbours", lambda: plain(kinds.graph())),
    Case("graph, attention", lambda: plain(kinds.graph(attends=True), kinds=WITH_FUNCTIONS)),
    Case("speech, CTC", lambda: plain(kinds.speech(), 2e-3, clip=1.0)),
    Case("speech, SiLU", lambda: plain(kinds.speech(activation=nn.SiLU), 2e-3)),
)
