"""Backward passes in all their forms."""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward, grad

import amanda
from tests.torch.reference import nodes_before
from tests.torch.support import Counter, Cube, On, after, applied, before, fingerprint


class Square(torch.autograd.Function):
    """An operator of the user's, in the form that functorch needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


cube = Cube.apply
"""Bound before any scope."""

ANNOTATED = """
class Scaled(Function):
    @staticmethod
    def forward(ctx, x: Missing, factor: float = 2.0) -> Missing:
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.0, None
"""


# -- autograd.Function ----------------------------------------------------


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="this Python computes annotations where they are written"
)
def test_annotations_of_a_function_are_left_alone() -> None:
    """A function whose annotations name what is not there runs as without a scope."""
    names: dict[str, Any] = {"Function": torch.autograd.Function}
    exec(compile(ANNOTATED, "program", "exec", dont_inherit=True), names)

    def gradients() -> list[float]:
        x = torch.ones(2, requires_grad=True)
        names["Scaled"].apply(x).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    own = gradients()
    with applied(tool := Counter()):
        assert gradients() == own
    assert any("Scaled" in name for name in tool.ids)


@pytest.mark.parametrize("apply", [cube, lambda x: Cube.apply(x)], ids=["early", "late"])
def test_function_is_an_operator(apply: Any) -> None:
    """An ``autograd.Function`` is one operator, named after its class; its inside is not seen."""
    counter = Counter()
    x = torch.full((2,), 2.0, requires_grad=True)
    with applied(counter):
        apply(x).sum().backward()
    assert counter.ids == ["/Cube:0", "/sum:0", "/ones_like:0"]
    assert collections.Counter(counter.backward_ids) == {
        "/sum:0/grad/SumBackward0:0": 1,
        "/Cube:0/grad/CubeBackward:0": 1,
        "/Cube:0/grad/AccumulateGrad:0": 1,
    }
    assert x.grad.tolist() == [12, 12]


def test_function_in_the_setup_context_form() -> None:
    """The ``setup_context`` form is the same one operator, with its inputs."""
    shapes = []
    tool = On(Square=before(lambda x: shapes.append(tuple(x.shape))))
    x = torch.full((2,), 3.0, requires_grad=True)
    with applied(tool):
        Square.apply(x).sum().backward()
    assert tool.met == ["/Square:0"]
    assert shapes == [(2,)]
    assert x.grad.tolist() == [6, 6]


class Power(torch.autograd.Function):
    """One with an argument that has a default."""

    @staticmethod
    def forward(x: torch.Tensor, exponent: int = 3) -> torch.Tensor:
        return x**exponent

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.exponent = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ctx.exponent * x ** (ctx.exponent - 1), None


@pytest.mark.parametrize("call", [lambda x: Power.apply(x), lambda x: Power.apply(x=x, exponent=2)])
def test_function_with_defaults_and_keywords(call: Any) -> None:
    """Defaults and keywords of a Function's arguments work as without a tool."""
    counter = Counter()
    x, y = (torch.full((2,), 2.0, requires_grad=True) for _ in range(2))
    with applied(counter):
        result = call(x)
        result.sum().backward()
    expected = call(y)
    expected.sum().backward()
    assert torch.equal(result, expected)
    assert torch.equal(x.grad, y.grad)
    assert counter.ids[0] == "/Power:0"


def test_function_of_a_thread_outside_of_the_scope() -> None:
    """A Function is not an operator in a thread that no scope covers."""
    counter = Counter()
    inside = threading.Event()
    done = []

    def run() -> None:
        inside.wait()
        done.append(cube(torch.full((1,), 3.0)).item())

    thread = threading.Thread(target=run)
    thread.start()
    with applied(counter):
        inside.set()
        thread.join()
        assert cube(torch.full((1,), 2.0)).item() == 8
    assert done == [27.0]
    assert counter.ops["Cube"] == 1


