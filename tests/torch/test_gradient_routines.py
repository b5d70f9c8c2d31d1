"""Routines on gradients beside the program's own functions, hooks, optimizers and graphs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F  # noqa: N812

import amanda
from amanda.errors import RoutineResultError
from amanda_torch import _internals
from tests.torch.support import Identity, On, Watcher, WholeIdentity, after, applied, before

# -- autograd.Function ----------------------------------------------------


class Doubling(Function):
    """Twice its input; the others below differ in how they say it."""

    ran: list[str] = []  # noqa: RUF012 - shared on purpose

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Doubling.ran.append("backward")
        return gradients[0] * 2


class InPlace(Doubling):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)


class InPlaceOnView(InPlace):
    """Gets a view, so that its node is not in the graph."""


class AsView(Doubling):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Doubling.ran.append("backward")
        return gradients[0].view(2, 2)


class Views(Doubling):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x[0], x[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Doubling.ran.append("backward")
        return torch.stack(gradients)


class Several(Doubling):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        index = x.argmax()
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        return "text", x * 2, index, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Doubling.ran.append("backward")
        return gradients[1] * 2 + gradients[3] * 3


class WithContext(Doubling):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> Any:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Doubling.ran.append("backward")
        return gradients[0] * ctx.factor, None


class Once(Doubling):
    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> Any:
        Doubling.ran.append("backward")
        return gradients[0] * 2


class NeedsOne(Doubling):
    @staticmethod
    def forward(ctx: Any, constant: torch.Tensor, x: torch.Tensor) -> Any:
        ctx.save_for_backward(constant)
        return constant * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Doubling.ran.append("backward")
        (constant,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (False, True)
        return None, gradients[0] * constant


FUNCTIONS = [Doubling, InPlace, InPlaceOnView, AsView, Views, Several, WithContext, Once, NeedsOne]


def _run_function(cls: type[Function]) -> tuple[list[Any], list[str]]:
    """What a program can see of one run: outputs, their graph, the gradient; and what has run."""
    Doubling.ran.clear()
    leaf = torch.arange(4.0).reshape(2, 2).requires_grad_()
    x = leaf * 1 if cls is InPlace else (leaf * 1)[:] if cls is InPlaceOnView else leaf
    args = {WithContext: (x, 3.0), NeedsOne: (torch.full((2, 2), 5.0), x)}.get(cls, (x,))
    result = cls.apply(*args)
    outputs = [o for o in (result if isinstance(result, tuple) else (result,)) if o is not None]
    tensors = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    seen: list[Any] = [o if isinstance(o, str) else o.tolist() for o in outputs]
    seen += [(o is x, _internals.is_view(o), type(o.grad_fn).__name__) for o in tensors]
    sum((o * (1 + torch.arange(o.numel()).reshape(o.shape))).sum() for o in tensors).backward()
    return [*seen, x.tolist(), leaf.grad], list(Doubling.ran)


def _on_gradients(kind: str, routine: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda context: getattr(context, kind)(routine)


def _tenfold(*gradients: Any) -> Any:
    return [None if gradient is None else gradient * 10 for gradient in gradients]


@pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda cls: cls.__name__)
def test_gradient_routines_on_functions_of_the_program(cls: type[Function]) -> None:
    """On an ``autograd.Function`` in any form, routines before and after its backward act once,
    and leave its outputs, its graph and what it changes in place as they are."""
    (*wanted, gradient), ran = _run_function(cls)
    for kind in ("insert_before_backward_op", "insert_after_backward_op"):
        for routine, factor in ((lambda *_: None, 1), (_tenfold, 10)):
            with applied(On(**{cls.__name__: _on_gradients(kind, routine)})):
                (*found, changed), ran_now = _run_function(cls)
            assert (found, ran_now) == (wanted, ran)
            assert torch.equal(changed, gradient * factor)


@pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda cls: cls.__name__)
def test_a_replaced_backward_of_a_function_does_not_run(cls: type[Function]) -> None:
    """``replace_backward_op`` runs instead of a Function's own backward, which is not called."""

    def sevens(*_: Any) -> Any:
        given = torch.full((2, 2), 7.0)
        return [given if index == (cls is NeedsOne) else None for index in range(2)][
            : 1 + (cls is NeedsOne)
        ]

    (*wanted, _), _ = _run_function(cls)
    with applied(On(**{cls.__name__: _on_gradients("replace_backward_op", sevens)})):
        (*found, gradient), ran = _run_function(cls)
    assert found == wanted
    assert ran == []
    assert torch.equal(gradient, torch.full((2, 2), 7.0))


