"""Exported models: which operators have nodes, and how far quantized and pruned ones differ.

``python -m tests.tools.optimization.exports`` prints the tables of amanda-tools/docs/quantize.md;
``--write`` puts it there, and names of models print theirs only. Minutes, with ONNX Runtime.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import amanda
from amanda_tools.export import checks

DOCUMENT = Path(__file__).parents[3] / "amanda-tools/docs/quantize.md"
SUFFIXES = (".pt2", ".onnx", ".safetensors")


class Net(nn.Module):
    """A convolution with a norm, functional attention, and a linear layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2).contiguous()
        q, k, v = self.qkv(x)[:, :9].chunk(3, -1)
        x = nn.functional.dropout((q @ k.transpose(1, 2) / 3).softmax(-1) @ v, 0.1, self.training)
        return self.head(self.head(x)).mean(1)


MODELS = (
    "CNN", "functional attention", "ViT", "ResNet-18", "MobileNetV2", "BERT", "GPT-2", "Llama",
    "Whisper",
)  # fmt: skip
"""The models that are exported; those of Transformers are tiny."""

_TIED = ("*lm_head*", "*proj_out*")
"""Layers whose weight is that of an embedding, which ``prune`` leaves alone."""


def _whisper(vocabulary: int) -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=vocabulary, num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, max_source_positions=32, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    tokens = torch.randint(3, vocabulary, (1, 6))
    inputs = {"input_features": torch.rand(1, 16, 64), "decoder_input_ids": tokens}
    return transformers.WhisperForConditionalGeneration(config), inputs


def _cnn() -> Any:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 8))
    return model, {"input": torch.rand(2, 3, 10, 10)}


def architectures() -> Sequence[str]:
    """The names of the architectures of the benchmarks."""
    from tests.benchmarks.architectures import ARCHITECTURES

    return sorted(ARCHITECTURES)


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """One of `MODELS`, or of the architectures of the benchmarks, and its inputs."""
    from tests import models
    from tests.benchmarks.architectures import ARCHITECTURES

    # isort: split
    import torchvision

    own = {
        "CNN": _cnn,
        "functional attention": lambda: (Net(), {"x": torch.rand(2, 3, 6, 6)}),
        "ViT": models.vit_timm,
        "ResNet-18": models.resnet18,
        "MobileNetV2": lambda: (
            torchvision.models.mobilenet_v2(num_classes=10),
            {"x": torch.rand(2, 3, 64, 64)},
        ),
        "BERT": models.bert,
        "GPT-2": models.gpt2,
        "Llama": models.llama,
        "Whisper": lambda: _whisper(models.VOCABULARY),
    }
    torch.manual_seed(0)
    model, inputs = (own.get(name) or ARCHITECTURES[name])()
    return model.eval(), inputs


def differences(name: str, suffix: str) -> list[float]:
    """The largest difference of an exported model to the simulated one: quantized, or pruned; for
    ``.onnx`` also that in ONNX Runtime as it is by default, in units of the largest step."""
    model, inputs = build(name)
    options = {"calibration": 1}
    if suffix == ".safetensors":
        options = {"method": "nm", "exclude": _TIED}
    tool = amanda.tools.load("prune" if "method" in options else "quantize")(**options)
    with amanda.apply(tool), torch.no_grad():
        model(**inputs), model(**inputs)
    with tempfile.TemporaryDirectory() as folder:
        found = tool.export_model(model, inputs, f"{folder}/model{suffix}")
        assert set(tool.ops) == set(found.ops)
        if suffix != ".onnx":
            return [found.difference]
        optimized = checks.run_onnx(str(found.path), inputs, is_optimized=True)
    with torch.no_grad():
        simulated = checks.outputs_under(model, inputs, tool)
    pairs = zip(optimized, simulated, strict=True)
    step = max(float(np.max(change.scale)) for change in tool.changes())
    return [found.difference, max(float(np.abs(one - other).max()) for one, other in pairs) / step]


def unaligned(name: str, suffix: str, *, optimize: bool) -> tuple[Sequence[Any], Sequence[Any]]:
    """The operators of an exported model, and those for which there is neither a node nor a reason
    for which there is none."""
    model, inputs = build(name)
    if hasattr(model, "config"):
        # torch.export refuses outputs such as a cache.
        model.config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            # An optimizer makes one of two layers that have the same weights, as at the beginning.
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        program: Any = torch.export.export(model, (), inputs)
        if suffix == ".onnx":
            options = {"dynamo": True, "verbose": False, "optimize": optimize}
            program = torch.onnx.export(program, (), kwargs=inputs, **options)
        found = amanda.align(model, inputs, program).values()
    return [*found], [one for one in found if not one.nodes and not one.is_dropped]


def table(names: Sequence[str]) -> str:
    """The largest differences as a table of Markdown."""
    lines = [["model", ".pt2", ".onnx", ".onnx optimized, in steps", ".safetensors"], ["---"] * 5]
    for name in names:
        found = [value for suffix in SUFFIXES for value in differences(name, suffix)]
        lines.append([name, *(f"{value:.0e}" for value in found)])
        print(*lines[-1], file=sys.stderr, flush=True)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("0e+00", "0")


def main(words: Sequence[str]) -> None:
    """The command."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from tests.tools.optimization import exports_keras

    own = exports_keras.MODELS
    named = [word for word in words if word != "--write"] or [*MODELS, *own]
    found = {"exports": table([name for name in named if name not in own])}
    found["keras exports"] = exports_keras.table([name for name in named if name in own])
    if "--write" not in words:
        print(*found.values(), sep="\n")
        return
    text = DOCUMENT.read_text(encoding="utf-8")
    for mark, rows in found.items():
        block = re.compile(rf"(?<=<!-- {mark} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        text = block.sub(f"\n{rows}\n", text)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
