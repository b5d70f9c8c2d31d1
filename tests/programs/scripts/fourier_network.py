"""A Fourier neural operator; then the phases of a silent signal, 0/0 of complex numbers."""

import torch
from bits import digest
from torch import nn


class Spectral(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x):
        z = torch.fft.rfft(x)
        kept = torch.einsum("bim,iom->bom", z[..., : self.modes], self.weight)
        return torch.fft.irfft(kept, n=x.shape[-1])


torch.manual_seed(0)
net = nn.Sequential(nn.Conv1d(1, 4, 1), Spectral(4, 5), nn.GELU(), nn.Conv1d(4, 1, 1))
optimizer, x = torch.optim.Adam(net.parameters(), 1e-2), torch.randn(3, 1, 32)
for step in range(3):
    loss = (net(x) - x.roll(1, -1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), digest(net))
z = torch.fft.fft(torch.zeros(8))
phase = z / z.abs()
print(digest(net(phase.real[None, None])))
