"""``diff``: the first divergence of two runs, and nothing where there is none."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amanda.testing import loopback as lb
from amanda_tools._values.recordings import Recording, TensorRecord
from amanda_tools.diff import DiffTool
from amanda_tools.diff.comparison import compare_tensors, distance
from amanda_tools.dump import DumpTool
from tests import models
from tests.running import applied, run_python


def step(model: nn.Module, inputs: Any) -> Callable[[], None]:
    def run() -> None:
        torch.manual_seed(5)
        models.loss(model(**inputs)).backward()

    return run


# -- two runs --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "bert", "gpt2"])
def test_a_run_agrees_with_itself(name: str) -> None:
    """The same model and data twice: every tensor of both passes is the same."""
    model, inputs = models.build(name)
    reference = applied(DiffTool(), step(copy.deepcopy(model), inputs))
    found = applied(DiffTool(reference=reference, tolerance=0), step(model, inputs)).summary()
    assert found["first"] is None
    assert found["agreeing"] == found["compared"] == len(reference.entries) > 50
    assert found["only_here"] == found["only_in_reference"] == []


class Net(nn.Module):
    """Some layers, and a functional line that a copy can change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) * self.factor
        return torch.tanh(self.second(h))


def test_a_perturbed_operator_is_the_first_divergence() -> None:
    """Of a copied model with one changed line that line's operator is named."""
    torch.manual_seed(0)
    net, x = Net(), torch.rand(3, 4)
    changed = copy.deepcopy(net)
    changed.factor = 1.001
    reference = applied(DiffTool(), lambda: net(x).sum().backward())
    tool = applied(DiffTool(reference=reference), lambda: changed(x).sum().backward())
    first = tool.summary()["first"]
    assert (first["id"], first["tensor"], first["step"]) == ("Net/mul:0", "output0", 0)
    assert first["relative_error"] == pytest.approx(1e-3, rel=1e-2)
    assert first["reference"] == "Net/mul:0"
    before = [pair.record.id for pair in tool.pairs()][: tool.pairs().index(_first(tool))]
    assert before == ["Net.first/linear:0", "Net/tanh:0"]
    out = io.StringIO()
    tool.print_summary(out)
    assert "first divergence: mul, op Net/mul:0" in out.getvalue()


def _first(tool: DiffTool) -> Any:
    return next(pair for pair in tool.pairs() if not pair.agrees)


def test_a_changed_weight_is_found_at_its_layer() -> None:
    """One weight of one layer of a ResNet: the convolution that reads it diverges first."""
    model, inputs = models.build("resnet18")
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.layer3[1].conv1.weight[0, 0, 0, 0] += 0.5  # type: ignore[index,union-attr,operator]
    reference = applied(DiffTool(tensors="activations"), step(model, inputs))
    tool = applied(DiffTool(tensors="activations", reference=reference), step(changed, inputs))
    assert tool.summary()["first"]["id"] == "ResNet.layer3.1.conv1/conv2d:0"


def test_a_narrower_type_is_within_its_precision() -> None:
    """float32 against bfloat16: errors of some 2^-8, within a tolerance of 0.1."""
    model, inputs = models.build("bert", training=False)
    narrow = copy.deepcopy(model).bfloat16()
    reference = applied(DiffTool(tensors="activations"), lambda: model(**inputs))
    options = {"tensors": "activations", "reference": reference}
    strict = applied(DiffTool(**options), lambda: narrow(**inputs))
    assert strict.summary()["first"] is not None
    loose = applied(DiffTool(tolerance=0.1, **options), lambda: narrow(**inputs))
    assert loose.summary()["first"] is None
    errors = [pair.relative for pair in loose.pairs()]
    assert 2**-10 < max(errors) < 2**-3


def test_gradients_are_compared_too() -> None:
    """A gradient that differs although all activations agree."""

    class Twice(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2 * Twice.factor

    x = torch.rand(3, requires_grad=True)

    def run() -> None:
        Twice.apply(x.sin()).sum().backward()

    reference = applied(DiffTool(), run)
    Twice.factor = 1.5
    first = applied(DiffTool(reference=reference), run).summary()["first"]
    assert (first["id"], first["direction"]) == ("/Twice:0/grad/TwiceBackward:0", "backward")


# -- alignment -------------------------------------------------------------------


def test_models_of_other_names_are_aligned_by_order() -> None:
    """No id is common; the order of types pairs them, and what is extra is listed."""

    class Port(nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.a, self.b = net.first, net.second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(x)) * 1.0)).abs()

    torch.manual_seed(0)
    net, x = Net(), torch.rand(3, 4)
    reference = applied(DiffTool(tensors="activations"), lambda: net(x))
    tool = applied(DiffTool(tensors="activations", reference=reference), lambda: Port(net)(x))
    found = tool.summary()
    assert found["first"] is None
    assert found["compared"] == 5
    assert found["only_here"] == ["Port/abs:0"]
    assert found["only_in_reference"] == []
    strict = applied(DiffTool(align="id", reference=reference), lambda: Port(net)(x))
    assert strict.summary()["compared"] == 0


