"""Two processes, each with its half of the data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
data = torch.rand(2, 3, 4)[dist.get_rank()]
for _ in range(2):
    model.zero_grad()
    model(data).sum().backward()
# In one piece, with the end of the line: the ranks share an output that is not buffered.
print(f"{dist.get_rank()} {model.module.weight.grad.sum().item().hex()}\n", end="", flush=True)
dist.destroy_process_group()
