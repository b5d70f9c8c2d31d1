"""Conv1d, ConvTranspose1d and an LSTM: an autoencoder of sounds, to be pruned."""

import torch
from bits import digest
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv1d(1, 8, 4, stride=2, padding=1)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.up = nn.ConvTranspose1d(8, 1, 4, stride=2, padding=1)

    def forward(self, x):
        hidden, _ = self.lstm(torch.relu(self.down(x)).transpose(1, 2))
        return self.up(hidden.transpose(1, 2))


torch.manual_seed(0)
net, x = Net(), torch.randn(3, 1, 16)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    loss = (net(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), digest(net))
