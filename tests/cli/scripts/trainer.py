"""transformers' Trainer on a tiny GPT-2 of random weights."""

import torch
import transformers

transformers.set_seed(0)
config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
model = transformers.GPT2LMHeadModel(config)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 50, (8, 16))]
arguments = transformers.TrainingArguments(
    output_dir="checkpoints", max_steps=3, per_device_train_batch_size=4, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
)  # fmt: skip
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
print(sum(p.sum().item() for p in model.parameters()).hex())
