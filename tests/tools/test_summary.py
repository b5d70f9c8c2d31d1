"""``summary``: the model tree, beside counts that hooks make by hand."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.testing import loopback as lb
from amanda.tools.reporting import plain_text
from amanda_tools.summary.pytorch import TorchModules
from amanda_tools.summary.recorder import ModelRecord


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3, self.relu = nn.BatchNorm2d(4 * width), nn.ReLU(inplace=True)
        shortcut = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
        self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        return self.relu(y + self.downsample(x))


class ResNet(nn.Sequential):
    """Two such blocks with a head."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1), Bottleneck(8, 4, 1),
            Bottleneck(16, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip


class Vit(nn.Module):
    """Patches, a class token, and encoder layers of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), 1, 8), x], 1)
        return self.head(self.encoder(x)[:, 0])


class Attention(nn.Module):
    """Attention as Llama has it: its products are functions, which no module shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    """One decoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width)
        self.norm2, self.gate = nn.RMSNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.silu(self.gate(self.norm2(x))))


class Llama(nn.Module):
    """Two of them; the head shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.layers = nn.ModuleList(LlamaBlock(8) for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IMAGES, TOKENS = torch.rand(2, 3, 32, 32), torch.arange(12).reshape(2, 6) % 11
MODELS = {"resnet": (ResNet, IMAGES), "vit": (Vit, IMAGES), "llama": (Llama, TOKENS)}


def by_hand(model: nn.Module, data: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    """Type, shape of the first output, parameters and calls of each module, by hooks."""
    outputs: dict[str, list[tuple[int, ...]]] = {name: [] for name, _ in model.named_modules()}
    handles = [
        module.register_forward_hook(
            lambda m, i, out, n=name: outputs[n].append(
                tuple(out[0].shape if isinstance(out, tuple) else out.shape)
            )
        )
        for name, module in model.named_modules()
    ]
    model(data)
    for handle in handles:
        handle.remove()
    return {
        name: (
            type(module).__name__,
            list(outputs[name][0]) if outputs[name] else None,
            sum({id(p): p.numel() for p in module.parameters()}.values()),
            len(outputs[name]),
        )
        for name, module in model.named_modules()
    }


def watched(*passes: tuple[nn.Module, Any], **options: Any) -> Any:
    """The tool after calls of models."""
    tool = amanda.tools.load("summary")(**options)
    with amanda.apply(tool):
        for model, data in passes:
            model(data)
    return tool


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_parameters_are_those_of_a_hand_count(name: str) -> None:
    """Of every module, in the order of the tree, with its type and its calls."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make()
    rows = watched((model, data)).modules()
    found = {r["path"]: (r["type"], r["output"], r["parameters"], r["calls"]) for r in rows}
    assert found == by_hand(model, data)
    assert [row["path"] for row in rows] == [path for path, _ in model.named_modules()]
    assert all(row["depth"] == len(row["path"].split(".")) * bool(row["path"]) for row in rows)


def test_operations_are_right_on_functional_code() -> None:
    """Those of Llama are the analytic figure, attention included, whatever the number of steps."""
    model = Llama()
    for steps in (1, 3):
        tool = watched(*[(model, TOKENS)] * steps)
        top = tool.summary()["models"]["Llama"]
        linear = 12 * (2 * (4 * 8 * 8 + 8 * 16 + 16 * 8) + 8 * 11)
        attention = 2 * (2 * 2 * 6 * 6 * (4 + 4))
        assert (top["flops"], top["passes"]) == (2 * (linear + attention), steps)
        rows = {row["path"]: row for row in tool.modules()}
        assert rows["layers.0.attention"]["macs"] == 12 * 4 * 8 * 8 + attention // 2
        assert rows["layers"]["macs"] == 2 * rows["layers.0"]["macs"]


def test_activations_are_the_outputs_of_operators() -> None:
    """Views and what is counted in a buffer are none: of a small network, a hand count."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    rows = watched((model, torch.rand(2, 3, 8, 8))).modules()
    assert [row["activation_bytes"] for row in rows] == [
        4 * (2 * 288 + 10),
        4 * 288,
        4 * 288,
        0,
        40,
    ]


class Parts(nn.Module):
    """Shared, recursive and unused modules, in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.again = self.a
        self.unused = nn.Linear(4, 9)
        self.named = nn.ModuleDict({"x": nn.ReLU()})
        self.a.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, depth: int = 2) -> Any:
        if depth:
            return self(self.a(x), depth - 1)
        return {"out": self.named["x"](self.again(x)), "rest": (x, None)}


def test_modules_that_are_shared_recursive_unused_or_containers() -> None:
    """Shared ones count once; calls are those of a pass; without a call there is no output."""
    rows = {row["path"]: row for row in watched((Parts(), torch.rand(3, 4))).modules()}
    assert list(rows) == ["", "a", "again", "unused", "named", "named.x"]
    assert (rows[""]["parameters"], rows[""]["trainable"]) == (20 + 45, 4 + 45)
    assert (rows[""]["calls"], rows["a"]["calls"], rows["unused"]["calls"]) == (3, 3, 0)
    assert (rows["unused"]["output"], rows["named"]["output"]) == (None, None)
    assert [spec["shape"] for spec in rows[""]["outputs"]] == [[3, 4], [3, 4]]
    assert rows[""]["macs"] == 3 * 3 * 16


def test_kernels_inputs_and_outputs_are_shown_on_demand() -> None:
    """With ``shapes``, and in the rows in any case."""
    model = nn.Sequential(nn.Conv2d(3, 8, (3, 1)), nn.MaxPool2d(2))
    shown = amanda.summary(model, (2, 3, 8, 8), shapes=True)
    assert re.search("0 +Conv2d +3 x 1 +2 x 3 x 8 x 8 float32 +2 x 8 x 6 x 8 float32 ", repr(shown))
    assert re.search("1 +MaxPool2d +2 +2 x 8 x 6 x 8 float32 +2 x 8 x 3 x 4 float32 ", repr(shown))
    row = amanda.summary(model, (2, 3, 8, 8)).modules[1]
    assert (row["kernel"], row["inputs"][0]["shape"]) == ((3, 1), [2, 3, 8, 8])


def test_models_of_a_program_have_a_tree_each() -> None:
    """A second one of a class is numbered; the last pass of each counts."""
    first, second = nn.Linear(2, 3), nn.Linear(2, 5)
    calls = [(first, torch.rand(4, 2)), (second, torch.rand(4, 2)), (first, torch.rand(7, 2))]
    found = watched(*calls).summary()["models"]
    assert {name: of["output"] for name, of in found.items()} == {
        "Linear": [7, 3],
        "Linear@1": [4, 5],
    }


def test_a_call_that_raises_is_no_pass() -> None:
    """And leaves nothing behind."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 5))
    tool = amanda.tools.load("summary")()
    with amanda.apply(tool):
        with pytest.raises(RuntimeError):
            model(torch.rand(1, 2))
        model[0](torch.rand(1, 2))
    assert list(tool.summary()["models"]) == ["Linear"]


@dataclasses.dataclass
class Answer:
    """What a module returns."""

    scores: torch.Tensor


class Wrapping(nn.Module):
    """Returns what a function makes of the result of its part."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.part, self.answer = nn.Linear(2, 3), answer

    def forward(self, x: torch.Tensor) -> Any:
        return self.answer(self.part(x))


@pytest.mark.parametrize(
    ("answer", "output"), [(Answer, [1, 3]), (lambda y: None, None), (lambda y: {"a": [y]}, [1, 3])]
)
def test_a_model_returns_whatever_it_likes(answer: Any, output: Any) -> None:
    """Data classes, nested lists and nothing; also where the program handles an exception."""
    try:
        raise ValueError
    except ValueError:
        rows = watched((Wrapping(answer), torch.rand(1, 2))).modules()
    assert [row["output"] for row in rows] == [output, [1, 3]]


def test_modules_without_a_hash_have_a_tree() -> None:
    """Though PyTorch itself lists none with them."""

    @dataclasses.dataclass
    class Named(nn.Module):
        name: str

        def __post_init__(self) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    tool = watched((Named("n"), torch.rand(2)), (nn.ReLU(), torch.rand(2)))
    assert [row["model"] for row in tool.modules()] == ["Named", "ReLU"]


def test_a_module_that_gets_the_identity_of_a_dropped_one_has_not_its_path() -> None:
    """Its figures are those of the module that calls it."""
    model, source = nn.Module(), TorchModules()
    model.part = nn.Identity()
    record, gone = ModelRecord("Module", source, model), id(model.part)
    del model.part
    made = [nn.Identity() for _ in range(1000)]
    assert [record.path_of(source, one, "up") for one in made if id(one) == gone] == ["up"]


def test_a_module_that_holds_its_owner_is_shown_once() -> None:
    """A reference to the module around it is not part."""
    model = nn.Sequential(nn.Linear(2, 3))
    model[0].owner = model
    rows = watched((model, torch.rand(1, 2))).modules()
    assert [(row["path"], row["parameters"]) for row in rows] == [("", 9), ("0", 9)]


def nested(depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def test_lazy_modules_are_shown_as_what_they_become() -> None:
    """Their parameters have a size from their first call on."""
    rows = watched((nn.Sequential(nn.LazyLinear(3)), torch.rand(1, 2))).modules()
    # Its parameters are no activations.
    assert [row["activation_bytes"] for row in rows] == [12, 12]
    assert [(row["type"], row["parameters"]) for row in rows] == [("Sequential", 9), ("Linear", 9)]


class Checkpointed(nn.Module):
    """Its block runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_what_is_recomputed_is_not_counted() -> None:
    """A checkpoint calls its modules in the backward pass, which is not a forward pass."""
    tool, model = amanda.tools.load("summary")(), Checkpointed()
    with amanda.apply(tool):
        model(torch.rand(2, 4)).sum().backward()
    assert [(r["path"], r["calls"], r["macs"]) for r in tool.modules()] == [
        ("", 1, 32),
        ("block", 1, 32),
        ("block.0", 1, 32),
        ("block.1", 1, 0),
    ]


def test_a_wrapper_is_left_out(tmp_path: Any) -> None:
    """That of distributed training, as in the ids of operators."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3)))
        rows = watched((model, torch.rand(4, 2))).modules()
    finally:
        torch.distributed.destroy_process_group()
    assert [(row["path"], row["calls"], row["parameters"]) for row in rows] == [
        ("", 1, 9),
        ("0", 1, 9),
    ]


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
def test_a_compiled_module_is_the_module() -> None:
    """``OptimizedModule`` is left out, too; each module has its calls."""
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), backend="eager")
    tool = watched((compiled, torch.rand(4, 2)), (compiled, torch.rand(4, 2)))
    assert [(row["path"], row["calls"], row["output"]) for row in tool.modules()] == [
        ("", 1, [4, 3]),
        ("0", 1, [4, 3]),
        ("1", 1, [4, 3]),
    ]


def train(model: nn.Module, data: torch.Tensor) -> list[torch.Tensor]:
    """Two steps; the parameters, buffers and the state of the random numbers after them."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        functional.dropout(model(data)).sum().backward()
        optimizer.step()
    return [*(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]


def test_watching_changes_nothing() -> None:
    """Training under the tool is bit-identical, and no hook is left."""
    torch.manual_seed(0)
    model = ResNet()
    vanilla = train(copy.deepcopy(model), IMAGES)
    with amanda.apply(amanda.tools.load("summary")()):
        found = train(model, IMAGES)
    assert all(map(torch.equal, vanilla, found))
    hooks = vars(nn.modules.module)
    assert not hooks["_global_forward_hooks"]
    assert not hooks["_global_forward_pre_hooks"]


def test_the_function_leaves_the_model_as_it_was() -> None:
    """``amanda.summary`` runs it in evaluation, without gradients, and draws no random numbers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[0].eval()
    before = [t.clone() for t in (*model.state_dict().values(), torch.get_rng_state())]
    amanda.summary(model, torch.rand(3, 4))
    random = torch.get_rng_state()
    torch.set_rng_state(before[-1])
    torch.rand(3, 4)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert [module.training for module in model] == [False, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_function_takes_several_inputs_or_shapes() -> None:
    """A tuple for positional arguments, a dictionary for keywords; shapes stand for zeros of the
    model's dtype. Without an input the tree has the shapes of weights."""
    pair, x = nn.Bilinear(2, 3, 4), (torch.rand(5, 2), torch.rand(5, 3))
    model, random = nn.Sequential(nn.Linear(64, 3)).double(), torch.get_rng_state()
    for given in (x, {"input1": x[0], "input2": x[1]}, [(5, 2), (5, 3)]):
        assert amanda.summary(pair, given).modules[0]["output"] == [5, 4]
    found, flops = amanda.summary(model, (4, 64)), amanda.flops(model, (4, 64))
    assert found.modules[0]["outputs"][0] == {"shape": [4, 3], "dtype": "float64", "device": "cpu"}
    assert (flops.flops, flops.macs, flops.params, flops.bound) == (1536, 768, 195, None)
    assert "1.54 kFLOP" in repr(flops)
    assert "<td" in flops._repr_html_()
    assert re.search("0 +Linear +weight 3 x 64, bias 3 +195 +- +-", repr(amanda.summary(model)))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ((nn.Linear(64, 3), (4, 63)), ValueError, r"zeros of \(4, 63\): mat1 and mat2"),
        ((nn.Linear(64, 3),), TypeError, "needs an input, or the shape of one"),
        ((nn.Linear,), TypeError, "got the class Linear: make one, Linear"),
        (("model",), TypeError, "a module of PyTorch or a layer of Keras, got str"),
    ],
)
def test_mistakes_are_answered_in_one_line(given: Any, kind: type[Exception], said: str) -> None:
    """They say what is expected."""
    with pytest.raises(kind, match=f"^.*{said}.*$"):
        amanda.flops(*given)


def test_the_result_is_shown_to_people() -> None:
    """As text and in notebooks, down to a depth; files have all modules."""
    found = amanda.summary(Llama(), TOKENS, depth=1)
    text = repr(found)
    assert text.startswith("summary of Llama: 1,144 parameters, ")
    assert "  layers" in text
    assert "attention" not in text
    assert "<td" in found._repr_html_()
    assert "attention" not in found._repr_html_()
    assert any(
        "attention" in row["path"] for row in json.loads(json.dumps(found.result))["modules"]
    )


def test_as_many_levels_are_printed_as_fit_a_screen() -> None:
    """The page, and the run with ``--full``, have all of them."""
    blocks = [nn.Sequential(layer, nn.Linear(2, 2)) for layer in [nn.ReLU(), nn.Tanh()] * 8]
    tool = watched((nn.Sequential(*map(copy.deepcopy, blocks)), torch.rand(2)))
    (table,) = tool.tables()
    assert len(plain_text(table, full=True).splitlines()) == 4 + 1 + 16 + 32
    lines = plain_text(table).splitlines()
    assert (len(lines), lines[-1]) == (4 + 1 + 16 + 1, "... 32 more rows with --full")
    assert max(map(len, lines)) <= 100


def test_modules_that_are_alike_have_one_line() -> None:
    """Blocks that are numbered one after the other, with the same parts and figures, stand once;
    `repeated` shows all, and the rows of the result have them in any case."""

    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))

    widths = [8, 8, 8, 16, 16, 8]
    model = nn.Sequential(*map(block, widths))
    x = torch.rand(2, 4)
    shown, listed = amanda.summary(model, x), amanda.summary(model, x, repeated=True)
    names = [line.split()[:4] for line in str(shown).splitlines()[4:]]
    parts = [["0", "Linear"], ["1", "ReLU"], ["2", "Linear"]]
    expected = [["Sequential", "Sequential"], ["0-2,", "each"], *parts]
    expected += [["3-4,", "each"], *parts, ["5", "Sequential"], *parts]
    assert [name[: len(e)] for name, e in zip(names, expected, strict=True)] == expected
    assert len(str(listed).splitlines()) == 4 + 1 + 4 * len(widths)
    assert shown.modules == listed.modules


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", ["summary", "flops"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_model_that_takes_nested_tensors_has_parameters_and_calls(
    layout: torch.layout, name: str
) -> None:
    """Its sizes are not numbers: there is no output shape, and the program runs on."""
    model = nn.Linear(4, 3)
    items = [torch.ones(2, 4), torch.ones(5, 4)]
    with amanda.apply(tool := amanda.tools.load(name)()):
        for _ in range(2):
            nested = torch.nested.nested_tensor(items, layout=layout)
            sum(tensor.sum() for tensor in model(nested).unbind()).backward()
    assert any("linear" in row["type"] for row in tool.op_rows()) or name == "summary"
    if name == "summary":
        (row,) = tool.modules()
        assert (row["parameters"], row["calls"], row["output"]) == (15, 1, None)


