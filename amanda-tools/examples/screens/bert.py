"""Two training steps of transformers' BERT-base with random weights, on texts with padding."""

import torch
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(num_labels=3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for step in range(2):
    ids, mask = torch.randint(0, 30000, (4, 64)), torch.ones(4, 64, dtype=torch.long)
    mask[1:, 48:] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1, 2, 0])).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
