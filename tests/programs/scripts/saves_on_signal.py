"""A training loop whose handler of SIGUSR1 evaluates and saves the model, as clusters ask for."""

import io
import signal

import torch
from bits import digest
from torch import nn


def save(number, frame):
    with torch.no_grad():
        print("saved", net(x).sum().item())
    torch.save(net.state_dict(), io.BytesIO())


torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(6, 4)
signal.signal(signal.SIGUSR1, save)
for step in range(4):
    loss = net(x).square().mean()
    loss.backward()
    if step == 1:
        signal.raise_signal(signal.SIGUSR1)
    print(step, loss.item(), digest(net))
