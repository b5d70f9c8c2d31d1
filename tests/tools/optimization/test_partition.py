"""``partition``: the cut with the fewest bytes within limits, and parts that run on their own."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import amanda
from amanda.errors import UnsupportedProgramError
from amanda_tools._operators.parameters import UsedParameter
from amanda_tools.partition import PartitionTool
from amanda_tools.partition.cut import CutOp, CutTensor
from amanda_tools.partition.cut import cut as cut_graph
from tests.packaging.environments import ROOT
from tests.running import run_python

pytestmark = pytest.mark.filterwarnings("ignore")
HAS_ONNX = all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
ONNX = pytest.param("onnx", marks=pytest.mark.skipif(not HAS_ONNX, reason="needs ONNX"))
FREE = (0.0, math.inf)

# -- the cut, against all cuts ------------------------------------------------


@attrs.define(slots=False)
class Problem:
    """Six operators with random tensors between them: in a row, if there are limits."""

    seed: int
    flops: Sequence[tuple[float, float]]

    def __attrs_post_init__(self) -> None:
        draw, count = random.Random(self.seed), 6
        self.ops = [
            CutOp(draw.randint(1, 9), frozenset({UsedParameter(draw.randint(0, 4), 1, 8)}))
            for _ in range(count)
        ]
        self.first, self.last = [draw.randrange(3)], [draw.randrange(3, 6)]
        self.tensors = [CutTensor(5, -1, range(count))]
        for maker in range(-1, count - 1):
            readers = {*draw.choices(range(maker + 1, count), k=2)}
            readers |= set() if FREE in self.flops else {maker + 1}
            self.tensors.append(CutTensor(draw.randint(1, 99), maker, sorted(readers)))

    def cut(self) -> tuple[list[int], int]:
        limits = [(own, FREE) for own in self.flops]
        return cut_graph(self.ops, self.tensors, self.first, self.last, limits)

    def cost(self, parts: Sequence[int]) -> float:
        """The bytes over the cuts; infinite for what is not allowed."""
        sums = [0] * len(self.flops)
        for op, part in zip(self.ops, parts, strict=True):
            sums[part] += op.flops
        is_allowed = parts[self.first[0]] == 0 and parts[self.last[0]] == len(self.flops) - 1
        for of, (low, high) in zip(sums, self.flops, strict=True):
            is_allowed &= of > 0 and low <= of <= high
        cost = 0
        for tensor in self.tensors:
            begin = parts[tensor.maker] if tensor.maker >= 0 else 0
            behind = [parts[reader] for reader in tensor.readers]
            is_allowed &= min(behind) >= begin
            cost += tensor.size * (max(behind) - begin)
        return cost if is_allowed else math.inf


@pytest.mark.parametrize("limits", [[FREE] * 2, [(9, math.inf)] * 2, [(0, 20)] * 3])
def test_the_cut_is_the_best_of_all(limits: Any) -> None:
    """Of any graph in two parts without limits, else of operators in a row; it is refused where
    there is none. What is told as the least is no more."""
    costs = []
    for seed in range(20):
        problem = Problem(seed, limits)
        every = itertools.product(range(len(limits)), repeat=6)
        costs.append(min(map(problem.cost, every)))
        if costs[-1] == math.inf:
            with pytest.raises(UnsupportedProgramError, match="partition: "):
                problem.cut()
            continue
        parts, least = problem.cut()
        assert least <= problem.cost(parts) == costs[-1]
        assert FREE not in limits or least == costs[-1]
    assert min(costs) < math.inf
    assert (math.inf in costs) == (FREE not in limits)


# -- models ---------------------------------------------------------------------


class Branches(nn.Module):
    """Has a skip connection, a tied weight, and an input that its end reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Linear(8, 4, bias=False), nn.Linear(4, 64)
        self.narrow, self.head = nn.Linear(64, 4), nn.Linear(4, 8)
        self.head.weight = nn.Parameter(self.stem.weight.t().detach().clone())
        self.again = self.stem

    def forward(self, x: Any, scale: Any) -> Any:
        x = self.stem(x)
        y = self.narrow(self.wide(x).relu())
        return self.again(self.head(x + y)) * scale, y


def inputs_of_branches() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.rand(2, 8), torch.rand(2, 1)


def cnn() -> tuple[nn.Module, Any]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(100, 10), nn.ReLU(), nn.Linear(10, 3),
    )  # fmt: skip
    return model, (torch.rand(2, 3, 16, 16),)


def branches() -> tuple[nn.Module, Any]:
    return Branches(), inputs_of_branches()


