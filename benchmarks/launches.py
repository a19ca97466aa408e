"""How many kernels a logged step launches on a GPU for GPT-2 and Llama 7B, counted without one.

The modules run on fake tensors, which gives the shapes of all activations; their gradients have the same. Triton's
launches are counted where the package makes them, torch operations as they are dispatched. Copies are not launches:
there is one to the host, and with Triton one of a table for each type of parameter, before and after the optimizer.

"Before" is commit c4a9827, before parameters and rows were merged. It is counted in the same way, with the code of that
commit, if there is a checkout of it:

    git worktree add DIRECTORY c4a9827
    python benchmarks/launches.py [--before DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from launch_counter import launched
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tbhooks.capture.recording import reducers
from tbhooks.reduction import batched, histogram, torch_rows, triton

TABLE = Path(__file__).with_name("results") / "launches.md"
SLOTS = histogram.SLOTS


@dataclass
class Shapes:
    """What a logged step reads, on the meta device."""

    activations: list[Tensor]
    parameters: list[Tensor]

    @property
    def weights_and_gradients(self) -> list[Tensor]:
        return self.parameters * 2


def gpt2() -> Shapes:
    from transformers import GPT2Config, GPT2LMHeadModel

    return shapes_of(lambda: GPT2LMHeadModel(GPT2Config()), torch.float32, (8, 1024))


def llama() -> Shapes:
    from transformers import LlamaConfig, LlamaForCausalLM

    return shapes_of(lambda: LlamaForCausalLM(LlamaConfig()), torch.bfloat16, (4, 2048))


def shapes_of(build: Callable[[], nn.Module], dtype: torch.dtype, batch: tuple[int, int]) -> Shapes:
    found: dict[int, Tensor] = {}

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else next(iter(_values(output)), None)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            found[id(tensor)] = tensor  # kept: what is passed on unchanged is read once

    with FakeTensorMode(), torch.no_grad():
        torch.set_default_dtype(dtype)
        model = build()
        torch.set_default_dtype(torch.float32)
        for module in model.modules():
            module.register_forward_hook(note)
        model(torch.zeros(batch, dtype=torch.int64), use_cache=False)
    return Shapes([_meta(tensor) for tensor in found.values()], [_meta(parameter) for parameter in model.parameters()])


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _values(output: Any) -> Iterable[Any]:
    return output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()


def by_triton(shapes: Shapes) -> int:
    """Through the code that launches, with the launches themselves left out."""
    count = 0

    def launch(*_: object) -> None:
        nonlocal count
        count += 1

    class Merge:
        def __getitem__(self, _grid: Any) -> Callable[..., None]:
            return lambda *_, **__: launch()

    triton._kernels = SimpleNamespace(
        PARTIALS=SimpleNamespace(value=8), SLOT=SimpleNamespace(value=3), merge_rows=Merge()
    )
    triton._launch = launch
    scratch = triton.Scratch(torch.device("cpu"))
    for _ in range(2):  # the second step has memory for as much as the first needed
        count = 0
        for tensor in shapes.activations * 2:  # and their gradients
            scratch.reduce(triton.Job(tensor, None, None, 0, 0))
        scratch.reduce_all([triton.Job(tensor, None, None, 0, 0) for tensor in shapes.weights_and_gradients])
        scratch.reduce_all([triton.Job(tensor, tensor, None, 0, 0) for tensor in shapes.parameters])
        scratch.merge()
        scratch.forget()
    return count


def by_torch(shapes: Shapes) -> int:
    total = sum(alone(tensor) for tensor in shapes.activations * 2)
    small = [tensor for tensor in shapes.parameters if tensor.numel() <= batched.LENGTHS[-1]]
    large = [tensor for tensor in shapes.parameters if tensor.numel() > batched.LENGTHS[-1]]
    total += sum(2 * alone(tensor) + update(tensor) for tensor in large)
    for minus in (False, False, True):
        wanted = [(0, tensor, tensor if minus else None, None) for tensor in small]
        total += sum(map(together, batched.groups(wanted)))
    return total


def parts_of(tensor: Tensor) -> int:
    return -(-tensor.numel() // reducers.part_length(tensor))


def update(tensor: Tensor) -> int:
    """Half precision is converted and subtracted part by part, float32 in place and at once."""
    if tensor.itemsize >= 4:
        return 1 + alone(tensor)
    return 2 * parts_of(tensor) + alone(torch.empty(tensor.numel(), device="meta"))


def alone(tensor: Tensor) -> int:
    parts = parts_of(tensor)
    part = torch.empty(tensor.numel() // parts, dtype=tensor.dtype, device="meta")
    counts = torch.empty(SLOTS, dtype=torch.int32, device="meta")

    def reduce() -> None:
        torch_rows.reduce(part, torch.float64)
        histogram.add_counts(part, counts)

    launched(reduce)  # makes what is made once
    return parts * launched(reduce)


def together(group: Any) -> int:
    def reduce() -> None:
        made = batched.block(group)
        batched.reduce(made, torch.float64)
        batched.count(made, [torch.empty(SLOTS, dtype=torch.int32, device="meta") for _ in group])

    launched(reduce)
    return launched(reduce)


def before(checkout: Path | None, shapes: Shapes) -> dict[str, int]:
    """The launches of the old commit, by what makes them; nothing if there is no checkout."""
    if checkout is None:
        return {}
    sizes = [
        [[tensor.numel(), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
        for tensors in (shapes.activations, shapes.parameters)
    ]
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(here)])}
    command = [sys.executable, str(here / "launches_before.py")]
    done = subprocess.run(
        command, input=json.dumps(sizes), env=environment, cwd=checkout, capture_output=True, text=True, check=True
    )
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def main() -> None:
    """Counts, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, metavar="DIRECTORY", help="a checkout of commit c4a9827")
    checkout = parser.parse_args().before
    lines = ["| launches of a logged step with histograms | tensors | before (c4a9827) | now |", "|---|---|---|---|"]

    def row(name: str, tensors: int, earlier: int | None, launches: int) -> None:
        text = "not counted" if earlier is None else f"{earlier:,}"
        lines.append(f"| {name} | {tensors:,} | {text} | {launches:,} |")

    for name, make in (("GPT-2", gpt2), ("Llama 7B", llama)):
        shapes = make()
        of_parameters = Shapes([], shapes.parameters)
        tensors, few = 2 * len(shapes.activations) + 3 * len(shapes.parameters), 3 * len(shapes.parameters)
        old = before(checkout, shapes)
        row(f"{name}, torch operations", tensors, old.get("torch operations"), by_torch(shapes))
        row(f"{name}, Triton", tensors, old.get("Triton"), by_triton(shapes))
        row(f"{name}, Triton, parameters only", few, old.get("Triton, parameters only"), by_triton(of_parameters))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.empty(100_000_000, dtype=dtype, device="meta")
        earlier = before(checkout, Shapes([tensor], [])).get("torch operations")
        text = str(dtype).removeprefix("torch.")
        # The script counts an activation and its gradient.
        row(
            f"100 million elements, {text}, torch operations", 1, None if earlier is None else earlier // 2,
            alone(tensor),
        )  # fmt: skip
    TABLE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
