"""What actions do to operators that are not plain functions of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import RoutineResultError, ToolTypeError
from amanda.inline import MemoryChange, MemoryUse
from amanda.tools.mapping import MappingTool
from amanda_torch import mapping_rules
from tests.torch.support import On, applied, fingerprint

Analysis = Callable[[amanda.OpContext], Any]

SGD_OPTIONS = {
    **dict.fromkeys(("lr", "weight_decay", "momentum", "dampening"), 0.5),
    **dict.fromkeys(("nesterov", "maximize", "is_first_step"), False),
}
INDEX = torch.tensor(0)


def on(name: str, act: Analysis, **where: bool) -> amanda.Tool:
    """A tool that acts on the operators of one name ("" for all)."""
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: act(c) if name in ("", c.get_op().__name__) else None, **where)
    return tool


def without_tangent(x: Any) -> Any:
    """Unpack a tensor that has no tangent."""
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(x)


def clone(*tensors: Any) -> list[Any]:
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def test_lists_changed_in_place() -> None:
    """What an operator writes into substituted lists reaches the caller's tensors."""
    tensors = [torch.ones(2), torch.zeros(2)]
    double = on("_foreach_add_", lambda c: c.insert_before_op(lambda *t: [x * 2 for x in t]))
    with applied(double):
        torch._foreach_add_(tensors, 1.0)
    assert [t.tolist() for t in tensors] == [[3, 3], [1, 1]]


ONES = torch.ones(2)


def fused_step(parameter: torch.Tensor, momentum: torch.Tensor) -> None:
    """A step of a fused optimizer, which returns nothing."""
    torch._fused_sgd_(
        [parameter],
        [ONES],
        [momentum],
        weight_decay=0.0,
        momentum=0.5,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def test_outputs_of_an_operator_that_returns_nothing() -> None:
    """The tensors that it has written into are its outputs for analyses and routines, and others
    that a routine returns are written into them."""
    analysed: list[list[Any]] = []
    seen: list[list[Any]] = []

    def look(*tensors: Any) -> Any:
        seen.append([t.tolist() for t in tensors])
        changed = [t * 10 for t in tensors]
        return [changed[0], ONES, changed[2]] if len(seen) == 3 else None

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: analysed.append(c.get_outputs()), require_outputs=True)
    tool.add_inst_for_op(lambda c: c.insert_after_op(look))
    parameter, momentum = torch.zeros(2), torch.zeros(2)
    expected, of_momentum = torch.zeros(2), torch.zeros(2)
    with applied(tool):
        for _ in range(3):
            fused_step(parameter, momentum)
            amanda.new_iteration()
    for number in range(3):
        fused_step(expected, of_momentum)
        assert seen[number] == [expected.tolist(), [1, 1], of_momentum.tolist()]
    assert [t is p for t, p in zip(analysed[0][::2], (parameter, momentum), strict=True)]
    assert parameter.equal(expected * 10)
    assert momentum.equal(of_momentum * 10)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_optimizer_on_clones(options: dict[str, bool]) -> None:
    """An optimizer whose operators work on equal clones trains the same weights, bit for bit."""

    def trained(*tools: amanda.Tool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        with applied(*tools):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(4, 3)).square().sum().backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    cloning = on("", lambda c: c.insert_before_op(clone))
    assert all(map(torch.equal, trained(cloning), trained()))


def test_running_statistics_of_substitutes() -> None:
    """Batch norm on equal clones of all its inputs updates the module's statistics."""
    model, twin = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.rand(4, 3)
    with applied(on("batch_norm", lambda c: c.insert_before_op(clone))):
        model(x)
    twin(x)
    assert torch.equal(model.running_mean, twin.running_mean)
    assert torch.equal(model.running_var, twin.running_var)


def test_written_back_to_views() -> None:
    """The value that a routine gives the result of an in-place op is seen through views of it."""
    with applied(on("sigmoid_", lambda c: c.insert_after_op(lambda y: y * 0 + 9))):
        y = torch.rand(4, requires_grad=True) * 2
        view = y.view(2, 2)
        y.sigmoid_()
    assert y.tolist() == [9] * 4
    assert view.tolist() == [[9, 9], [9, 9]]


def test_replaced_in_place_op() -> None:
    """What replaces an in-place op is written into the caller's tensor, and trained through."""
    leaf = torch.tensor([1.0, -1.0], requires_grad=True)
    with applied(on("relu_", lambda c: c.replace_op(lambda y: y * 3))):
        y = leaf * 1
        result = y.relu_()
        y.sum().backward()
    assert result is y
    assert y.tolist() == [3, -3]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3]