def test_function_that_raises() -> None:
    """What a Function raises reaches the program, and the next operators are seen."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not this one")

    early, counter = Raises.apply, Counter()
    with applied(counter):
        with pytest.raises(ValueError, match="not this one"):
            early(torch.ones(1))
        with pytest.raises(TypeError):
            cube()
        cube(torch.ones(1))
    assert counter.ops["Cube"] == 1


def test_function_with_substituted_input() -> None:
    """A Function computes with the substitute, saves it, and passes the gradient on."""
    x = torch.full((2,), 2.0, requires_grad=True)
    with applied(On(Cube=before(lambda x: x + 1))):
        y = cube(x)
    y.sum().backward()
    assert y.tolist() == [27, 27]
    assert x.grad.tolist() == [27, 27]


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_function_under_functorch(transform: str) -> None:
    """Under a functorch transform a Function is the same one operator, and works."""
    counter = Counter()
    x = torch.tensor([1.0, 2.0])
    vanilla = _transformed(transform)(x)
    with applied(counter):
        result = _transformed(transform)(x)
    assert torch.equal(result, vanilla)
    assert [name for name in counter.ops if "Square" in name] == ["Square"]
    assert counter.ops["Square"] == 1


def _transformed(transform: str) -> Any:
    if transform == "vmap":
        return torch.vmap(Square.apply)
    return torch.func.grad(lambda x: Square.apply(x).sum())


# -- one graph, several passes --------------------------------------------


@pytest.mark.parametrize("outputs", ["h", "c", "hc"])
def test_operator_of_many_nodes(outputs: str) -> None:
    """An operator of many nodes has those backward operators that a pass comes to, under the same
    ids in each iteration, whichever of its outputs the pass starts from."""
    counter, cell = Counter(), nn.LSTMCell(3, 4)
    x, seen = torch.rand(2, 3), []
    with applied(counter):
        for _ in range(4):
            made = dict(zip("hc", cell(x), strict=True))
            loss = sum(made[name].sum() for name in outputs)
            nodes = nodes_before(loss)
            loss.backward(retain_graph=True)
            once, again = dict(counter.backward_ops), collections.Counter(counter.backward_ids)
            loss.backward()
            assert once == nodes
            assert collections.Counter(counter.backward_ids) == again + again
            seen.append(sorted(again))
            counter.backward_ops.clear()
            counter.backward_ids.clear()
    assert seen[1:] == seen[:-1]


def test_a_graph_that_takes_turns_between_two_forms() -> None:
    """In a loop whose first state needs no gradient, routines of backward operators run as often in
    every pass, and gradients are those of the program."""
    cell, x = nn.LSTMCell(3, 3), torch.rand(2, 3)

    def loop() -> list[torch.Tensor]:
        state: Any = (torch.ones(2, 3), torch.ones(2, 3))
        for _ in range(3):
            state = cell(x, state)
        cell.zero_grad()
        (state[0].sum() + state[1].prod()).backward()
        return [weight.grad.clone() for weight in cell.parameters() if weight.grad is not None]

    expected, tool, runs = loop(), Counter(), []
    with applied(tool):
        for _ in range(5):
            tool.backward_ops.clear()
            found = loop()
            runs.append(dict(tool.backward_ops))
            assert all(map(torch.equal, found, expected))
    assert len(found) == 4
    assert runs[0]["AccumulateGrad"] == 4
    assert all(run == runs[0] for run in runs)


def test_each_output_in_a_pass_of_its_own() -> None:
    """Passes that come to an operator from one output after the other run each node as often as
    they come to it."""
    counter, cell = Counter(), nn.LSTMCell(3, 4)
    with applied(counter):
        for _ in range(3):
            h, c = (output.sum() for output in cell(torch.rand(2, 3)))
            wanted = nodes_before(h) + nodes_before(c)
            h.backward(retain_graph=True)
            c.backward()
            assert counter.backward_ops == wanted
            counter.backward_ops.clear()


def test_operator_that_gets_other_nodes() -> None:
    """An operator whose gradient graph has another form than in the last iteration has the
    backward operators of this one."""
    counter, layer = Counter(), nn.Linear(3, 4)
    x = torch.rand(2, 3)
    with applied(counter):
        for needs in [(True, True), (True, True), (False, True), (True, False), (True, True)]:
            for parameter, need in zip(layer.parameters(), needs, strict=True):
                parameter.requires_grad_(need)
            loss = layer(x.clone().requires_grad_(sum(needs) > 1)).sum()
            wanted = nodes_before(loss)
            loss.backward()
            assert counter.backward_ops == wanted
            counter.backward_ops.clear()


def test_gradient_routine_acts_on_every_pass() -> None:
    """A routine that halves a gradient does so in each pass through a retained graph."""
    tool = amanda.Tool()

    def halve(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "MulBackward0":
            context.insert_after_backward_op(lambda *gs: [None if g is None else g / 2 for g in gs])

    tool.add_inst_for_op(halve, backward=True)
    x = torch.tensor(3.0, requires_grad=True)
    with applied(tool):
        y = x * 4
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        second = torch.autograd.grad(y, x)[0]
    assert (first.item(), second.item()) == (2, 2)


NET = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
LAYER = nn.Linear(4, 4, bias=False)


def second_derivatives() -> None:
    """What a network that solves a differential equation trains on."""
    x = torch.ones(5, 2, requires_grad=True)
    (first,) = torch.autograd.grad(NET(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    (first[:, 1] - second[:, 0]).square().mean().backward()


def gradient_penalty() -> None:
    """The norm of a gradient is a loss; a weight is used twice, its gradients are summed."""
    x = torch.ones(3, 4, requires_grad=True)
    loss = LAYER(torch.tanh(LAYER(x))).sin().sum()
    gradients = torch.autograd.grad(loss, [x, LAYER.weight], create_graph=True)
    torch.stack([gradient.norm() for gradient in gradients]).sum().backward()


def updates_within_a_graph() -> None:
    """Weights after steps of descent are differentiated by the first ones."""
    weight = first = torch.eye(4, requires_grad=True)
    for _ in range(3):
        loss = torch.tanh(torch.ones(2, 4) @ weight).sum()
        weight = weight - torch.autograd.grad(loss, weight, create_graph=True)[0]
    (weight.sum() + first.sum()).backward()


def third_derivative() -> None:
    """Of a function of the program's own."""
    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    second.sum().backward()


