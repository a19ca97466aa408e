"""What experts, attention heads, optimizer state and noise scale add to a logged step, on one thread of this machine.

All variants train the same small Mixtral, a step each in turn, every step logged; times are those of the training
thread. Printed are medians over rounds of the ratio to the unwatched step of the same round.

python benchmarks/large_models.py [--rounds 25]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import nn

import tbhooks
from tbhooks.data.frame import KINDS

RESULTS = Path(__file__).parent / "results" / "large_models.json"
MICRO_BATCHES, WARM_UP = 2, 4


def watched(model: nn.Module, **options: Any) -> tbhooks.Watch:
    return tbhooks.watch(model, every=1, histograms=False, rules=(), **options)


VARIANTS: dict[str, Callable[[nn.Module], Any] | None] = {
    "not watched": None,
    "watched": watched,
    "with experts()": lambda model: watched(model).experts(),
    "with the kind functional (heads)": lambda model: watched(model, kinds=(*KINDS, "functional")),
    "with optimizer_state()": lambda model: watched(model).optimizer_state(),
    "with noise_scale()": lambda model: watched(model).noise_scale(),
}


def make() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1024, hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=3, num_local_experts=8, num_experts_per_tok=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config)


class Run:
    """One variant."""

    def __init__(self, start: Callable[[nn.Module], Any] | None) -> None:
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.watching = None if start is None else start(self.model)
        self.seconds: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        started = time.thread_time()
        for _ in range(MICRO_BATCHES):
            self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.thread_time() - started)
        if self.watching is not None:
            self.watching.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    runs = {name: Run(start) for name, start in VARIANTS.items()}
    tokens = torch.randint(1024, (4, 128), generator=torch.Generator().manual_seed(0))
    for _ in range(rounds + WARM_UP):
        for run in runs.values():
            run.step(tokens)
    found: dict[str, float] = {}
    bare, plain = runs["not watched"].seconds[WARM_UP:], runs["watched"].seconds[WARM_UP:]
    print(f"unwatched step: {statistics.median(bare) * 1e3:.0f} ms")
    for name, run in runs.items():
        mine = run.seconds[WARM_UP:]
        found[name] = statistics.median(a / b for a, b in zip(mine, bare, strict=True))
        added = statistics.median((a - p) / b for a, p, b in zip(mine, plain, bare, strict=True))
        print(f"{name:34}{found[name]:7.3f} of the unwatched step{'' if run.watching is None else f'{added:+9.3f}'}")
    RESULTS.write_text(json.dumps({"step_ms": statistics.median(bare) * 1e3, "ratios": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