def test_factory_stays_a_leaf() -> None:
    """A tensor made to be trained stays a leaf when a routine gives it another value."""
    with applied(on("ones", lambda c: c.insert_after_op(lambda y: y * 5))):
        x = torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()
    assert x.is_leaf
    assert x.tolist() == [5, 5]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda x: [x, x], r"a list of 2 \(Tensor, Tensor\)"),
        (lambda x: None, "NoneType None"),
        (lambda x: 3, "int 3"),
        (lambda x: ["x"], r"a list of 1 \(str\)"),
    ],
)
def test_wrong_replacement(result: Callable[[Any], Any], got: str) -> None:
    """A replacement that returns something else than the op's outputs: an error naming both."""
    expected = rf"<lambda> replaces op /relu:0 and must return its output tensor, got {got}$"
    with (
        applied(on("relu", lambda c: c.replace_op(result))),
        pytest.raises(RoutineResultError, match=expected),
    ):
        torch.relu(torch.ones(2))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda x: x.__setitem__(0, 7.0), id="setitem"),
        pytest.param(lambda x: torch._foreach_mul_([x, x.clone()], 2)[0], id="foreach"),
        pytest.param(
            lambda x: torch._fused_sgd_([x], [x.clone()], [x.clone()], **SGD_OPTIONS),
            id="optimizer",
        ),
        pytest.param(lambda x: x.nonzero(as_tuple=True), id="tuple"),
        pytest.param(lambda x: torch.add(x, 1, out=x), id="out"),
        pytest.param(lambda x: torch.add(x, 1, out=torch.empty(0)), id="resized"),
        pytest.param(lambda x: torch.max(x.clone(), 0, out=(x[0], INDEX.clone())), id="several"),
        pytest.param(lambda x: torch.ops.aten.add_(x, 1), id="packet"),
        pytest.param(lambda x: x.equal(x), id="number"),
        pytest.param(lambda x: without_tangent(x).primal, id="absent"),
    ],
)
def test_every_operator_may_be_replaced_by_itself(program: Callable[[Any], Any]) -> None:
    """A replacement may return what the operator does, nothing and its own inputs included, and
    what it writes into, tensors of ``out=`` too, gets what the replacement gives."""

    def replace_all(context: amanda.OpContext) -> None:
        function = context.get_function()
        context.replace_op(lambda *inputs: function(*inputs))

    tool = amanda.Tool()
    tool.add_inst_for_op(replace_all)
    x, y = torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])
    expected = program(x)
    with applied(tool):
        result = program(y)
    assert isinstance(result, tuple) == isinstance(expected, tuple)
    assert isinstance(expected, (list, tuple, torch.Tensor)) or result == expected
    assert fingerprint((result, y)) == fingerprint((expected, x))
    assert (result is y) == (expected is x)


def test_replacement_writes_into_the_tensors_of_out() -> None:
    """The tensors of ``out=`` and of the lists of in-place operators get other values, too."""
    out, listed = torch.empty(0), [torch.ones(1), torch.ones(2)]
    by_keyword = [torch.ones(1), torch.ones(2)]
    tool = On(
        add=lambda c: c.replace_op(lambda x, y: x * 5),
        _foreach_mul_=lambda c: c.replace_op(lambda *tensors: [t + 4 for t in tensors]),
    )
    with applied(tool):
        result = torch.add(torch.ones(2), torch.ones(2), out=out)
        torch._foreach_mul_(listed, 2.0)
        assert torch._foreach_mul_(scalar=2.0, self=by_keyword) is by_keyword
    assert result is out
    assert out.tolist() == [5, 5]
    assert [t.tolist() for t in (*listed, *by_keyword)] == [[5], [5, 5]] * 2


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (lambda x: x.relu_(), torch.ones(1)),
        (lambda x: x.relu_(), torch.ones(2, dtype=torch.cfloat)),
        (lambda x: x.long().relu_(), torch.full((2,), 1.5)),
        (lambda x: torch.neg(x, out=x.long()), torch.full((2,), 1.5)),
        (lambda x: torch.ops.aten.relu_(x), torch.ones(3)),
    ],
)
def test_what_a_replacement_gives_must_fit_what_the_operator_writes_into(
    program: Callable[[torch.Tensor], Any], result: torch.Tensor
) -> None:
    """No value is cut off or spread out: PyTorch's own operators raise an error there, too."""
    x = torch.tensor([1.0, -1.0])
    tool = On(**{name: lambda c: c.replace_op(lambda _: result) for name in ("neg", "relu_")})
    with applied(tool), pytest.raises(RoutineResultError, match="writes into a tensor: of torch"):
        program(x)
    assert x.tolist() == [1, -1]


