"""Flat inputs and outputs: the same tensors in the same order, however an operator is called."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import amanda
from tests.torch.support import Identity, On, after, applied, before

R = torch.rand


class Seen(amanda.Tool):
    """Keeps the flat inputs, their names, the attributes and the outputs of every operator."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.inputs: list[list[Any]] = []
        self.names: list[list[str]] = []
        self.attributes: list[dict[str, Any]] = []
        self.outputs: list[list[Any]] = []
        self.values: list[list[Any]] = []
        self.add_inst_for_op(self.before)
        self.add_inst_for_op(self.after, require_outputs=True)

    def before(self, context: amanda.OpContext) -> None:
        inputs = list(context.get_inputs())
        self.ops.append(context.get_op().__name__)
        self.inputs.append(inputs)
        self.names.append(context.get_input_names())
        self.attributes.append(context.get_attrs())
        self.values.append([context.get_value(i) for i in range(len(inputs))])

    def after(self, context: amanda.OpContext) -> None:
        self.outputs.append(list(context.get_outputs()))


def _seen(run: Callable[[], Any]) -> Seen:
    seen = Seen()
    with applied(seen):
        run()
    return seen


def _is(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(found) == len(wanted) and all(
        one is other for one, other in zip(found, wanted, strict=True)
    )


# -- calls of every form --------------------------------------------------

SIGNATURES: dict[str, tuple[Callable[..., Any], list[str], dict[str, Any]]] = {
    "conv2d": (
        functional.conv2d,
        ["input", "weight", "bias", "stride", "padding"],
        {"input": R(1, 2, 4, 4), "weight": R(3, 2, 1, 1), "bias": R(3), "stride": 1, "padding": 0},
    ),
    "linear": (
        functional.linear,
        ["input", "weight", "bias"],
        {"input": R(1, 2), "weight": R(3, 2), "bias": R(3)},
    ),
    "addmm": (
        torch.addmm,
        ["input", "mat1", "mat2"],
        {"input": R(3), "mat1": R(2, 2), "mat2": R(2, 3)},
    ),
    "batch_norm": (
        functional.batch_norm,
        ["input", "running_mean", "running_var", "weight", "bias", "training"],
        {
            "input": R(2, 3),
            "running_mean": R(3),
            "running_var": R(3),
            "weight": R(3),
            "bias": R(3),
            "training": False,
        },
    ),
    "cat": (torch.cat, ["tensors", "dim"], {"tensors": [R(2), R(3)], "dim": 0}),
    "where": (
        torch.where,
        ["condition", "input", "other"],
        {"condition": torch.tensor([True, False]), "input": R(2), "other": R(2)},
    ),
    "scaled_dot_product_attention": (
        functional.scaled_dot_product_attention,
        ["query", "key", "value", "attn_mask", "dropout_p"],
        {
            "query": R(1, 2, 4),
            "key": R(1, 2, 4),
            "value": R(1, 2, 4),
            "attn_mask": R(2, 2),
            "dropout_p": 0.0,
        },
    ),
    "embedding": (
        functional.embedding,
        ["input", "weight"],
        {"input": torch.tensor([0, 1]), "weight": R(3, 2)},
    ),
    "layer_norm": (
        functional.layer_norm,
        ["input", "normalized_shape", "weight", "bias"],
        {"input": R(2, 3), "normalized_shape": [3], "weight": R(3), "bias": R(3)},
    ),
}
_ORDER: dict[str, list[str]] = {
    "batch_norm": ["input", "weight", "bias", "running_mean", "running_var"]
}
"""Leaves whose parameters are declared in another order than those of their function."""


def _flat(name: str, values: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for parameter in _ORDER.get(name, SIGNATURES[name][1]):
        value = values.get(parameter)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list) and isinstance(value[0], torch.Tensor):
            found.extend(value)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
@hypothesis.settings(max_examples=30)
@hypothesis.given(data=st.data())
def test_any_split_of_arguments_gives_the_same_inputs(name: str, data: st.DataObject) -> None:
    """Positional or by keyword, in any order: the flat inputs are the same."""
    func, parameters, values = SIGNATURES[name]
    split = data.draw(st.integers(0, len(parameters)))
    keywords = data.draw(st.permutations(parameters[split:]))
    args = [values[p] for p in parameters[:split]]
    kwargs = {p: values[p] for p in keywords}
    seen = _seen(lambda: func(*args, **kwargs))
    assert _is(seen.inputs[seen.ops.index(name)], _flat(name, values))


@pytest.mark.parametrize("name", SIGNATURES)
@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
def test_any_split_of_arguments_can_be_replaced(name: str, data: st.DataObject) -> None:
    """Substituted inputs reach the operator at their own place, however it was called."""
    func, parameters, values = SIGNATURES[name]
    split = data.draw(st.integers(0, len(parameters)))
    flat = _flat(name, values)
    place = data.draw(st.sampled_from([i for i, t in enumerate(flat) if t.is_floating_point()]))
    args = [values[p] for p in parameters[:split]]
    kwargs = {p: values[p] for p in parameters[split:]}
    with applied(On(**{name: before(lambda t: t * 2, [place])})):
        result = func(*args, **kwargs)
    doubled = {
        p: [_twice(t, flat[place]) for t in v] if isinstance(v, list) else _twice(v, flat[place])
        for p, v in values.items()
    }
    assert torch.equal(result, func(**doubled))


def _twice(value: Any, target: torch.Tensor) -> Any:
    return value * 2 if value is target else value


# -- single facts ---------------------------------------------------------


def test_absent_input_can_be_given() -> None:
    """A routine may put a tensor where an optional one is absent."""
    x, layer = R(1, 3), nn.Linear(3, 2, bias=False)
    bias = torch.ones(2)
    with applied(On(linear=before(lambda _: bias, [2]))):
        result = layer(x)
    assert torch.equal(result, functional.linear(x, layer.weight, bias))


def test_embedding_is_presented_as_its_function() -> None:
    """An embedding's inputs are (input, weight), though the leaf takes the weight first."""
    table, index = nn.Embedding(4, 2), torch.tensor([1, 3])
    seen = _seen(lambda: table(index))
    assert seen.ops == ["embedding"]
    assert _is(seen.inputs[0], [index, table.weight])
    assert seen.names[0] == ["input", "weight"]
    with applied(On(embedding=before(lambda w: w + 1, ["weight"]))):
        result = table(index)
    assert torch.equal(result, table.weight[index] + 1)


def test_embedding_by_the_leafs_own_names() -> None:
    """``torch.embedding(weight, indices)`` is presented in the same order."""
    weight, index = R(4, 2), torch.tensor([1, 3])
    for run in (
        lambda: torch.embedding(weight, index),
        lambda: torch.embedding(weight=weight, indices=index),
        lambda: torch.ops.aten.embedding(weight, index),
        lambda: torch.ops.aten.embedding.default(weight, index),
    ):
        assert _is(_seen(run).inputs[0], [index, weight])


def test_recurrent_weights_are_expanded_in_place() -> None:
    """The weights of an LSTM are inputs in the order in which the operator takes them."""
    model, x = nn.LSTM(3, 4, num_layers=2), R(5, 1, 3)
    seen = _seen(lambda: model(x))
    at = seen.ops.index("lstm")
    inputs = seen.inputs[at]
    assert inputs[0] is x
    assert _is(inputs[3:], list(model.parameters()))
    assert _is(seen.values[at][3:], list(model.parameters()))


def test_index_with_tensors() -> None:
    """A tensor in an index is an input; the rest of the index is an attribute."""
    x, index = R(4, 4, 4), torch.tensor([0, 2])
    seen = _seen(lambda: x[1, index, :2])
    assert _is(seen.inputs[0], [x, index])
    with applied(On(__getitem__=before(lambda i: i + 1, [1]))):
        result = x[1, index, :2]
    assert torch.equal(result, x[1, index + 1, :2])
    assert _is(_seen(lambda: x[index]).inputs[0], [x, index])
    assert _is(_seen(lambda: x[..., 0]).inputs[0], [x])


def test_reflected_operators() -> None:
    """The tensor of ``1 - x`` is its input, the number an attribute."""
    x = R(3)
    seen = _seen(lambda: 1 - x)
    assert _is(seen.inputs[0], [x])
    with applied(On(**{seen.ops[0]: before(lambda t: t * 2, [0])})):
        result = 1 - x
    assert torch.equal(result, 1 - x * 2)


def test_variadic_sizes_are_no_inputs() -> None:
    """``x.view(2, 3)`` has one input, and its sizes are attributes."""
    x = R(6)
    for run in (lambda: x.view(2, 3), lambda: x.view((2, 3)), lambda: x.view(size=(2, 3))):
        assert _is(_seen(run).inputs[0], [x])


def test_attributes_have_names() -> None:
    """Non-tensors are attributes by their declared names, defaults included."""
    x, w = R(1, 2, 8, 8), R(2, 1, 3, 3)
    seen = _seen(lambda: functional.conv2d(x, w, None, 2, padding=1, groups=2))
    attributes = seen.attributes[0]
    assert attributes["groups"] == 2
    assert attributes["stride"] in (2, [2], (2,), [2, 2], (2, 2))
    assert attributes["padding"] in (1, [1], (1,), [1, 1], (1, 1))
    assert "dilation" in attributes
    assert not any(isinstance(v, torch.Tensor) for v in attributes.values())


def test_get_value_knows_parameters_and_buffers() -> None:
    """``get_value`` gives parameters, buffers and leaf variables, None for activations."""
    norm, x = nn.BatchNorm1d(3).eval(), R(2, 3)
    seen = _seen(lambda: norm(x))
    at = seen.ops.index("batch_norm")
    values = dict(zip(seen.names[at], seen.values[at], strict=True))
    assert values["input"] is None
    assert values["weight"] is norm.weight
    assert values["bias"] is norm.bias
    assert values["running_mean"] is norm.running_mean
    assert values["running_var"] is norm.running_var


# -- outputs --------------------------------------------------------------


def test_outputs_of_many_kinds() -> None:
    """Tuples, lists, named tuples and nested ones are flat lists of outputs."""
    x = R(4, 2)
    counts = {
        "split": (lambda: x.split(1), 4),
        "max": (lambda: x.max(dim=0), 2),
        "topk": (lambda: x.topk(1), 2),
        "unbind": (lambda: torch.unbind(x), 4),
        "lstm": (lambda: nn.LSTM(2, 3)(x), 3),
        "sum": (lambda: x.sum(), 1),
    }
    for name, (run, count) in counts.items():
        seen = _seen(run)
        assert len(seen.outputs[seen.ops.index(name)]) == count, name


def test_replaced_output_keeps_the_structure() -> None:
    """A result with one output replaced is what it was: named tuple, tuple or list."""
    x = R(4, 2)
    with applied(On(max=after(lambda v: v + 1, [0]), split=after(lambda t: t * 0, [1]))):
        largest = x.max(dim=0)
        parts = x.split(2)
    assert type(largest) is type(x.max(dim=0))
    assert torch.equal(largest.values, x.max(dim=0).values + 1)
    assert torch.equal(largest.indices, x.max(dim=0).indices)
    assert type(parts) is type(x.split(2))
    assert torch.equal(parts[0], x[:2])
    assert parts[1].sum() == 0


def test_replaced_output_of_a_multi_output_operator_passes_gradients() -> None:
    """Gradients of the outputs that were not replaced and of those that were are the same."""
    x = R(4, 2, requires_grad=True)
    with applied(On(split=after(lambda t: t + 1, [1]))):
        one, two = x.split(2)
    (one.sum() + 3 * two.sum()).backward()
    assert x.grad.tolist() == [[1, 1], [1, 1], [3, 3], [3, 3]]


def test_operators_without_tensors() -> None:
    """Factories have no input, and their output can be replaced."""
    seen = _seen(lambda: torch.zeros(2, 3))
    assert seen.ops == ["zeros"]
    assert seen.inputs[0] == []
    with applied(On(zeros=after(lambda t: t + 1))):
        assert torch.zeros(2).tolist() == [1, 1]


def test_the_operator_is_callable() -> None:
    """``context.get_op()`` is callable and has the operator's name."""
    found = []
    tool = On(linear=lambda context: found.append(context.get_op()))
    x, layer = R(1, 3), nn.Linear(3, 2)
    with applied(tool):
        wanted = layer(x)
    assert found[0].__name__ == "linear"
    assert torch.equal(found[0](x, layer.weight, layer.bias), wanted)


# -- structures that hold themselves --------------------------------------


@dataclasses.dataclass
class _Node:
    """A node of a graph, which leads to its neighbours and they to it."""

    value: torch.Tensor
    neighbours: list[_Node] = dataclasses.field(default_factory=list)


class _Linked(nn.Module):
    def forward(self, structure: Any, x: torch.Tensor) -> Any:
        for _ in range(8):
            x = torch.tanh(x)
        result: dict[str, Any] = {"x": x, "given": structure}
        result["itself"] = result
        return result


class _Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, structure: Any) -> Any:
        itself: list[Any] = [structure]
        itself.append(itself)
        return x * 2, itself

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2, None


