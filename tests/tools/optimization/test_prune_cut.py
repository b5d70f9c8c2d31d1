"""``prune:method=channel,cut=true``: smaller models that compute what masked ones do."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import AmandaError, UnsupportedProgramError
from amanda_tools.prune import PruneTool
from tests.running import run_python

pytest.importorskip("torch_pruning")
pytestmark = pytest.mark.filterwarnings("ignore")


def cnn() -> tuple[Any, Any]:
    """Two convolutions with a residual sum between them, and statistics of their own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.inner, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 3)
            self.head = nn.Linear(6 * 36, 5)

        def forward(self, x: Any) -> Any:
            x = self.norm(self.stem(x)).relu()
            return self.head(self.last(x + self.inner(x)).flatten(1))

    model: Any = Net()
    for value in (model.norm.weight, model.norm.bias, model.norm.running_mean):
        nn.init.normal_(value)
    return model, (torch.rand(2, 3, 8, 8),)


def resnet() -> tuple[Any, Any]:
    import tests.torchvision_ops  # noqa: F401 - before torchvision

    return pytest.importorskip("torchvision").models.resnet18(), (torch.rand(1, 3, 32, 32),)


def vit() -> tuple[Any, Any]:
    import tests.torchvision_ops  # noqa: F401 - before timm

    options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 4, "depth": 2}
    model = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", **options)
    return model, torch.rand(1, 3, 32, 32)


def of_transformers(name: str, **options: Any) -> tuple[Any, Any]:
    import tests.torchvision_ops  # noqa: F401 - before transformers

    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=50, **options
    )
    model = getattr(transformers, f"{name}Model")(config)
    return model, {"input_ids": torch.arange(8)[None]}


def bert() -> tuple[Any, Any]:
    return of_transformers("Bert", num_attention_heads=4)


def llama() -> tuple[Any, Any]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return of_transformers("Llama", use_cache=False, **heads)


def new_tool(**options: Any) -> PruneTool:
    return PruneTool(method="channel", cut=True, **options)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "heads", "channels"),
    [
        (cnn, 0, 2),
        pytest.param(resnet, 0, 12, marks=SLOW),
        pytest.param(vit, 2, 2, marks=SLOW),
        pytest.param(bert, 2, 2, marks=SLOW),
        pytest.param(llama, 2, 2, marks=SLOW),
    ],
)
def test_channels_and_heads_are_cut(
    make: Callable[[], Any], heads: int, channels: int, tmp_path: Path
) -> None:
    """The model is as before, and the smaller one is exported in each format."""
    torch.manual_seed(0)
    model, inputs = make()
    before = copy.deepcopy(model.state_dict())
    next(model.parameters()).requires_grad_(False)
    tool = new_tool()
    small = tool.cut_model(model, inputs)
    found = tool.result()["summary"]["cut"]
    kinds = [row["kind"] for row in found["layers"]]
    assert (kinds.count("heads"), kinds.count("channels")) == (heads, channels), found
    assert all(row["after"] == row["before"] / 2 for row in found["layers"])
    assert found["difference"] <= 1e-5
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, small)]
    assert found["parameters"] == sizes
    assert found["flops"][1] < found["flops"][0]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    flags = [[p.requires_grad for p in each.parameters()] for each in (model, small)]
    assert flags[0] == flags[1]
    assert small.training
    exported = tool.export_model(model, inputs, tmp_path / "small.pt2")
    assert exported.difference <= 1e-5
    assert exported.ops == [row["layer"] for row in found["layers"]]


def test_the_masked_model_has_zeros_where_channels_are_read() -> None:
    """Channels that a sum joins go together; the figures are those counted by hand."""
    torch.manual_seed(0)
    model, inputs = cnn()
    tool = new_tool()
    small, masked = tool.cut_model(model, inputs).eval(), copy.deepcopy(model).eval()
    stem = [(row == small.stem.weight).flatten(1).all(1).any() for row in model.stem.weight]
    gone = ~torch.stack(stem)
    assert gone.sum() == 4
    masked.inner.weight.data[:, gone] = masked.last.weight.data[:, gone] = 0
    rows = masked.last.weight.data[:, ~gone]
    last = ~torch.stack([(row == small.last.weight).flatten(1).all(1).any() for row in rows])
    assert last.sum() == 3
    masked.head.weight.data.view(5, 6, 36)[:, last] = 0
    torch.testing.assert_close(small(*inputs), masked(*inputs), rtol=1e-5, atol=1e-5)
    flops = [
        2 * 2 * (64 * n * (3 + n) * 9 + 36 * m * n * 9 + m * 36 * 5) for n, m in ((8, 6), (4, 3))
    ]
    assert [*tool.result()["summary"]["cut"]["flops"]] == flops


@pytest.mark.slow
def test_heads_go_with_the_keys_and_values_that_they_share() -> None:
    torch.manual_seed(0)
    model, inputs = llama()
    small = new_tool().cut_model(model, inputs)
    for one, other in zip(model.layers, small.layers, strict=True):
        kept = []
        for name, heads in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
            rows = getattr(one.self_attn, name).weight
            left = getattr(other.self_attn, name).weight
            stays = torch.stack([(row == left).all(1).any() for row in rows]).view(heads, 4)
            assert stays.all(1).equal(stays.any(1))
            kept.append(stays[:: heads // 4].all(1).tolist())
        assert kept[0] == kept[1] == kept[2]
        assert sum(kept[0]) == 2


def test_what_cannot_be_cut_is_left_by_name() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4),
        nn.Linear(4, 6), nn.Linear(6, 4),
    )  # fmt: skip
    tool = new_tool(exclude=["Sequential.3"])
    tool.cut_model(model, torch.rand(2, 5, 8))
    found = tool.result()["summary"]["cut"]
    assert {row["layer"] for row in found["layers"]} == {"1.linear1", "2"}
    assert found["left"] == {
        "0": "its channels reach a softmax",
        "1.linear2": "it shares channels with a layer that stays",
        "3": "it is excluded",
        "4": "its channels reach an output of the model",
    }


