"""Training with sharded parameters (FSDP2): torchrun --nproc-per-node 2 fsdp_loop.py."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    whole = model[0].weight.detach().norm()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(rank)
    for step in range(12):
        x = torch.randn(32, 8, generator=random)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    print(f"rank {rank} loss {loss.item():.6f} norm at the start {whole.item():.6f}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
