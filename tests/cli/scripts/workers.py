"""A DataLoader with workers, and classes that it pickles."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Computed in the workers."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.relu(torch.tensor([float(i)])) ** 2


if __name__ == "__main__":
    context = sys.argv[1]
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=context)
    weight = torch.ones(1, requires_grad=True)
    for batch in loader:
        (batch * weight).sum().backward()
    print(weight.grad.item())
