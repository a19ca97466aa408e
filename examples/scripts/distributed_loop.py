"""Data-parallel training: torchrun --nproc-per-node 2 distributed_loop.py."""

import hashlib

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def main():
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(rank)
    for step in range(12):
        x = torch.randn(32, 8, generator=random)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {rank} loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