def test_a_replacement_may_give_a_type_that_pytorch_casts() -> None:
    """What has a place in the type of a tensor is cast, as for PyTorch's own operators."""
    out = torch.zeros(2)
    with applied(On(add=lambda c: c.replace_op(lambda x, y: torch.tensor([3, 4])))):
        torch.add(torch.ones(2), torch.ones(2), out=out)
    assert out.tolist() == [3, 4]


def test_sequence_of_one() -> None:
    """A replacement may return its one tensor in a list."""
    with applied(on("relu", lambda c: c.replace_op(lambda x: [x * 2]))):
        assert torch.relu(torch.ones(2)).tolist() == [2, 2]


def test_replaced_gradient_after_the_scope() -> None:
    """After the scope the backward pass is vanilla, gradients of gradients included."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with applied(on("mul", lambda c: c.replace_backward_op(lambda g: (g * 7, g * 7)))):
        y = x * x
        (inside,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert inside.tolist() == [14, 14]
    assert first.tolist() == [2, 4]
    assert second.tolist() == [2, 2]


class _Unhashable:
    """A callable that notes its calls in the list that it is bound to."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, calls: list[None]) -> None:
        calls.append(None)


@pytest.mark.usefixtures("interceptor")
def test_a_bound_routine_need_not_be_hashable() -> None:
    """What a tool binds as a method runs, whether or not it can be a key of a dict."""
    calls, twin, model, tool = list[None](), list[None](), nn.Linear(2, 2), amanda.Tool()

    def forward(context: amanda.OpContext) -> None:
        context.insert_before_op(MethodType(_Unhashable(), calls), inputs=[])
        context.insert_before_op(lambda: twin.append(None), inputs=[])

    def backward(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(MethodType(_Unhashable(), calls), grad_outputs=[])
        context.insert_before_backward_op(lambda: twin.append(None), grad_outputs=[])

    tool.add_inst_for_op(forward)
    tool.add_inst_for_op(backward, backward=True)
    with applied(tool):
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == len(twin) > 4 * 4


class _Reads(MemoryUse):
    """Counts how often the memory is read."""

    count = 0

    def read(self) -> int:
        self.count += 1
        return super().read()


@pytest.mark.usefixtures("interceptor")
def test_a_memory_of_a_subclass_is_read_by_its_method() -> None:
    """What a subclass of ``MemoryUse`` overrides is called, twice at each execution."""
    use, model = _Reads(), nn.Linear(2, 2)
    change, tool = MemoryChange(use), amanda.Tool()

    def forward(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "linear":
            context.insert_before_op(change.before, inputs=[])
            context.insert_after_op(change.after, outputs=[])

    def backward(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AddmmBackward0":
            context.insert_before_backward_op(change.before, grad_outputs=[])
            context.insert_after_backward_op(change.after, grad_inputs=[])

    tool.add_inst_for_op(forward)
    tool.add_inst_for_op(backward, backward=True)
    with applied(tool):
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
    assert use.count == 6 * 2 * 2


@pytest.mark.parametrize(
    "operation",
    [lambda x: x + x, lambda x: 2 - x, lambda x: x @ x, lambda x: x == 2, lambda x: x > 1],
    ids=["+", "rsub", "@", "==", ">"],
)
def test_type_error_in_a_routine(operation: Callable[[torch.Tensor], Any]) -> None:
    """A tool's TypeError is not taken for an unsupported operand by Python's operators."""

    def routine() -> None:
        """Takes no tensor, but gets some."""

    with (
        applied(on("", lambda c: c.insert_before_op(routine))),
        pytest.raises(ToolTypeError, match="takes 0 positional arguments") as caught,
    ):
        operation(torch.ones(2))
    assert isinstance(caught.value.__cause__, TypeError)
    assert "routine at op" in caught.value.__notes__[0]


def test_calling_the_operator() -> None:
    """get_function() runs the operator as it was called, on inputs in the order of tools."""

    def analysis(context: amanda.OpContext) -> None:
        function = context.get_function()
        context.replace_op(lambda *inputs: function(*inputs) * 2)

    weight, index = torch.rand(4, 2), torch.tensor([1, 3])
    runs = (
        ("embedding", lambda: nn.functional.embedding(index, weight)),
        ("layer_norm", lambda: nn.functional.layer_norm(weight, (2,), eps=0.1)),
        (
            "conv2d",
            lambda: nn.functional.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2), stride=2),
        ),
    )
    for name, run in runs:
        vanilla = run()
        with applied(on(name, analysis)):
            assert torch.equal(run(), vanilla * 2)


def test_calling_the_operator_with_other_attributes() -> None:
    """In a replacement get_function() has the attributes of the execution that it replaces;
    now() keeps them."""
    kept: list[Any] = []

    def analysis(context: amanda.OpContext) -> None:
        function = context.get_function()

        def replaced(tensor: Any) -> Any:
            kept.append(function.now())
            return function(tensor)

        context.replace_op(replaced)

    model = nn.Flatten(1)
    model.forward = lambda x: x.reshape(len(x) // 2, -1)  # type: ignore[method-assign]
    with applied(on("reshape", analysis)):
        shapes = [model(torch.ones(rows, 3)).shape for rows in (4, 6)]
    assert shapes == [(2, 6), (3, 6)]
    assert kept[0](torch.ones(12)).shape == (2, 6)
    assert kept[1](torch.ones(18)).shape == (3, 6)


def test_sizes_one_by_one() -> None:
    """Sizes and dimensions are one attribute, however they are given."""
    seen: dict[str, Any] = {}
    tool = on("", lambda c: seen.update({c.get_op().__name__: c.get_attrs()}))
    with applied(tool):
        x = torch.zeros(2, 3)
        x.view(3, 2)
        x.permute(1, 0)
        x[0]
    assert seen["zeros"]["size"] == (2, 3)
    assert seen["view"]["size"] == (3, 2)
    assert seen["permute"]["dims"] == (1, 0)
    assert seen["__getitem__"] == {"index": 0}


def test_a_leaf_input_is_no_parameter() -> None:
    """get_value gives a module's parameters, and not its input, trained or not."""
    values: list[Any] = []
    model = nn.Linear(2, 2)
    tool = on("linear", lambda c: values.extend(c.get_value(i) for i in range(3)))
    with applied(tool):
        model(torch.ones(1, 2, requires_grad=True))
    assert values[0] is None
    assert values[1] is model.weight
    assert values[2] is model.bias


def test_canonical_types_and_roles() -> None:
    """The standard mapping tells a product with a parameter from one of two activations."""
    seen: dict[str, Any] = {}
    tool = amanda.Tool()
    tool.depends_on(MappingTool([["pytorch", mapping_rules.standard]]))
    tool.add_inst_for_op(lambda c: seen.update({c.get_op_id(): (c["op_type"], c["weight_index"])}))
    tool.add_inst_for_op(
        lambda c: seen.update({c.get_backward_op_id(): c["backward_op_type"]}), backward=True
    )
    weight, x = nn.Parameter(torch.rand(3, 3)), torch.rand(2, 3)
    with applied(tool):
        torch.addmm(weight[0], x, weight)
        torch.addmm(x[0], x, weight.detach())
        x @ weight
        nn.functional.linear(torch.ones(2, 2, 3), weight).sum().backward()
    assert seen["/addmm:0"] == ("linear", 2)
    assert seen["/addmm:1"] == ("addmm", None)
    assert seen["/matmul:0"] == ("matmul", 1)
    assert seen["/linear:0"] == ("linear", 1)
    assert seen["/linear:0/grad/MmBackward0:0"] == "linear_backward"


def test_an_analysis_is_told_of_the_execution_that_it_sees() -> None:
    """An operator may raise before the analysis of its outputs has run, and have another form when
    it has the same id again: names and attributes are then those of the inputs."""
    x, result, told = torch.ones(2, requires_grad=True), torch.ones(2), []

    def tell(context: amanda.OpContext) -> None:
        told.append((context.get_input_names(), len(context.get_inputs()), context.get_attrs()))

    tool = amanda.Tool()
    tool.add_inst_for_op(tell)
    tool.add_inst_for_op(tell, require_outputs=True)
    with applied(tool):
        with pytest.raises(RuntimeError):
            torch.mul(x, 2, out=result)
        amanda.new_iteration()
        torch.mul(x, x)
        tool.reanalyse()
        amanda.new_iteration()
        torch.mul(x, 3)
    two, three = ((["input"], 1, {"other": number}) for number in (2, 3))
    assert told == [two, (["input", "other"], 2, {}), three, three]
