"""How far an update's norm estimated from a sample is from the exact one, on real trainings.

Trains a language model on English text (the documentation in Python's standard library) and a classifier of digits,
with AdamW, SGD and Adagrad; at some steps the update of every weight larger than the sample is computed from all
elements in float64, and from the sample that `tbhooks.capture.parameters.weight_sample` takes. Both come from the same
step, so the difference is the error of sampling alone. Embeddings and the layer with an output for each word are left
out unless `--embeddings` is given: tbhooks never samples them, because the error is large.

    python benchmarks/sampled_updates.py [--steps 31] [--sizes 65536 262144] [--embeddings]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import torch
from torch import Tensor, nn

from tbhooks.capture.parameters import weight_sample

VOCABULARY, LENGTH, BATCH = 4096, 64, 4
FEWEST_STEPS = 2
# An optimizer's first steps are unlike the others: read them, and then every tenth.
READ_FIRST, READ_EVERY = 3, 10
# Rules judge an update by its order of magnitude.
LARGEST_ERROR = 0.06
TABLE = Path(__file__).with_name("results") / "sampled_updates.md"


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, and the loss of each step."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module], Tensor]


def trainings() -> Iterator[Training]:
    text = _words()
    for name, make in (
        ("AdamW", lambda p: torch.optim.AdamW(p, lr=3e-4)),
        ("SGD, momentum 0.9", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("SGD", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.01)),
    ):
        torch.manual_seed(0)
        model = _language_model()
        yield Training(f"GPT-2 on text, {name}", model, make(model.parameters()), _text_loss(text))
    torch.manual_seed(0)
    model = _classifier()
    yield Training("CNN on digits, AdamW", model, torch.optim.AdamW(model.parameters(), lr=1e-3), _digit_loss())


def _words() -> Tensor:
    """The documentation of Python's topics as word numbers; rare words share the last number."""
    from pydoc_data import topics

    words = re.findall(r"\w+|[^\w\s]", " ".join(topics.topics.values()))
    known: dict[str, int] = {}
    numbers = [known.setdefault(word, len(known)) for word in words]
    return torch.tensor(numbers).clamp_(max=VOCABULARY - 1)


def _language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 8, "n_embd": 512, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, tie_word_embeddings=False))
    return model


def _text_loss(text: Tensor) -> Callable[[nn.Module], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def loss(model: nn.Module) -> Tensor:
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        tokens = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        result: Tensor = model(input_ids=tokens, labels=tokens).loss
        return result

    return loss


def _classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256 * 16, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def _digit_loss() -> Callable[[nn.Module], Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)

    def loss(model: nn.Module) -> Tensor:
        some = torch.randint(len(labels), (64,), generator=generator)
        return nn.functional.cross_entropy(model(images[some]), labels[some])

    return loss


def errors(training: Training, steps: int, sizes: list[int], embeddings: bool) -> dict[int, dict[str, list[float]]]:
    """The relative errors of each weight's update norm, by sample size and path."""
    found: dict[int, dict[str, list[float]]] = {size: {} for size in sizes}
    left_out = frozenset() if embeddings else weight_sample.updated_in_few_rows(training.model)
    for step in range(steps):
        training.optimizer.zero_grad()
        training.loss(training.model).backward()
        is_read = step < READ_FIRST or step % READ_EVERY == 0
        before = {name: p.detach().clone() for name, p in training.model.named_parameters()} if is_read else {}
        training.optimizer.step()
        for name, parameter in training.model.named_parameters() if is_read else ():
            exact = _norm(parameter.detach(), before[name])
            for size in sizes if id(parameter) not in left_out else ():
                if parameter.numel() > size and exact > 0:
                    after, earlier = (weight_sample.sample(each, size) for each in (parameter, before[name]))
                    assert after is not None
                    assert earlier is not None
                    estimate = _norm(after, earlier) * (parameter.numel() / after.numel()) ** 0.5
                    found[size].setdefault(name, []).append(abs(estimate / exact - 1))
    return found


def _norm(after: Tensor, before: Tensor) -> float:
    return float((after.double() - before.double()).norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--sizes", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--embeddings", action="store_true", help="sample embeddings too, which tbhooks never does")
    options = parser.parse_args()
    worst = 0.0
    lines = ["| training | sample | weights | median | p99 | largest | largest of |", "|---|---|---|---|---|---|---|"]
    for training in trainings():
        for size, by_name in errors(
            training, max(options.steps, FEWEST_STEPS), options.sizes, options.embeddings
        ).items():
            if not by_name:
                continue
            every = np.array([error for several in by_name.values() for error in several])
            name, largest = max(((n, max(several)) for n, several in by_name.items()), key=lambda pair: pair[1])
            middle, high = np.quantile(every, (0.5, 0.99))
            row = f"{training.name} | {size:,} | {len(by_name)} | {middle:.2%} | {high:.2%} | {largest:.2%} | `{name}`"
            lines.append(f"| {row} |")
            if size >= weight_sample.SMALLEST_SAMPLE:
                worst = max(worst, largest)
    smallest = (
        f"The smallest sample that tbhooks takes is {weight_sample.SMALLEST_SAMPLE:,}: largest error {worst:.2%}."
    )
    text = "\n".join([*lines, "", smallest])
    print(text)
    if not options.embeddings:
        TABLE.write_text(text + "\n")
    return int(worst > LARGEST_ERROR)


if __name__ == "__main__":
    sys.exit(main())
