"""``stats`` and ``sparsity``, against numpy on the whole of the values."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import amanda
from amanda_tools._values import moments as moments_module
from amanda_tools._values.moments import KnownMoments, Moments
from amanda_tools._values.tensors import reader_of
from amanda_tools.sparsity import SparsityTool, pattern_share
from amanda_tools.stats import StatsTool
from tests.running import applied, run_python


def rows_of(tool: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["id"], row["tensor"]): row for row in tool.op_rows()}


# -- the sums -------------------------------------------------------------------

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_parts_add_up_to_the_whole(parts: list[list[float]]) -> None:
    """Moments, extremes, zeros and histogram of parts are those of all values at once."""
    moments = Moments()
    for part in parts:
        moments.add(np.array(part))
    whole = np.concatenate([np.array(part) for part in parts])
    row = moments.row()
    assert row["mean"] == pytest.approx(whole.mean(), rel=1e-9, abs=1e-9)
    assert row["std"] == pytest.approx(whole.std(), rel=1e-6, abs=1e-6)
    assert (row["min"], row["max"]) == (whole.min(), whole.max())
    assert row["zeros"] == (whole == 0).sum()
    assert sum(count for _, _, count in row["histogram"]) == whole.size
    for low, high, count in row["histogram"]:
        if 2.0**-29 < abs(low) < 2.0**29:
            inside = (whole >= low) & (whole < high) if low > 0 else (whole > low) & (whole <= high)
            assert count == inside.sum()


def test_large_tensors_are_taken_in_parts() -> None:
    """The figures and the histogram of many elements, in any order of memory."""
    array = np.random.default_rng(0).normal(size=(500, 400)) ** 9
    array[::7] = 0
    moments = Moments()
    moments.add(array.T)
    row = moments.row()
    assert row["mean"] == pytest.approx(array.mean())
    assert row["std"] == pytest.approx(array.std())
    assert (row["min"], row["max"]) == (array.min(), array.max())
    exponents = np.clip(np.frexp(array[array > 0])[1] - 1, -30, 30)
    powers, counts = np.unique(exponents, return_counts=True)
    expected = [[2.0**e, 2.0 ** (e + 1), n] for e, n in zip(powers, counts, strict=True)]
    assert [bar for bar in row["histogram"] if bar[0] > 0] == expected


def test_units_of_tensors_with_and_without_zeros() -> None:
    """A unit is dead that was zero in every tensor; of one without elements all units are."""
    for arrays, dead in (
        ([np.zeros((2, 3)), np.array([[1.0, 0.0, 0.0]])], 2),
        ([np.ones((2, 3)), np.zeros((2, 3))], 0),
        ([np.full((2, 3), math.nan)], 0),
        ([np.ones((0, 3))], 3),
    ):
        moments = Moments(unit_axis=1)
        for array in arrays:
            moments.add(array)
        assert moments.row()["dead_units"] == dead


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_each_type_of_numbers_has_the_figures_of_its_values(dtype: str) -> None:
    """Zeros of both signs, subnormal numbers, the largest, NaN and infinities, against float64."""
    limits = np.finfo(dtype)
    special = [0.0, -0.0, limits.smallest_subnormal, -limits.smallest_subnormal, limits.tiny]
    special += [limits.max, -limits.max, 2.0**-31, 2.0**-30, -(2.0**-24), 1.0, -3.0]
    finite = np.array(special, dtype=dtype)
    array = np.append(finite, np.array([math.nan, math.inf, -math.inf, -math.nan], dtype=dtype))
    moments = Moments()
    moments.add(array)
    row = moments.row()
    assert row["mean"] == pytest.approx(finite.mean(dtype=np.float64))
    assert row["std"] == pytest.approx(float(np.std(finite, dtype=np.longdouble)))
    assert (row["min"], row["max"]) == (-limits.max, limits.max)
    assert (row["nan"], row["inf"], row["zeros"]) == (2, 2, int((finite == 0).sum()))
    wide = finite.astype(np.float64)
    exponents = np.clip(np.floor(np.log2(np.abs(wide[wide != 0]))), -30, 30)
    signed = zip(np.sign(wide[wide != 0]), exponents, strict=True)
    expected = Counter((float(sign), float(exponent)) for sign, exponent in signed)
    bars = [bar for bar in row["histogram"] if bar[0] or bar[1]]
    found = {
        (-1.0, math.log2(-high)) if high <= 0 else (1.0, math.log2(low)): count
        for low, high, count in bars
    }
    assert found == expected


def test_the_same_elements_are_computed_with_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor, its transposed view and a copy: their moments are taken once, and those of other
    elements, another order or another type again. The units of each are its own."""
    taken = list[Any]()
    count = np.bincount
    monkeypatch.setattr(np, "bincount", lambda *a, **k: (taken.append(a), count(*a, **k))[1])
    array = np.array([[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]], dtype=np.float32)
    known = KnownMoments(zeros_only=False)
    first = known.of(array, None, 1)
    assert (first.row()["dead_units"], first.row()["units"], len(taken)) == (1, 3, 1)
    transposed = known.of(array.T, None, 1)
    assert (transposed.row()["dead_units"], transposed.row()["units"], len(taken)) == (0, 2, 1)
    assert known.of(array.copy(), None, None).row()["mean"] == first.mean
    assert len(taken) == 1
    for other in (-array, array[::-1].copy(), array.astype(np.float64)):
        moments = known.of(other, (-math.inf, 4.0), None)
        assert moments.row()["mean"] == other.mean()
        assert moments.row()["saturated"] == (other >= 4.0 - 0.01).sum()
    assert len(taken) == 4


