"""The toy framework itself, and the parts of its driver that the contract does not reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import amanda
from amanda.testing import loopback as lb
from amanda.testing.loopback.tape import set_grad

NUMBERS = st.floats(-4, 4).map(lambda x: round(x, 2))
MATRICES = st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=2, max_size=2)


def test_parameters_have_their_paths() -> None:
    """An input that is one, and the gradient of one, in the pass after the module's call."""
    model = lb.Sequential(lb.Linear([[1.0, 2.0]], [0.5]))
    found: dict[str, list[str | None]] = {}
    tool = amanda.Tool()

    def look(context: amanda.OpContext) -> None:
        names = context.get_grad_input_names() or context.get_input_names()
        known = [context.get_parameter_name(i) for i in range(len(names))]
        found[context.get_backward_op_id() or context.get_op_id()] = known

    tool.add_inst_for_op(look)
    tool.add_inst_for_op(look, backward=True)
    with amanda.apply(tool):
        model(lb.tensor([[3.0, 4.0]], requires_grad=True)).backward()
    linear = "Sequential.0/linear:0"
    assert found[linear] == [None, "0.weight", "0.bias"]
    assert found[f"{linear}/grad/AddBiasBackward:0"] == [None, "0.bias"]


def scalar(x: Any, w: Any) -> Any:
    """A function that uses every differentiable operator."""
    hidden = lb.linear(x, w, lb.tensor([0.5, -0.5]))
    top, bottom = lb.split(lb.cat([hidden, lb.mul(x, w)]))
    return lb.sum(lb.add(lb.mul(lb.matmul(top, bottom), 0.5), lb.transpose(lb.add(x, 1.0))))


def slope(
    function: Callable[[Any], float], values: list[list[float]], row: int, column: int
) -> float:
    """A derivative by finite differences."""
    step = 1e-4
    shifted = [[list(r) for r in values] for _ in range(2)]
    shifted[0][row][column] += step
    shifted[1][row][column] -= step
    return (function(shifted[0]) - function(shifted[1])) / (2 * step)


@given(MATRICES, MATRICES)
def test_gradients(x: list[list[float]], w: list[list[float]]) -> None:
    """The tape's gradients are the derivatives."""
    leaf = lb.tensor(x, requires_grad=True)
    (gradient,) = lb.grad([scalar(leaf, lb.tensor(w))], [leaf])
    assert gradient is not None
    expected = [
        [
            slope(lambda v: float(scalar(lb.tensor(v), lb.tensor(w)).tolist()), x, row, column)
            for column in range(2)
        ]
        for row in range(2)
    ]
    assert gradient.data == pytest.approx([e for r in expected for e in r], abs=1e-3)


@given(MATRICES)
def test_second_gradients(x: list[list[float]]) -> None:
    """Gradients of gradients are the derivatives of the gradients."""
    leaf = lb.tensor(x, requires_grad=True)
    cube = lb.mul(lb.mul(leaf, leaf), leaf)
    (first,) = lb.grad([cube], [leaf], create_graph=True)
    assert first is not None
    (second,) = lb.grad([first], [leaf])
    assert second is not None
    assert second.data == pytest.approx([6 * value for row in x for value in row])


@pytest.mark.parametrize(
    ("values", "shape"), [(2.0, ()), ([1, 2, 3], (3,)), ([[1, 2], [3, 4]], (2, 2)), ([], (0,))]
)
def test_tensors(values: Any, shape: tuple[int, ...]) -> None:
    """A tensor has the shape of its values, and gives them back."""
    made = lb.tensor(values)
    assert made.shape == shape
    assert made.tolist() == values


@pytest.mark.parametrize("values", [[[1], [1, 2]], [1, [2]]])
def test_ragged_values(values: Any) -> None:
    """Rows of different lengths are an error."""
    with pytest.raises(ValueError, match="not a rectangle"):
        lb.tensor(values)


def test_in_place_and_the_tape() -> None:
    """A tensor that the tape needs and that was changed in place is an error in backward."""
    x = lb.tensor([1.0], requires_grad=True)
    y = lb.mul(x, 2.0)
    z = lb.mul(y, y)
    lb.add_(y, 1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward()


def test_in_place_on_a_leaf() -> None:
    """A leaf that requires a gradient cannot be changed in place."""
    with pytest.raises(RuntimeError, match="leaf"):
        lb.add_(lb.tensor([1.0], requires_grad=True), 1.0)


def test_backward_twice() -> None:
    """A graph can be run twice only with retain_graph."""
    x = lb.tensor([1.0], requires_grad=True)
    y = lb.mul(x, x)
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0]
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.backward()


def test_no_grad() -> None:
    """Within no_grad nothing is recorded."""
    x = lb.tensor([1.0], requires_grad=True)
    with lb.no_grad():
        assert not lb.mul(x, 2.0).requires_grad
    assert lb.mul(x, 2.0).requires_grad
    assert not lb.detach(x).requires_grad


# -- the driver ---------------------------------------------------------------


def ids_of(run: Callable[[], Any]) -> list[str]:
    """The ids of all ops that run."""
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op_id()))
    with amanda.apply(tool), amanda.cache_disabled():
        run()
    return seen


