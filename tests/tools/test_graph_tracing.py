"""Graph tracing on the loopback framework."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import amanda
from amanda.errors import CapabilityError, TensorReleased
from amanda.interface.calls import BoundCall, OpCall
from amanda.testing import loopback as lb
from amanda.tools.graph import Edge, Graph
from amanda.tools.graph_tracing import GraphTracingTool


def model() -> lb.Sequential:
    return lb.Sequential(lb.Linear([[1.0, 2.0], [3.0, 4.0]], [0.5, -0.5]), lb.Linear([[1.0, -2.0]]))


def traced(function: Any, *inputs: Any) -> tuple[Graph, Any]:
    tool = GraphTracingTool()
    with amanda.apply(tool):
        result = function(*inputs)
    return tool.graph, result


def test_operators_come_in_order_with_their_modules() -> None:
    """The graph has every operator once, in execution order, with type and module path."""
    net, x = model(), lb.tensor([[1.0, 2.0]])
    graph, _ = traced(lambda: lb.relu(net(x)))
    assert [(op.id, op.type, op.module) for op in graph.ops] == [
        ("Sequential.0/linear:0", "linear", "0"),
        ("Sequential.1/linear:0", "linear", "1"),
        ("/relu:0", "relu", ""),
    ]
    assert [op.namespace for op in graph.ops] == ["loopback/1.0/eager"] * 3
    assert len(graph) == 3
    assert "/relu:0" in graph


def test_edges_lead_from_outputs_to_inputs() -> None:
    """An edge names producer and output, consumer and input; lists count one by one."""

    def run(x: Any) -> Any:
        left, right = lb.split(x, 2)
        return lb.cat([right, left, right])

    graph, _ = traced(run, lb.tensor([1.0, 2.0, 3.0, 4.0]))
    assert graph.edges == [
        Edge("/split:0", 1, "/cat:0", 0),
        Edge("/split:0", 0, "/cat:0", 1),
        Edge("/split:0", 1, "/cat:0", 2),
    ]
    assert [op.id for op in graph.producers("/cat:0")] == ["/split:0"]
    assert [op.id for op in graph.consumers("/split:0")] == ["/cat:0"]


def test_inputs_parameters_and_outputs_are_told_apart() -> None:
    """What comes in is an input or a parameter; what nobody reads is an output."""
    net, x = model(), lb.tensor([[1.0, 2.0]])
    graph, y = traced(net, x)
    assert graph.inputs == [graph.tensor_of(x)]
    assert graph.parameters == [
        graph.tensor_of(p) for p in (net.__dict__["0"].weight, net.__dict__["0"].bias)
    ] + [graph.tensor_of(net.__dict__["1"].weight)]
    assert graph.outputs == [graph.tensor_of(y)]


def test_absent_inputs_keep_their_position() -> None:
    """A missing bias is None at its place."""
    net = model()
    graph, _ = traced(net, lb.tensor([[1.0, 2.0]]))
    bare = graph.op("Sequential.1/linear:0")
    assert bare.input_names == ("input", "weight", "bias")
    assert bare.inputs[2] is None
    assert None not in graph.op("Sequential.0/linear:0").inputs


def test_attributes_are_plain_data() -> None:
    """Arguments that are not tensors are kept by name."""
    graph, _ = traced(lambda x: lb.dropout(x, p=0.25), lb.tensor([1.0]))
    assert graph.op("/dropout:0").attributes == {"p": 0.25}


def test_an_in_place_operator_gives_its_tensor_a_new_entry() -> None:
    """Readers before and after are connected to the right producer."""

    def run(x: Any) -> Any:
        y = lb.relu(x)
        z = lb.mul(y, 2.0)
        lb.add_(y, z)
        return lb.relu(y)

    graph, _ = traced(run, lb.tensor([1.0, -2.0]))
    assert graph.edges == [
        Edge("/relu:0", 0, "/mul:0", 0),
        Edge("/relu:0", 0, "/add_:0", 0),
        Edge("/mul:0", 0, "/add_:0", 1),
        Edge("/add_:0", 0, "/relu:1", 0),
    ]


def test_backward_operators_belong_to_their_forward_operator() -> None:
    """Each backward operator is listed once at the operator it is the backward of."""
    net, x = model(), lb.tensor([[1.0, 2.0]])

    def step() -> None:
        for _ in range(2):
            lb.sum(net(x)).backward()

    graph, _ = traced(step)
    (total,) = graph.op("/sum:0").backward
    assert (total.id, total.type, total.forward) == (
        "/sum:0/grad/SumBackward:0",
        "SumBackward",
        "/sum:0",
    )
    types = sorted(op.type for op in graph.op("Sequential.1/linear:0").backward)
    assert types == ["AccumulateGrad", "MatmulBackward", "TransposeBackward"]
    assert len({op.id for op in graph.backward_ops}) == len(graph.backward_ops)


def test_another_tool_finds_the_graph_in_the_context() -> None:
    """A tool that depends on it reads ``context["graph"]`` at every point."""
    tracing, watching = GraphTracingTool(), amanda.Tool()
    found: list[Any] = []
    watching.depends_on(tracing)
    for backward in (False, True):
        for require_outputs in (False, True):
            watching.add_inst_for_op(
                lambda context: found.append(context["graph"]), backward, require_outputs
            )
    with amanda.apply(watching):
        lb.sum(lb.relu(lb.parameter([1.0]))).backward()
    assert len(found) == 10
    assert set(map(id, found)) == {id(tracing.graph)}


def test_a_substitute_is_the_output_that_it_stands_for() -> None:
    """The edges are those of the program, whatever a tool before or behind puts in their place."""

    def run() -> None:
        y = lb.relu(lb.tensor([1.0]))
        lb.mul(y, lb.relu(y))

    def edges(*tools: amanda.Tool) -> list[Edge]:
        with amanda.apply(*tools):
            run()
        (tracing,) = (tool for tool in tools if isinstance(tool, GraphTracingTool))
        return tracing.graph.edges

    doubling = amanda.Tool()
    doubling.add_inst_for_op(lambda context: context.insert_after_op(lambda y: lb.mul(y, 2.0)))
    alone = edges(GraphTracingTool())
    assert len(alone) == 3
    assert edges(doubling, GraphTracingTool()) == alone
    assert edges(GraphTracingTool(), doubling) == alone
    assert edges(GraphTracingTool(follow=False), doubling) == alone


def test_a_second_scope_changes_nothing() -> None:
    """What is known keeps its place when the tool is applied again."""
    tool, net, x = GraphTracingTool(), model(), lb.tensor([[1.0, 2.0]])
    graphs = []
    for _ in range(2):
        with amanda.apply(tool):
            y = net(x)
        graphs.append((tool.graph.ops, tool.graph.tensors, tool.graph.edges))
    assert graphs[0] == graphs[1]
    assert tool.graph.tensor_of(y) == tool.graph.outputs[0]


def test_no_tensor_is_kept_alive() -> None:
    """Inputs, parameters, intermediates and gradients die with the program's references."""
    net, x = model(), lb.tensor([[1.0, 2.0]])
    tool = GraphTracingTool()
    with amanda.apply(tool):
        y = net(x)
        z = lb.relu(y)
        z.backward()
    alive = [weakref.ref(tensor) for tensor in (x, y, z, net.parameters()[0])]
    del net, x, y, z
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4
    assert len(tool.graph.edges) == 2