def test_moments_of_many_arrays_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are remembered as are allowed; the ones that were asked for last."""
    monkeypatch.setattr(moments_module, "_KNOWN", 2)
    known = KnownMoments(zeros_only=False)
    arrays = [np.full(3, float(number)) for number in range(3)]
    of = [known.of(array, None, None) for array in arrays[:2]]
    assert known.of(arrays[0], None, None) is of[0]
    known.of(arrays[2], None, None)
    assert known.of(arrays[0], None, None) is of[0]
    assert known.of(arrays[1], None, None) is not of[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.expand(3, *x.shape),
        lambda x: x[:0],
        lambda x: x[0, 0],
        lambda x: x.bfloat16(),
        lambda x: x.half().t(),
        lambda x: x.double(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: x.requires_grad_(),
        lambda x: x.view(1, 2, 3, 2).to(memory_format=torch.channels_last),
    ],
)
def test_the_memory_of_a_tensor_is_read_in_place(make: Callable[[Any], Any]) -> None:
    """The view has the values of the copy; PyTorch may resize the memory later, as FSDP does."""
    tensor = make(torch.arange(12.0).reshape(3, 4) - 5)
    reader = reader_of(tensor)
    view = reader.numpy_view(tensor)
    np.testing.assert_array_equal(view, reader.numpy(tensor))
    assert view.dtype == reader.numpy(tensor).dtype
    del view
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() + 64)


def test_zeros_without_memory_are_read() -> None:
    """Forward-mode AD makes tensors of zeros that have no memory: they are read as others."""
    zeros = torch._efficientzerotensor((2, 3))  # noqa: SLF001
    tool = applied(StatsTool(), lambda: torch.sigmoid(zeros))
    [row] = rows_of(tool).values()
    assert row["min"] == row["max"] == 0.5
    view = reader_of(zeros).numpy_view(zeros)
    np.testing.assert_array_equal(view, np.zeros((2, 3)))


def test_a_tensor_of_nan_has_no_mean() -> None:
    """Where no element is finite there is nothing to take a mean of."""
    moments = Moments()
    moments.add(np.array([math.nan]))
    assert moments.row()["mean"] is None


# -- on a model -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_looked_at_are_counted_by_kind() -> None:
    """Statistics are of dense real floating-point tensors; others are counted by kind, integers
    left out."""
    tool = StatsTool(tensors="activations")
    with amanda.apply(tool):
        torch.fft.fft(torch.ones(3)).abs().int()
        torch.ones(3).to_sparse() * 2
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    expected = {"complex64": 1, "sparse_coo": 2, "quint8": 1}
    assert tool.result()["summary"]["not_looked_at"] == expected
    [table] = [table for table in tool.tables() if "not looked at" in table.title]
    assert dict(table.rows) == expected


def test_activations_weights_and_gradients_of_a_layer() -> None:
    """Three steps of a layer, against the same values taken with hooks."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    outputs: list[Any] = []
    data = [torch.rand(5, 4, requires_grad=True) for _ in range(3)]

    def run() -> None:
        for x in data:
            y = layer(x)
            outputs.append(y.detach().numpy().astype(np.float64))
            (y * y).sum().backward()

    tool = applied(StatsTool(), run)
    rows = rows_of(tool)
    activations = rows["Linear/linear:0", "output0"]
    everything = np.stack(outputs)
    assert activations["executions"] == 3
    assert activations["mean"] == pytest.approx(everything.mean())
    assert activations["std"] == pytest.approx(everything.std())
    weight = rows["Linear/linear:0", "weight"]
    assert weight["max"] == pytest.approx(float(layer.weight.detach().max()))
    [gradients] = [
        row for (_, tensor), row in rows.items() if row["type"] == "linear_backward"
        and tensor == "grad1"
    ]  # fmt: skip
    of_data = np.stack([x.grad.numpy().astype(np.float64) for x in data])  # type: ignore[union-attr]
    assert gradients["mean"] == pytest.approx(of_data.mean())
    assert gradients["std"] == pytest.approx(of_data.std())


