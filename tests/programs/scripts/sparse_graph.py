"""A graph network on a sparse adjacency matrix, in COO and CSR; then logarithms of its values."""

import warnings

import torch
from bits import digest
from torch import nn

warnings.filterwarnings("ignore", "Sparse CSR", UserWarning)
torch.manual_seed(0)
edges = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 0, 3, 2, 0, 4, 4]])
coo = torch.sparse_coo_tensor(edges, torch.full((7,), 0.5), (5, 5)).coalesce()
first, second = nn.Linear(8, 16), nn.Linear(16, 2)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
x, labels = torch.randn(5, 8), torch.tensor([0, 1, 0, 1, 1])
for adjacency in (coo, coo.to_sparse_csr()):
    hidden = torch.relu(torch.sparse.mm(adjacency, first(x)))
    loss = nn.functional.cross_entropy(torch.sparse.mm(adjacency, second(hidden)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), digest(first, second))
print(digest(torch.log1p(-2 * coo).to_dense()))
