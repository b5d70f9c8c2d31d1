"""The tools on tensors that are not plain ones: in transforms, nested, of a class of their own."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.overrides import TorchFunctionMode

import amanda
from amanda_tools._output.report.model_ops import tensor_text
from amanda_tools._values.tensors import reader_of
from amanda_tools.inject import InjectTool
from amanda_tools.nan import NanTool
from amanda_tools.prune import PruneTool
from amanda_tools.quantize import QuantizeTool
from amanda_tools.remat import RematTool
from tests.running import in_threads, run_python
from tests.torch.support import Standing

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
    pytest.mark.filterwarnings("ignore:actions on the gradients of operators do nothing"),
    # PyTorch's own modules of distributed tensors and of masked ones.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

X = torch.arange(1.0, 65.0).reshape(4, 16) / 64


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


class Wrapped(torch.Tensor):
    """Holds a tensor, and computes a few operators on it, as quantized weights do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # noqa: SLF001

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        same = func in (aten.detach.default, aten.t.default)
        if not same and func not in (aten.mm.default, aten.addmm.default):
            raise NotImplementedError(str(func))
        found = func(*(arg.inner if isinstance(arg, cls) else arg for arg in args))
        return cls(found) if same else found


class Refusing(torch.Tensor):
    """Takes ``linear``, and gives its attributes."""

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear and getattr(func, "__name__", "") != "__get__":
            raise TypeError(str(func))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(*args, **(kwargs or {}))


class Counting(torch.Tensor):
    """Overrides PyTorch's functions as fastai's tensors do: all of them work."""


def _with_weight(make: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    def run() -> Any:
        model = _model()
        layer = model[0]
        del layer.weight
        layer.weight = make(torch.linspace(-1, 1, 256).reshape(16, 16))
        return [model(X), model(X)]

    return run


def _of_samples() -> list[Any]:
    model = _model()
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        call_for_per_sample_grads(model)(X).sum().backward()
    return [parameter.grad_sample for parameter in model.parameters()]  # type: ignore[attr-defined]


def _transformed(transform: Callable[[nn.Module, dict[str, Any]], Any]) -> Callable[[], Any]:
    def run() -> Any:
        model = _model()
        return [transform(model, dict(model.named_parameters())) for _ in range(2)]

    return run


def _loss(model: nn.Module) -> Callable[..., Any]:
    return lambda p, x: torch.func.functional_call(model, p, (x,)).square().sum()


def _many_models(model: nn.Module, _: Any) -> Any:
    stacked, buffers = torch.func.stack_module_state([_model(), model])
    call = lambda p, b: torch.func.functional_call(model, (p, b), (X,))  # noqa: E731
    return torch.vmap(call)(stacked, buffers)


def _nested(layout: torch.layout) -> Callable[[], Any]:
    def run() -> Any:
        x = torch.nested.nested_tensor([X[:2], X[2:3]], layout=layout)
        model = _model()
        return [tensor for _ in range(2) for tensor in model(x).unbind()]

    return run


def _masked() -> Any:
    data = torch.masked.masked_tensor(X, X > 0.5)
    return [(data * data).sum(-1).get_data() for _ in range(2)]


def _biased() -> Any:
    q = X.reshape(1, 2, 4, 8)
    # PyTorch's own class of masks takes one function.
    return F.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(4, 4))


def _distributed() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.linspace(-1, 1, 256).reshape(16, 16), mesh, [Shard(0)])
        x = distribute_tensor(X, mesh, [Shard(0)])
        layer = nn.Linear(16, 16, bias=False)
        layer.weight = nn.Parameter(weight)
        return [layer(x).to_local() for _ in range(2)]
    finally:
        dist.destroy_process_group()


RANKS = """
import json
import re
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import amanda

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
load = amanda.tools.load
tools = [load("flops")(), load("stats")(), load("summary")(shapes=True)]
with amanda.apply(*tools):
    model(torch.ones(8, 16)).sum().backward()
if rank == 0:
    tools[-1].print_summary(sys.stderr)
    print(json.dumps([tool.result()["ops"] for tool in tools[:2]]))
dist.destroy_process_group()
"""


