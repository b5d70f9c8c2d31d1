"""Alignment with exported programs, and the export of what tools change; ONNX where installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import amanda
from amanda.errors import AmandaError, CoverageWarning, FileError, UnsupportedProgramError
from amanda_tools.export import Change, Function, Mask, Rounding, checks, export_model
from amanda_tools.export.checks import Applied
from amanda_tools.export.model_of_run import copied
from tests.running import run_python
from tests.tools.optimization import exports
from tests.tools.optimization.exports import Net
from tests.tutorial.documents import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")
HAS_ONNX = all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
NEEDS_ONNX = pytest.mark.skipif(not HAS_ONNX, reason="needs ONNX")
ONNX = pytest.param(".onnx", marks=NEEDS_ONNX)
BOTH = pytest.mark.parametrize("suffix", [".pt2", ONNX])


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


ALL = os.environ.get("AMANDA_EXPORTS") == "all"
"""``nox -s exports``: all models and architectures, in minutes; else one of each."""

SAMPLE: Any = [{}, {"group": 8, "weight_bits": 4}, {"method": "dynamic"}]
"""Options of ``quantize`` with which CI, too, exports to ONNX; the others are of that session."""

X = (torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(1)),)


def ran(model: Any, name: str = "quantize", **options: Any) -> Any:
    """A tool that has run a model."""
    given = {"calibration": 1} if options.get("method", "static") in ("static", "qat") else {}
    tool = amanda.tools.load(name)(**(given if name == "quantize" else {}), **options)
    with amanda.apply(tool), torch.no_grad():
        model(*X), model(*X)
    return tool


@BOTH
@pytest.mark.parametrize("is_lowered", [False, True])
def test_operators_have_nodes_of_the_exported_program(
    net: Any, tmp_path: Path, suffix: str, is_lowered: bool
) -> None:
    """Of a program, also a decomposed or optimized one, and of its file; what an exporter joins or
    leaves out is told."""
    path = tmp_path / f"net{suffix}"
    if suffix == ".pt2":
        program = torch.export.export(net, X)
        torch.export.save(program.run_decompositions() if is_lowered else program, path)
    else:
        torch.onnx.export(net, X, path, dynamo=True, verbose=False, optimize=is_lowered)
    found = amanda.align(net, X, path)
    joined = suffix == ".onnx" and is_lowered
    assert all(one.nodes or one.is_dropped for one in found.values())
    reasons = {op_id: one.reason for op_id, one in found.items() if one.is_dropped}
    assert ("left it out" in reasons.get("Net/dropout:0", "")) == joined
    # onnxscript's optimizer writes a split that names no operator.
    assert ("names no operator" in reasons.get("Net/chunk:0", "")) == joined
    qkv = found["Net.qkv/linear:0"].nodes
    assert (len(qkv) > 1) == (suffix == ".onnx" or is_lowered)
    heads = [found[f"Net.head{call}/linear:0"].nodes for call in ("", "#1")]
    assert heads[0]
    assert heads[0] != heads[1]
    assert found["Net.conv/conv2d:0"].weight == "conv.weight"
    assert (found["Net.conv/conv2d:0"].nodes == found["Net.norm/batch_norm:0"].nodes) == joined


@pytest.mark.parametrize("is_lowered", [False, True])
def test_operators_of_functions_in_python_have_their_own_nodes(is_lowered: bool) -> None:
    class Composed(nn.Module):
        def forward(self, x: Any) -> Any:
            x = nn.functional.normalize(nn.functional.lp_pool1d(x, 2.0, 2))
            return nn.functional.tanhshrink(x) + torch.norm(x)

    model, x = Composed(), torch.rand(3, 8)
    program = torch.export.export(model, (x,))
    found = amanda.align(model, x, program.run_decompositions() if is_lowered else program)
    assert [len(one.nodes) for one in found.values()] == [1, 3 if is_lowered else 1] + [1] * 14


class Slice(nn.Module):
    """Takes the first elements."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Any) -> Any:
        return x[..., : self.count]


def test_missing_operators_and_other_targets_are_named(net: Any, tmp_path: Path) -> None:
    program = torch.export.export(net, X)
    net.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    missing = amanda.align(net, X, program)["Net.head.1/tanh:0"]
    assert (missing.nodes, missing.reason) == ((), "the program has no other tanh in head.1")
    for taken, is_dropped in ((8, True), (4, False)):
        net.head = Slice(taken)
        assert amanda.align(net, X, program)["Net.head/__getitem__:0"].is_dropped == is_dropped
    with pytest.raises(UnsupportedProgramError, match="is no exported program"):
        amanda.align(net, X, "net.bin")
    with pytest.raises(FileError, match=r"net\.pt2 cannot be read"):
        amanda.align(net, X, tmp_path / "net.pt2")