class Attention(nn.Module):
    """Has a module whose operators an exporter writes as one group."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.head = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        x = self.body(x)
        return self.out(self.head(x, x, x, need_weights=False)[0])


class Odd(nn.Module):
    """Returns a parameter, or has a part of constants."""

    def __init__(self, *, returns_parameter: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.returns_parameter = returns_parameter

    def forward(self, x: Any) -> Any:
        if self.returns_parameter:
            return self.b(self.a(x)), self.a.bias
        x = self.a(x)
        constant = torch.ones(2, 8) @ torch.ones(8, 4)
        return self.b(x) + constant


@pytest.fixture
def without_fast_path() -> Iterator[None]:
    """PyTorch's attention runs as the operators that are exported."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def of_transformers(name: str) -> tuple[nn.Module, Any]:
    import tests.torchvision_ops  # noqa: F401 - before transformers

    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=50, use_cache=False, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config), {"input_ids": torch.arange(8)[None]}
    if name == "resnet":
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
        return transformers.ResNetModel(config), (torch.rand(1, 3, 32, 32),)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return transformers.ViTModel(config), (torch.rand(2, 3, 32, 32),)


def cut(model: Any, inputs: Any, **options: Any) -> PartitionTool:
    """The tool, which has run a model."""
    tool = PartitionTool(**options)
    with amanda.apply(tool), torch.no_grad():
        model.eval()
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return tool


def test_what_crosses_the_cut_is_told() -> None:
    """A tensor with two readers counts once; inputs that a later part reads, and parameters that
    both parts read, are named."""
    model, inputs = branches()
    found = cut(model, inputs, inside="Branches.stem/linear:0", outside="wide").result()
    assert [(row["tensor"], row["bytes"]) for row in found["tensors"]] == [
        ("Branches.stem/linear:0[0]", 32),
        ("input of Branches/mul:0", 8),
    ]
    assert found["summary"]["bytes"] == found["summary"]["least_bytes"] == 40
    assert [(part["ops"], part["parameter_bytes"]) for part in found["parts"]] == [
        (1, 128), (7, 128 + 128 + 32 + 1280 + 1040),
    ]  # fmt: skip
    assert [row["parameter"] for row in found["shared_parameters"]] == ["stem.weight"]
    assert found["parts"][0]["flops"] == 2 * 2 * 8 * 4
    parts = {row["id"]: (row["part"], row["sent_bytes"]) for row in found["ops"]}
    assert parts["Branches.stem/linear:0"] == (1, 32)
    assert parts["Branches.stem#1/linear:0"] == (2, 0)


def test_limits_of_flops_and_of_memory_hold() -> None:
    model, inputs = cnn()
    of = cut(model, inputs, parts=3, flops="0.01-0.9").result()["parts"]
    shares = [part["flops"] / sum(p["flops"] for p in of) for part in of]
    assert all(0.01 <= share <= 0.9 for share in shares)
    first, _ = cut(model, inputs, memory=["-1kB", "-"]).result()["parts"]
    assert 0 < first["parameter_bytes"] <= 1000


@pytest.mark.parametrize("format", ["pt2", ONNX])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (cnn, {"parts": 3, "flops": "0.01-"}),
        (branches, {"outside": "narrow"}),
        (lambda: of_transformers("vit"), {"outside": "pooler"}),
        pytest.param(lambda: of_transformers("gpt2"), {"flops": "0.3-"}, marks=pytest.mark.slow),
        pytest.param(lambda: of_transformers("resnet"), {}, marks=pytest.mark.slow),
    ],
)
def test_parts_compute_what_the_model_does(
    make: Callable[[], Any], options: Any, format: Any, tmp_path: Path
) -> None:
    """The export compares them; the model is as before, and the parts exchange what is told."""
    torch.manual_seed(0)
    model, inputs = make()
    tool = cut(model, inputs, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    written = tool.export_parts(model, inputs, tmp_path / "parts", format=format)
    about = json.loads((tmp_path / "parts/parts.json").read_text())
    assert [path.name for path in written[:-1]] == [part["file"] for part in about["parts"]]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    sent = {row["bytes"] for row in tool.result()["tensors"]}
    later = {of["bytes"] for part in about["parts"][1:] for of in part["inputs"].values()}
    assert later == sent


def parameters_of_parts(folder: Path) -> list[list[str]]:
    parts = json.loads((folder / "parts.json").read_text())["parts"]
    return [part["parameters"] for part in parts]


@pytest.mark.usefixtures("without_fast_path")
def test_a_function_of_several_operators_is_cut_where_the_plan_says(tmp_path: Path) -> None:
    model, inputs = Attention(), (torch.rand(2, 5, 8),)
    cut(model, inputs, outside="head").export_parts(model, inputs, tmp_path)
    assert parameters_of_parts(tmp_path)[0] == ["body.weight", "body.bias"]
    within = {"outside": "*/scaled_dot_product_attention:0", "inside": "*.head/linear:0"}
    cut(model, inputs, **within).export_parts(model, inputs, tmp_path)
    assert parameters_of_parts(tmp_path) == [
        ["body.weight", "body.bias", "head.in_proj_weight", "head.in_proj_bias"],
        ["out.weight", "out.bias", "head.out_proj.weight", "head.out_proj.bias"],
    ]


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"),
                                  nn.DataParallel])  # fmt: skip
