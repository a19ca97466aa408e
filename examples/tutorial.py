"""Everything that tutorials log to TensorBoard by hand, from one line: a CNN + LSTM + attention classifier of digits.

python examples/tutorial.py
tensorboard --logdir runs
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tbhooks


class Reader(nn.Module):
    """Reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()
        self.lstm = nn.LSTM(16 * 8, 64, batch_first=True)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        maps = self.relu(self.conv(image))
        rows, _ = self.lstm(maps.transpose(1, 2).flatten(2))
        read, _ = self.attention(rows, rows, rows, average_attn_weights=False)
        return self.head(read.mean(1))


torch.manual_seed(0)
pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = (pixels.float() / 16).view(-1, 1, 8, 8)
x, y, x_test, y_test = images[:1500], digits[:1500], images[1500:], digits[1500:]
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

w = tbhooks.watch(model, "runs/", every=20).evaluation()
w.graph().images("*").per_channel("conv", histograms=True).embeddings("head", lambda: y[batch], lambda: x[batch])
w.log_every(5).progress().hparams({"lr": 3e-3, "hidden": 64}, ["eval/accuracy"]).profile((10, 12)).environment()
print(w.summary())  # the TEXT tab has it too, with the shapes of the first logged step

for _epoch in range(6):
    for batch in torch.randperm(len(x)).split(50):
        loss = cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        w.log({"loss": loss})
    with torch.no_grad():
        right = model.eval()(x_test).argmax(1) == y_test
    w.log({"eval/accuracy": right.float().mean()})
    model.train()
print(f"{right.float().mean():.1%} of the test digits are right; found wrong: {len(w.findings)}")
