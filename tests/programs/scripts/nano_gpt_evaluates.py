"""A decoder that evaluates on a larger batch and generates before it trains, as nanoGPT does."""

import torch
import torch.nn.functional as F  # noqa: N812
from bits import digest
from torch import nn


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.mix(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(-2)))


torch.manual_seed(0)
model, ids = GPT(), torch.randint(0, 50, (12, 9))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(4):
    if step % 2 == 0:
        with torch.no_grad():
            text = ids[:1, :2]
            for _ in range(2):
                text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
            print("validation", model(ids[:, :-1]).logsumexp(-1).mean().item(), text.tolist())
    loss = F.cross_entropy(model(ids[:4, :-1]).flatten(0, 1), ids[:4, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), digest(model))