def nodes_run(program: Callable[[], None]) -> collections.Counter[str]:
    """The nodes that the engine has run, by name, without accumulations, as PyTorch notes them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        program()
    counts = {event.key: event.count for event in profile.key_averages()}
    # A node whose gradient the pass returns is noted by the engine, and not by itself.
    prefix = "autograd::engine::evaluate_function: "
    names = [key.removeprefix(prefix) for key in counts if key.startswith(prefix)]
    return collections.Counter({k: counts[k] for k in names if k in counts and ":" not in k})


@pytest.mark.parametrize(
    "program",
    [second_derivatives, gradient_penalty, updates_within_a_graph, third_derivative],
    ids=lambda program: program.__name__,
)
def test_backward_operators_of_gradients_are_seen(program: Callable[[], None]) -> None:
    """Nodes that passes with ``create_graph=True`` make are backward operators of the forward
    operator whose gradient they differentiate, with ids of their own, equal in all steps."""
    expected = nodes_run(program)
    counter = Counter()
    with applied(counter) as scope:
        for _ in range(3):
            program()
    seen = collections.Counter(
        {name: n for name, n in counter.backward_ops.items() if name != "AccumulateGrad"}
    )
    assert seen == collections.Counter({name: 3 * n for name, n in expected.items()})
    assert not scope.statistics.not_seen
    third = len(counter.backward_ids) // 3
    assert counter.backward_ids[:third] == counter.backward_ids[2 * third :]
    assert any(op_id.count("/grad/") > 1 for op_id in counter.backward_ids)


def test_backward_operators_of_a_write_by_index_are_seen() -> None:
    """In each execution, though the operator returns nothing: its gradient is of what it wrote."""
    counter, x = Counter(), torch.ones(2, 3, requires_grad=True)
    with applied(counter):
        for _ in range(4):
            y = torch.zeros(4, 3)
            y[torch.tensor([0, 2])] = x
            y[1:2] = 1
            y.sum().backward()
    names = "IndexPutBackward0", "CopySlices", "AccumulateGrad"
    assert [counter.backward_ops[name] for name in names] == [4, 4, 4]


def test_gradients_of_gradients_that_begin_late_are_counted_once() -> None:
    """A first pass that makes a graph after steps without one is seen, too, behind the gradients
    that it returns."""
    x, counter = torch.ones(3, requires_grad=True), Counter()

    def step(makes_graph: bool) -> int:
        counter.backward_ids.clear()
        (gradient,) = torch.autograd.grad(x.sin().sum(), x, create_graph=makes_graph)
        (gradient * x).sum().backward()
        return sum(op_id.count("/grad/") > 1 for op_id in counter.backward_ids)

    with applied(counter) as scope:
        found = [step(makes_graph) for makes_graph in (False, False, False, True, True, True)]
        assert not scope.statistics.not_seen
    assert found[3:] == [2, 2, 2]


def test_differentiable_gradient_routines_with_create_graph() -> None:
    """A routine on gradients that takes part in AD has a gradient of its own."""

    class Scaling(amanda.Tool):
        differentiable = True

        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_backward_op().__name__ == "PowBackward0":
                context.insert_after_backward_op(lambda g: g * g)

    x = torch.tensor(3.0, requires_grad=True)
    with applied(Scaling()):
        (first,) = torch.autograd.grad(x.pow(2), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert first.item() == 36
    assert second.item() == 2 * 6 * 2


# -- accumulation ---------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2),
        lambda: nn.LSTM(2, 2),  # several outputs
    ],
    ids=["linear", "lstm"],
)
def test_parameters_that_begin_to_need_a_gradient(make: Any) -> None:
    """An operator of which more inputs need a gradient than before gets its new backward ops."""
    torch.manual_seed(0)
    module = make()
    *frozen, last = module.parameters()
    assert last.requires_grad
    x = torch.ones(1, 2)

    def step() -> None:
        result = module(x)
        loss = result if isinstance(result, torch.Tensor) else result[0]
        loss.sum().backward()

    def watcher() -> tuple[amanda.Tool, collections.Counter[str]]:
        tool, names = amanda.Tool(), collections.Counter[str]()
        tool.add_inst_for_op(
            lambda context: names.update([context.get_backward_op().__name__]), backward=True
        )
        return tool, names

    tool, wanted = watcher()
    with applied(tool):
        step()
    for parameter in frozen:
        parameter.requires_grad_(False)
    tool, names = watcher()
    with applied(tool):
        for _ in range(3):
            step()
        assert names != wanted
        for parameter in frozen:
            parameter.requires_grad_(True)
        step()
    assert names == wanted


@pytest.mark.parametrize("where", ["insert_before_backward_op", "insert_after_backward_op"])
def test_gradients_that_a_routine_gives_another_type(where: str) -> None:
    """A gradient that a routine returns gets the dtype of the one that it stands for."""
    x = torch.ones(2, requires_grad=True)
    dtypes = []
    x.register_hook(lambda gradient: dtypes.append(gradient.dtype))

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "MulBackward0":
            getattr(context, where)(lambda *g: [v if v is None else 2 * v.double() for v in g])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, backward=True)
    with applied(tool):
        (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6, 6]
    assert dtypes == [torch.float32]


@pytest.mark.parametrize("steps", [1, 6])
def test_accumulation_outlives_the_graph_of_its_owner(steps: int) -> None:
    """Where the graph of the first operator that used a leaf is gone, as that of a norm which is
    printed, the accumulation executes in another graph, and is seen all the same."""
    layer = nn.Linear(3, 2)
    counter = Counter()
    with applied(counter):
        for _ in range(steps):
            counter.backward_ids.clear()
            layer.weight.norm().item()
            (layer(torch.rand(2, 3)) + layer.weight.sum()).sum().backward()
    owners = sorted(i for i in counter.backward_ids if "AccumulateGrad" in i)
    assert owners == [
        "/linalg_vector_norm:0/grad/AccumulateGrad:0",
        "Linear/linear:0/grad/AccumulateGrad:0",
    ]
    assert counter.backward_ops["AccumulateGrad"] == 2 * steps


def test_owner_of_an_accumulation_follows_the_branch() -> None:
    """Where the first consumer changes between iterations, so does the owner."""
    w = torch.rand(3, requires_grad=True)
    counter = Counter()
    owners = []
    with applied(counter):
        for step in range(4):
            counter.backward_ids.clear()
            (torch.exp(w) if step % 2 else torch.sin(w)).sum().backward()
            owners += [i for i in counter.backward_ids if "AccumulateGrad" in i]
    sine, exponential = "/sin:0/grad/AccumulateGrad:0", "/exp:0/grad/AccumulateGrad:0"
    assert owners == [sine, exponential, sine, exponential]


# -- entries --------------------------------------------------------------


@pytest.mark.parametrize("entry", ["method", "function", "grad", "inputs"])
def test_entries_bound_before_the_scope(entry: str) -> None:
    """``backward`` and ``grad`` are instrumented however and whenever they were bound."""
    counter = Counter()
    w = torch.rand(3, requires_grad=True)
    with applied(counter):
        loss = (w * w).sum()
        if entry == "method":
            loss.backward()
        elif entry == "function":
            backward([loss])
        elif entry == "grad":
            grad(loss, w)
        else:
            loss.backward(inputs=[w])
    accumulates = {"grad": 0}.get(entry, 1)
    wanted = nodes_before((w * w).sum()) - collections.Counter(AccumulateGrad=1 - accumulates)
    assert counter.backward_ops == wanted


def test_gradients_of_substitutes_go_back_to_the_device() -> None:
    """A routine may return a tensor of another device: the gradient is that of the tensor's own."""
    x = torch.ones(2, device="meta", requires_grad=True)
    with applied(On(exp=after(lambda y: torch.ones(2)))):
        y = torch.exp(x)
        y.sum().backward()
    assert y.device.type == "cpu"
    assert x.grad is not None
    assert x.grad.device.type == "meta"