@BOTH
@pytest.mark.parametrize(
    "options",
    [*SAMPLE, {"symmetric": True}, {"weight_bits": 4, "activation_bits": 4},
     {"activation_bits": 0}, {"per_channel": False}, {"method": "qat"}, {"number": "e4m3"},
     {"group": 4}, {"group": 2, "method": "qat"},
     {"method": "dynamic", "per_token": True}, {"method": "dynamic", "smooth": 0.5},
     {"smooth": 0.5, "gptq": True, "group": 4}, {"gptq": True, "weight_bits": 4},
     {"weight_bits": 3, "per_channel": False}],
)  # fmt: skip
def test_quantize_exports_what_it_simulates(
    net: Any, tmp_path: Path, suffix: str, options: Any
) -> None:
    """Integer weights and nodes that quantize; the model itself is as it was."""
    if suffix == ".onnx" and not ALL and options not in SAMPLE:
        pytest.skip("nox -s exports runs it")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = ran(net, **options).export_model(net, X, tmp_path / f"net{suffix}")
    # The convolution has three inputs, which are no groups, and no tokens.
    assert len(found.ops) == 4 - any(map(options.get, ("group", "per_token", "smooth", "gptq")))
    assert found.difference <= (2e-6 if suffix == ".onnx" else 0)
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    if suffix == ".pt2" and "number" not in options:
        program = torch.export.load(found.path)
        kinds = {v.dtype for name, v in program.state_dict.items() if "integers" in name}
        assert kinds == {torch.uint8 if options.get("weight_bits", 8) < 8 else torch.int8}
        assert "dequantize_per" in str(program.graph)
    if suffix == ".onnx" and options.get("weight_bits", 8) < 8:
        model = importlib.import_module("onnx").load(found.path)
        kinds = {each.data_type for each in model.graph.initializer if "integers" in each.name}
        assert kinds == {model.graph.initializer[0].DataType.INT4}


@pytest.mark.parametrize("suffix", [".pt2", ".safetensors", ONNX])
def test_prune_exports_its_masks(net: Any, tmp_path: Path, suffix: str) -> None:
    found = ran(net, "prune", method="nm").export_model(net, X, tmp_path / f"net{suffix}")
    assert found.difference <= (2e-6 if suffix == ".onnx" else 0)
    if suffix == ".safetensors":
        net.load_state_dict(load_file(found.path))
        assert (net.head.weight == 0).float().mean() == 0.5


class Own(amanda.Tool):
    """A tool of a third party: halves what enters an operator, and says so or something else."""

    def __init__(self, told: Sequence[Change]) -> None:
        super().__init__()
        self.told = told
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_id() == "Net.qkv/linear:0":
            context.insert_before_op(lambda x: x / 2, inputs=[0])

    def changes(self) -> Sequence[Change]:
        return self.told


