"""``flops`` on PyTorch: what it does not count, executions, memory, tables and files."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import amanda
from amanda.inline import Counter
from amanda.python.memo import Memo
from amanda.tools.description import OpDescription
from amanda_tools._operators.flop_registry import formula_of
from amanda_tools._operators.signature import OpSignature
from amanda_tools._output.units import format_short
from amanda_tools.flops import FlopsTool
from amanda_tools.flops.counting import SHAPES_KEPT, OpFlops
from amanda_tools.summary import SummaryTool
from tests.running import applied
from tests.torch.support import Cube

# -- batches that shapes do not show ------------------------------------------


@pytest.mark.parametrize(
    "case", ["samples", "ensemble", "ensemble of samples", "per sample gradients"]
)
def test_work_under_vmap_is_that_of_all_samples(case: str) -> None:
    """FLOPs, bytes and shapes have the axes that ``torch.vmap`` maps over, each axis once."""
    layer, x = nn.Linear(16, 32), torch.ones(4, 16)
    layers = [nn.Linear(16, 32) for _ in range(5)]
    stacked = torch.func.stack_module_state(layers)

    def call(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, (parameters, buffers), (x,))

    def each(parameters: Any, buffers: Any) -> torch.Tensor:
        return torch.vmap(lambda x: call(parameters, buffers, x))(x)

    run, shape = {
        "samples": (lambda: torch.vmap(layer)(x), [4, 32]),
        "ensemble": (lambda: torch.vmap(lambda p, b: call(p, b, x))(*stacked), [5, 4, 32]),
        "ensemble of samples": (lambda: torch.vmap(each)(*stacked), [5, 4, 32]),
        "per sample gradients": (
            lambda: torch.vmap(torch.func.grad(lambda x: layer(x).sum()))(x),
            [4, 32],
        ),
    }[case]
    flops, summary = FlopsTool(), SummaryTool()
    with amanda.apply(flops, summary):
        run()
    count = math.prod(shape)
    (row,) = (row for row in flops.op_rows() if row["type"] == "linear")
    (module, *_) = summary.result()["modules"]
    assert row["flops"] == module["flops"] == 2 * 16 * count
    assert module["outputs"][0]["shape"] == shape
    assert module["activation_bytes"] == 4 * count


# -- what is not counted ------------------------------------------------------


class Failing(torch.autograd.Function):
    """Cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def test_an_operator_that_raised_has_not_executed() -> None:
    """With and without a formula: the program may have caught the exception."""
    layer, tool = nn.Linear(4, 2), FlopsTool()
    with amanda.apply(tool):
        layer(torch.ones(3, 4))
        with pytest.raises(RuntimeError):
            layer(torch.ones(3, 5))
        with pytest.raises(RuntimeError):
            torch.linalg.cholesky(torch.zeros(2, 2))
        with pytest.raises(ZeroDivisionError):
            Failing.apply(torch.ones(2, requires_grad=True)).sum().backward()
    rows = {row["type"]: row for row in tool.op_rows()}
    assert (rows["linear"]["executions"], rows["linear"]["flops"]) == (1, 48)
    assert rows["linalg_cholesky"]["executions"] == 0
    executions = rows["Failing"]["executions"], rows["failing_backward"]["executions"]
    assert executions == (1, 0)


def test_a_function_that_an_operator_calls_is_unknown() -> None:
    """The products of a branch of ``torch.cond`` are not seen."""
    x = torch.rand(3, 3)
    found = applied(FlopsTool(), lambda: torch.cond(x.sum() > 0, torch.exp, torch.exp, (x,)))
    assert found.summary()["unknown_ops"] == {"cond": 1}


