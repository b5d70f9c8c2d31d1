"""A network of which one part is a module of TorchScript."""

import warnings

import torch
from bits import digest
from torch import nn

warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
torch.manual_seed(0)
part = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
net = nn.Sequential(nn.Linear(6, 8), part, nn.Linear(8, 2))
for step in range(2):
    loss = net(torch.ones(5, 6)).square().mean()
    loss.backward()
    print(step, loss.item(), digest(net))