def _list_of_itself() -> Any:
    itself: list[Any] = [R(2)]
    itself += [itself, itself]
    return itself


def _mapping_of_itself() -> Any:
    itself: dict[str, Any] = {"x": R(2)}
    itself["itself"] = (itself, [itself])
    return itself


def _complete_graph() -> Any:
    nodes = [_Node(R(2)) for _ in range(20)]
    for node in nodes:
        node.neighbours.extend(nodes)
    return nodes[0]


def _long_chain() -> Any:
    first = node = _Node(R(2))
    for _ in range(3 * sys.getrecursionlimit()):
        node.neighbours.append(_Node(R(2)))
        node = node.neighbours[0]
    return first


@pytest.mark.usefixtures("interceptor")
@pytest.mark.parametrize(
    "make", [_list_of_itself, _mapping_of_itself, _complete_graph, _long_chain]
)
@pytest.mark.parametrize("tool", ["count", "summary", "trace", "path", None])
def test_structures_may_hold_themselves(make: Callable[[], Any], tool: str | None) -> None:
    """A module or an ``autograd.Function`` may take and give structures that lead back to
    themselves, and such as are deeper than Python calls functions."""
    x, structure, model = R(2, requires_grad=True), make(), _Linked()
    with applied(Identity() if tool is None else amanda.tools.load(tool)()):
        for _ in range(5):
            result = model(structure, x)
            assert result["given"] is structure
            assert result["itself"] is result
            result["x"].sum().backward()
            doubled, itself = _Holding.apply(x, structure)
            assert itself[1] is itself
            doubled.sum().backward()


def test_trace_shows_that_a_list_holds_itself() -> None:
    """An attribute that holds itself has an ellipsis where it does."""
    itself: list[Any] = [1]
    itself.append(itself)
    trace = amanda.tools.graph_tracing.GraphTracingTool()
    with applied(trace):
        _Holding.apply(R(2, requires_grad=True), itself)
    attributes = [dict(node.attributes) for node in trace.graph.ops]
    assert [1, "..."] in [value for found in attributes for value in found.values()]