def test_unknown_operators_are_said() -> None:
    """A matrix exponential and somebody's own Function have no formula; their calls are counted."""

    def run() -> None:
        for _ in range(3):
            x = torch.rand(3, 3, requires_grad=True)
            torch.linalg.matrix_exp(x.detach())
            Cube.apply(x.relu()).sum().backward()
            amanda.new_iteration()

    tool = applied(FlopsTool(), run)
    found = tool.summary()
    assert found["unknown_ops"] == {"linalg_matrix_exp": 3, "Cube": 3, "cube_backward": 3}
    assert found["unknown_share"] == pytest.approx(3 / len(tool.op_rows()))
    assert {"relu", "relu_backward", "sum", "rand"} <= set(found["zero_ops"])
    out = io.StringIO()
    tool.print_summary(out)
    assert "types without a formula" in out.getvalue()
    assert "linalg_matrix_exp" in out.getvalue()


def test_moving_a_model_is_no_arithmetic() -> None:
    """What PyTorch asks of parameters when it converts a module is not unknown."""
    assert applied(FlopsTool(), lambda: nn.Linear(2, 2).double()).summary()["unknown_ops"] == {}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_count_item_by_item(layout: torch.layout) -> None:
    """Two and three rows of four, in five features; an attention within each item."""

    def nested(*items: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor(list(items), layout=layout)

    rows = nested(torch.rand(2, 4), torch.rand(3, 4))
    found = applied(FlopsTool(), lambda: functional.linear(rows, torch.rand(5, 4))).summary()
    assert found["flops"] == 2 * (2 + 3) * 4 * 5
    assert found["unknown_ops"] == {}
    heads = nested(*(torch.rand(n, 2, 4) for n in (3, 5))).transpose(1, 2)
    # Of the strided kind a transposed one is refused, of the jagged one a copy.
    heads = heads.contiguous() if layout is torch.strided else heads
    found = applied(
        FlopsTool(), lambda: functional.scaled_dot_product_attention(heads, heads, heads)
    ).summary()
    assert found["flops"] == 2 * 2 * (3 * 3 + 5 * 5) * (4 + 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_conversions_of_autocast_are_no_arithmetic() -> None:
    """Training in bfloat16 costs what it costs in float32, and nothing of it is unknown."""
    torch.manual_seed(3)
    net, x = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4)), torch.rand(2, 6)
    found = []
    for enabled in (False, True):
        tool = FlopsTool()
        with amanda.apply(tool), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            net(x).float().sum().backward()
        found.append(tool.result()["summary"])
    plain, mixed = found
    assert "to_copy_backward" in mixed["zero_ops"]
    assert mixed["unknown_ops"] == {}
    assert (mixed["flops"], mixed["flops_backward"]) == (plain["flops"], plain["flops_backward"])
    assert plain["flops"] == 2 * 2 * (6 * 5 + 5 * 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_is_no_work_for_a_native_encoder() -> None:
    """In eval mode PyTorch makes a nested tensor of what is not padded."""
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
    padded = torch.tensor([[False, False, False], [False, True, True]])

    def run() -> None:
        with torch.no_grad():
            encoder(torch.rand(2, 3, 8), src_key_padding_mask=padded)

    found = applied(FlopsTool(), run).summary()
    tokens, pairs = 3 + 1, 3 * 3 + 1
    assert found["flops"] == 2 * (tokens * (4 * 8 * 8 + 2 * 8 * 16) + pairs * 2 * 8)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", ["linear", "matmul", "attention"])
def test_gradients_of_nested_tensors_count_item_by_item(case: str) -> None:
    """Each of the two gradients of a product costs what the product does, in each item."""

    def nested(*shapes: tuple[int, ...]) -> torch.Tensor:
        items = [torch.rand(shape) for shape in shapes]
        return torch.nested.nested_tensor(items, requires_grad=True)

    if case == "linear":
        inputs = nested((2, 4), (3, 4)), torch.rand(5, 4, requires_grad=True)
        gradient, flops = nested((2, 5), (3, 5)), 2 * (2 + 3) * 4 * 5
    elif case == "matmul":
        inputs = nested((2, 2, 4), (2, 3, 4)), nested((2, 4, 5), (2, 4, 6))
        gradient, flops = nested((2, 2, 5), (2, 3, 6)), 2 * 2 * 4 * (2 * 5 + 3 * 6)
    else:
        inputs = tuple(nested((2, 3, 4), (2, 5, 4)) for _ in range(3))
        gradient, flops = nested((2, 3, 4), (2, 5, 4)), 2 * 2 * (3 * 3 + 5 * 5) * (4 + 4)
    function = functional.scaled_dot_product_attention
    function = {"linear": functional.linear, "matmul": torch.matmul}.get(case, function)
    found = applied(FlopsTool(), lambda: function(*inputs).backward(gradient)).summary()
    assert (found["flops"], found["flops_backward"]) == (flops, 2 * flops)
    assert found["unknown_ops"] == {}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", ["a batch of gradients", "a ragged axis"])
def test_gradients_whose_sizes_are_not_known_are_unknown(case: str) -> None:
    """The gradient of a product of unknown size is listed, and no silent zero; of a ragged axis
    PyTorch's code in Python runs the operators, which count."""

    def run() -> None:
        if case == "a ragged axis":
            items = [torch.rand(2, 4), torch.rand(3, 4)]
            x = torch.nested.nested_tensor(items, requires_grad=True, layout=torch.jagged)
            functional.linear(x, torch.rand(5, 4)).values().sum().backward()
        else:
            x = torch.rand(2, 4, requires_grad=True)
            directions = torch.rand(3, 2, 5)
            y = functional.linear(x, torch.rand(5, 4))
            torch.autograd.grad(y, x, directions, is_grads_batched=True)

    found = applied(FlopsTool(), run).summary()
    ragged = 2 * (2 + 3) * 5 * 4
    assert (found["flops"], found["flops_backward"]) == {
        "a ragged axis": (ragged, ragged), "a batch of gradients": (2 * 2 * 4 * 5, 0),
    }[case]  # fmt: skip
    assert sum(found["unknown_ops"][kind] for kind in found["unknown_ops"] if "backward" in kind)


@pytest.mark.parametrize("case", ["gradients", "gradients of samples", "Jacobians", "ensemble"])
def test_gradients_under_transforms_are_those_of_all_samples(case: str) -> None:
    """Backward operators under ``torch.func`` count as PyTorch's counter counts their kernels."""
    layer, x = nn.Linear(4, 5), torch.rand(3, 4)
    parameters, _ = torch.func.stack_module_state([nn.Linear(4, 5) for _ in range(6)])

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    def product(x: torch.Tensor) -> torch.Tensor:
        # FlopCounterMode fails where a module is called under jacrev.
        return functional.linear(x, layer.weight.detach())

    one = dict(layer.named_parameters())
    run: Any = {
        "gradients": lambda: torch.func.grad(loss)(one, x),
        "gradients of samples": lambda: torch.vmap(torch.func.grad(loss), (None, 0))(one, x),
        "Jacobians": lambda: torch.vmap(torch.func.jacrev(product))(x),
        "ensemble": lambda: torch.vmap(loss, (0, None))(parameters, x).sum().backward(),
    }[case]
    with FlopCounterMode(display=False) as counter:
        run()
    found = applied(FlopsTool(), run).result()["summary"]
    assert found["flops_backward"] > 0
    assert found["flops"] + found["flops_backward"] == counter.get_total_flops()
    assert not found["not_seen"]


# -- executions ---------------------------------------------------------------


def test_every_execution_counts_with_the_shapes_it_has() -> None:
    """One operator that runs on three sizes adds up; so do its gradients, in any order."""
    layer = nn.Linear(4, 5)

    def run() -> None:
        outputs = []
        for rows in (1, 2, 3):
            outputs.append(layer(torch.rand(rows, 4)).sum())
            amanda.new_iteration()
        for output in reversed(outputs):
            output.backward()

    tool = applied(FlopsTool(), run)
    rows = {row["id"]: row for row in tool.op_rows()}
    forward = rows["Linear/linear:0"]
    assert (forward["executions"], forward["flops"]) == (3, 2 * 4 * 5 * (1 + 2 + 3))
    assert tool.summary()["flops_backward"] == 2 * 4 * 5 * (1 + 2 + 3)
    assert forward["params"] == 25
    # The first step might be an evaluation, and training begin with the second one.
    assert forward["activation_bytes"] == 2 * 5 * 4


def test_work_that_formulas_do_not_describe_is_not_counted_as_theirs() -> None:
    """Products with a sparse tensor are unknown, of all elements or not; a gradient of a gradient
    of a loss counts zero as the loss does; what an optimizer multiplies is none of the model's."""
    model, x = nn.Linear(4, 3), torch.rand(6, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        (loss := functional.mse_loss(model(x), torch.ones(6, 3))).backward()
        return loss

    def run() -> None:
        optimizer.step(closure)
        loss = functional.mse_loss(model.weight, torch.ones(3, 4))
        (gradient,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        (gradient.ravel() @ torch.ones(12)).backward()
        torch.eye(6).to_sparse() @ x

    tool = applied(FlopsTool(), run)
    products = [row for row in tool.op_rows() if row["type"] in ("linear", "linear_backward")]
    found = tool.summary()
    assert found["unknown_ops"] == {"matmul": 1}
    assert (
        found["flops"] - 2 * 12
        == found["flops_backward"]
        == sum(row["flops"] for row in products if row["type"] == "linear_backward")
    )


def test_many_shapes_take_bounded_memory() -> None:
    """Shapes become a number once there are many: a decoder meets a new one at each step."""
    weight = torch.rand(2, 3)
    tool = FlopsTool()
    with amanda.apply(tool), torch.no_grad():
        for length in range(1, 2101):
            functional.linear(torch.empty(length, 3), weight)
            amanda.new_iteration()
    assert tool.summary()["flops"] == 2 * 6 * sum(range(1, 2101))
    signature = OpSignature("linear", weight=1, weight_layout="OI")
    about = OpDescription("linear:0", "linear", "linear", "", "pytorch/2/eager")
    known = OpFlops.of(about, formula_of("linear"), signature, Counter())
    lengths = range(1, 2 * SHAPES_KEPT)
    found = [known.flops((((length, 3), (2, 3)), ())) for length in lengths]
    assert found == [2 * 6 * length for length in lengths]
    (kept,) = (one for one in attrs.astuple(known, recurse=False) if isinstance(one, Memo))
    assert len(kept) <= SHAPES_KEPT


# -- memory -------------------------------------------------------------------


def test_bytes_follow_from_types_and_views_have_none() -> None:
    """Half precision takes half; a view writes nothing."""
    layer = nn.Linear(4, 6).bfloat16()
    tool = applied(FlopsTool(), lambda: layer(torch.rand(2, 4).bfloat16()).view(3, 4))
    rows = {row["type"]: row for row in tool.op_rows()}
    assert rows["linear"]["activation_bytes"] == 2 * 6 * 2
    assert rows["linear"]["weight_bytes"] == (24 + 6) * 2
    assert rows["view"]["activation_bytes"] == 0


def test_parameters_that_are_no_weights_count_too() -> None:
    """A learned offset counts, a buffer does not, and a shared parameter counts once, in the sum
    and at the operators of all modules together."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.tied = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
            self.tied.weight = self.first.weight
            self.offset = nn.Parameter(torch.zeros(7, 3))
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tied(self.first(self.first(x))) * self.scale + self.offset

    net = Net()
    found = applied(FlopsTool(), lambda: net(torch.rand(7, 3)))
    assert found.summary()["params"] == 3 * 3 + 3 + 7 * 3
    assert sum(row["params"] for row in found.op_rows()) == 3 * 3 + 3 + 7 * 3


# -- tables, files ------------------------------------------------------------


def test_tables_by_module_type_and_operator() -> None:
    """The largest table is chosen with ``by``."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)), nn.Linear(4, 1))
    for options, first in (
        ({"by": "module"}, {"0.0", "0.1", "1"}),
        ({"by": "op"}, {f"Sequential.{path}/linear:0" for path in ("0.0", "0.1", "1")}),
        ({"by": "type"}, {"linear"}),
    ):
        tool = applied(FlopsTool(**options), lambda: model(torch.rand(1, 4)))
        table = list(tool.tables())[1]
        assert {row[0] for row in table.rows} == first
        shares = [float(row[4].removesuffix(" %")) for row in table.rows]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(100, abs=0.2)


def test_the_result_is_plain_data_and_a_table(tmp_path: Path) -> None:
    """JSON takes it as it is; the CSV file has a line per operator."""
    tool = applied(FlopsTool(csv=True), lambda: nn.Linear(4, 5)(torch.rand(2, 4)).sum().backward())
    result = tool.result()
    assert json.loads(json.dumps(result)) == result
    [path] = tool.write_files(tmp_path, "flops")
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["id"] for line in lines] == [row["id"] for row in result["ops"]]
    assert sum(int(line["flops"]) for line in lines) == sum(r["flops"] for r in result["ops"])


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (35_127_656_448, "35.1 GFLOP"), (2.5e15, "2.5 PFLOP")],
)
def test_numbers_for_people(amount: float, text: str) -> None:
    """Powers of a thousand, three digits."""
    assert format_short(amount, "FLOP") == text


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_recomputed_work_is_a_figure_of_its_own(is_reentrant: bool) -> None:
    """What a checkpoint runs again is in the FLOPs of the hardware and not in those of the model;
    what a backward pass itself runs is not recomputed."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient @ torch.eye(4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, Product.apply(self.first(x)), use_reentrant=is_reentrant)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def run() -> None:
        for _ in range(2):
            net(torch.rand(2, 4)).sum().backward()
            optimizer.step()

    with FlopCounterMode(display=False) as counter:
        run()
    found = applied(FlopsTool(peak=1.0), run).result()["summary"]
    # But for the product of the program's own function, whose gradient has no formula.
    total = counter.get_total_flops() - 2 * 2 * 2 * 4 * 4
    assert found["flops"] + found["flops_backward"] == total
    step = found["per_step"]
    # Without reentrance the last product is ended by an exception.
    products = 4 * 8 + (8 * 4 if is_reentrant else 0)
    assert 2 * step["flops_recomputed"] == found["flops_recomputed"] == 2 * 2 * 2 * products
    total = step["flops"] + step["flops_backward"]
    assert found["mfu"] / found["hfu"] == pytest.approx(1 - step["flops_recomputed"] / total)


def test_elementwise_work_is_a_figure_of_its_own() -> None:
    """With the option, work that counts zero by convention has a figure, in no other one."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Softmax(-1))
    step = lambda: layers(torch.rand(2, 4)).sum().backward()  # noqa: E731
    found = applied(FlopsTool(elementwise=True), step)
    extra = {row["type"]: row.get("elementwise") for row in found.op_rows()}
    expected = {
        "layer_norm": 80, "relu": 16, "softmax": 80, "sum": 16, "native_layer_norm_backward": 80,
        "relu_backward": 16, "softmax_backward": 80, "sum_backward": 16,
    }  # fmt: skip
    assert {kind: extra[kind] for kind in expected} == expected
    figures, others = found.summary(), applied(FlopsTool(), step).summary()
    assert figures["elementwise"] == sum(expected.values())
    assert others["elementwise"] is None
    names = ("flops", "flops_backward", "unknown_ops", "zero_ops")
    assert [figures[name] for name in names] == [others[name] for name in names]
