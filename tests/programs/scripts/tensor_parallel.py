"""Two ranks share a network: columns of its first layer, rows of its second."""

import os

import torch
import torch.distributed as dist
from bits import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{os.environ['STORE']}", rank=rank, world_size=2)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
for step in range(3):
    loss = net(torch.ones(8, 16)).square().sum()
    loss.backward()
    print(step, loss.item(), digest(net))
dist.destroy_process_group()