# -- replay -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def seed() -> None:
    lb.manual_seed(0)


def everything(net: Any, x: Any) -> Any:
    """Modules, lists, an absent input, an in-place operator, random numbers, two outputs."""
    y = lb.cat([lb.relu(net(x)), lb.mul(x, 3.0)])
    lb.add_(y, y)
    left, right = lb.split(lb.dropout(y), 2)
    return lb.matmul(left, lb.transpose(right))


def square() -> Any:
    return lb.Linear([[1.0, 2.0], [3.0, 4.0]], [0.5, -0.5])


def test_a_replay_gives_the_same_numbers() -> None:
    """With the generator seeded alike the replayed output is that of the model."""
    net, x = square(), lb.tensor([[1.0, 2.0], [0.5, -3.0]])
    lb.manual_seed(7)
    graph, y = traced(everything, net, x)
    lb.manual_seed(7)
    (again,) = graph.replay([x], [graph.tensor_of(y)])
    assert again is not y
    assert again.data == y.data


def test_a_replay_takes_other_inputs_and_parameters() -> None:
    """A mapping from tensors of the graph to values replaces what it names."""
    net, x = model(), lb.tensor([[1.0, 2.0]])
    graph, _ = traced(net, x)
    other = lb.tensor([[5.0, 6.0]])
    assert graph.replay([other])[0].data == net(other).data
    weight = net.__dict__["1"].weight
    given = {graph.tensor_of(x): x, graph.tensor_of(weight): lb.tensor([[0.0, 0.0]])}
    assert graph.replay(given)[0].data == [0.0]


