"""``prune`` on PyTorch: static masks, against models whose source is changed by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools.prune import PruneTool
from tests import models
from tests.running import applied


class MaskedConv2d(nn.Conv2d):
    """What a user would write by hand."""

    def forward(self, x: Any) -> Any:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class MaskedLinear(nn.Linear):
    def forward(self, x: Any) -> Any:
        return F.linear(x, self.weight * self.mask, self.bias)


def by_hand(model: nn.Module, masks: dict[str, Any]) -> nn.Module:
    """A copy of a model with masked layers of other classes, by module path."""
    model = copy.deepcopy(model)
    for op_id, mask in masks.items():
        path = op_id.partition("/")[0].partition(".")[2]
        layer = model.get_submodule(path)
        layer.__class__ = MaskedConv2d if isinstance(layer, nn.Conv2d) else MaskedLinear
        layer.register_buffer("mask", torch.from_numpy(mask).to(layer.weight), persistent=False)
    return model


def train(model: nn.Module, inputs: Any, steps: int = 3) -> list[Any]:
    """The outputs of some training steps with momentum and weight decay."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    outputs = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(**inputs)
        models.loss(output).backward()
        optimizer.step()
        outputs += [tensor.detach().clone() for tensor in models.tensors(output)]
    return outputs


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same weights, gradients and buffers, bit by bit."""
    gradients = zip(a.parameters(), b.parameters(), strict=True)
    state, other = a.state_dict(), b.state_dict()
    return all(torch.equal(state[name], other[name]) for name in state) and all(
        torch.equal(x.grad, y.grad) if x.grad is not None else y.grad is None for x, y in gradients
    )


METHODS: list[dict[str, Any]] = [
    {"method": "magnitude", "sparsity": 0.7},
    {"method": "nm"},
    {"method": "nm", "n": 1, "m": 8},
    {"method": "tile", "sparsity": 0.6, "tile": 16},
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", METHODS[0]),
        *(("bert", options) for options in METHODS),
        ("vit_timm", METHODS[1]),
    ],
    ids=str,
)
def test_training_equals_a_model_changed_by_hand(name: str, options: dict[str, Any]) -> None:
    """Outputs, weights and gradients of three steps are the same bits."""
    model, inputs = models.build(name)
    model.eval()  # without dropout, with gradients
    probe = PruneTool(**options)
    with amanda.apply(probe), torch.no_grad():
        model(**inputs)
    reference = by_hand(model, probe.masks)

    tool = PruneTool(**options)
    with amanda.apply(tool):
        outputs = train(model, inputs)
    expected = train(reference, inputs)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert same(model, reference)
    assert tool.masks.keys() == probe.masks.keys()
    assert all(np.array_equal(tool.masks[op_id], mask) for op_id, mask in probe.masks.items())
    assert len(tool.masks) > 5


def functional(x: Any, weights: dict[str, Any]) -> Any:
    """A model without modules: convolution, product, addmm and linear."""
    x = F.conv2d(x, weight=weights["conv"], padding=1).relu().flatten(1)
    x = (x @ weights["matmul"]).relu()
    x = torch.addmm(weights["bias"], x, weights["addmm"]).relu()
    return F.linear(x, weights["linear"])


def new_weights() -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {
        "conv": (8, 4, 3, 3),
        "matmul": (8 * 36, 16),
        "bias": (12,),
        "addmm": (16, 12),
        "linear": (5, 12),
    }
    return {name: nn.Parameter(torch.randn(size) / 4) for name, size in sizes.items()}


def test_functional_code_is_pruned_as_modules_are() -> None:
    """By the operators that use them, in the layouts they have."""
    x, weights = torch.rand(2, 4, 6, 6), new_weights()
    tool = PruneTool(method="nm", ops=("conv2d", "linear", "matmul"))
    with amanda.apply(tool):
        output = functional(x, weights)
        output.square().sum().backward()
    masks = tool.masks
    assert list(masks) == ["/conv2d:0", "/matmul:0", "/addmm:0", "/linear:0"]
    assert [mask.shape for mask in masks.values()] == [
        tuple(weights[name].shape) for name in ("conv", "matmul", "addmm", "linear")
    ]
    assert (masks["/matmul:0"].reshape(-1, 4, 16).sum(1) == 2).all()
    assert (masks["/linear:0"].reshape(5, -1, 4).sum(2) == 2).all()

    names = dict(zip(("conv", "matmul", "addmm", "linear"), masks.values(), strict=True))
    reference = new_weights()
    masked = {n: w * torch.from_numpy(names[n]) if n in names else w for n, w in reference.items()}
    expected = functional(x, masked)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert all(torch.equal(weights[name].grad, w.grad) for name, w in reference.items())


class Tied(nn.Module):
    """A weight that several operators read: one module twice, and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.embedding = nn.Embedding(8, 8)

    def forward(self, x: Any) -> Any:
        x = self.fc(self.fc(x).relu())
        return F.linear(x, self.fc.weight) @ self.embedding(torch.arange(8))