@pytest.mark.parametrize("keeps", [True, False], ids=["one accumulation", "one in each iteration"])
@pytest.mark.usefixtures("interceptor")
def test_each_of_two_scopes_acts_on_a_leaf_in_the_passes_that_come_through_it(keeps: bool) -> None:
    """Where two scopes have hooked one accumulation, each acts once in each pass that comes to it
    through an operator of that scope, also after iterations in which everything is known."""
    weight, outer, inner = torch.ones(3, requires_grad=True), Counter(), Counter()
    with applied(outer):
        kept = (weight * 2).sum() if keeps else None
        amanda.new_iteration()
        with applied(inner):
            for _ in range(4):
                loss = (weight * 2).sum() + (weight * 3).sum()
                loss.backward()
                amanda.new_iteration()
            assert outer.backward_ops["AccumulateGrad"] == 4
            assert inner.backward_ops["AccumulateGrad"] == 4
            if kept is not None:
                kept.backward()
    assert outer.backward_ops["AccumulateGrad"] == 4 + keeps
    assert inner.backward_ops["AccumulateGrad"] == 4
    assert weight.grad is not None
    assert weight.grad.tolist() == [4 * 5 + 2 * keeps] * 3
    assert {op_id for op_id in outer.backward_ids if "AccumulateGrad" in op_id} == {
        op_id for op_id in inner.backward_ids if "AccumulateGrad" in op_id
    }


