"""Jacobians in forward mode: torch.func, torch.autograd.functional and dual numbers."""

import torch
from bits import digest
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 2)), torch.randn(3)
print(digest(torch.func.jacfwd(net)(x)))
print(digest(jacobian(net, x, strategy="forward-mode", vectorize=True)))
with forward_ad.dual_level():
    dual = net(forward_ad.make_dual(x, torch.ones(3)))
    print(digest(*forward_ad.unpack_dual(dual)))
print(digest(torch.func.hessian(lambda x: net(x).sum())(x)))