def test_the_part_of_a_rank_stands_beside_the_whole_tensor(tmp_path: Path) -> None:
    """Figures of tensor parallelism are of the rank; specs have its shape, and the global shape and
    the placement, which the tables of modules show, too."""
    runs: dict[str, Any] = {}

    def run(rank: str) -> None:
        runs[rank] = run_python("-c", RANKS, rank, f"{tmp_path}/store", check=True)

    in_threads(*(functools.partial(run, rank) for rank in "01"))
    rows, stats = json.loads(runs["0"].stdout)
    weights = [row["inputs"][1] for row in rows if row["type"] == "linear"]
    assert [(w["shape"], w["global_shape"], w["placement"]) for w in weights] == [
        ([16, 16], [32, 16], "Shard(0)"),
        ([16, 16], [16, 32], "Shard(1)"),
    ]
    assert {r["parameter"]: r["elements"] for r in stats if r["kind"] == "weights"} == {
        "0.weight": 256,
        "0.bias": 16,
        "2.weight": 256,
        "2.bias": 16,
    }
    assert re.search(r"8 x 16 of 8 x 32 .*\n +Shard\(1\)", runs["0"].stderr)
    assert tensor_text(weights[0]) == "16×16 of 32×16 Shard(0) f32"


def _padded() -> Any:
    """Making the layer changes a view in place without gradients, whose grad_fn raises."""
    torch.manual_seed(0)
    layer = nn.Embedding(4, 16, padding_idx=0)
    return [nn.functional.linear(layer(torch.arange(4)), layer.weight)]


def _jagged_leaf() -> Any:
    """A nested tensor that gets a gradient is taken for a parameter."""
    items = [X[:2], X[2:3]]
    leaf = torch.nested.nested_tensor(items, layout=torch.jagged, requires_grad=True)
    F.silu(_model()[0](leaf) * leaf).values().sum().backward()
    return [leaf.grad.values()] if leaf.grad is not None else []


def _fake() -> Any:
    """Tensors without memory, as tools that plan a run make."""
    with FakeTensorMode():
        model = _model()
        output = model(torch.ones(4, 16))
        output.sum().backward()
    return [torch.tensor(output.shape)]


def _batched_gradients(model: nn.Module, _: Any) -> Any:
    output = model(X)
    directions = torch.eye(output.numel()).reshape(-1, *output.shape)
    return torch.autograd.grad(output, list(model.parameters()), directions, is_grads_batched=True)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "gradients of samples": _of_samples,
    "vmap": _transformed(lambda m, _: torch.vmap(m)(X)),
    "grad": _transformed(lambda m, p: torch.func.grad(_loss(m))(p, X)),
    "vmap of grad": _transformed(
        lambda m, p: torch.vmap(torch.func.grad(_loss(m)), (None, 0))(p, X)
    ),
    "jacrev": _transformed(lambda m, _: torch.func.jacrev(m)(X)),
    "ensemble": _transformed(_many_models),
    "vectorized jacobian": _transformed(
        lambda m, _: torch.autograd.functional.jacobian(
            lambda x: m(x) * m(x).sigmoid(), X, vectorize=True
        )
    ),
    "batched gradients": _transformed(_batched_gradients),
    "nested": _nested(torch.strided),
    "jagged": _nested(torch.jagged),
    "jagged leaf": _jagged_leaf,
    "fake": _fake,
    "masked": _masked,
    "attention bias": _biased,
    "padded embedding": _padded,
    "distributed": _distributed,
    "wrapped weight": _with_weight(lambda w: nn.Parameter(Wrapped(w), requires_grad=False)),
    "refusing weight": _with_weight(lambda w: w.as_subclass(Refusing)),
    "overriding weight": _with_weight(lambda w: nn.Parameter(w.as_subclass(Counting))),
}
WATCHING = (
    "count coverage diff dump flops kernels nan path profile sparsity stats summary trace"
).split()
OWN = ", which computes on its own"
OPS = ["linear", "mul", "scaled_dot_product_attention"]
ACTING: dict[str, Callable[[], list[amanda.Tool]]] = {
    "once": lambda: [
        PruneTool(sparsity=0.5),
        QuantizeTool(ops=OPS),
        InjectTool(ops=OPS, target="weights"),
        InjectTool(ops=OPS, target="gradients"),
    ],
    "each time": lambda: [
        PruneTool(sparsity=0.5, end=4),
        PruneTool(method="channel", ops=OPS),
        QuantizeTool(method="dynamic", ops=OPS),
        InjectTool(ops=OPS),
    ],
    "together": lambda: [
        PruneTool(sparsity=0.5, scope="global"),
        PruneTool(method="attention"),
        QuantizeTool(method="qat", ops=OPS),
    ],
    "by replacement": lambda: [QuantizeTool(method="qat", learning_rate=0.1, ops=OPS)],
    "by position": lambda: [PruneTool(method="activation", ops=OPS)],
}
EVERY = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def _plain(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result
    return [tensor for value in values for tensor in _plain(value)]


@EVERY
@pytest.mark.parametrize("make", ACTING.values(), ids=ACTING)
def test_a_tool_that_acts_runs_any_class_of_tensors(
    make: Callable[[], list[Any]], program: Callable[[], Any]
) -> None:
    """A tool acts on a tensor, or leaves its operator as it is: the program runs on."""
    shapes = [tensor.shape for tensor in _plain(program())]
    tools = make()
    with amanda.apply(*tools):
        result = program()
    assert [tensor.shape for tensor in _plain(result)] == shapes
    for tool in tools:
        tool.result()


@EVERY
def test_tools_that_watch_leave_any_class_as_it_is(program: Callable[[], Any]) -> None:
    """Tensors are read where they can be, and results are bit-identical."""
    vanilla = _plain(program())
    tools = [amanda.tools.load(name)() for name in WATCHING]
    with amanda.apply(*tools, RematTool()):
        result = _plain(program())
    for tool in tools:
        tool.result()
    for one, other in zip(vanilla, result, strict=True):
        assert torch.equal(one.detach(), other.detach())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gradients of samples", f"its weight is of the class ExpandedWeight{OWN}"),
        ("ensemble", "its weight is another one for each sample of torch.vmap"),
        ("distributed", "its weight is spread over processes, and this one has a part of it"),
        ("wrapped weight", f"its weight is of the class Wrapped{OWN}"),
    ],
)
def test_a_weight_that_cannot_be_changed_is_skipped_with_a_reason(name: str, reason: str) -> None:
    """Pruning and quantization say which operators they leave alone, and why."""
    for tool in PruneTool(sparsity=0.5), QuantizeTool(method="dynamic", activation_bits=0):
        with amanda.apply(tool):
            PROGRAMS[name]()
        skipped = {row["id"]: row["reason"] for row in tool.summary()["skipped"]}
        assert reason in skipped.values()