def test_modules_of_another_framework_are_known_by_their_paths() -> None:
    """Its operators count for them; outside of modules there is nothing to show, as is said."""
    tool, other = (amanda.tools.load("summary")() for _ in range(2))
    x = lb.tensor([[1.0, 1.0]])
    with amanda.apply(tool):
        lb.Linear([[1.0, 2.0]])(x)
    assert [(row["path"], row["type"], row["output"]) for row in tool.modules()] == [
        ("Linear", "graph", [1, 1])
    ]
    with amanda.apply(other):
        lb.mul(x, x)
    (table,) = other.tables()
    assert table.title == (
        "summary: no module was called of PyTorch, TensorFlow or Keras, only of loopback/1.0/eager"
    )


class Direct(nn.Module):
    """Runs a child without calling it, and another one in TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.direct, self.called = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scripted = torch.jit.script(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.scripted(self.called(self.direct.forward(x)))


def test_figures_that_are_not_known_are_no_zeros() -> None:
    """A module that is run without a call, or in TorchScript, has no figures of its own, and sums
    with TorchScript in them are lower bounds: in the table and in the rows; the result of every
    tool says what was not seen."""
    model, x = Direct(), torch.rand(2, 4)
    names = "count", "coverage", "dump", "flops", "nan", "profile", "remat", "stats", "trace"
    tools = [amanda.tools.load(name)() for name in names]
    with amanda.apply(*tools):
        summary = amanda.summary(model, x)  # type: ignore[attr-defined]
    rows = {row["path"]: row for row in summary.modules}
    assert {path: (row["flops"], row["bound"]) for path, row in rows.items()} == {
        "": (128, "lower"), "direct": (None, None), "called": (64, None),
        "scripted": (None, "lower"),
    }  # fmt: skip
    text = repr(summary)
    assert "≥ 128 FLOP" in text
    assert "not called in Direct" in text
    for tool in tools:
        [(reason, count)] = tool.result()["summary"]["not_seen"].items()
        assert ("TorchScript" in reason, count) == (True, 1)
    says = {tool.name for tool in tools for t in tool.tables() if "were not seen" in t.title}
    assert says == {"count", "coverage", "flops", "nan", "remat"}