def test_ids_outside_of_modules() -> None:
    """Code outside of modules is counted by op name."""

    def run() -> None:
        for _ in range(2):
            lb.mul(lb.add(lb.tensor(1.0), 1.0), 1.0)

    assert ids_of(run) == ["/add:0", "/mul:0", "/add:1", "/mul:1"]


def test_ids_of_an_unregistered_module() -> None:
    """A module that belongs to no attribute of the model is named by its class."""

    class Model(lb.Module):
        def forward(self, x: Any) -> Any:
            return lb.Linear([[1.0]])(x)

    assert ids_of(lambda: Model()(lb.tensor([[1.0]]))) == ["Model.Linear/linear:0"]


def test_a_forward_pass_ends_with_the_outputs_of_its_model() -> None:
    """They are those of the outermost module; there are none where it has raised."""
    outputs: list[Any] = []
    tool = amanda.Tool()
    tool.add_inst_for_pass(lambda point: outputs.append(point.outputs), end=True)
    model = lb.Linear([[2.0]])
    with amanda.apply(tool):
        model(lb.tensor([[1.0]]))
        with pytest.raises(AttributeError):
            model(None)
    [[output], nothing] = outputs
    assert (output.tolist(), nothing) == ([[2.0]], None)


def test_a_scope_that_ends_within_a_module() -> None:
    """A scope may be entered and left inside of a module's call."""

    class Model(lb.Module):
        def __init__(self) -> None:
            self.inner = lb.Linear([[1.0]])

        def forward(self, x: Any) -> Any:
            seen.extend(ids_of(lambda: self.inner(x)))
            return self.inner(x)

    seen: list[str] = []
    model = Model()
    assert model(lb.tensor([[2.0]])).tolist() == [[2.0]]
    with amanda.apply(amanda.Tool()):
        model(lb.tensor([[2.0]]))
    assert seen == ["Linear/linear:0", "Model.inner/linear:0"]


def test_grad_of_inner_tensors() -> None:
    """lb.grad with respect to a tensor in the middle of the graph runs instrumented."""
    counts: list[int] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.insert_before_backward_op(lambda *t: counts.append(1)), backward=True
    )
    x = lb.tensor(3.0, requires_grad=True)
    with amanda.apply(tool):
        middle = lb.mul(x, x)
        (gradient,) = lb.grad([lb.mul(middle, middle)], [middle])
    assert gradient is not None
    assert gradient.tolist() == 18.0
    assert counts


def test_calls_with_keywords() -> None:
    """Modules and in-place operators may be called with keywords, as without Amanda."""
    model = lb.Linear([[1.0, 2.0]])
    x = lb.tensor([[3.0, 4.0]])
    with amanda.apply(amanda.Tool()):
        assert model(input=x).tolist() == [[11.0]]
        assert lb.add_(other=1.0, input=x) is x
    assert x.tolist() == [[4.0, 5.0]]


def test_value_of_a_buffer() -> None:
    """get_value gives the current value of a buffer, as it is at that time."""
    seen: list[Any] = []
    state = lb.buffer([1.0])
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: seen.append(c.get_value(1).tolist()))
    with amanda.apply(tool), amanda.cache_disabled():
        for _ in range(2):
            lb.add(lb.tensor([2.0]), state)
            state.data[0] += 1
    assert seen == [[1.0], [2.0]]


def test_ops_inside_of_a_user_op() -> None:
    """The body of a user's operator is a part of it, and not seen as operators."""

    @lb.op
    def twice(input: lb.Tensor) -> Any:
        return lb.add(input, input)

    assert ids_of(lambda: twice(lb.tensor(1.0))) == ["/twice:0"]


def test_new_iteration_counts_what_ran_outside_of_modules_after_a_module() -> None:
    """Each call of ``new_iteration`` ends an iteration, with or without a module in it."""
    tool, (x, net) = amanda.Tool(), (lb.tensor([[1.0]]), lb.Linear([[1.0]]))
    ended = list[int]()
    tool.add_inst_for_iteration(lambda point: ended.append(point.iteration), end=True)
    with amanda.apply(tool, drivers=["loopback"]):
        net(x)
        amanda.new_iteration()
        for _ in range(3):
            lb.mul(x, x)
            amanda.new_iteration()
    assert ended == [0, 1, 2, 3]


def test_a_backward_pass_of_a_tool_leaves_the_ids_of_the_program() -> None:
    """A pass that a routine runs ends no iteration: later operators get ids of their own."""
    x, w = lb.tensor([2.0]), lb.parameter([3.0])
    seen, tool = list[str](), amanda.Tool()

    def differentiate(*_: Any) -> None:
        with set_grad(True):
            lb.grad([lb.mul(x, w)], [w])

    def analyse(context: amanda.OpContext) -> None:
        seen.append(context.get_op_id())
        if len(seen) == 1:
            context.insert_after_op(differentiate)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool, drivers=["loopback"]):
        lb.mul(x, w)
        lb.mul(x, w)
    assert seen == ["/mul:0", "/mul:1"]
