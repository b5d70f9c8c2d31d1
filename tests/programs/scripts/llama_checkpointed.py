"""A Llama of random weights with checkpoints that are not reentrant."""

import torch
from bits import digest
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, attn_implementation="eager", **size))
model.train().gradient_checkpointing_enable({"use_reentrant": False})
ids = torch.randint(0, 100, (2, 16))
for step in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    print(step, loss.item(), digest(model))
