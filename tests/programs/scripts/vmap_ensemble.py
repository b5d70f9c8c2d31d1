"""An ensemble of five networks, trained together by vmap over their stacked weights."""

import torch
from bits import digest
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

torch.manual_seed(0)
nets = [nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)) for _ in range(5)]
weights, buffers = stack_module_state(nets)
x, labels = torch.randn(7, 6), torch.randint(0, 3, (7,))
optimizer = torch.optim.SGD(weights.values(), 0.1)


def scores(weights, buffers):
    return functional_call(nets[0], (weights, buffers), (x,))


for step in range(3):
    logits = vmap(scores)(weights, buffers)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.repeat(5))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), digest(logits, weights, [w.grad for w in weights.values()]))
