"""Gradients of each sample by vmap(grad), clipped one by one, as in private training."""

import torch
from bits import digest
from torch import nn
from torch.func import functional_call, grad, vmap


def loss(weights, sample, label):
    return nn.functional.cross_entropy(functional_call(net, weights, (sample,)), label)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
x, labels = torch.randn(9, 6), torch.randint(0, 3, (9,))
for _ in range(2):
    weights = {name: p.detach() for name, p in net.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, labels)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p -= torch.einsum("b,b...->...", (1 / norms).clamp(max=1), found[name]) / 90
    print(digest(norms, net))