def test_hooks_of_the_user_work_as_ever() -> None:
    """Tensor hooks, retained gradients and module hooks see what they see without us."""

    def run() -> list[Any]:
        torch.manual_seed(0)
        layer, seen = nn.Linear(3, 2), []
        layer.register_full_backward_hook(lambda _, gi, go: seen.extend(fingerprint([gi, go])))
        x = torch.rand(2, 3, requires_grad=True)
        h = layer(x)
        h.retain_grad()
        h.register_hook(lambda g: g * 2)
        h.sum().backward()
        return [seen, fingerprint([h.grad, x.grad, layer.weight.grad])]

    vanilla = run()
    counter = Counter()
    with applied(counter):
        assert run() == vanilla


def test_saved_tensors_hooks_of_the_user() -> None:
    """Hooks that pack saved tensors see the substituted ones, and the gradient uses them."""
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.tolist())
        return tensor

    x = torch.tensor(3.0, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with applied(On(mul=before(lambda x: x + 1, [0]))), hooks:
        y = torch.mul(x, x)
    y.backward()
    assert sorted(packed) == [3, 4]
    assert x.grad.item() == 7


@pytest.mark.parametrize("without", ["no_grad", "constants"])
def test_operators_first_met_without_gradients(without: str) -> None:
    """What is known of operators that were met where nothing wanted a gradient says nothing of
    their gradients, nor of those of other operators."""
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ReLU())

    def train(x: torch.Tensor) -> None:
        for _ in range(3):
            model(x).sum().backward()
            amanda.new_iteration()

    with applied(known := Counter()):
        train(torch.ones(2, requires_grad=True))
    with applied(met := Counter()):
        for _ in range(2):
            with torch.set_grad_enabled(without == "constants"):
                model(torch.ones(2))
            amanda.new_iteration()
        assert not met.backward_ops
        train(torch.ones(2, requires_grad=True))
    assert met.backward_ops == known.backward_ops
    assert known.backward_ops.total() == 15