@BOTH
def test_a_difference_is_an_error_that_names_the_operator(
    net: Any, tmp_path: Path, suffix: str
) -> None:
    """Any tool that states its changes is exported, and held to them."""
    path = tmp_path / f"net{suffix}"
    halved = Function("Net.qkv/linear:0", 0, lambda x: x / 2)
    assert export_model(Own([halved]), net, X, path).ops == ["Net.qkv/linear:0"]
    before = path.read_bytes()
    wrong = Function("Net.qkv/linear:0", 0, lambda x: x / 3)
    with pytest.raises(UnsupportedProgramError, match=r"first at op Net\.qkv/linear:0, by"):
        export_model(Own([wrong]), net, X, path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


STEP = np.float32(3 / 255)
HALVES = (np.arange(127, dtype="f") + np.float32(0.5)) * STEP
TIES = HALVES[np.round(HALVES / STEP) != np.round(HALVES * (1 / STEP))][:8]
"""Numbers that a division by a step rounds to another integer than its reciprocal does."""


@NEEDS_ONNX
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize(
    ("shape", "group", "wrong"), [((8, 1), 0, "integers"), ((8, 2), 4, "scale")]
)
def test_ties_may_round_otherwise_and_nothing_else(
    tmp_path: Path, monkeypatch: Any, divides: bool, shape: Any, group: int, wrong: str
) -> None:
    """ONNX Runtime divides, as QAT does; an operator that is wrong on equal inputs is an error."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    axes: Any = {"axis": int(group > 0), "group": group, "divides": divides}
    grid = np.full(shape, 0.003), np.zeros(shape)
    changes = [
        Rounding("Sequential.0/linear:0", 0, [STEP], [0], -128, 127, divides=divides),
        Rounding("Sequential.1/linear:0", 1, *grid, -128, 127, **axes),
    ]
    tool: Any = Applied(changes)
    tool.changes = lambda: changes
    given = tool, model, torch.tensor(TIES), tmp_path / "net.onnx"
    assert (export_model(*given).difference > 2e-6) == (not divides)

    helper, export = importlib.import_module("onnx.numpy_helper"), torch.onnx.export

    def edited(*args: Any, **options: Any) -> Any:
        proto = export(*args, **options).model_proto
        part = next(each for each in proto.graph.initializer if wrong in each.name)
        value = helper.to_array(part).copy()
        value.flat[3] += 1 if wrong == "integers" else 1e-4
        part.CopyFrom(helper.from_array(value, part.name))
        return SimpleNamespace(model_proto=proto)

    monkeypatch.setattr(torch.onnx, "export", edited)
    with pytest.raises(UnsupportedProgramError, match=r"first at op Sequential\.1/linear:0, by"):
        export_model(*given)


class Stateful(nn.Linear):
    """Counts its calls, changes its input, and holds what it has computed."""

    config = SimpleNamespace(use_cache=True)

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.last = super().forward(x.add_(1))
        return self.last


@pytest.mark.parametrize(("name", "suffix"), [("quantize", ".pt2"), ("prune", ".safetensors")])
def test_the_runs_of_an_export_leave_no_trace(tmp_path: Path, name: str, suffix: str) -> None:
    """In the file, the model, its inputs, and its class."""
    model, x = Stateful().eval(), torch.rand(2, 6)
    tool = amanda.tools.load(name)()
    with amanda.apply(tool):
        model(x.clone()), model(x.clone())
    before = x.clone()
    path = tool.export_model(model, x, tmp_path / f"net{suffix}").path
    state = torch.export.load(path).state_dict if suffix == ".pt2" else load_file(path)
    assert (model.calls, state["calls"]) == (2, 2)
    assert x.equal(before)
    assert Stateful.config.use_cache


@pytest.mark.parametrize("grad", [False, True])
def test_attention_is_exported_without_the_fast_path(tmp_path: Path, grad: bool) -> None:
    """As it runs under a tool that changes values, whatever gradients it was run with."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 1).eval(), torch.rand(2, 5, 8)
    for name, suffix in (("quantize", ".pt2"), ("prune", ".safetensors")):
        tool = amanda.tools.load(name)()
        with amanda.apply(tool), torch.set_grad_enabled(grad):
            model(x), model(x)
        assert len(tool.export_model(model, x, tmp_path / f"net{suffix}").ops) == 4
    assert export_model(None, model, x, tmp_path / "net.pt2").difference == 0
    assert torch.backends.mha.get_fastpath_enabled()
    found = amanda.align(model, x, torch.export.export(model, (x,))).values()
    assert all(one.nodes or one.is_dropped for one in found)


class Filled(nn.Linear):
    """Has outputs that are no numbers, or random, and a state that is no tensor."""

    def __init__(self, value: float, share: float = 0) -> None:
        super().__init__(6, 6)
        self.value, self.share = value, share

    def forward(self, x: Any) -> Any:
        x = super().forward(x.flatten(1)[:, :6])
        return nn.functional.dropout(x.masked_fill(x > 0, self.value), self.share, True)

    def get_extra_state(self) -> Any:
        return self.share

    def set_extra_state(self, state: Any) -> None:
        self.share = state


@BOTH
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_equals_itself_only(tmp_path: Path, suffix: str, value: float) -> None:
    model = Filled(value).eval()
    assert ran(model).export_model(model, X, tmp_path / f"net{suffix}").difference < 2e-6
    given = [np.array(value)], [np.array(0.0)]
    assert checks.difference(*given, 2e-6) is checks.difference(*given[::-1], 2e-6) is None


@NEEDS_ONNX
def test_half_precision_is_compared_in_its_own_units(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).half().eval(), torch.rand(9, 64)
    assert 0 < export_model(None, model, x.half(), tmp_path / "net.onnx").difference < 2e-3


def test_a_model_in_inference_mode_is_exported(net: Any, tmp_path: Path) -> None:
    with torch.inference_mode():
        x = X[0] + 0
        assert export_model(None, net, x, tmp_path / "net.pt2").difference == 0
        assert not copied(x).is_inference()


class Branching(nn.Module):
    """Has control flow that depends on values."""

    def forward(self, x: Any) -> Any:
        return x @ x if x.sum() > 0 else x


class Unknown(nn.Module):
    """Has an operator that ONNX lacks."""

    def forward(self, x: Any) -> Any:
        return torch.linalg.eigvals(x @ x)


HALVED = Function("Unknown/matmul:0", 0, lambda x: x / 2)
WIDE = Rounding("Net.qkv/linear:0", 0, [[1.0], [2.0]], [[0.0], [0.0]], -128, 127)
MASK = Mask("Net.qkv/linear:0", 1, torch.ones(2, 2).numpy())
OTHER = Rounding("Net.qkv/linear:0", 1, [1.0] * 8, [0.0] * 8, -128, 127, axis=0)
MASKED = Mask("Filled/linear:0", 1, torch.ones(6, 6).numpy())


@pytest.mark.parametrize(
    ("tool", "model", "inputs", "name", "message"),
    [
        ([WIDE], Net(), None, "net.pt2", "needs example inputs"),
        ([WIDE], Net(), X, "net.bin", "none of the suffixes"),
        ([WIDE], lambda x: x, X, "net.pt2", "only models of PyTorch"),
        ([], Net(), X, "net.pt2", "nothing to export"),
        ([WIDE], Branching(), X, "net.pt2", r"torch\.export refuses the model: .* \.\.\.$"),
        ([WIDE], Net(), X[0][:, :2], "net.pt2", r"torch\.export refuses the model"),
        ([OTHER], Net(), X, "net.pt2", r"is not for its shape \(24, 8\): the model has changed"),
        ([MASKED], Filled(0), X, "net.safetensors", "holds tensors only, and _extra_state"),
        ([MASKED], Filled(0, 0.5), X, "net.pt2", r"at each run, .* first at op Filled/dropout:0"),
        ([WIDE], nn.Sequential(Net()), X, "net.pt2", "the model has changed"),
        ([WIDE], Net(), X, "net.pt2", r"qkv/linear:0: \.pt2 cannot express .* several axes"),
        ([WIDE], Net(), X, "net.safetensors", r"\.safetensors has no operators"),
        ([MASK], Net(), X, "net.pt2", r"has the shape \(2, 2\)"),
        ([WIDE], Net(), X, "missing/net.pt2", "No such file"),
        pytest.param(
            [HALVED],
            Unknown(),
            X,
            "net.onnx",
            r"torch\.onnx refuses .*linalg_eig",
            marks=NEEDS_ONNX,
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, capfd: Any, tool: Any, model: Any, inputs: Any, name: str, message: str
) -> None:
    random = torch.get_rng_state()
    with pytest.raises((AmandaError, OSError), match=message) as caught:
        export_model(Own(tool), model, inputs, tmp_path / name)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    assert torch.get_rng_state().equal(random)
    assert [*tmp_path.iterdir()] == []


@BOTH
def test_activations_can_have_groups(net: Any, tmp_path: Path, suffix: str) -> None:
    """As a third party may state; what is no constant is rounded by plain arithmetic."""
    grid = np.full((2, 16, 2), 0.1), np.zeros((2, 16, 2))
    changes = [Rounding("Net.qkv/linear:0", 0, *grid, -8, 7, axis=2, group=4)]
    tool: Any = Applied(changes)
    tool.changes = lambda: changes
    found = export_model(tool, net, X, tmp_path / f"net{suffix}")
    assert found.difference <= (2e-6 if suffix == ".onnx" else 0)


def test_an_operator_can_stay_in_floating_point(net: Any, tmp_path: Path) -> None:
    kept = Function("Net.conv/conv2d:0", 0, lambda x: x / 2)
    found = export_model(Own([WIDE, kept]), net, X, tmp_path / "net.pt2", fallback=True)
    assert found.ops == ["Net.conv/conv2d:0"]
    assert "several axes" in found.in_floating_point["Net.qkv/linear:0"]


def test_an_export_within_a_scope_is_of_the_exact_model(net: Any, tmp_path: Path) -> None:
    """torch.export warns once, and names the way; export_model() refuses; other tools may run."""
    tool = amanda.tools.load("quantize")(calibration=1)
    silent = warnings.catch_warnings(action="error", category=CoverageWarning)
    with amanda.apply(tool), torch.no_grad():
        net(*X)
        with pytest.warns(CoverageWarning, match=r"changes of QuantizeTool; .*export_model"):
            torch.export.export(net, X)
        with silent:
            torch.export.export(net, X)
        with pytest.raises(UnsupportedProgramError, match="after the with-block"):
            tool.export_model(net, X, tmp_path / "net.pt2")
    silent = warnings.catch_warnings(action="error", category=CoverageWarning)
    with amanda.apply(amanda.tools.load("count")()), silent:
        torch.export.export(net, X)
    assert len(tool.export_model(net, X, tmp_path / "net.pt2").ops) == 4


def test_a_full_disk_leaves_nothing(net: Any, tmp_path: Path) -> None:
    tool, limits = ran(net), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"net\.pt2"):
            tool.export_model(net, X, tmp_path / "net.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("suffix", "optimize"), [(".pt2", False), (".onnx", False), (".onnx", True)]
)
@pytest.mark.parametrize("name", exports.architectures() if ALL else ["gpt2"])
def test_architectures_align(name: str, suffix: str, optimize: bool) -> None:
    """99 % of the operators with weights, and 95 % of all."""
    if suffix == ".onnx" and not ALL:
        pytest.skip("nox -s exports runs it")
    ops, missing = exports.unaligned(name, suffix, optimize=optimize)
    assert len([op for op in missing if op.weight]) <= len([op for op in ops if op.weight]) // 100
    assert len(missing) <= len(ops) // 20


@pytest.mark.parametrize("suffix", exports.SUFFIXES)
@pytest.mark.parametrize("name", exports.MODELS if ALL else ["CNN", "GPT-2"])
def test_models_are_exported(name: str, suffix: str) -> None:
    """Tied weights and caches included; ONNX within what export_model() asks for, and within one
    step with the runtime's optimizer."""
    if suffix == ".onnx" and not (HAS_ONNX and (ALL or name == "CNN")):
        pytest.skip("nox -s exports runs it")
    found = exports.differences(name, suffix)
    assert found == [0] if suffix != ".onnx" else found[1] <= 1


# -- amanda run ---------------------------------------------------------------

PROGRAM = """
import os, torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)
    def forward(self, x, scale, shift=None):
        if CONTROL and x.sum() > 0: x = x * 2
        return self.fc(x * scale) + shift
os.chdir("..")
net = Net()
for _ in range(2):
    x, shift = torch.rand(2, 8), torch.rand(4)
    if CALLED: net(x, 0.5, shift=shift).sum().backward()
    else: torch.nn.functional.linear(x, torch.ones(4, 8)); torch.relu(shift)
    x.zero_()
if FULL: import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
print("done")
"""


def run(
    folder: Path, tool: str, *, called: bool = True, control: bool = False, full: bool = False
) -> Any:
    """`amanda run` of a program, which may call a model, with control flow or without, and may fill
    the disk."""
    program = f"CALLED, CONTROL, FULL = {called}, {control}, {full}\n{PROGRAM}"
    inner = folder / "inner"
    inner.mkdir()
    return run_python("-m", "amanda", "run", "-t", tool, "-c", program, cwd=inner)


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("quantize:export=net.pt2", "quantize: exported 1 op to"),
        ("prune:method=nm,bake=net.safetensors", "prune: exported 1 op to"),
    ],
)
def test_amanda_run_exports_the_model_of_the_program(tmp_path: Path, tool: str, said: str) -> None:
    """The outermost module, with the arguments of its first call as they were then."""
    done = run(tmp_path, tool)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done\n")
    assert said in done.stdout
    file = tmp_path / "inner" / tool.rpartition("=")[2]
    if file.suffix == ".pt2":
        importlib.import_module("torch.ao.quantization.fx._decomposed")
        program = torch.export.load(file)
        assert "quantize_per_tensor" in str(program.graph)
        assert program.example_inputs[1]["x"].any()
    else:
        assert (load_file(file)["fc.weight"] == 0).float().mean() == 0.5