def test_operators_that_share_a_weight_share_its_mask() -> None:
    torch.manual_seed(0)
    model, reference = Tied(), Tied()
    reference.load_state_dict(model.state_dict())
    x, tool = torch.rand(4, 8), PruneTool(sparsity=0.6)
    with amanda.apply(tool):
        model(x).sum().backward()
    ids = ["Tied.fc/linear:0", "Tied.fc#1/linear:0", "Tied/linear:0"]
    assert list(tool.masks) == ids
    assert all(np.array_equal(tool.masks[op_id], tool.masks[ids[0]]) for op_id in ids)
    assert tool.result()["ops"][1]["shares_weight_with"] == [ids[0], ids[2]]
    assert tool.result()["summary"]["weights"] == 64

    weight = reference.fc.weight * torch.from_numpy(tool.masks[ids[0]])
    hidden = F.linear(F.linear(x, weight, reference.fc.bias).relu(), weight, reference.fc.bias)
    (F.linear(hidden, weight) @ reference.embedding.weight).sum().backward()
    assert torch.allclose(model.fc.weight.grad, reference.fc.weight.grad, atol=1e-6)


def test_a_weight_that_an_embedding_reads_whole_is_reported() -> None:
    """GPT-2's last layer shares the weight of its first, which is not a linear layer."""
    model, inputs = models.build("gpt2")
    tool = applied(PruneTool(method="nm"), lambda: model(**inputs))
    last, first = "GPT2LMHeadModel.lm_head/linear:0", "GPT2LMHeadModel.transformer.wte/embedding:0"
    assert tool.result()["summary"]["read_without_mask"] == {last: first}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AmandaError, match=r"op GPT2LMHeadModel.transformer.wte/embedding:0 reads"):
        tool.bake(lambda: model(**inputs))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# -- global and schedule ---------------------------------------------------


def test_a_global_threshold_is_that_of_all_weights_together() -> None:
    """It acts from the second iteration, when all operators have been met."""
    model, inputs = models.build("resnet18", training=False)
    tool = PruneTool(sparsity=0.8, scope="global")
    with torch.no_grad():
        expected = model(**inputs)
    with amanda.apply(tool), torch.no_grad():
        assert torch.equal(model(**inputs), expected)
        assert tool.masks == {}
        model(**inputs)
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    flat = torch.cat([layer.weight.detach().abs().flatten() for layer in layers])
    threshold = flat.kthvalue(round(0.8 * len(flat))).values
    kept = sum(int(mask.sum()) for mask in tool.masks.values())
    assert kept == len(flat) - round(0.8 * len(flat))
    for layer in layers:
        expected_mask = (layer.weight.abs() > threshold).numpy()
        assert any(np.array_equal(expected_mask, mask) for mask in tool.masks.values())


