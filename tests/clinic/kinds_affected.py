"""Trainings of further kinds with one deliberate issue each."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.clinic import kinds
from tests.clinic.kinds_normal import WITH_FUNCTIONS, accumulated, plain
from tests.clinic.training import Case, Training, stepper


def policy_forgotten() -> Training:
    """The optimizer has the body and the critic, and not the policy."""
    model, loss_of = kinds.actor_critic()
    parts = [*model.body.parameters(), *model.value.parameters()]
    return Training(model, stepper(torch.optim.AdamW(parts, lr=1e-3), loss_of))


def dead_tower() -> Training:
    model, loss_of = kinds.two_towers()
    nn.init.constant_(model.image[0].bias, -20.0)
    return plain((model, loss_of))


def adapters_at_zero() -> Training:
    """Both factors begin at zero: neither gets a gradient."""
    model, loss_of = kinds.adapted()
    for module in model:
        if isinstance(module, kinds.Adapted):
            nn.init.zeros_(module.down.weight)
    return plain((model, loss_of))


def adapters_forgotten() -> Training:
    """The optimizer was made before the adapters were added."""
    model, loss_of = kinds.adapted()
    return Training(model, stepper(torch.optim.AdamW(model[4].parameters(), lr=1e-3), loss_of))


def schedule_at_zero() -> Training:
    """A schedule in epochs that is stepped every iteration: the learning rate is zero from step 40 on."""
    model, loss_of = kinds.speech()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = LambdaLR(optimizer, lambda number: max(1.0 - number / 40, 0.0))
    return Training(model, stepper(optimizer, loss_of, schedule=schedule))


def packed_attention_blown_up() -> Training:
    model, loss_of = kinds.packed(shortest=16)
    with torch.no_grad():
        model.qkv.weight[:64].mul_(40.0)
    return plain((model, loss_of), kinds=WITH_FUNCTIONS)


KINDS_AFFECTED = (
    Case("diffusion, no signal left", lambda: plain(kinds.diffusion(whole_range_from=40)), ("non_finite",), onset=40),
    Case("diffusion, learning rate x1000", lambda: plain(kinds.diffusion(), 1.0), ("update_ratio",), severity="error"),
    Case("diffusion, learning rate too small", lambda: plain(kinds.diffusion(), 1e-8), ("update_ratio",)),
    Case("policy, log of a masked action", lambda: plain(kinds.masked_policy(40)), ("non_finite",), onset=40),
    Case("policy not in the optimizer", policy_forgotten, ("unchanged_weight",), ("policy.*",)),
    Case(
        "rewards x10000 from step 50", lambda: plain(kinds.actor_critic(reward=lambda n: 1e4 if n >= 50 else 1.0)),
        ("exploding_gradient",), onset=50,
    ),
    Case("two towers, one detached", lambda: plain(kinds.two_towers(True)), ("missing_gradient",), ("text", "text.*")),
    Case("two towers, one dead", dead_tower, ("dead_units",), ("image.1",)),
    Case(
        "Switch, router collapsed", lambda: plain(kinds.switch(20.0), experts="gate", steps=50),
        ("expert_collapse",), ("gate",),
    ),
    Case(
        "Switch, expert without tokens", lambda: plain(kinds.switch(-20.0), experts="gate", steps=50),
        ("expert_collapse",), ("gate",),
    ),
    Case(
        "rounded without straight-through", lambda: plain(kinds.quantised(straight=False)),
        ("missing_gradient",), ("0.*", "2.*"),
    ),
    Case(
        "quantiser's range too small", lambda: plain(kinds.quantised(limit=1e-5)),
        ("missing_gradient",), ("0.*", "2.*"),
    ),
    Case("LoRA, both factors zero", adapters_at_zero, ("missing_gradient",), ("0.*", "2.*")),
    Case("LoRA, adapters not in the optimizer", adapters_forgotten, ("unchanged_weight",), ("0.*", "2.*")),
    Case(
        "64 micro-batches, no longer divided", lambda: accumulated(
            kinds.graph(8), 64, lambda number: 1.0 if number >= 15 else 64.0, steps=30, every=3
        ), ("exploding_gradient",), onset=15,
    ),
    Case("schedule at zero too early", schedule_at_zero, ("unchanged_weight",), onset=40, severity="warning"),
    Case("packed, padding sees nothing", lambda: plain(kinds.packed(padding_from=40)), ("non_finite",), onset=40),
    Case("packed, attention logits blown up", packed_attention_blown_up, ("attention_collapse",), ("*softmax*",)),
    Case(
        "graph, sums of 60 neighbours", lambda: plain(kinds.graph(neighbours=60, depth=8, plain=True)),
        ("exploding_activation",),
    ),
    Case("graph, node without neighbours", lambda: plain(kinds.graph(isolated_from=40)), ("non_finite",), onset=40),
    Case("speech, target too long", lambda: plain(kinds.speech(too_long_from=40)), ("non_finite",), onset=40),
    Case(
        "speech, raw samples into tanh", lambda: plain(kinds.speech(scale=32768.0, activation=nn.Tanh)),
        ("saturated",), ("act",),
    ),
)  # fmt: skip
