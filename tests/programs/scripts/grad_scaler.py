"""Mixed precision on the CPU: the first scale overflows, and the scaler skips that step."""

import torch
from bits import digest
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-14)
for step in range(4):
    with torch.autocast("cpu", torch.float16):
        loss = net(torch.randn(6, 4)).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), scaler.get_scale(), digest(net))