def _numbers(transform: Callable[[Callable[[Any], Any]], Any]) -> list[np.ndarray[Any, Any]]:
    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        reader = reader_of(x)
        assert reader.is_readable(x)
        found.append(reader.numpy(x))
        return x.sum()

    transform(look)
    return found


def test_numbers_are_read_through_transforms() -> None:
    """Under torch.vmap the values of all samples are read, one after the other."""
    x = X[:, :6].reshape(4, 2, 3)
    (plain,) = _numbers(lambda look: torch.func.grad(look)(x))
    assert np.array_equal(plain, x.numpy())
    (samples,) = _numbers(lambda look: torch.vmap(look)(x))
    assert np.array_equal(samples, x.reshape(8, 3).numpy())
    (other,) = _numbers(lambda look: torch.vmap(torch.func.grad(look), in_dims=2)(x))
    assert np.array_equal(other, x.movedim(2, 0).reshape(12, 2).numpy())
    (twice,) = _numbers(lambda look: torch.vmap(torch.vmap(look, in_dims=1))(x))
    assert np.array_equal(np.sort(twice), np.sort(x.numpy(), axis=None))


@pytest.mark.parametrize("name", ["vmap", "grad", "vmap of grad", "jacrev"])
def test_a_nan_is_found_within_transforms(name: str) -> None:
    """A function that torch.func transforms is examined as any other."""
    tool = NanTool(action="record")
    program = _transformed(lambda m, _: _TRANSFORMS[name](lambda x: (m(x) * 0 - 1).log().sum())(X))
    with amanda.apply(tool):
        program()
    assert [event.op.name for event in tool.events] == ["log"]


_TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": torch.vmap,
    "grad": torch.func.grad,
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f)),
    "jacrev": torch.func.jacrev,
}


def test_a_mask_holds_within_transforms() -> None:
    """A pruned weight has the gradient that it has without a transform."""
    model = _model()
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        _loss(model)(dict(model.named_parameters()), X).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        found = torch.func.grad(_loss(model))(dict(model.named_parameters()), X)
    assert all(map(torch.equal, found.values(), _present(wanted)))
    assert tool.summary()["sparsity"] == 0.5


