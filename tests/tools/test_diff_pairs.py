"""``diff`` between what is not alike: compiled code, another precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.diff import DiffTool
from amanda_tools.stats import StatsTool
from tests import models


def recorded(run: Callable[[], Any], *drivers: str, **options: Any) -> DiffTool:
    tool = DiffTool(**options)
    with amanda.apply(tool, **({"drivers": drivers} if drivers else {})):
        run()
    return tool


class Net(nn.Module):
    """A few layers, one of which can be detuned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))) * self.factor).softmax(-1)


class Port(nn.Module):
    """The same layers under other names, and a mask that is made once."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.entry, self.exit, self.mask = net[0], net[2], torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not len(self.mask):
            self.mask = torch.arange(5.0).cos()
        return self.exit(torch.relu(self.entry(x)))


def test_what_runs_once_is_in_no_loop() -> None:
    """An operator that one run has once leaves all steps of the others compared."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    port, inputs = Port(net), torch.rand(3, 2, 4)
    only = {"tensors": ["activations"]}
    reference = recorded(lambda: [net(x) for x in inputs], **only)
    other = torch.stack([inputs[0], *inputs[1:] + 1])
    tool = recorded(lambda: [port(x) for x in other], reference=reference, **only)
    summary = tool.summary()
    assert (summary["compared"], summary["agreeing"]) == (12, 4)


# -- compiled -----------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The compiler that needs no C++ compiler, and none of what was compiled before."""
    monkeypatch.setenv("AMANDA_TORCH_COMPILER", "aot_eager")
    torch.compiler.reset()
    yield "aot_eager"
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_eager_against_compiled(compiler: str) -> None:
    """The values inside of the compiled code, which is run; a planted difference is found there."""
    torch.manual_seed(0)
    net, x = Net().eval(), torch.rand(3, 4)
    reference = recorded(lambda: net(x))
    plain = torch.compile(net, backend=compiler)(x)
    torch.compiler.reset()
    results: list[torch.Tensor] = []
    compiled = torch.compile(net)
    only = {"reference": reference, "tensors": ["activations"]}
    tool = recorded(lambda: results.extend([compiled(x), compiled(x)]), "torch-graph", **only)
    summary = tool.summary()
    assert (summary["compared"], summary["agreeing"], summary["first"]) == (6, 6, None)
    assert {record.id.partition("/")[0] for record in (p.record for p in tool.pairs())} == {
        "Net", "Net.first", "Net.norm", "Net.second",
    }  # fmt: skip
    # The first run is that of eager mode, in which the graph's operators are met.
    assert torch.equal(results[1], plain)
    net.factor = 2.02
    torch.compiler.reset()
    changed = recorded(lambda: torch.compile(net)(x), "torch-graph", **only)
    assert changed.summary()["first"]["reference"] == "Net/mul:0"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_gradients_pass_what_looks_at_compiled_code(compiler: str) -> None:
    """They are those of the compiled code without the tool, to the last bit."""
    torch.manual_seed(0)
    net, x = Net(), torch.rand(3, 4)
    other = copy.deepcopy(net)
    torch.compile(other, backend=compiler)(x)[:, 0].sum().backward()
    torch.compiler.reset()
    tool = StatsTool(tensors=("activations", "weights"))
    compiled = torch.compile(net)
    with amanda.apply(tool, drivers=["torch-graph"]):
        compiled(x)
        compiled(x)[:, 0].sum().backward()
    assert tool.summary()["tensors"] == {"activations": 8, "weights": 6, "gradients": 0}
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


@pytest.mark.filterwarnings("ignore:a compiled function runs operator by operator")
def test_what_looks_at_compiled_code_changes_no_stride(compiler: str) -> None:
    """Code that runs operator by operator has its own results, to the last bit."""
    torch.manual_seed(0)
    net, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(2, 8, 16).mT
    model = torch.compile(lambda: net(x, x, x, need_weights=False)[0], backend=compiler)
    with torch.no_grad():
        wanted = model()
        with amanda.apply(StatsTool(), drivers=["torch-graph"]):
            found = [model(), model()]
    assert [torch.equal(each, wanted) for each in found] == [True, True]


# -- precision ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["converted", "autocast"])
def test_one_precision_against_another(how: str) -> None:
    """Every operator has its like; the error is that of bfloat16, and is not hidden."""
    model, inputs = models.build("bert", training=False)

    def run() -> Any:
        with torch.no_grad():
            return model(**inputs)

    reference = recorded(run)
    if how == "converted":
        model.bfloat16()
        tool = recorded(run, reference=reference, tolerance=0.05)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            tool = recorded(run, reference=reference, tolerance=0.05)
    found = tool.summary()
    assert found["only_here"] == found["only_in_reference"] == []
    assert found["agreeing"] == found["compared"] > 50
    assert 1e-4 < max(pair.relative for pair in tool.pairs()) < 0.05


RENAMED = {
    "vit.embeddings.cls_token": "cls_token", "vit.embeddings.position_embeddings": "pos_embed",
    "vit.embeddings.patch_embeddings.projection": "patch_embed.proj", "vit.layers": "blocks",
    "layernorm_before": "norm1", "layernorm_after": "norm2", "attention.o_proj": "attn.proj",
    "vit.layernorm": "norm", "classifier": "head",
}  # fmt: skip


@pytest.fixture(scope="module")
def vits() -> tuple[Any, Any]:
    """Transformers' ViT, and timm's, which has one projection for queries, keys and values."""
    config = models.transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=8, num_labels=5, qkv_bias=False, layer_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    split = models.transformers.ViTForImageClassification(config).eval()
    fused = models.timm.models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2, num_classes=5,
        qkv_bias=False,
    ).eval()  # fmt: skip
    state = split.state_dict()
    for i in range(2):
        whole = [state.pop(f"vit.layers.{i}.attention.{x}_proj.weight") for x in "qkv"]
        state[f"blocks.{i}.attn.qkv.weight"] = torch.cat(whole)
    for old, new in RENAMED.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    fused.load_state_dict(state)
    return split, fused


@pytest.mark.parametrize("kinds", [("activations",), ("weights", "activations", "gradients")])
@pytest.mark.parametrize("turned", [False, True])
def test_a_fused_projection_is_compared_in_pieces(
    vits: Any, kinds: Sequence[str], turned: bool
) -> None:
    """All agrees, gradients too, whichever run is fused; an error is found in the piece."""
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def record(model: Any, **options: Any) -> DiffTool:
        def run() -> None:
            found = model(x)
            getattr(found, "logits", found).square().sum().backward()

        return recorded(run, tensors=kinds, **options)

    split, fused = vits
    one, other = (split, fused) if turned else (fused, split)
    reference = record(other)
    summary = record(one, reference=reference, tolerance=1e-3).summary()
    assert summary["first"] is None
    # The gradient of its input is a sum.
    alone = [op for op in summary["only_here"] if "linear:0" in op and "/ViewBackward" not in op]
    assert alone == []
    fused.blocks[1].attn.qkv.weight.data[40, 0] += 0.5
    wrong = record(one, reference=record(fused) if turned else reference, tolerance=1e-3)
    fused.blocks[1].attn.qkv.weight.data[40, 0] -= 0.5
    first = wrong.summary()["first"]
    names = ["VisionTransformer.blocks.1.attn.qkv/linear:0[32:64]",
             "ViTForImageClassification.vit.layers.1.attention.k_proj/linear:0"]  # fmt: skip
    assert [first["id"], first["reference"]] == (names[::-1] if turned else names)