def test_wrapped_models_are_exported_as_plain_ones(
    wrap: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    torch.compiler.reset()
    model, inputs = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))), (torch.rand(2, 8),)
    cut(model, inputs).export_parts(model, inputs, tmp_path)
    assert parameters_of_parts(tmp_path) == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


@pytest.mark.filterwarnings("error")
def test_an_export_does_not_warn(tmp_path: Path) -> None:
    model, inputs = (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)),
        (torch.rand(2, 8),),
    )
    cut(model, inputs).export_parts(model, inputs, tmp_path)


def test_parts_run_in_processes_of_their_own(tmp_path: Path) -> None:
    """The example's runner gives the bits of the whole exported program; it ends when a part
    fails."""
    torch.manual_seed(0)
    model, inputs = of_transformers("vit")
    model, inputs = model.bfloat16(), (inputs[0].bfloat16(),)
    cut(model, inputs, flops="0.3-").export_parts(model, inputs, tmp_path / "parts")
    expected = [*torch.export.export(model, inputs).module()(*inputs).values()]
    torch.save((inputs, expected), tmp_path / "values.pt")
    (tmp_path / "check.py").write_text(
        "import torch\nfrom run_parts import run_parts\n"
        "if __name__ == '__main__':\n"
        "    inputs, expected = torch.load('values.pt')\n"
        "    found = run_parts('parts', *inputs)\n"
        "    print(all(a.equal(b) for a, b in zip(found, expected, strict=True)))\n"
        "    run_parts('parts', torch.rand(1, 2))\n"
    )
    path = {"PYTHONPATH": str(ROOT / "amanda-tools/examples")}
    done = run_python("check.py", cwd=tmp_path, env=path)
    assert done.stdout == "True\n"
    assert done.stderr.splitlines()[-1] == "EOFError"


# -- bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inside": "stm"}, r"inside=stm is no module and no op of the model; did you mean stem\?"),
        ({"inside": "stem", "outside": "*/linear:0"}, "is one of the last part, or reads"),
        ({"inside": "narrow", "outside": "stem"}, "is one of the last part, or reads"),
        ({"inside": "Branches", "outside": "Branches.head"}, "is one of the last part, or reads"),
        ({"flops": "0.99-"}, "no cut into 2 parts fulfils inside, outside, flops and memory"),
        ({"parts": 9}, "9 parts need as many ops with FLOPs or parameters, and the model has 5"),
    ],
)
def test_cuts_that_cannot_be_are_refused(options: Any, message: str) -> None:
    tool = cut(*branches(), **options)
    assert re.search(message, tool.result()["summary"]["refusal"])
    with pytest.raises(UnsupportedProgramError, match=message) as caught:
        tool.export_parts(*branches(), "parts")
    assert "\n" not in str(caught.value)


def test_options_that_no_program_could_accept_are_refused() -> None:
    for options in ({"flops": "0.5"}, {"memory": ["-1kB"] * 3}, {"parts": 1}, {"format": "pb"}):
        with pytest.raises(ValueError, match="|".join(options)):
            PartitionTool(**options)


def test_exports_that_cannot_be_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    model, inputs = branches()
    tool, folder = cut(model, inputs, outside="narrow"), tmp_path / "parts"
    other = Branches().eval()
    other.narrow = nn.Sequential(other.narrow, nn.Tanh())  # type: ignore[assignment]
    for given, message in (
        ((other, inputs), "the model has changed"),
        ((model, None), "needs example inputs"),
        ((lambda x: x, inputs), "only models of PyTorch"),
        ((nn.Sequential(), inputs), "torch.export refuses|has run under the tool"),
    ):
        with pytest.raises(UnsupportedProgramError, match=message):
            tool.export_parts(given[0], given[1], folder)
        assert [*tmp_path.iterdir()] == []
    folder.write_text("")
    with pytest.raises(OSError, match="parts"):
        tool.export_parts(model, inputs, folder)
    with pytest.raises(UnsupportedProgramError, match="no forward pass"):
        PartitionTool().export_parts(model, inputs, tmp_path)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Odd(returns_parameter=True), {}, "the model returns a.bias itself"),
        (Odd(returns_parameter=False), {"parts": 3}, "part 2 computes only constants"),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 4)), {},
         "the model changes its buffers or inputs"),
        (nn.Sequential(nn.Linear(8, 8), nn.Sequential(torch.compile(nn.Linear(8, 4)))), {},
         r"the part of linear_1 in the program is not known"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_exported_are_refused_and_leave_nothing(
    model: Any, options: Any, message: str, tmp_path: Path
) -> None:
    inputs = (torch.rand(2, 8),)
    tool = cut(model, inputs, **options)
    with pytest.raises(UnsupportedProgramError, match=message):
        tool.export_parts(model, inputs, tmp_path / "new/parts")
    assert [*tmp_path.iterdir()] == []


def test_parts_of_other_programs_are_refused(tmp_path: Path) -> None:
    """The fast path of attention, and training, run operators that are not exported."""
    model, inputs = Attention(), (torch.rand(2, 5, 8),)
    with pytest.raises(UnsupportedProgramError, match=r"op Attention\.head/_native_multi_head_att"):
        cut(model, inputs, outside="head").export_parts(model, inputs, tmp_path)
    norm, tool = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), PartitionTool()
    with amanda.apply(tool):
        norm(torch.rand(2, 8))
    with pytest.raises(UnsupportedProgramError, match=r"add_:0 .* was in training mode"):
        tool.export_parts(norm, torch.rand(2, 8), tmp_path)


