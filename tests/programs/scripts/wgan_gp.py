"""WGAN-GP: a critic with a penalty on the slopes between real and made points, then its maker."""

import torch
from bits import digest
from torch import nn

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (maker, critic)]
for step in range(3):
    real, noise = torch.randn(8, 2) + 3, torch.randn(8, 4)
    made = maker(noise).detach()
    mixed = torch.lerp(real, made, torch.rand(8, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    cost = critic(made).mean() - critic(real).mean() + 10 * penalty
    optimizers[1].zero_grad()
    cost.backward()
    optimizers[1].step()
    if step == 2:
        optimizers[0].zero_grad()
        (-critic(maker(noise)).mean()).backward()
        optimizers[0].step()
    print(step, cost.item(), digest(maker, critic))
