"""Two training steps of a small diffusion UNet, then three denoising steps."""

import math

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, ins: int, outs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, ins), nn.Conv2d(ins, outs, 3, padding=1)
        self.time = nn.Linear(time, outs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outs), nn.Conv2d(outs, outs, 3, padding=1)
        self.skip = nn.Conv2d(ins, outs, 1) if ins != outs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x)))
        y = y + self.time(nn.functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(nn.functional.silu(self.norm2(y)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attn = (
            nn.GroupNorm(8, width),
            nn.MultiheadAttention(width, 4, batch_first=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attn(tokens, tokens, tokens)[0].transpose(1, 2).view_as(x)


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        time, self.width = 4 * width, width
        self.time_embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, time), Residual(width, 2 * width, time)])
        self.downsample = nn.ModuleList(
            [nn.Conv2d(c, c, 3, stride=2, padding=1) for c in (width, 2 * width)]
        )
        self.mid = nn.ModuleList([Residual(2 * width, 2 * width, time) for _ in range(2)])
        self.attn = Attention(2 * width)
        self.up = nn.ModuleList(
            [Residual(4 * width, width, time), Residual(2 * width, width, time)]
        )
        self.norm_out, self.conv_out = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(self.width // 2) / (self.width // 2))
        angles = step[:, None] * rates
        time = self.time_embed(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x, skips = self.conv_in(x), []
        for block, smaller in zip(self.down, self.downsample, strict=True):
            x = block(x, time)
            skips.append(x)
            x = smaller(x)
        x = self.mid[1](self.attn(self.mid[0](x, time)), time)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return self.conv_out(nn.functional.silu(self.norm_out(x)))


torch.manual_seed(0)
model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for number in range(2):
    images, noise = torch.rand(8, 3, 32, 32), torch.randn(8, 3, 32, 32)
    steps = torch.randint(0, 1000, (8,))
    alpha = torch.cos(steps / 1000 * math.pi / 2)[:, None, None, None]
    noisy = alpha * images + (1 - alpha**2).sqrt() * noise
    loss = nn.functional.mse_loss(model(noisy, steps), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {number}: loss {loss.item():.3f}")
sample = torch.randn(1, 3, 32, 32)
with torch.no_grad():
    for step in (900, 600, 300):
        sample = sample - 0.1 * model(sample, torch.tensor([step]))
print(f"a sample of shape {tuple(sample.shape)}")
