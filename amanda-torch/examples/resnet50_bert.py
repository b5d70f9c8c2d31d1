"""One training step of ResNet-50 and one of BERT-base, in plain PyTorch.

Nothing here knows of Amanda. The weights are random, made from the models'
configurations, so that nothing is downloaded. Try it vanilla, then under tools:

    python resnet50_bert.py
    amanda run -t count,trace -o out -- resnet50_bert.py
"""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
)


def train_one_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """One step of SGD; returns the loss before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    loss: torch.Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def resnet50() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """ResNet-50, the default of transformers' ResNet, with two random images."""
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    images = torch.rand(2, 3, 224, 224)
    return model, {"pixel_values": images, "labels": torch.tensor([1, 2])}


def bert_base() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """BERT-base, the default of transformers' BERT, with two random sentences."""
    config = BertConfig()
    model = BertForSequenceClassification(config)
    tokens = torch.randint(0, config.vocab_size, (2, 64))
    return model, {"input_ids": tokens, "labels": torch.tensor([0, 1])}


def main() -> None:
    """Train both."""
    torch.manual_seed(0)
    for name, build in (("ResNet-50", resnet50), ("BERT-base", bert_base)):
        model, batch = build()
        print(f"{name}: loss {train_one_step(model, batch):.4f}")


if __name__ == "__main__":
    main()