def test_a_replay_gives_any_tensor() -> None:
    """``outputs`` chooses among all tensors of the graph."""
    net, x = model(), lb.tensor([[1.0, 2.0]])
    graph, _ = traced(net, x)
    hidden = graph.op("Sequential.0/linear:0").outputs[0]
    assert hidden is not None
    assert graph.replay([x], [hidden])[0].data == net.__dict__["0"](x).data


def test_a_replay_is_not_instrumented() -> None:
    """Inside of a scope the replayed operators are not operators of the program."""
    net, x, tool = model(), lb.tensor([[1.0, 2.0]]), GraphTracingTool()
    with amanda.apply(tool):
        net(x)
        tool.graph.replay([x])
    assert len(tool.graph) == 2


def test_a_replay_says_what_it_lacks() -> None:
    """A wrong number of inputs and a parameter that is gone are errors that say so."""
    net, x = model(), lb.tensor([[1.0, 2.0]])
    graph, y = traced(net, x)
    with pytest.raises(ValueError, match="the graph has 1 inputs, got 2"):
        graph.replay([x, x])
    del net, y
    gc.collect()
    with pytest.raises(TensorReleased, match=r"input 1 of op Sequential\.0/linear:0 is neither"):
        graph.replay([x])


def test_a_driver_without_replay_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing works where a single operator cannot be run again; the replay says so."""
    monkeypatch.setattr(BoundCall, "freeze", OpCall.freeze)
    x = lb.tensor([1.0])
    graph, _ = traced(lb.relu, x)
    with pytest.raises(CapabilityError, match="cannot run a single operator again"):
        graph.replay([x])


# -- other forms --------------------------------------------------------------


def scalars() -> int:
    """How many tensors without dimensions there are."""
    gc.collect()
    return sum(type(item) is lb.tape.Scalar for item in gc.get_objects())


def test_tensors_without_weak_references() -> None:
    """Tensors that take no weak reference are followed, and held no longer than the scope."""
    before = scalars()
    x = lb.tensor(2.0)
    with pytest.raises(TypeError):
        weakref.ref(x)
    tool = GraphTracingTool()
    graph = tool.graph
    with amanda.apply(tool):
        for _ in range(3):
            y = lb.relu(lb.mul(x, x))
            amanda.new_iteration()
        assert graph.inputs == [graph.tensor_of(x)]
        assert graph.outputs == [graph.tensor_of(y)]
        assert scalars() == before + len(graph.tensors) == before + 3
    assert scalars() == before + 2  # x and y
    assert graph.edges == [Edge("/mul:0", 0, "/relu:0", 0)]
    (again,) = graph.replay([lb.tensor(3.0)])
    assert again.tolist() == 9.0