def test_operators_of_two_modules_of_both_runs_are_not_paired() -> None:
    """A program may index in a module, where the other one indexes something else outside of it."""

    class Indexing(nn.Linear):
        is_inner = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if not self.is_inner else y + 0 * torch.arange(4)[1:3].sum()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Indexing(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            is_outer = not self.inner[0].is_inner
            return self.inner(x) + 0 * (torch.arange(6)[4:].sum() if is_outer else 0)

    net, x = Outer(), torch.rand(3, 4)
    reference = applied(DiffTool(tensors="activations"), lambda: net(x))
    Indexing.is_inner = True
    tool = DiffTool(tensors="activations", reference=reference, align="value")
    assert applied(tool, lambda: net(x)).summary()["first"] is None


def record(array: Any) -> TensorRecord:
    return TensorRecord(
        "a", "t", "", "forward", "", "activations", "output0", 0, 0, True, lambda: np.array(array)
    )


def test_channels_last_meets_channels_first() -> None:
    """Data of both layouts is compared in one of them."""
    array = np.random.default_rng(0).random((2, 3, 4, 5))
    for ours, theirs in (
        (array, array.transpose(0, 2, 3, 1)),
        (array.transpose(0, 2, 3, 1), array),
    ):
        pair = compare_tensors(record(ours), record(theirs), 0.0)
        assert pair.agrees
        assert "channels last" in pair.note
    other = compare_tensors(record(array), record(array[..., :2]), 1.0)
    assert (other.agrees, other.largest) == (False, None)
    assert "shapes" in other.note


def test_distances() -> None:
    """Against numpy, with zeros, NaN and infinities."""
    generator = np.random.default_rng(1)
    a, b = generator.random(50), generator.random(50)
    relative, largest, _ = distance(a, b)
    assert relative == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert largest == pytest.approx(np.abs(a - b).max())
    nan, inf = math.nan, math.inf
    assert distance(np.array([nan, inf, 1]), np.array([nan, inf, 1]))[0] == 0
    assert distance(np.array([nan, 1]), np.array([1.0, 1]))[0] == inf
    assert distance(np.array([inf]), np.array([-inf]))[0] == inf
    assert distance(np.array([1.0]), np.array([0.0]))[0] == inf
    assert distance(np.zeros(0), np.zeros(0))[0] == 0


# -- files -----------------------------------------------------------------------

PROGRAM = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
x = torch.rand(3, 4)
h = model[1](model[0](x)) * float(sys.argv[1])
model[2](h).sum().backward()
"""


def test_from_the_command_line(tmp_path: Path) -> None:
    """The first run is recorded, the second compared."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(tool: str, folder: str, factor: str) -> str:
        words = ["-m", "amanda", "run", "-t", tool, "-o", folder, "program.py", factor]
        done = run_python(*words, cwd=tmp_path, check=True)
        return done.stdout

    run("diff", "before", "1")
    assert "no divergence" in run("diff:reference=before", "same", "1")
    assert "first divergence: mul, op /mul:0" in run("diff:reference=before", "after", "1.5")
    found = json.loads((tmp_path / "after/diff.json").read_text())
    assert found["summary"]["first"]["id"] == "/mul:0"


def test_a_dump_can_be_the_reference(tmp_path: Path) -> None:
    """The files of ``dump`` are a recording too; what is none is refused."""
    dump = applied(DumpTool(tensors="activations"), lambda: torch.ones(2).exp())
    dump.write_files(tmp_path, "dump")
    tool = applied(DiffTool(reference=str(tmp_path)), lambda: torch.ones(2).exp())
    assert (tool.summary()["first"], tool.summary()["compared"]) == (None, 2)
    assert len(Recording.read(tmp_path / "dump.index.json").records) == 2
    with pytest.raises(ValueError, match="recordings"):
        DiffTool(reference=str(tmp_path / ".."))
    with pytest.raises(ValueError, match="json cannot be read: No such file"):
        DiffTool(reference=str(tmp_path / "nothing.json"))


@pytest.mark.parametrize("lacks", ["here", "in_reference"])
def test_a_kind_of_tensors_that_one_run_lacks_is_named(lacks: str) -> None:
    """Its operators are not listed one by one as those of one run only."""
    kinds = ["activations", "gradients"]
    runs = [kinds[:1], kinds] if lacks == "here" else [kinds, kinds[:1]]
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        x.exp().sum().backward()  # type: ignore[no-untyped-call]

    reference = applied(DiffTool(tensors=runs[0]), run)
    tool = applied(DiffTool(reference=reference, tensors=runs[1]), run)
    found = tool.summary()
    assert found["only_here"] == found["only_in_reference"] == []
    assert found[f"kinds_only_{lacks}"] == ["gradients"]
    which = "the reference" if lacks == "here" else "this run"
    assert f"diff: {which} has no gradients" in [table.title for table in tool.tables()]


def test_the_toy_framework() -> None:
    """The tool has no branch for a framework."""

    def run(number: float) -> Callable[[], Any]:
        return lambda: lb.relu(lb.mul(lb.tensor([1.0, -2.0]), number))

    reference = applied(DiffTool(), run(2.0))
    tool = applied(DiffTool(reference=reference), run(3.0))
    assert tool.summary()["first"]["id"] == "/mul:0"
