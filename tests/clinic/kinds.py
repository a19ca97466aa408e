"""Models of further kinds of training: each function returns a model and a function that returns its loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.clinic.training import VOCABULARY, mlp, tokens, vectors

Kind = tuple[nn.Module, Callable[[int], Tensor]]


class Denoiser(nn.Module):
    """Predicts the noise in a digit, given the noise level."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.into, self.out = nn.Linear(64, width), nn.Linear(width, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        angles = level[:, None] * torch.exp(torch.arange(8) * (math.log(100.0) / 8))
        x = self.into(noisy) + self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.silu(layer(norm(x)))
        return self.out(x)


def diffusion(velocity: bool = False, whole_range_from: int | None = None) -> Kind:
    """With `whole_range_from`, levels reach 1 from that step on, where the clean image is divided by zero."""
    model = Denoiser()

    def loss_of(number: int) -> Tensor:
        clean, _ = vectors()
        level = torch.rand(len(clean)) * 0.98 + 0.01
        noise, signal = torch.randn_like(clean), torch.cos(level * math.pi / 2)[:, None]
        if whole_range_from is not None and number >= whole_range_from:
            signal = signal * torch.rand(len(clean), 1).gt(0.2)
        spread = (1 - signal.square()).sqrt()
        found = model(signal * clean + spread * noise, level)
        if whole_range_from is not None:
            return ((signal * clean + spread * (noise - found)) / signal - clean).square().clamp(max=4.0).mean()
        return F.mse_loss(found, signal * noise - spread * clean if velocity else noise)

    return model, loss_of


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = mlp((64, 64, 64)), nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.tanh(self.body(x))
        return self.policy(hidden), self.value(hidden).squeeze(1)


def actor_critic(clipped: bool = False, reward: Callable[[int], float] = lambda number: 1.0) -> Kind:
    """The reward is for naming the digit. With `clipped`, the loss is that of PPO."""
    model = ActorCritic()

    def loss_of(number: int) -> Tensor:
        x, labels = vectors(64)
        logits, value = model(x)
        chances = torch.distributions.Categorical(logits=logits)
        action = chances.sample()
        gain = (action == labels).float() * reward(number)
        advantage = (gain - value).detach()
        if clipped:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
            ratio = (chances.log_prob(action) - chances.log_prob(action).detach()).exp()
            policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        else:
            policy = -(chances.log_prob(action) * advantage).mean()
        return policy + 0.5 * F.mse_loss(value, gain) - 0.01 * chances.entropy().mean()

    return model, loss_of


def masked_policy(masked_from: int) -> Kind:
    """From a step on, impossible actions get probability zero before the logarithm."""
    model = nn.Sequential(mlp((64, 64, 10)), nn.Softmax(dim=1))

    def loss_of(number: int) -> Tensor:
        x, labels = vectors()
        chances = model(x)
        if number >= masked_from:
            chances = chances * (torch.arange(10) != 3)
        return -chances.log().gather(1, labels[:, None]).mean()

    return model, loss_of


def q_learning() -> Kind:
    """A value network and a slow copy of it, which is watched with it."""
    online = mlp((64, 64, 10))
    model = nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})

    def loss_of(number: int) -> Tensor:
        x, labels = vectors()
        with torch.no_grad():
            for slow, quick in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
                slow.lerp_(quick, 0.05)
            goal = F.one_hot(labels, 10).float() + 0.5 * model["target"](vectors()[0]).amax(dim=1, keepdim=True)
        return F.smooth_l1_loss(model["online"](x), goal)

    return model, loss_of


