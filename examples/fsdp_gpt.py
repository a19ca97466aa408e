"""A small GPT on text, its weights spread over several processes by FSDP2, watched together.

    torchrun --nproc-per-node 2 examples/fsdp_gpt.py

Runs on CPUs with gloo, and unchanged on GPUs with NCCL. Norms of weights and gradients are those of the whole
tensors, not of the pieces a rank holds.
"""

import argparse
import os
from pydoc_data.topics import topics

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tbhooks

WIDTH, HEADS, BLOCKS, CONTEXT = 64, 4, 3, 64


class Block(nn.Module):
    """Attention and a multilayer perceptron, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--logdir", default="runs/fsdp_gpt")
    asked = arguments.parse_args()

    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world, local = distributed.get_rank(), distributed.get_world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = GPT().to(device)
    mesh = init_device_mesh(device.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    watching = tbhooks.watch(model, asked.logdir, every=10, ranks="merge")

    text = torch.tensor(list("".join(topics.values()).encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)
    for _ in range(asked.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (16,))
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).to(device)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        watching.log({"loss": loss})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if rank == 0:
        frame = watching.latest
        weight = frame["blocks.0.up.weight", "weight"]
        print(f"{asked.steps} steps on {world} ranks, loss {frame.scalars['train/loss']:.3f}")
        print(f"blocks.0.up.weight: {weight.count:.0f} elements, norm {weight.norm:.4g}")
        print(f"norm of all gradients: {frame.scalars['train.grad_norm']:.4g}")
        print(f"findings: {len(watching.findings)}")
        print(f"look at it: tensorboard --logdir {asked.logdir}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
