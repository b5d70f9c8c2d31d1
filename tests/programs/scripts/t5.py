"""A T5 of random weights learns, then generates."""

import torch
from bits import digest
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
plain = {"dropout_rate": 0.0, "attn_implementation": "eager"}
config = T5Config(decoder_start_token_id=0, **plain, **size)
model = T5ForConditionalGeneration(config)
ids, labels = torch.randint(3, 50, (2, 40)), torch.randint(3, 50, (2, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(2):
    loss = model(input_ids=ids, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
print(digest(model), model.eval().generate(ids, max_new_tokens=3).tolist())