class Towers(nn.Module):
    """Digits and their names, embedded in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp((64, 64, 32)), nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 32))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, names: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(names), dim=1)


def two_towers(detached: bool = False) -> Kind:
    model = Towers()

    def loss_of(number: int) -> Tensor:
        x, labels = vectors()
        image, text = model(x, labels)
        logits = model.scale.exp().clamp(max=100.0) * image @ (text.detach() if detached else text).T
        same = (labels[:, None] == labels).float()
        return -(F.log_softmax(logits, dim=1) * same / same.sum(dim=1, keepdim=True)).sum(dim=1).mean()

    return model, loss_of


class Switch(nn.Module):
    """A language model of a few tokens whose layer chooses one of four experts for each token."""

    def __init__(self, experts: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(mlp((width, 64, width)) for _ in range(experts))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(chosen)
        flat = self.norm(x).flatten(0, 1)
        chances = self.gate(flat).softmax(dim=1)
        weight, expert = chances.max(dim=1)
        mixed = torch.zeros_like(flat)
        for number, each in enumerate(self.experts):
            mine = expert == number
            mixed[mine] = weight[mine, None] * each(flat[mine])
        share = F.one_hot(expert, len(self.experts)).float().mean(dim=0)
        return self.head(x + mixed.view_as(x)), len(self.experts) * (share * chances.mean(dim=0)).sum()


def switch(bias: float = 0.0, experts: slice = slice(1)) -> Kind:
    model = Switch()
    with torch.no_grad():
        model.gate.bias[experts] = bias

    def loss_of(number: int) -> Tensor:
        chosen = tokens()
        logits, balance = model(chosen[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten()) + 0.01 * balance

    return model, loss_of


class Quantised(nn.Linear):
    """Weights and inputs rounded to a few levels; gradients pass through unless `straight` is False."""

    def __init__(self, before: int, after: int, *, straight: bool = True, limit: float = 4.0) -> None:
        super().__init__(before, after)
        self.straight, self.limit = straight, limit

    def _rounded(self, x: Tensor, limit: float) -> Tensor:
        kept = x.clamp(-limit, limit)
        levels = (kept * (127 / limit)).round() / (127 / limit)
        return kept + (levels - kept).detach() if self.straight else levels

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self._rounded(x, self.limit), self._rounded(self.weight, min(self.limit, 1.0)), self.bias)


def quantised(**options: Any) -> Kind:
    model = nn.Sequential(Quantised(64, 64, **options), nn.ReLU(), Quantised(64, 64, **options), nn.ReLU())
    model.append(nn.Linear(64, 10))

    def loss_of(number: int) -> Tensor:
        x, labels = vectors()
        return F.cross_entropy(model(x), labels)

    return model, loss_of


class Adapted(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


def adapted(dropout: float = 0.0) -> Kind:
    """A classifier whose layers are frozen and adapted; only adapters and the head are trained."""
    base = mlp((64, 64, 64, 10))
    model = nn.Sequential(*[
        Adapted(layer, dropout=dropout) if isinstance(layer, nn.Linear) and number < 4 else layer
        for number, layer in enumerate(base)
    ])  # fmt: skip

    def loss_of(number: int) -> Tensor:
        x, labels = vectors()
        return F.cross_entropy(model(x), labels)

    return model, loss_of


class Packed(nn.Module):
    """A block of attention over documents that are packed into one row; a token sees its own document only."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.head = mlp((width, 4 * width, width), nn.GELU), nn.Linear(width, VOCABULARY)

    def forward(self, chosen: Tensor, seen: Tensor) -> Tensor:
        x = self.embed(chosen)
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        logits = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen[:, None], float("-inf"))
        x = x + self.out((logits.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
        return self.head(self.last(x + self.up(x)))


def packed(shortest: int = 4, padding_from: int | None = None) -> Kind:
    """With `padding_from`, the last tokens of a row are padding from that step on, and padding sees nothing."""
    model = Packed()

    def loss_of(number: int) -> Tensor:
        chosen = tokens(length=33)
        starts = torch.rand(len(chosen), 32).lt(1 / (2 * shortest))
        document = starts.cumsum(dim=1)
        seen = (document[:, :, None] == document[:, None]) & torch.ones(32, 32, dtype=torch.bool).tril()
        if padding_from is not None and number >= padding_from:
            seen[:, -4:] = False
        logits = model(chosen[:, :-1], seen)
        return F.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten())

    return model, loss_of


class Graph(nn.Module):
    """Passes messages between digits that look alike."""

    def __init__(self, depth: int = 3, attends: bool = False, plain: bool = False) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(64, 48), nn.Linear(48, 10)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(depth))
        self.scores = nn.ModuleList(nn.Linear(48, 48) for _ in range(depth if attends else 0))
        self.plain = plain
        """Whether messages are summed, whatever the number of neighbours."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.into(x)
        for number, layer in enumerate(self.layers):
            weights = edges
            if len(self.scores):
                logits = self.scores[number](x) @ x.T / 48**0.5
                weights = logits.masked_fill(edges == 0, float("-inf")).softmax(dim=1)
            elif not self.plain:
                weights = edges / edges.sum(dim=1, keepdim=True)
            x = F.relu(layer(weights @ x)) + (0 if self.plain else x)
        return self.head(x)


def graph(count: int = 64, isolated_from: int | None = None, neighbours: int = 6, **options: Any) -> Kind:
    """With `isolated_from`, a node has no neighbour, not even itself, from that step on."""
    model = Graph(**options)

    def loss_of(number: int) -> Tensor:
        x, labels = vectors(count)
        nearest = torch.cdist(x, x).topk(neighbours, largest=False).indices
        edges = torch.zeros(count, count).scatter_(1, nearest, 1.0)
        if isolated_from is not None and number >= isolated_from:
            edges[0] = 0.0
        return F.cross_entropy(model(x, edges), labels)

    return model, loss_of


class Speech(nn.Module):
    """Convolutions and a recurrent layer over a waveform; the output is for CTC."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first, self.act = nn.Conv1d(1, 16, 16, stride=8), activation()
        self.second, self.norm = nn.Conv1d(16, 32, 4, stride=2), nn.LayerNorm(32)
        self.recurrent, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 6)

    def forward(self, wave: Tensor) -> Tensor:
        x = F.relu(self.second(self.act(self.first(wave[:, None])))).transpose(1, 2)
        return self.head(self.recurrent(self.norm(x))[0]).log_softmax(dim=2)


def speech(scale: float = 1.0, too_long_from: int | None = None, **options: Any) -> Kind:
    """Tones of five pitches, one after another. With `too_long_from`, a target is longer than the output."""
    model = Speech(**options)

    def loss_of(number: int) -> Tensor:
        said = torch.randint(1, 6, (8, 4))
        pitch = said.repeat_interleave(100, dim=1) * 0.15
        wave = (pitch.cumsum(dim=1).sin() + 0.1 * torch.randn(8, 400)) * scale
        found = model(wave).transpose(0, 1)
        if too_long_from is not None and number >= too_long_from:
            said = torch.randint(1, 6, (8, 40))
        lengths = torch.full((8,), said.shape[1])
        return F.ctc_loss(found, said, torch.full((8,), len(found)), lengths)

    return model, loss_of
