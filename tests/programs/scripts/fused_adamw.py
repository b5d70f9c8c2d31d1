"""Fused AdamW without epsilon: a gradient of zero makes the weights NaN in the optimizer's step."""

import torch
from bits import digest
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(net.parameters(), eps=0.0, fused=True)
for step in range(4):
    loss = net(torch.randn(6, 4)).square().mean() * (step < 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 2:
        optimizer.state.clear()
    print(step, loss.item(), digest(net))
