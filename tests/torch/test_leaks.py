"""Nothing that Amanda does keeps a tensor, a graph or a module alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import CapabilityError
from amanda.tools.graph_tracing import GraphTracingTool
from tests.counting import no_collection
from tests.running import in_threads
from tests.torch.support import TRANSPARENT, Counter, LiveTensors, On, applied


class Cloning(amanda.Tool):
    """Puts another tensor in place of every input and output."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        def copies(*tensors: Any) -> list[Any]:
            return [None if t is None else t.clone() for t in tensors]

        context.insert_before_op(copies)
        context.insert_after_op(copies)


TOOLS: tuple[Callable[[], amanda.Tool], ...] = (*TRANSPARENT, Counter, Cloning)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )


@pytest.mark.parametrize("make", TOOLS)
def test_activations_die_by_reference_counting(make: Callable[[], amanda.Tool]) -> None:
    """Every tensor of a training step is freed by its reference count, without gc."""
    model = _network()
    died: list[weakref.ref[torch.Tensor]] = []
    kept = [module.register_forward_hook(_note(died)) for module in model]
    with no_collection(), applied(make()):
        for _ in range(3):
            output = model(torch.rand(2, 3, 8, 8))
            loss = output.sum()
            died += [weakref.ref(output), weakref.ref(loss)]
            loss.backward()
            del output, loss
            alive = [ref() for ref in died if ref() is not None]
            assert alive == []
    assert len(died) == 21
    assert len(kept) == 5