@pytest.mark.parametrize("scope", ["op", "global"])
def test_sparsity_grows_with_the_training_steps(scope: str) -> None:
    """At each backward pass, up to the end; passes without gradients do not count."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 8)), torch.rand(4, 40)
    tool = PruneTool(sparsity=0.9, start=2, end=6, every=2, scope=scope)
    found = []
    with amanda.apply(tool):
        for _ in range(9):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
            found.append(round(tool.result()["summary"]["sparsity"], 3))
    middle = round(0.9 * (1 - 0.5**3), 3)
    # The pass without gradients comes after the step, and sees the mask that is due then;
    # a global threshold is applied one pass after its weights have been collected.
    late = [0] if scope == "global" else []
    assert found == [*late, 0, 0, 0, middle, middle, 0.9, 0.9, 0.9, 0.9][:9]


def test_a_mask_due_later_leaves_the_first_steps_dense() -> None:
    model, x = nn.Linear(8, 4), torch.rand(3, 8)
    tool = PruneTool(method="nm", start=2)
    with amanda.apply(tool):
        for step in range(4):
            output = model(x)
            with amanda.disabled():
                assert torch.equal(output, model(x)) == (step < 2)
            output.sum().backward()
    assert tool.result()["ops"][0]["sparsity"] == 0.5


# -- what is not treated -----------------------------------------------------


def test_what_cannot_be_pruned_is_listed_with_the_reason() -> None:
    """No error: other operators are pruned."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
            self.last = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            x = self.depthwise(self.first(x)).mean((2, 3))
            return self.last(self.normed(x)) @ x.T

    tool = PruneTool(method="nm", ops=("conv2d", "linear", "matmul", "conv3d"))
    with amanda.apply(tool):
        Net()(torch.rand(2, 3, 8, 8))
    summary = tool.result()["summary"]
    assert {row["id"]: row["reason"] for row in summary["skipped"]} == {
        "Net.first/conv2d:0": "its input axis, 3, is not a multiple of m=4",
        "Net.depthwise/conv2d:0": "its input axis, 1, is not a multiple of m=4",
        "Net.normed/linear:0": "its weight is not a parameter: the program computes it",
        "Net/matmul:0": "none of its inputs is known as its weight",
    }
    assert list(tool.masks) == ["Net.last/linear:0"]
    assert summary["ops_never_met"] == ["conv3d"]


def test_excluded_operators_stay_dense() -> None:
    model, inputs = models.build("resnet18")
    tool = PruneTool(exclude=("layer[12].*", "ResNet.fc/linear:0", "conv1"))
    with amanda.apply(tool):
        model(**inputs)
    assert {op_id.split(".")[1] for op_id in tool.masks} == {"layer3", "layer4"}
    reasons = {row["reason"] for row in tool.result()["summary"]["skipped"]}
    assert reasons == {"it is excluded"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_types_keep_them(dtype: torch.dtype) -> None:
    model, x = nn.Linear(8, 4).to(dtype), torch.rand(2, 8, dtype=dtype)
    with amanda.apply(tool := PruneTool(method="nm")):
        output = model(x)
        output.sum().backward()
        mask = torch.from_numpy(tool.masks["Linear/linear:0"]).to(dtype)
        assert torch.equal(output, F.linear(x, model.weight * mask, model.bias))
        assert model.weight.grad.dtype == dtype
        model.float()
        assert model(x.float()).dtype == torch.float32


def test_a_compiled_model_is_pruned_where_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_COMPILER", "aot_eager")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.rand(2, 8)
    compiled = torch.compile(model, backend="aot_eager")
    tool = PruneTool(method="nm")
    with amanda.apply(tool, drivers=["torch-graph"]):
        compiled(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with amanda.apply(PruneTool(method="nm")):
        model(x).sum().backward()
    assert list(tool.masks) == ["Sequential.0/linear:0", "Sequential.2/linear:0"]
    assert all(
        torch.allclose(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True)
    )


def test_the_summary_is_printed_and_written(tmp_path: Path, capsys: Any) -> None:
    import sys

    model, inputs = models.build("resnet18")
    with amanda.apply(tool := PruneTool(method="nm")):
        model(**inputs)
    tool.print_summary(sys.stdout)
    printed = capsys.readouterr().out
    assert "prune: nm, 5581312 of 11162624 weights are zero" in printed
    assert "is not a multiple of m=4" in printed
    (path,) = tool.write_files(tmp_path, "prune")
    again = PruneTool()
    again.load(path)