class Tied(nn.Module):
    """A language model whose output layer has the weight of its embedding, and a free scale."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.out.weight, self.scale = self.emb.weight, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.out(self.fc(self.norm(self.emb(x))) * self.scale))


def test_a_parameter_has_one_row_and_so_has_its_gradient() -> None:
    """Weights of norms and free parameters are weights, a tied one is looked at once, and the row
    of a gradient is of the sum that the optimizer sees, in place of those that hand it on."""
    torch.manual_seed(0)
    model, gradients = Tied(), dict[str, list[Any]]()

    def run() -> None:
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([[1, 2, 3]])).pow(2).sum().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                gradients.setdefault(name, []).append(parameter.grad.numpy().copy())

    tool = applied(StatsTool(), run)
    rows = [row for row in tool.op_rows() if row["parameter"]]
    names = [name for name, _ in model.named_parameters()]
    weights = {row["parameter"]: row for row in rows if row["kind"] == "weights"}
    found = {row["parameter"]: row for row in rows if row["kind"] == "gradients"}
    assert sorted(names) == sorted(weights) == sorted(found)
    assert len(rows) == 2 * len(names)
    for name, arrays in gradients.items():
        assert (weights[name]["executions"], found[name]["executions"]) == (2, 2)
        everything = np.stack(arrays).astype(np.float64)
        assert found[name]["mean"] == pytest.approx(everything.mean(), abs=1e-6)
        assert found[name]["max"] == pytest.approx(everything.max())
    others = [r["id"] for r in tool.op_rows() if r["kind"] == "gradients" and not r["parameter"]]
    assert not [op_id for op_id in others if "TBackward" in op_id or "Accumulate" in op_id]
    # The gradient of the transposed weight is another order of the same elements.
    assert [op_id for op_id in others if "AddmmBackward" in op_id] == [
        "Tied.fc/linear:0/grad/AddmmBackward0:0"
    ]
    keys = {look.key for look in tool.series}
    assert keys == set(tool.watched)
    assert {"emb.weight", "emb.weight gradient"} <= keys
    [table] = [table for table in tool.tables() if "parameters" in table.title]
    assert sorted(row[0] for row in table.rows) == sorted(names)
    assert table.columns[-2:] == ["gradient std", "gradient max"]


def test_gradients_of_zeros_are_not_taken_for_one() -> None:
    """Two gradients within an operator are one if their elements show it."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight)

    model, x = Scaled(), torch.zeros(2, 3)

    def run() -> None:
        model(x).sum().backward()

    found = applied(StatsTool(tensors="gradients"), run).watched
    assert {key.rpartition("/")[2] for key in found} >= {"weight gradient"}
    x.fill_(1)
    assert len(applied(StatsTool(tensors="gradients"), run).watched) < len(found)


def test_gradients_that_are_returned_are_those_of_the_operators() -> None:
    """``autograd.grad`` accumulates none: the row is of the gradient of each operator."""
    model = Tied()

    def run() -> None:
        torch.autograd.grad(model(torch.tensor([[1]])).sum(), list(model.parameters()))

    tool = applied(StatsTool(tensors="gradients"), run)
    found = {row["parameter"]: row["executions"] for row in tool.op_rows() if row["parameter"]}
    assert found == {**dict.fromkeys(dict(model.named_parameters()), 1), "emb.weight": 2}


