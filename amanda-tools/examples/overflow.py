"""A training step that overflows in the middle of a block, in plain PyTorch.

Nothing here knows of Amanda: `amanda run -t nan -o out -- overflow.py`.
"""

import torch
from torch import nn


class Block(nn.Module):
    """A linear layer and a functional line that leaves the range of float32."""

    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        h = torch.relu(self.fc(x)) + 1
        h = h * 1e30 * 1e30
        return torch.sigmoid(h)


torch.manual_seed(0)
model = nn.Sequential(Block(8), nn.Linear(8, 1))
loss = model(torch.rand(4, 8)).mean()
loss.backward()
print(f"loss {loss.item():.3f}")
