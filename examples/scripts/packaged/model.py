"""The model of the package."""

from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, width), nn.ReLU())
        self.decoder = nn.Linear(width, 16)

    def forward(self, x):
        return self.decoder(self.encoder(x))
