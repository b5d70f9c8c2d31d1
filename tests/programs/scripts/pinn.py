"""A physics-informed network: its loss is the residual of u'' = -sin(x)."""

import torch
from bits import digest
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(3):
    x = torch.linspace(0, 3, 20)[:, None].requires_grad_()
    u = net(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    loss = (bend + torch.sin(x)).square().mean() + u[0].square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), digest(net))