def test_a_parameter_in_a_part_that_does_not_read_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = branches()
    tool = cut(model, inputs)
    monkeypatch.setattr(tool, "_readers", dict)
    with pytest.raises(UnsupportedProgramError, match="would come into part 1, and is read in an"):
        tool.export_parts(model, inputs, tmp_path)


def test_an_error_leaves_no_description_of_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = branches()
    tool, replace = cut(model, inputs), Path.replace
    tool.export_parts(model, inputs, tmp_path)

    def failing(path: Path, target: Any) -> Any:
        if path.name == "part2.pt2":
            raise OSError("disk full")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="disk full"):
        tool.export_parts(model, inputs, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"part1.pt2", "part2.pt2"}


def run(folder: Path, options: str, program: str) -> Any:
    (folder / "net.py").write_text(program)
    words = "-m", "amanda", "run", "-t", f"partition:{options}", "-o", "out", "--", "net.py"
    return run_python(*words, cwd=folder)


def test_on_the_command_line(tmp_path: Path) -> None:
    """The model of the program is exported at its end; what cannot be is one line, and status 2."""
    program = (
        "import torch\nmodel = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])\n"
        "with torch.no_grad():\n    model(torch.ones(1, 8))\n"
    )
    done = run(tmp_path, "outside=3,export=new/parts", program)
    assert done.returncode == 0, done.stderr
    assert "partition: 32 B on the cut" in done.stdout
    assert {path.name for path in (tmp_path / "new/parts").iterdir()} == {
        "part1.pt2", "part2.pt2", "parts.json",
    }  # fmt: skip
    for options in ("inside=7,export=other", "outside=3,export=net.py/parts", "flops=1.0-"):
        done = run(tmp_path, options, program)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert not (tmp_path / "other").exists()


KERAS = (
    "import keras\nmodel = keras.Sequential([keras.layers.Dense(8) for _ in range(4)])\n"
    "model.predict(keras.ops.ones((2, 8)), verbose=0)\n"
)


@pytest.mark.parametrize(
    ("program", "shown", "refusal"),
    [
        (KERAS, "partition: 64 B on the cut (the least)", "nothing is exported"),
        ("import torch\n(torch.ones(3) + 1).sum()\n", "partition: 12 B", "nothing is exported"),
        ("import torch\n", "", "no forward pass of a model has been seen"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_what_is_no_model_of_pytorch_is_cut_and_not_exported(
    program: str, shown: str, refusal: str, tmp_path: Path
) -> None:
    done = run(tmp_path, "export=parts", program)
    assert done.returncode == 2
    assert shown in done.stdout
    assert re.fullmatch(f"amanda: error: partition: .*{refusal}.*\n", done.stderr), done.stderr
    assert not (tmp_path / "parts").exists()


def test_a_program_without_an_export_keeps_its_scope() -> None:
    """Only an export, or an error, ends the scope before the exit functions run."""
    model, inputs = branches()
    assert not cut(model, inputs).needs_end
    assert cut(model, inputs, inside="stm").needs_end
    assert PartitionTool(export="parts").needs_end


def test_compiled_models_are_cut_as_plain_ones() -> None:
    model, inputs = cnn()
    torch.compiler.reset()
    compiled = cut(torch.compile(model, backend="eager"), inputs).result()
    assert compiled["parts"] == cut(model, inputs).result()["parts"]


def test_of_equal_cuts_the_most_even_is_taken() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    assert [part["ops"] for part in cut(model, (torch.ones(1, 8),)).result()["parts"]] == [3, 3]