def chain(first: Any = None) -> Any:
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    return nn.Sequential(*([first] if first else []), *layers, nn.Linear(8, 4))


@pytest.mark.parametrize("pattern", ["2", "Sequential.2", "2.*", "Sequential.2.0/linear:0"])
def test_modules_are_excluded_by_their_paths_or_ids(pattern: str) -> None:
    """A pattern that excludes nothing is an error."""
    tool = new_tool(exclude=[pattern])
    tool.cut_model(chain(), torch.rand(2, 8))
    found = tool.result()["summary"]["cut"]
    assert [row["layer"] for row in found["layers"]] == ["0"]
    assert found["left"]["2.0"] == "it is excluded"
    with pytest.raises(UnsupportedProgramError, match="exclude=body matches no module"):
        new_tool(exclude=["2", "body"]).cut_model(chain(), torch.rand(2, 8))


def test_layers_with_parametrized_weights_are_left(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    weight_norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8),
        nn.ReLU(), nn.Linear(8, 4),
    )  # fmt: skip
    tool = new_tool()
    tool.cut_model(model, torch.rand(2, 8))
    found = tool.result()["summary"]["cut"]
    assert [row["layer"] for row in found["layers"]] == ["4"]
    assert {found["left"][name] for name in "02"} == {"its channels reach a parametrized weight"}
    assert not [one for one in recwarn if ".grad attribute" in str(one.message)]


def test_inputs_are_not_changed() -> None:
    x = torch.randn(2, 8)
    before = x.clone()
    new_tool().cut_model(chain(nn.ReLU(inplace=True)), x)
    assert x.equal(before)


def test_programs_without_gradients() -> None:
    with torch.inference_mode():
        x = torch.rand(2, 8)
        assert new_tool().cut_model(chain(), x)[0].out_features == 8
    assert new_tool().cut_model(chain(), x)[0].out_features == 8


def test_layers_that_share_channels_with_an_excluded_one_are_left() -> None:
    tool = new_tool(exclude=["Net.inner"])
    tool.cut_model(*cnn())
    found = tool.result()["summary"]["cut"]
    assert [row["layer"] for row in found["layers"]] == ["last"]
    assert found["left"]["inner"] == "it is excluded"
    assert found["left"]["stem"] == "it shares channels with a layer that stays"


def test_a_layer_whose_cut_changes_the_result_is_left() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            x = self.two(self.one(x).relu()).abs()
            return self.three(x / x.sum(-1, keepdim=True))

    tool = new_tool()
    tool.cut_model(Net(), torch.rand(2, 4))
    found = tool.result()["summary"]["cut"]
    assert [row["layer"] for row in found["layers"]] == ["one"]
    assert found["left"]["two"] == "the smaller model computes another result"


def test_models_that_cannot_be_cut_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tool, model = new_tool(), nn.Linear(4, 4)
    for given, message in (
        ((model, torch.rand(1, 4)), "nothing can be cut: Linear: .*an output of the model"),
        ((nn.LSTM(4, 4), torch.rand(1, 1, 4)), "nothing can be cut: it has no layers"),
        ((nn.Sequential(model, model), torch.rand(1, 5)), "the model cannot be cut: RuntimeError"),
        ((model, None), "needs example inputs"),
        ((lambda x: x, torch.rand(1)), "for models of PyTorch"),
    ):
        with pytest.raises(UnsupportedProgramError, match=message) as caught:
            tool.cut_model(*given)
        assert "\n" not in str(caught.value)
    with amanda.apply(tool), pytest.raises(UnsupportedProgramError, match="with-block"):
        tool.cut_model(model, torch.rand(1, 4))
    with pytest.raises(AmandaError, match="only method=channel,cut=true"):
        PruneTool(method="channel").cut_model(model, torch.rand(1, 4))
    for options in ({"method": "nm", "cut": True}, {"method": "channel", "cut": True, "ops": "x"}):
        with pytest.raises(ValueError, match="cut"):
            PruneTool(**options)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedProgramError, match=r"pip install 'amanda-tools\[cut\]'"):
        new_tool()


def test_an_export_that_is_refused_names_the_tool(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = chain()

        def forward(self, x: Any) -> Any:
            x = self.body(x)
            return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedProgramError, match=r"^prune: torch\.export refuses"):
        new_tool().export_model(Net(), torch.rand(1, 8), tmp_path / "a.pt2")


def test_on_the_command_line(tmp_path: Path) -> None:
    """The run is as without the tool; at its end the smaller model is written."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))\n"
        "print(model(torch.ones(1, 8)).sum().item())\n"
    )
    options = "prune:method=channel,cut=true,sparsity=0.75,bake=small.pt2"
    words = "-m", "amanda", "run", "-t", options, "-o", "out", "--", "net.py"
    done = run_python(*words, cwd=tmp_path, check=True)
    assert done.stdout.startswith(run_python("net.py", cwd=tmp_path).stdout)
    assert "prune: 420 to 108 parameters, 768 to 192 FLOPs" in done.stdout
    assert re.search(r"0 +channels +32 +8", done.stdout)
    small = torch.export.load(tmp_path / "small.pt2").module()
    assert small(torch.ones(1, 8)).shape == (1, 4)
    assert sum(p.numel() for p in small.parameters()) == 108
