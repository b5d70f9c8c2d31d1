"""A potential |x|^1.5: its force is finite everywhere, its curvature is NaN at zero."""

import torch
from bits import digest

x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
for _ in range(2):
    (force,) = torch.autograd.grad((x.abs() ** 1.5).sum(), x, create_graph=True)
    x.grad = None
    force.square().sum().backward()
    print(digest(force, x.grad))
