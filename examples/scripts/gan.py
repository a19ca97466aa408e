"""Two models and two optimizers that take turns."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
judge = nn.BCEWithLogitsLoss()
real, fake = torch.ones(64, 1), torch.zeros(64, 1)

for step in range(20):
    angle = 6.2832 * torch.rand(64, 1)
    circle = torch.cat([angle.cos(), angle.sin()], dim=1)
    made = generator(torch.randn(64, 4))

    discriminator_optimizer.zero_grad()
    discriminator_loss = judge(discriminator(circle), real) + judge(discriminator(made.detach()), fake)
    discriminator_loss.backward()
    discriminator_optimizer.step()

    generator_optimizer.zero_grad()
    generator_loss = judge(discriminator(made), real)
    generator_loss.backward()
    generator_optimizer.step()

both = [*generator.parameters(), *discriminator.parameters()]
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in both)
print(
    f"losses {generator_loss.item():.6f} {discriminator_loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}"
)
