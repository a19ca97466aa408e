"""Data made by a worker process that imports this file again, as on macOS and Windows."""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        phase = torch.tensor(index / 10.0)
        return torch.sin(phase + torch.arange(16) / 4), torch.cos(phase)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Waves(), batch_size=16, shuffle=True, num_workers=1, multiprocessing_context="spawn")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