def test_parameters_of_one_name_in_two_models_are_told_apart() -> None:
    """Those of a second model are named after it, too."""
    models = nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2)), nn.Bilinear(2, 2, 2)
    x = torch.rand(1, 2)

    def run() -> None:
        models[2](models[0](x), models[1](x))

    tool = applied(SparsityTool(tensors="weights"), run)
    assert list(tool.watched) == [
        "weight",
        "Sequential: 0.weight",
        "Sequential: 0.bias",
        "Bilinear: weight",
        "Bilinear: bias",
    ]


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
def test_a_parameter_belongs_to_the_model_that_holds_it(wrap: Any) -> None:
    """An operator outside of both models adds its gradient to the rows of the one whose parameter
    it reads, and a parameter of both is looked at where either uses it."""
    first, second = nn.Sequential(nn.Linear(3, 5)), nn.Sequential(nn.Linear(3, 5))
    second[0].bias = first[0].bias
    wrapped, x = [wrap(model) for model in (first, second)], torch.rand(4, 3)

    def run() -> None:
        for model in wrapped:
            model(x)
        amanda.new_iteration()
        loss = wrapped[0](x).sum() + 1000 * nn.functional.linear(x, second[0].weight).sum()
        loss.backward()

    watched = applied(StatsTool(tensors=["weights", "gradients"]), run).watched
    assert [key for key, found in watched.items() if found.kind == "weights"] == [
        *("0.weight", "0.bias", "Sequential@1: 0.weight", "Sequential@1: 0.bias")
    ]
    for key, tensor in (
        ("0.weight", first[0].weight),
        ("0.bias", first[0].bias),
        ("Sequential@1: 0.weight", second[0].weight),
    ):
        moments = watched[f"{key} gradient"].moments
        assert moments.executions == 1
        assert moments.mean == pytest.approx(tensor.grad.mean().item())


def test_dead_units_and_saturation() -> None:
    """A channel that is always zero is dead; outputs near the bounds of a sigmoid saturate."""
    conv = nn.Conv2d(1, 3, 1)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([1.0, -1.0, 2.0]).view(3, 1, 1, 1))
        conv.bias.zero_()
    data = torch.rand(2, 1, 4, 4) + 0.1

    def run() -> None:
        conv(data).relu().clamp(max=9)
        torch.sigmoid(torch.tensor([-100.0, 0.0, 1.0, 100.0]))

    tool = applied(StatsTool(tensors="activations"), run)
    rows = rows_of(tool)
    convolution = rows["Conv2d/conv2d:0", "output0"]
    assert (convolution["units"], convolution["dead_units"]) == (3, 0)
    assert rows["/sigmoid:0", "output0"]["saturated"] == 2
    assert tool.summary()["saturated"] == {"/sigmoid:0 output0": 0.5}
    dead = applied(StatsTool(tensors="activations"), lambda: nn.ReLU()(torch.rand(3, 2) - 1))
    assert dead.summary()["dead_units"] == {"ReLU/relu:0 output0": 2}


def test_selection_by_frequency_and_kind() -> None:
    """Only tensors of the kinds are watched, and only at each N-th execution."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))

    def run() -> None:
        for _ in range(5):
            model(torch.rand(1, 2)).sum().backward()

    tool = applied(StatsTool(tensors="activations", every=2), run)
    modules = {key: row for key, row in rows_of(tool).items() if "Sequential" in key[0]}
    assert {(i, t): r["executions"] for (i, t), r in modules.items()} == {
        ("Sequential.0/linear:0", "output0"): 3,
        ("Sequential.1.0/linear:0", "output0"): 3,
    }
    assert {look.step for look in tool.series} == {0, 2, 4}
    gradients = applied(StatsTool(tensors="gradients"), run)
    assert all(row["direction"] == "backward" for row in gradients.op_rows())


@pytest.mark.parametrize("options", [{"tensors": "colours"}, {"every": 0}, {"tensors": ()}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """Kinds and frequencies that cannot be."""
    with pytest.raises(ValueError, match=r"tensors|every"):
        StatsTool(**options)


# -- files --------------------------------------------------------------------------


def trained() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    for _ in range(3):
        layer(torch.rand(5, 4)).tanh().sum().backward()


def test_the_series_as_a_table(tmp_path: Path) -> None:
    """One line per look, with the figures of that execution."""
    tool = applied(StatsTool(tensors="activations"), trained)
    [path] = tool.write_files(tmp_path, "stats")
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(tool.series)
    steps = [line["step"] for line in lines if line["key"] == "Linear/linear:0 output0"]
    assert steps == ["0", "1", "2"]
    limited = applied(StatsTool(tensors="activations", limit=2), trained)
    assert len(limited.series) == 2
    assert limited.summary()["looks_not_in_series"] == limited.summary()["looks"] - 2


def test_the_series_for_tensorboard(tmp_path: Path) -> None:
    """TensorBoard's own reader finds the scalars and the histogram."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tool = applied(StatsTool(tensors="activations", tensorboard=True, csv=False), trained)
    [path] = tool.write_files(tmp_path, "stats")
    assert path.parent.name == "stats.tensorboard"
    read = accumulators.EventAccumulator(str(path.parent))
    read.Reload()
    row = rows_of(tool)["Linear/linear:0", "output0"]
    means = [event.value for event in read.Scalars("Linear/linear:0/output0/mean")]
    assert np.mean(means) == pytest.approx(row["mean"], rel=1e-5)
    [histogram] = read.Histograms("Linear/linear:0/output0/histogram")
    assert histogram.histogram_value.num == row["elements"]
    assert histogram.histogram_value.max == pytest.approx(row["max"])


