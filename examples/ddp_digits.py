"""Digits on several processes with DistributedDataParallel, watched together.

    torchrun --nproc-per-node 2 examples/ddp_digits.py

Runs on CPUs with gloo, and unchanged on GPUs with NCCL. What is written to runs/ddp_digits is over all ranks.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tbhooks


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--logdir", default="runs/ddp_digits")
    asked = arguments.parse_args()

    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local = distributed.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    ).to(device)  # fmt: skip
    parallel = DistributedDataParallel(model)
    watching = tbhooks.watch(parallel, asked.logdir, every=20, ranks="merge")

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(pixels, torch.tensor(labels))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-3)

    step = 0
    while step < asked.steps:
        sampler.set_epoch(step)
        for x, y in loader:
            loss = nn.functional.cross_entropy(parallel(x.to(device)), y.to(device))
            watching.log({"loss": loss})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == asked.steps:
                break

    if rank == 0:
        frame = watching.latest
        apart = frame["3", "gradient"].spread("norm")
        print(f"{step} steps on {distributed.get_world_size()} ranks, loss {frame.scalars['train/loss']:.3f}")
        print(f"gradient of the second convolution: norm {frame['3', 'gradient'].norm:.3g} over all ranks,")
        print(f"  {apart.min:.3g} on rank {apart.min_rank} to {apart.max:.3g} on rank {apart.max_rank}")
        print(f"findings: {len(watching.findings)}")
        print(f"look at it: tensorboard --logdir {asked.logdir}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