def _note(died: list[weakref.ref[torch.Tensor]]) -> Callable[..., None]:
    def note(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        died.append(weakref.ref(output))

    return note


@pytest.mark.parametrize("make", TOOLS)
def test_activations_of_an_inference_die_on_the_way(make: Callable[[], amanda.Tool]) -> None:
    """Without gradients an activation is freed as soon as the next operator has used it."""
    died: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(sum(ref() is not None for ref in died))
            y = super().forward(x)
            died.append(weakref.ref(y))
            return y

    model = nn.Sequential(*[Layer(3, 3) for _ in range(5)])
    with no_collection(), torch.no_grad():
        model(torch.rand(2, 3))
        vanilla = list(alive)
        with applied(make()):
            for _ in range(2):
                died.clear()
                alive.clear()
                model(torch.rand(2, 3))
                assert alive == vanilla


@pytest.mark.parametrize("make", TOOLS)
def test_no_garbage(make: Callable[[], amanda.Tool]) -> None:
    """The path of an operator makes no reference cycle: gc finds nothing to collect."""
    model = _network()
    with applied(make()):
        for _ in range(2):
            model(torch.rand(2, 3, 8, 8)).sum().backward()
        gc.collect()
        gc.disable()
        try:
            model(torch.rand(2, 3, 8, 8)).sum().backward()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            # Not isinstance(), which asks proxies: Dynamo has weak ones, of what is gone.
            found = [o for o in gc.garbage if issubclass(type(o), torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert found == []


def test_memory_does_not_grow_over_iterations() -> None:
    """An iteration leaves no tensor, and the number of objects is bounded over iterations."""
    model = _network()
    counter = Counter()
    objects = []
    with applied(counter):
        for step in range(8):
            model(torch.rand(2, 3, 8, 8)).sum().backward()
            counter.ids.clear()
            counter.backward_ids.clear()
            if step == 3:
                tensors = LiveTensors()
            if step >= 3:
                objects.append(len(gc.get_objects()))
        assert tensors.made_since() == []
    assert objects[-1] - objects[0] < 50


@pytest.mark.filterwarnings("ignore:actions on the gradients of operators do nothing")
def test_classes_of_functions_die_with_their_program() -> None:
    """No class of an ``autograd.Function`` is held after the scope."""

    def define() -> list[weakref.ref[type]]:
        class Classic(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return gradients[0] * 2

        class WithContext(Classic):
            generate_vmap_rule = True

            @staticmethod
            def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return x * 2

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                pass

        x = torch.rand(2, requires_grad=True)
        replacing = On(Classic=lambda context: context.replace_op(lambda x: x * 3))
        with applied(*(make() for make in TOOLS), replacing):
            (Classic.apply(x) + WithContext.apply(x)).sum().backward()
            torch.vmap(WithContext.apply)(x.detach())
        return [weakref.ref(Classic), weakref.ref(WithContext)]

    found = define()
    # A class is a cycle.
    gc.collect()
    assert [reference() for reference in found] == [None, None]


@pytest.mark.parametrize("make", ["count", "flops", "stats", Counter])
def test_classes_of_functions_that_iterations_define_die(make: Any) -> None:
    """A program may define a function anew at each call, which leads to tensors of its own: within
    the scope no more than the first two and the last two are held, and none after it."""

    def iterate() -> weakref.ref[type]:
        factor = torch.rand(2)

        class Local(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * factor

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return gradients[0] * factor

        Local.apply(torch.rand(2, requires_grad=True)).relu().sum().backward()
        return weakref.ref(Local)

    tool = make() if callable(make) else amanda.tools.load(make)()
    with applied(tool):
        found = [iterate() for _ in range(12)]
        # A class is a cycle.
        gc.collect()
        assert sum(reference() is not None for reference in found) <= 4
    gc.collect()
    assert [reference() for reference in found] == [None] * 12


class Doubling(amanda.Tool):
    """Doubles what ReLUs return, by a tensor of its own for each of them, and notes gradients."""

    def __init__(self) -> None:
        self.factors: list[weakref.ref[torch.Tensor]] = []
        self.gradients = 0
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.look, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "relu":
            factor = torch.tensor(2.0)
            self.factors.append(weakref.ref(factor))
            context.insert_after_op(lambda y, factor: y * factor, factor=factor)

    def look(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.note, grad_outputs=[])

    def note(self) -> None:
        self.gradients += 1


WATCHING = "count trace flops nan path coverage profile stats sparsity summary kernels".split()


@pytest.mark.parametrize("tool", WATCHING)
@pytest.mark.usefixtures("interceptor")
def test_tools_keep_nothing_of_the_program(tool: str) -> None:
    """Tensors, models, an ``autograd.Function`` that a function defines, what it leads to, and the
    functions and modules that it is given, die with the program's own references, while the tool
    lives."""

    def program() -> list[weakref.ref[Any]]:
        leads_to, inner = torch.ones(3), nn.Linear(3, 3)

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any, function: Any, module: Any) -> Any:
                return function(x) + leads_to

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return *gradients, None, None

        def square(x: torch.Tensor) -> torch.Tensor:
            return x * x * leads_to

        class Net(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return Square.apply(x, square, inner)

        model, tensors = Net(), list[torch.Tensor]()
        for _ in range(4):
            x = torch.ones(3, requires_grad=True)
            y = torch.nn.functional.normalize(model(inner(x)).relu(), dim=0)
            loss = y.sum()
            loss.backward()
            tensors += [x, y, loss, *inner.parameters()]
        kept = (leads_to, inner, Square, square, model, *tensors)
        return [weakref.ref(one) for one in kept]

    kept = amanda.tools.load(tool)()
    with applied(kept):
        references = program()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_replay_says_that_a_function_is_gone() -> None:
    """To run an operator again whose ``autograd.Function`` is gone is an error that says so."""
    tracing, x = GraphTracingTool(), torch.ones(3, requires_grad=True)

    def program() -> Any:
        class Identity(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x * 2

        Identity.apply(x)
        return Identity

    with applied(tracing):
        function = program()
    given = {tracing.graph.tensor_of(x): x * 2}
    assert tracing.graph.replay(given)[0].tolist() == [4.0, 4.0, 4.0]
    del function
    gc.collect()
    with pytest.raises(CapabilityError, match="has dropped its function"):
        tracing.graph.replay(given)


def test_records_of_a_model_that_is_gone() -> None:
    """A scope keeps no actions of a model that is gone, and counts its operators; while a graph of
    the model is there, its routines run."""
    tool = Doubling()
    x = torch.ones(2, requires_grad=True)
    with no_collection(), applied(tool) as scope:
        for _ in range(20):
            model = nn.Sequential(nn.ReLU(), nn.Tanh())
            loss = model(x)
            del model
            gone = tool.gradients
            loss.sum().backward()
            assert tool.gradients == gone + 4
            del loss
            assert [factor() for factor in tool.factors] == [None] * len(tool.factors)
    assert scope.statistics.ops_seen > 40


def test_records_of_models_without_a_backward_pass() -> None:
    """A scope keeps no actions of a model that is gone, also if no iteration has ended."""
    tool = Doubling()
    with no_collection(), applied(tool):
        for _ in range(3):
            nn.Sequential(nn.ReLU())(torch.ones(2))
            assert [factor() for factor in tool.factors] == [None] * len(tool.factors)


def test_records_of_a_model_that_another_thread_has_run() -> None:
    """An operator that each of many threads runs is analysed once per scope."""
    model, seen = nn.Sequential(nn.ReLU()), Counter()
    analysed = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: analysed.append(context.get_op_id()))
    with applied(tool, seen):
        for _ in range(3):
            in_threads(lambda: model(torch.ones(1)))
    assert analysed.count("Sequential.0/relu:0") == 1


@pytest.mark.parametrize("make", TOOLS)
def test_graphs_of_gradients_leave_nothing(make: Callable[[], amanda.Tool]) -> None:
    """The graph of a gradient that is differentiated dies with it: no hook holds it."""

    def run() -> None:
        x = torch.rand(2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(x.sin().pow(3).sum(), x, create_graph=True)
        torch.autograd.grad(gradient.sum(), x, create_graph=True)

    with applied(make()):
        run()
        live = LiveTensors()
        run()
        assert not live.made_since()


def test_hooks_on_input_gradients_keep_no_gradient() -> None:
    """A kept graph holds no gradient of the pass that has run over it."""
    x, held = torch.rand(3, requires_grad=True), list[weakref.ref[torch.Tensor]]()

    def note(*gradients: Any) -> None:
        held.extend(weakref.ref(g) for g in gradients if g is not None)

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(note)
        context.insert_after_backward_op(note)

    with applied(On(sin=analyse)):
        y = x.sin() * 2
        y.sum().backward(retain_graph=True)
        x.grad = None
        assert held
        assert [reference() for reference in held] == [None] * len(held)
    del y


def _within_passes(run: Callable[[], object], depth: int) -> None:
    """Call a function within so many backward passes."""
    with torch.enable_grad():
        if not depth:
            run()
            return
        y = torch.ones(1, requires_grad=True) * 1
        y.register_hook(lambda _: _within_passes(run, depth - 1))
        y.backward()


# PyTorch runs deeper passes in another thread, whose errors it loses (2.13).
@pytest.mark.parametrize("depth", [0, 61])
def test_a_pass_that_raises_keeps_no_graph_of_views(depth: int) -> None:
    """The gradients of several views are noted until they are joined, or the pass has raised."""

    class Marker:
        pass

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    x = torch.rand(3, requires_grad=True)
    tool = On(tensor_split=lambda c: c.insert_before_backward_op(lambda *gradients: None))
    with applied(tool):
        first, second, _ = (x * 1).tensor_split(3)
        first.register_hook(refuse)
        assert second.grad_fn is not None
        marker = Marker()
        # A pass comes to it before it comes to the first view.
        second.grad_fn.metadata["marker"] = marker
        with pytest.raises((ValueError, SystemError)):
            _within_passes((first * second).sum().backward, depth)
        alive = weakref.ref(marker)
        del first, second, _, marker
    gc.collect()
    assert alive() is None


def test_compiled_code_keeps_no_input_of_its_capture() -> None:
    """The inputs of the run in which a graph is captured are freed by reference counting."""
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="eager")
    with applied(Counter()), torch.no_grad(), no_collection():
        x = torch.ones(2, 4)
        given = weakref.ref(x)
        compiled(x)
        del x
        assert given() is None
        compiled(torch.ones(2, 4))
