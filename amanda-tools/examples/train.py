"""Three steps of training a small convolutional network, in plain PyTorch.

Nothing here knows of Amanda: `amanda run -t count,trace -o out -- train.py`.
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = nn.functional.cross_entropy(model(torch.rand(4, 3, 8, 8)), torch.tensor([1, 2, 3, 4]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