def test_a_run_writes_for_tensorboard_when_it_ends(tmp_path: Path) -> None:
    """Nothing is imported or started while Python ends; TensorFlow is not imported at all."""
    pytest.importorskip("tensorboard")
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, sys, torch\n"
        "atexit.register(lambda: print('tensorflow' in sys.modules))\n"
        "torch.ones(2).exp()\n",
        encoding="utf-8",
    )
    words = ["-m", "amanda", "run", "-t", "stats:tensorboard=true", "-o", "out", program.name]
    done = run_python(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is lost" not in done.stderr
    assert done.stdout.startswith("False")
    [path] = (tmp_path / "out/stats.tensorboard").iterdir()
    assert path.stat().st_size > 100


def test_results_are_plain_data_and_tables_show_them() -> None:
    """JSON takes the results; the tables name the tensors."""
    for cls in (StatsTool, SparsityTool):
        tool = applied(cls(), trained)
        assert json.loads(json.dumps(tool.result())) == tool.result()
        out = io.StringIO()
        tool.print_summary(out)
        assert "\n  weight  " in out.getvalue()


# -- sparsity -------------------------------------------------------------------------


@given(st.integers(1, 4), st.data())
def test_patterns_along_an_axis(kept: int, data: st.DataObject) -> None:
    """The share of groups of four that the pattern allows, by the definition."""
    flags = data.draw(st.lists(st.booleans(), min_size=24, max_size=24))
    array = np.array(flags, dtype=float).reshape(2, 4, 3)
    groups = [array[i, :, k] for i in range(2) for k in range(3)]
    expected = np.mean([np.count_nonzero(group) <= kept for group in groups])
    assert pattern_share(array, kept, 4, 1) == pytest.approx(expected)
    assert pattern_share(array, kept, 4, 2) is None


def test_zeros_of_a_pruned_and_a_dense_layer() -> None:
    """A weight with a 2:4 mask conforms; the activations' zeros are those of the ReLU."""
    torch.manual_seed(0)
    pruned, dense = nn.Linear(8, 4), nn.Linear(4, 4)
    with torch.no_grad():
        pruned.weight.view(4, 2, 4)[:, :, :2] = 0
    kept: list[Any] = []

    def run() -> None:
        kept.append(torch.relu(pruned(torch.randn(6, 8))))
        dense(kept[-1])

    tool = applied(SparsityTool(), run)
    rows = rows_of(tool)
    assert rows["Linear/linear:0", "weight"]["pattern_share"] == 1
    assert rows["Linear/linear:0", "weight"]["sparsity"] == 0.5
    assert rows["Linear@1/linear:0", "weight"]["pattern_share"] == 0
    zeros = float((kept[0] == 0).float().mean())
    assert rows["/relu:0", "output0"]["sparsity"] == pytest.approx(zeros)
    summary = tool.summary()
    assert (summary["conforming_weights"], summary["checked_weights"]) == (1, 2)
    assert summary["by_type"]["activations"]["relu"] == pytest.approx(zeros)
    # The biases, 4 and 4, are weights too.
    assert summary["weights"] == pytest.approx(16 / (32 + 16 + 4 + 4))


def test_convolutions_are_looked_at_along_their_inputs() -> None:
    """Of OIHW the groups lie along I."""
    conv = nn.Conv2d(8, 2, 3, bias=False)
    with torch.no_grad():
        conv.weight[:, ::2] = 0
    tool = applied(SparsityTool(tensors="weights"), lambda: conv(torch.rand(1, 8, 5, 5)))
    [row] = tool.op_rows()
    assert row["pattern_share"] == 1
    with pytest.raises(ValueError, match="pattern"):
        SparsityTool(pattern="4:2")


@pytest.mark.parametrize("name", ["stats", "sparsity"])
def test_operators_of_modules_come_first(name: str) -> None:
    """What a program does outside of its modules, such as initialising, stands behind them."""
    tool = amanda.tools.load(name)()
    with amanda.apply(tool):
        torch.zeros(4) + 1e6
        torch.nn.Linear(4, 4)(torch.ones(1, 4))
    table = next(iter(tool.tables()))
    assert [row[0].startswith("Linear/") for row in table.rows] == sorted(
        (row[0].startswith("Linear/") for row in table.rows), reverse=True
    )
    assert table.rows[0][0].startswith("Linear/")
    assert any(row[0].startswith("/") for row in table.rows)