def _present(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def test_numbers_of_nested_tensors_are_those_of_the_items() -> None:
    """They are read on the device of the tensor, whatever the default one is; there are none where
    PyTorch cannot read those of an item."""
    items = [torch.tensor([2**40 + 1]), torch.tensor([2, 3])]
    nested, empty = torch.nested.nested_tensor(items), torch.nested.nested_tensor([])
    packed = torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    unreadable = torch.nested.nested_tensor([packed], layout=torch.jagged)
    with torch.device("meta"):
        found = [reader_of(tensor).numbers(tensor) for tensor in (nested, empty, unreadable)]
    assert [None if array is None else array.tolist() for array in found] == [
        [2**40 + 1, 2, 3],
        [],
        None,
    ]
    assert reader_of(unreadable).is_finite(unreadable) is None


def test_memory_of_tensors_that_are_read_can_be_freed() -> None:
    """Reading a tensor's numbers does not forbid to resize its memory, as FSDP2 does."""
    tensor = torch.ones(4)
    array = reader_of(tensor).numpy(tensor)
    tensor.untyped_storage().resize_(0)
    assert array.tolist() == [1.0] * 4


CALLS: list[tuple[str, Any]] = []


class Noting(torch.Tensor):
    """Notes the functions that it is asked to override."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS.append(("class", func))
        return super().__torch_function__(func, types, args, kwargs or {})


class NotingMode(TorchFunctionMode):
    """Does so for all tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS.append(("mode", func))
        return func(*args, **(kwargs or {}))


class Twice(torch.autograd.Function):
    """Two outputs of one node."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(_: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one * 2 + other * 3


def _train_noting() -> None:
    model = _model()
    model[2].weight = nn.Parameter(model[2].weight.detach().as_subclass(Noting))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in (X.as_subclass(Noting), X.as_subclass(Noting), X):
        for part in Twice.apply(model(x)):
            part.sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def _train_in_a_mode() -> None:
    with NotingMode():
        _train_noting()
        for _ in range(2):
            sum(Twice.apply(X.clone().requires_grad_())).sum().backward()


def _evaluate_noting() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad():
        for _ in range(2):
            layer(X[None].as_subclass(Noting))
            X.as_subclass(Noting).topk(2, 1)[0].tolist()


@pytest.mark.parametrize("name", WATCHING)
@pytest.mark.parametrize("run", [_train_noting, _train_in_a_mode, _evaluate_noting])
def test_what_tools_read_reaches_no_class_or_mode_of_the_program(
    run: Callable[[], None], name: str
) -> None:
    """The ``__torch_function__`` of a program sees the calls that it sees without a tool."""
    CALLS.clear()
    run()
    vanilla = list(CALLS)
    CALLS.clear()
    with amanda.apply(amanda.tools.load(name)()):
        run()
    assert vanilla
    assert vanilla == CALLS


class Scaling(amanda.Tool):
    """Returns other tensors than it is given, at one point."""

    def __init__(self, point: str) -> None:
        self._point = point
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: amanda.OpContext) -> None:
        getattr(context, self._point)(self._scale)

    def _scale(self, *tensors: Any) -> Sequence[Any]:
        return [None if tensor is None else tensor * 1 for tensor in tensors]


@pytest.mark.parametrize("point", ["insert_before_op", "insert_after_op"])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_what_takes_the_place_of_a_tensor_is_of_its_class(point: str, needs_gradient: bool) -> None:
    """An operator's result has the class that it has without the tool."""
    model = _model()
    x = X.as_subclass(Noting).requires_grad_(needs_gradient)
    with amanda.apply(Scaling(point)):
        for _ in range(2):
            found = model(x)
            assert type(found) is Noting
            assert type(found.sum()) is Noting
    assert torch.equal(found, model(x))


@pytest.mark.parametrize("tool", ["flops", "summary", "quantize", "stats"])
def test_what_stands_for_a_tensor_is_no_input(tool: str) -> None:
    """Operators that are given an object in place of a weight have no weight for tools."""
    weight, x = Standing(X.T.contiguous()), X.clone().requires_grad_()

    def products() -> list[Any]:
        calls = x @ weight, torch.addmm(X[:, :4], x, weight), torch.einsum("ab,bc->ac", x, weight)
        return list(calls)

    expected = products()
    with amanda.apply(amanda.tools.load(tool)()):
        found = [products() for _ in range(2)][-1]
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_converted_while_it_is_watched() -> None:
    """The quantized layer of a path is another operator, of other inputs, with its own FLOPs; the
    samples of a model without parameters are not known."""
    import torch.ao.quantization as quantization

    torch.backends.quantized.engine = "fbgemm"
    tools = [amanda.tools.load(name)() for name in ("flops", "stats", "sparsity")]
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(16, 8)).eval()
    observers = quantization.MinMaxObserver, quantization.default_weight_observer
    model.qconfig = quantization.QConfig(*observers)  # type: ignore[assignment]
    with amanda.apply(*tools):
        quantization.prepare(model, inplace=True)(X)
        quantization.convert(model, inplace=True)
        assert all(torch.equal(model(X).dequantize(), model(X).dequantize()) for _ in range(2))
    result = tools[0].result()
    counted = {row["id"]: row["flops"] for row in result["ops"] if row["flops"]}
    once = 2 * 4 * 16 * 8
    assert counted == {"Sequential.1/linear:0": once, "Sequential.1/quantized::linear:0": 4 * once}
    assert result["summary"]["unknown_ops"] == {}
    assert result["summary"]["per_step"].keys().isdisjoint({"samples", "tokens"})
