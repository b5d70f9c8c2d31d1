"""MAML: two tasks, an inner step of gradient descent each, and the gradient through both."""

import torch
import torch.nn.functional as F  # noqa: N812
from bits import digest
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(2):
    optimizer.zero_grad()
    for phase in (0.0, 1.0):
        x = torch.randn(10, 1)
        y, weights = torch.sin(x + phase), dict(net.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(net, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, weights.values(), create_graph=True)
        moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
        outer = F.mse_loss(torch.func.functional_call(net, moved, (x,)), y)
        outer.backward()
        print(step, outer.item())
    optimizer.step()
print(digest(net))
