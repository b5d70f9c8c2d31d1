"""A batch of sequences of unequal lengths as a nested tensor, through attention without padding."""

import torch
from bits import digest
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
parts = [nn.Linear(16, 16) for _ in range(3)]
last = nn.Linear(16, 4)
rows = [torch.randn(length, 16) for length in (3, 7, 5)]
for step in range(2):
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
    y = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
    loss = last(y).values().square().mean()
    loss.backward()
    print(step, loss.item(), digest(*parts, last))