@pytest.mark.parametrize(
    ("tool", "how", "message"),
    [
        ("quantize:export=net.bin", {}, "none of the suffixes"),
        ("quantize:export=none/net.pt2", {}, "none/net.pt2 cannot be written: No such file"),
        ("prune:bake=net.pt2", {"called": False}, "not those of one model, but of no module"),
        ("quantize:export=net.pt2", {"control": True}, "torch.export refuses the model"),
        ("quantize:export=net.safetensors", {}, "the suffix .safetensors a file has no operators"),
        ("prune:method=channel,cut=true,bake=net.keras", {}, "has none of the suffixes"),
        ("quantize:export=net.pt2", {"full": True}, "File too large"),
    ],
)
def test_what_amanda_run_cannot_export_is_one_line(
    tmp_path: Path, tool: str, how: Any, message: str
) -> None:
    """Status 2, and nothing is left; what is known before stops before the program."""
    done = run(tmp_path, tool, **how)
    lines = [line for line in done.stderr.splitlines() if line.startswith("amanda: error")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in done.stderr
    assert ("done" in done.stdout) == (
        "cannot be written" not in message and "suffix" not in message
    )
    assert [*(tmp_path / "inner").iterdir()] == []


@pytest.mark.parametrize(
    ("name", "planted"),
    [("CNN", "Sequential.3/conv2d:0"), ("CNN", "Sequential.6/linear:0"),
     ("ViT", "VisionTransformer.blocks.0.norm2/layer_norm:0"),
     ("ViT", "VisionTransformer.blocks.1.attn.qkv/linear:0"),
     ("ViT", "VisionTransformer.blocks.1.mlp.fc2/linear:0"),
     ("GPT-2", "GPT2LMHeadModel.transformer.h.1.mlp.c_fc/addmm:0"),
     ("Llama", "LlamaForCausalLM.model.layers.1.self_attn.q_proj/linear:0")],
)  # fmt: skip
def test_diff_names_the_operator_that_is_wrong_in_onnx_runtime(name: str, planted: str) -> None:
    """By PyTorch's id of it: the weight of one operator is another one in the file."""
    onnx = pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("amanda_onnx", reason="nox -s exports runs it")
    model, inputs = exports.build(name)
    if hasattr(model, "config"):
        model.config.use_cache = False
    weight = planted.partition(".")[2].partition("/")[0] + ".weight"
    options: Any = {"dynamo": True, "verbose": False, "optimize": False}
    proto = torch.onnx.export(model, kwargs=inputs, **options).model_proto
    exact = amanda.tools.load("diff")(tensors="activations")
    with torch.no_grad(), amanda.apply(exact):
        model(**inputs)
    for is_wrong in (False, True):
        if is_wrong:
            [part] = [each for each in proto.graph.initializer if each.name == weight]
            value = onnx.numpy_helper.to_array(part).copy()
            value.flat[::7] += np.float32(0.1)
            part.CopyFrom(onnx.numpy_helper.from_array(value, weight))
        session = ort.InferenceSession(proto.SerializeToString())
        tool = amanda.tools.load("diff")(
            reference=exact, tensors="activations", tolerance=1e-3, align="value"
        )
        with amanda.apply(tool):
            session.run(None, {key: value.numpy() for key, value in inputs.items()})
        first = tool.result()["summary"]["first"]
        assert (first and first["reference"]) == (planted if is_wrong else None)
        assert not is_wrong or first["module"] == planted.partition("/")[0].partition(".")[2]


@NEEDS_ONNX
def test_the_commands_from_training_to_serving_run(tmp_path: Path) -> None:
    """The page's commands, as they stand: what is served is as accurate as what was trained."""
    driver = ROOT / "amanda-core/examples/amanda-onnx"
    options = "-q", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "driver")
    run_python("-m", "pip", "install", *options, str(driver), check=True)
    paths = os.pathsep.join([str(tmp_path / "driver"), *os.environ.get("PYTHONPATH", "").split()])
    text = (ROOT / "amanda-tools/docs/tasks/quantize-a-model.md").read_text()
    commands = text.partition("```sh\n")[2].partition("```")[0].splitlines()
    program = ROOT / "amanda-tools/examples/serving.py"
    (tmp_path / program.name).write_bytes(program.read_bytes())
    printed = []
    for command in commands:
        first, *words = shlex.split(command, comments=True)
        words = [*(["-m", "amanda"] if first == "amanda" else []), *words]
        done = run_python(*words, cwd=tmp_path, env={"PYTHONPATH": paths})
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert len(commands) == 4
    assert "exported 2 ops" in printed[1]
    exact, served = (float(text.split("%")[0].split()[-1]) for text in printed[2:])
    assert exact > 96
    assert abs(served - exact) < 1
    assert printed[3].startswith("ONNX Runtime: ")
    assert "diff: no divergence" in printed[3]
