"""A network that calls its parts by their forward methods, around the call of the module."""

import torch
from bits import digest
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.two.forward(torch.tanh(self.one.forward(x)))


torch.manual_seed(0)
net = Net()
for step in range(2):
    loss = net(torch.randn(5, 6)).square().mean()
    loss.backward()
    print(step, loss.item(), digest(net))
