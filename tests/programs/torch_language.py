"""Programs of PyTorch: language models."""

from __future__ import annotations

from typing import Any

import torch

from tests.programs.registry import program
from tests.programs.torch_parts import grown, tokens, trained


@program("transformers")
def transformers_gpt2() -> Any:
    """GPT-2: three steps of AdamW with dropout and clipping, greedy and sampled generation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    config.bos_token_id = config.eos_token_id = 1
    model, ids = GPT2LMHeadModel(config), tokens(2, 16)
    steps = trained(model, lambda: model(ids, labels=ids).loss, clip=1.0)
    model.eval()
    sampled = {"do_sample": True, "top_k": 10, "max_new_tokens": 6, "pad_token_id": 0}
    greedy = model.generate(ids[:, :4], max_new_tokens=6, pad_token_id=0)
    return steps, greedy, model.generate(ids[:, :4], **sampled)


@program("transformers")
def transformers_bert_trainer() -> Any:
    """BERT classifies sequences: the Trainer of the package, with evaluation."""
    import tempfile

    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
        )
    )
    rows = [{"input_ids": row, "labels": int(row[0]) % 2} for row in tokens(12, 10)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=3, report_to=[], disable_tqdm=True,
            save_strategy="no", use_cpu=True, logging_steps=1,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        return grown(model), trainer.evaluate()["eval_loss"], trainer.predict(rows).predictions


@program("transformers")
def transformers_mixtral() -> Any:
    """Mixtral, a mixture of experts: three steps in bfloat16 autocast, logits afterwards."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True,
    )  # fmt: skip
    model, ids = MixtralForCausalLM(config), tokens(2, 12)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, labels=ids).loss

    steps = trained(model, loss)
    with torch.inference_mode():
        return steps, model.eval()(ids).logits


@program("transformers")
def transformers_mamba() -> Any:
    """Mamba, a state-space model: a scan written in Python, generation with its cache."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=100, hidden_size=24, num_hidden_layers=2, state_size=4)
    config.eos_token_id, config.pad_token_id = 1, 0
    model, ids = MambaForCausalLM(config), tokens(2, 8)
    steps = trained(model, lambda: model(ids, labels=ids).loss)
    return steps, model.eval().generate(ids[:, :4], max_new_tokens=4)


@program("peft", "transformers")
def peft_lora() -> Any:
    """LoRA on Llama: three steps of the adapters, then merged into the weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model, ids = get_peft_model(LlamaForCausalLM(config), lora), tokens(2, 12)
    steps = trained(model, lambda: model(input_ids=ids, labels=ids).loss)
    merged = model.merge_and_unload().eval()
    with torch.no_grad():
        return steps, merged(ids).logits, merged.state_dict()