def test_a_replaced_operator_runs_no_function_of_its_own() -> None:
    """The Function that ``torch.library`` makes for a gradient does not run when it is replaced."""
    ran: list[str] = []

    @torch.library.custom_op("amanda_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ran.append("backward")
        return grad * 2

    twice.register_autograd(gradient)
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if "twice" in context.get_op().__name__:
            context.replace_backward_op(lambda grad: grad * 3)

    tool.add_inst_for_op(analyse)
    x = torch.ones(2, requires_grad=True)
    with applied(tool):
        twice(x).sum().backward()
    assert (x.grad.tolist(), ran) == ([3, 3], [])
    twice(x).sum().backward()
    assert ran == ["backward"]


@pytest.mark.parametrize("grad", [True, False])
def test_a_function_in_place_changes_its_callers_tensor(grad: bool) -> None:
    """Where routines substitute what a Function changes in place, the caller's tensor changes."""
    with torch.set_grad_enabled(grad):
        for action in (before(lambda x: x + 1), after(lambda y: y + 2)):
            x = torch.ones(2, requires_grad=grad) * 1
            with applied(On(InPlace=action)):
                for _ in range(2):
                    assert InPlace.apply(x) is x
            assert x.tolist() == [10, 10]


# -- graphs, hooks and optimizers of the program --------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.first = nn.Linear(8, 4)
        self.layer_norm = nn.LayerNorm(4)
        self.embedding = nn.Embedding(3, 4)
        self.second = nn.Linear(4, 2, bias=False)
        self.bilinear = nn.Bilinear(4, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = self.layer_norm(self.first(x)) + self.embedding(torch.arange(3))
        return self.second(x).sum() + self.bilinear(x, x).sum()


def _post_accumulate(model: nn.Module, log: list[Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))


def _tensor_hooks(model: nn.Module, log: list[Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: log.append(name))


def _multi(model: nn.Module, log: list[Any]) -> None:
    parameters = list(model.parameters())
    register_multi_grad_hook(parameters, lambda gs: log.append([g is not None for g in gs]))
    register_multi_grad_hook(parameters, lambda g: log.append(g.shape), mode="any")


def _in_accumulation(model: nn.Module, log: list[Any]) -> None:
    """The optimizer's step in the backward pass, as FSDP and DeepSpeed find its place."""
    for name, parameter in model.named_parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

        def step(*_: Any, name: str = name, parameter: Any = parameter) -> None:
            log.append(name)
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        node.register_hook(step)
        log.append(node)


def _in_post_accumulate(model: nn.Module, log: list[Any]) -> None:
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.Adam([parameter], foreach=True)

        def step(_: Any, name: str = name, optimizer: Any = optimizer) -> None:
            log.append(name)
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def _module_hooks(model: nn.Module, log: list[Any]) -> None:
    for name, module in model.named_modules():
        module.register_full_backward_pre_hook(lambda *_, name=name: log.append(f"pre {name}"))
        module.register_full_backward_hook(lambda *_, name=name: log.append(name))


def _train(install: Callable[[nn.Module, list[Any]], None]) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    model, log = Small(), list[Any]()
    install(model, log)
    for _ in range(2):
        model(torch.rand(3, 1, 4, 4)).backward()
    log = [entry if isinstance(entry, (str, list)) else type(entry) for entry in log]
    return log, [p.sum().item() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("tool", [Watcher, Identity, WholeIdentity])
@pytest.mark.parametrize(
    "install",
    [_post_accumulate, _tensor_hooks, _multi, _in_accumulation, _in_post_accumulate, _module_hooks],
)
def test_hooks_of_the_program_run_as_without_a_tool(install: Any, tool: Any) -> None:
    """Hooks on parameters, modules and accumulations run in the same order under gradient
    routines, and optimizers that step in them do the same."""
    wanted = _train(install)
    with applied(tool()):
        assert _train(install) == wanted


Operator = tuple[Callable[..., Any], list[torch.Tensor]]
Hook = Callable[..., Any]


@pytest.fixture(params=["linear", "linear3", "matmul", "prelu", "conv1d"])
def of_two_nodes(request: pytest.FixtureRequest) -> Operator:
    """An operator that computes with views of some inputs, and the values of its inputs."""
    function, *shapes = {
        "linear": (F.linear, (4, 3), (5, 3), (5,)),
        "linear3": (F.linear, (2, 4, 3), (5, 3), (5,)),
        "matmul": (torch.matmul, (2, 4, 3), (3, 5)),
        "prelu": (F.prelu, (2, 3, 4), (3,)),
        "conv1d": (F.conv1d, (3, 9), (4, 3, 3), (4,)),
    }[request.param]
    torch.manual_seed(0)
    return function, [torch.rand(shape) - 0.5 for shape in shapes]


def _on_nodes(output: torch.Tensor, inputs: Any, hook: Hook, kind: str = "register_hook") -> None:
    nodes = [output.grad_fn]
    for node in nodes:
        getattr(node, kind)(hook)
        following = [target for target, _ in node.next_functions]
        nodes += [target for target in following if type(target).__name__.endswith("Backward0")]


def _before_nodes(output: torch.Tensor, inputs: Any, hook: Hook) -> None:
    _on_nodes(output, inputs, hook, "register_prehook")


def _within_the_pass(output: torch.Tensor, inputs: Any, hook: Hook) -> None:
    output.register_hook(lambda _: _on_nodes(output, inputs, hook))


def _on_tensors(output: torch.Tensor, inputs: Any, hook: Hook) -> None:
    for tensor in (output, *inputs):
        tensor.register_hook(lambda gradient: hook((gradient,))[0])


def _looks(output: torch.Tensor, inputs: Any, hook: Hook) -> None:
    output.retain_grad()
    register_multi_grad_hook(inputs, lambda gradients: (hook(gradients), None)[1])


@pytest.mark.parametrize(
    "register", [_on_nodes, _before_nodes, _within_the_pass, _on_tensors, _looks]
)
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("option", ["", "create_graph", "inputs", "anomaly"])
def test_hooks_of_the_program_see_and_replace_all_gradients(
    of_two_nodes: Operator, register: Callable[..., None], option: str
) -> None:
    """Under routines on an operator and on its nodes, hooks that the program adds afterwards see
    the gradients that they see without tools, and what they return is passed on."""
    function, values = of_two_nodes

    def run() -> list[list[Any]]:
        inputs, seen = [value.clone().requires_grad_() for value in values], []

        def hook(gradients: Any, *_: Any) -> Any:
            seen.append([None if one is None else one.detach().clone() for one in gradients])
            return tuple(None if one is None else one * 2 for one in gradients)

        output = function(*inputs)
        register(output, inputs, hook)
        with torch.autograd.set_detect_anomaly(option == "anomaly"):
            output.sin().sum().backward(
                inputs=inputs[:1] if option == "inputs" else None,
                create_graph=option == "create_graph",
            )
        results = [tensor.grad for tensor in inputs]
        if option == "inputs":
            # An identity leads to all inputs, so that their gradients are computed, too.
            return [results]
        return [*seen, [output.grad if output.retains_grad else None], results]

    expected = run()
    with applied(Identity(), WholeIdentity()):
        found = run()
    for one, other in zip(expected, found, strict=True):
        for gradient, same in zip(one, other, strict=True):
            assert gradient is same is None or torch.equal(gradient, same)


def test_gradient_routines_leave_the_graph_as_it_is() -> None:
    """A graph under routines on whole operators has the nodes and edges that it has without them,
    where one node has all gradients of an operator's inputs; with linear layers, too."""
    model, x = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
        torch.rand(2, 1, 4, 4),
    )

    def names(node: Any) -> Any:
        return node and (node.name(), [names(following) for following, _ in node.next_functions])

    wanted = names(model(x).sum().grad_fn)
    with applied(WholeIdentity()):
        assert names(model(x).sum().grad_fn) == wanted


def test_routines_get_the_gradients_of_linear_layers_inputs() -> None:
    """A routine after the backward of ``linear`` gets gradients in the shapes of the inputs, and
    what it returns is what is accumulated."""
    shapes: list[Any] = []

    def tenfold(*gradients: Any) -> Any:
        shapes.append([tuple(gradient.shape) for gradient in gradients if gradient is not None])
        return _tenfold(*gradients)

    for shape in ((2, 3), (2, 4, 3), (3,)):
        x = torch.rand(shape, requires_grad=True)
        layer = nn.Linear(3, 5)
        layer(x).square().sum().backward()
        wanted = [t.grad * 10 for t in (x, *layer.parameters())]
        x.grad = None
        layer.zero_grad()
        with applied(On(linear=_on_gradients("insert_after_backward_op", tenfold))):
            layer(x).square().sum().backward()
        assert all(map(torch.equal, [t.grad for t in (x, *layer.parameters())], wanted))
        assert shapes.pop() == [shape, (5, 3), (5,)]
    with applied(On(linear=_on_gradients("insert_after_backward_op", tenfold))):
        x = torch.rand(2, 4, 3, requires_grad=True)
        nn.functional.linear(x, layer.weight).sum().backward()
        nn.functional.linear(x, layer.weight[0]).sum().backward()
    # The backward pass runs the last one first.
    assert shapes == [[(2, 4, 3), (5, 3)], [(2, 4, 3), (3,)]]


def _on_whole(**routines: Callable[..., Any]) -> On:
    """Routines on the gradients of operators that split as a whole, by the point or "replace"."""

    def analyse(context: amanda.OpContext) -> None:
        for point, routine in routines.items():
            if point == "replace":
                context.replace_backward_op(routine)
            else:
                getattr(context, f"insert_{point}_backward_op")(routine)

    return On(tensor_split=analyse, split=analyse)


def _split(x: torch.Tensor, operator: str = "tensor_split") -> Any:
    """The gradient of an input that is split in three, of which the last part is not used, once and
    by a second pass."""
    first, second, _ = getattr(x * 1, operator)(3 if operator == "tensor_split" else 1)
    loss = (first**2).sum() + (second**3).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return gradient, torch.autograd.grad(gradient.sum(), x)[0]


def _scaled(*gradients: Any) -> Any:
    return [None if g is None else g * 10**i for i, g in enumerate(gradients, 1)]


@pytest.mark.parametrize("operator", ["split", "tensor_split"])
def test_routines_get_the_gradients_of_several_views_together(operator: str) -> None:
    """Routines before and after get them in order, and what they return reaches the input, in
    passes through the gradient, too; whether the views have one node or one each."""
    seen: list[Any] = []

    def note(*gradients: Any) -> None:
        seen.append([None if g is None else g.tolist() for g in gradients])

    def scale(*gradients: Any) -> Any:
        note(*gradients)
        return _scaled(*gradients)

    x = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    with applied(_on_whole(before=scale, after=note)):
        gradient, second = _split(x, operator)
    assert seen[:2] == [[[2.0], [12.0], None], [[20.0, 1200.0, 0.0]]]
    assert gradient.tolist() == [20.0, 1200.0, 0.0]
    # The gradient of what the routine has changed passes straight through it.
    assert second.tolist() == [20.0, 1200.0, 0.0]
    assert [g.tolist() for g in _split(x)] == [[2.0, 12.0, 0.0], [2.0, 12.0, 0.0]]


def test_replaced_gradient_of_several_views() -> None:
    """A replacement gets the gradients that routines before it have left."""
    got: list[Any] = []

    def replace(*gradients: Any) -> Any:
        got.append([None if g is None else g.tolist() for g in gradients])
        return torch.full((3,), 7.0)

    x = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    with applied(_on_whole(before=_scaled, replace=replace)):
        first, second, _ = (x * 1).tensor_split(3)
        ((first**2).sum() + (second**3).sum()).backward()
    assert got == [[[20.0], [1200.0], None]]
    assert x.grad is not None
    assert x.grad.tolist() == [7.0, 7.0, 7.0]


def test_backward_operators_of_several_views_run_on_what_the_whole_has_left() -> None:
    """The routines of the views' own backward operators have the last word on changed gradients."""

    def slices(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "SliceBackward0":
            context.insert_before_backward_op(lambda gradient: gradient + 1)

    tool = _on_whole(before=_scaled)
    tool.add_inst_for_op(slices, backward=True)
    x = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    with applied(tool):
        first, second, _ = (x * 1).tensor_split(3)
        ((first**2).sum() + (second**3).sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [21.0, 1201.0, 0.0]


def test_a_gradient_for_a_view_that_has_none_names_the_routine() -> None:
    """No node leads from a view that the pass does not reach."""
    x = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    tool = _on_whole(before=lambda *gradients: [torch.ones(1) for _ in gradients])
    with (
        applied(tool),
        pytest.raises(RoutineResultError, match=r"at op /tensor_split:0 .* None .* output 2"),
    ):
        _split(x)
    assert [g.tolist() for g in _split(x)] == [[2.0, 12.0, 0.0], [2.0, 12.0, 0.0]]


def test_gradients_of_several_views_do_not_outlive_the_pass() -> None:
    """The hooks hold neither the gradients nor the graph."""
    alive: list[Any] = []

    def note(*gradients: Any) -> None:
        alive.extend(weakref.ref(g) for g in gradients if g is not None)

    x = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with applied(_on_whole(before=note)):
            token = Small()
            base = x * 1
            assert base.grad_fn is not None
            base.grad_fn.metadata["token"] = token
            first, second, _ = base.tensor_split(3)
            loss = (first**2).sum() + (second**3).sum()
            loss.backward(retain_graph=True)
            assert alive
            assert [ref() for ref in alive] == [None] * len(alive)
            alive.append(weakref.ref(token))
            del base, first, second, _, loss, token
            assert alive[-1]() is None
    finally:
        gc.enable()


def test_routines_under_autocast() -> None:
    """Routines on whole operators get the gradients of the inputs that the program passed."""
    x, w = torch.rand(2, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    dtypes: list[Any] = []

    def note(*gradients: Any) -> None:
        dtypes.extend(gradient.dtype for gradient in gradients if gradient is not None)

    action = _on_gradients("insert_after_backward_op", note)
    with applied(On(mm=action, linear=action)), torch.autocast("cpu", torch.bfloat16):
        (torch.mm(x, w) + nn.functional.linear(x, w)).sum().backward()
    assert dtypes == [torch.float32] * 4


# -- accumulations: the executions of their scope only ---------------------


class Zero(amanda.Tool):
    """Lets nothing be accumulated."""

    def __init__(self) -> None:
        def analyse(context: amanda.OpContext) -> None:
            if context.get_backward_op().__name__ == "AccumulateGrad":
                context.insert_before_backward_op(torch.zeros_like)

        self.add_inst_for_op(analyse, backward=True)


def _gradient(leaf: torch.Tensor, run: Callable[[], None]) -> list[float]:
    leaf.grad = None
    run()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def test_accumulations_are_instrumented_for_graphs_of_the_scope_only() -> None:
    """A leaf's accumulation acts in passes that come to it through operators of the scope, not for
    a graph that was made before it, under ``disabled()`` or by a thread outside of it."""
    leaf = torch.ones(1, requires_grad=True)
    earlier, go, found = (leaf * 3).sum(), threading.Event(), list[Any]()

    def outside() -> None:
        go.wait()
        found.append(_gradient(leaf, (leaf * 4).sum().backward))

    thread = threading.Thread(target=outside)
    thread.start()
    with applied(Zero()):
        own = (leaf * 5).sum()
        assert _gradient(leaf, lambda: earlier.backward(retain_graph=True)) == [3]
        with amanda.disabled():
            unseen = (leaf * 2).sum()
        assert _gradient(leaf, unseen.backward) == [2]
        go.set()
        thread.join()
        assert found == [[4]]
        assert _gradient(leaf, lambda: own.backward(retain_graph=True)) == [0]
        assert _gradient(leaf, (leaf * 7).exp().sum().backward) == [0]
        assert _gradient(leaf, lambda: (own + earlier).backward(retain_graph=True)) == [0]
        other = threading.Thread(target=lambda: found.append(_gradient(leaf, own.backward)))
        other.start()
        other.join()
        assert found[1:] == [[0]]
    assert _gradient(leaf, earlier.backward) == [3]


def test_accumulations_after_a_pass_that_makes_a_graph() -> None:
    """The second pass of a gradient penalty, on a graph that the first one made, is the scope's."""
    weight, x = torch.ones(3, requires_grad=True), torch.rand(3, requires_grad=True)
    with applied(Zero()):
        (gradient,) = torch.autograd.grad((weight * x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert weight.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "change",
    [lambda grad: grad.to_sparse(), lambda grad: grad.to("meta")],
    ids=["layout", "device"],
)
@pytest.mark.parametrize("point", ["insert_before_backward_op", "insert_after_backward_op"])
@pytest.mark.parametrize("backward", [False, True])
def test_gradients_of_another_layout_or_device_name_the_routine(
    change: Any, point: str, backward: bool
) -> None:
    """What autograd takes from no hook is the routine's error, which names it and the operator."""

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "sin":
            getattr(context, point)(lambda *grads: [change(grad) for grad in grads])

    tool, x = amanda.Tool(), torch.ones(3, requires_grad=True)
    tool.add_inst_for_op(analyse, backward=backward)
    expected = (
        r"lambda> at op /sin:0.*keep layout and device of the gradient.*torch\.strided on cpu"
    )
    with applied(tool), pytest.raises(amanda.errors.RoutineResultError, match=expected):
        x.sin().sum().backward()
