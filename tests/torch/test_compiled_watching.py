"""Compiled functions under tools that let the program's compiler have its graphs as they are."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import amanda
import amanda_tools
import amanda_torch
from amanda import inline
from amanda.errors import CoverageWarning, InPlaceWarning
from amanda.state import STATE, TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.compiled.deferred import call_all, deferred_sum
from amanda_torch.plugin import COMPILER_VARIABLE, TorchGraphDriver
from tests.torch.support import Watcher, applied, fingerprint

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning",
    "ignore:.*script_method:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

OURS = tuple(str(Path(package.__file__).parent) for package in (amanda, amanda_torch, amanda_tools))

SHIFT = 0.125


def _shifted(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.relu.default:
            with graph.graph.inserting_after(node):
                moved = graph.graph.call_function(torch.ops.aten.add.Tensor, (node, SHIFT))
            node.replace_all_uses_with(
                moved, delete_user_cb=lambda user, new=moved: user is not new
            )
    graph.recompile()
    return make_boxed_func(graph.forward)


shifting = aot_autograd(fw_compiler=_shifted, bw_compiler=lambda g, _: make_boxed_func(g.forward))
"""A compiler whose code gives other results than eager mode: what ``relu`` gives is moved."""

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Counting(amanda.Tool):
    """Counts every operator, forward and backward, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[str, inline.Counter] = {}
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        counter = self.counters.setdefault(context.get_op_id(), inline.Counter())
        context.insert_before_op(counter, inputs=[])

    def backward(self, context: amanda.OpContext) -> None:
        op_id = context.get_backward_op_id()
        assert op_id is not None
        counter = self.counters.setdefault(op_id, inline.Counter())
        context.insert_before_backward_op(counter, grad_outputs=[])

    def counts(self) -> dict[str, int]:
        return {op_id: counter.count for op_id, counter in self.counters.items()}


class Shapes(amanda.Tool):
    """Notes the shapes of each execution, in routines that may be called later."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Any]]] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.note, op_id=context.get_op_id())

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_after_backward_op(self.note, op_id=context.get_backward_op_id())

    @amanda.deferrable
    def note(self, *tensors: Any, op_id: str) -> None:
        self.seen.append((op_id, [None if t is None else (t.shape, t.dtype) for t in tensors]))


class Calls(amanda.Tool):
    """A routine at each forward operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.note, outputs=[], op_id=context.get_op_id())

    def note(self, op_id: str) -> None:
        self.calls.append(op_id)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


@pytest.fixture(autouse=True)
def _compiler_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


Program = Callable[[Any], Any]


def train(backend: Any) -> list[Any]:
    """The losses, gradients, parameters and buffers of some steps, and the generator's state."""
    model = Net()
    compiled = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = compiled(X).square().mean()
        loss.backward()
        optimizer.step()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
    return [*found, *(t.detach().clone() for t in model.state_dict().values())]


def vanilla(program: Program, backend: Any) -> Any:
    """What a program gives without a tool, and the state of the generator afterwards."""
    torch.compiler.reset()
    torch.manual_seed(3)
    return fingerprint([program(backend), torch.get_rng_state()])


def watched(program: Program, backend: Any, *tools: amanda.Tool) -> tuple[Any, list[str]]:
    """The same with tools, and how its graphs ran."""
    torch.compiler.reset()
    torch.manual_seed(3)
    with applied(*tools) as scope:
        found = program(backend)
    assert not scope.statistics.not_seen
    return fingerprint([found, torch.get_rng_state()]), [*scope.statistics.compiled.values()]


def test_a_watched_function_gives_what_its_compiler_gives() -> None:
    """Under counters and analyses a compiled function runs the code of its compiler, from its first
    run on: losses, gradients, buffers and random numbers are those without a tool, bit for bit."""
    wanted = vanilla(train, shifting)
    assert wanted != vanilla(train, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CoverageWarning)
        for tools in ([Counting()], [Watcher()], [Shapes()], [Counting(), Watcher()]):
            found, ways = watched(train, shifting, *tools)
            assert found == wanted
            assert [way[:3] for way in ways] == ["by "]


def test_a_run_that_is_undone_leaves_an_unused_accelerator_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that computes on the processor does not begin to use the machine's GPU under a
    tool: its generator is not asked for, nor whether there is one."""
    asked: list[str] = []
    cuda = torch.device("cuda")

    def current(check_available: bool = False) -> torch.device:
        asked.extend(["whether it is available"] * check_available)
        return cuda

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: asked.append("index"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: asked.append("state"))
    found, ways = watched(train, shifting, Counting())
    assert [way[:3] for way in ways] == ["by "]
    assert not asked
    assert found == vanilla(train, shifting)


def test_a_run_that_begins_to_use_an_accelerator_is_not_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the first run begins to use the GPU, numbers that it may have drawn there cannot be put
    back: the graph is not run again, but operator by operator."""
    begun: list[bool] = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(begun))

    class Begins(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.begin)

        def begin(self, context: amanda.OpContext) -> None:
            begun.extend([True] * (context.get_op().__name__ == "relu"))

    with pytest.warns(CoverageWarning, match="operator by operator"):
        found, ways = watched(train, shifting, Begins())
    assert ways == ["operator by operator"]
    monkeypatch.undo()
    assert found == vanilla(train, "eager")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_counts_of_a_watched_function_are_those_of_eager_mode(backend: str) -> None:
    """Every operator, backward operators and accumulations among them, is counted as often as in
    eager mode; routines that only look at shapes are called as often, with the same shapes."""
    eager, compiled = Counting(), Counting()
    watched(train, None, eager)
    _, ways = watched(train, backend, compiled)
    assert ways == [f"by {backend}"]
    assert compiled.counts() == eager.counts()
    assert set(eager.counts().values()) >= {4}
    noted, later = Shapes(), Shapes()
    watched(train, None, noted)
    watched(train, backend, later)
    assert sorted(map(str, noted.seen)) == sorted(map(str, later.seen))


def test_a_routine_at_each_execution_keeps_a_function_operator_by_operator() -> None:
    """Where a routine has to run between operators, forward or backward, the graph runs operator by
    operator from its first run on, each routine once for each execution, and a warning says why."""
    tool = Calls()
    with pytest.warns(CoverageWarning, match="operator by operator.*since .* is not traceable"):
        found, ways = watched(train, shifting, tool)
    assert ways == ["operator by operator"]
    assert found == vanilla(train, "eager")
    assert {tool.calls.count(op_id) for op_id in tool.calls if op_id.startswith("Net")} == {4}


class SummedAndTimed(amanda.Tool):
    """Adds up sizes at all operators, and has a routine that looks at the tensors of some."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        total = amanda.inline.ShapeSum(lambda shapes: len(shapes[0]))
        context.insert_before_op(total.before)
        context.insert_after_op(total.after)
        if context.get_op().__name__ == "relu":
            context.insert_after_op(self.culprit)

    def culprit(self, output: torch.Tensor) -> None:
        pass


def test_the_warning_names_the_routine_that_keeps_the_compiler_away() -> None:
    """Not a sum at the same operator or at an earlier one, which alone would leave it its code."""
    expected = r"since SummedAndTimed\.culprit is not traceable"
    with pytest.warns(CoverageWarning, match=expected):
        _, ways = watched(train, shifting, SummedAndTimed())
    assert ways == ["operator by operator"]


class Backward(amanda.Tool):
    """A routine at each backward operator, and none at forward operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        op_id = context.get_backward_op_id()
        context.insert_before_backward_op(lambda *g: self.calls.append(str(op_id)))


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
def test_routines_at_backward_operators_run_once_in_the_first_step() -> None:
    """The backward pass that analyses are run in calls no routine: those that have to run at each
    execution see the program's passes, and these only."""
    tool = Backward()
    found, ways = watched(train, shifting, tool)
    assert ways == ["operator by operator"]
    assert found == vanilla(train, "eager")
    assert {tool.calls.count(op_id) for op_id in tool.calls} == {4}


# -- programs -----------------------------------------------------------------


def whole_step(backend: Any) -> Any:
    """A function that calls a model and computes a loss."""
    model = Net().eval()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(model(x)).square().mean()

    run = torch.compile(loss_of, backend=backend) if backend else loss_of
    found = []
    for _ in range(3):
        loss = run(X)
        loss.backward()
        found.append(loss.detach())
    return [*found, *(p.grad for p in model.parameters())]


def in_place(backend: Any) -> Any:
    """A function that writes into its input, and into a buffer."""
    total = torch.zeros(4)

    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        x.mul_(1.5)
        total += torch.relu(x).sum(0)
        return x + torch.rand_like(x)

    run = torch.compile(step, backend=backend) if backend else step
    x, found = X.clone(), []
    with torch.no_grad():
        for _ in range(3):
            found += [run(x, total)]
    return [x, total, *found]


def inference(backend: Any) -> Any:
    """A module under ``inference_mode``, one under ``no_grad``, and one under autocast."""
    model = Net()
    run = torch.compile(model, backend=backend) if backend else model
    with torch.inference_mode():
        found = [run(X).clone(), run(X).clone()]
    with torch.no_grad():
        found += [run(X), run(X)]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(run(X))
        found[-1].float().sum().backward()
    return [*found, *(p.grad for p in model.parameters())]


def graph_breaks(backend: Any) -> Any:
    """A function of two graphs, with a branch on a value between them."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2
        if y.sum() > 0:
            y = y + torch.relu(y)
        return y.cos()

    run = torch.compile(halves, backend=backend) if backend else halves
    x = X.clone().requires_grad_()
    found = [run(x), run(-x), run(x)]
    torch.stack([y.sum() for y in found]).sum().backward()
    return [*found, x.grad]


def one_output(backend: Any) -> Any:
    """A function of several outputs, of which one is an input."""

    def two(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.relu(x * y), y, torch.relu(y).sum()

    run = torch.compile(two, backend=backend) if backend else two
    x, y = X.clone().requires_grad_(), (X + 1).requires_grad_()
    found = []
    for _ in range(3):
        z, same, total = run(x * 2, y)
        (z.sum() + same.sum() + 0 * total).backward()
        found.append(z)
    return [*found, x.grad, y.grad]


def twice(backend: Any) -> Any:
    """A module that is called twice in a step, and by two threads."""
    model = Net().eval()
    run = torch.compile(model, backend=backend) if backend else model
    found = []
    for _ in range(3):
        y = run(X) + run(X * 2)
        y.sum().backward()
        found.append(y)
    return [*found, *(p.grad for p in model.parameters())]


def evaluation(backend: Any) -> Any:
    """A function that calls two models, in a loop without a backward pass."""
    one, other = Net().eval(), nn.Linear(2, 3)

    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(other(one(x)))

    run = torch.compile(both, backend=backend) if backend else both
    found = []
    with torch.no_grad():
        for n in range(3):
            found += [run(X + n) * 2]
    return found


PROGRAMS = [whole_step, evaluation, in_place, inference, graph_breaks, one_output, twice]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_of_many_kinds_are_left_as_they_are(program: Program) -> None:
    """What a program computes under its compiler does not depend on whether a tool watches, and
    what the tool counts does not depend on the compiler."""
    wanted = vanilla(program, shifting)
    assert wanted != vanilla(program, "eager")
    tool, reference = Counting(), Counting()
    found, ways = watched(program, shifting, tool)
    assert found == wanted, ways
    assert all(way.startswith("by ") for way in ways)
    watched(program, "eager", reference)
    executed = {op_id: n for op_id, n in tool.counts().items() if n}
    assert executed == {op_id: n for op_id, n in reference.counts().items() if n}


class Passes(Counting):
    """Counts, and is told of forward and backward passes and of iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        for backward in (False, True):
            for end in (False, True):
                self.add_inst_for_pass(
                    lambda point, told=(backward, end): self.told.append(told),
                    backward=backward,
                    end=end,
                )
        self.add_inst_for_iteration(lambda point: self.told.append("iteration"))


@pytest.mark.parametrize("program", [train, whole_step, evaluation, twice])
def test_tools_are_told_of_the_passes_of_watched_functions(program: Program) -> None:
    """Passes and iterations of a program are those that it has operator by operator, the first
    run, which is run twice, included."""
    tool, reference = Passes(), Passes()
    found, ways = watched(program, shifting, tool)
    assert found == vanilla(program, shifting), ways
    watched(program, "eager", reference)
    assert tool.told == reference.told
    assert reference.told
    executed = {op_id: n for op_id, n in tool.counts().items() if n}
    assert executed == {op_id: n for op_id, n in reference.counts().items() if n}


def test_a_function_keeps_its_code_for_the_next_scope() -> None:
    """A graph is compiled once, and not for each scope; each scope counts for itself."""
    compiled = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled.append(graph)
        return shifting(graph, inputs)

    model = Net().eval()
    run = torch.compile(model, backend=backend)
    for _ in range(3):
        tool = Counting()
        with applied(tool):
            for _ in range(2):
                run(X).sum().backward()
        assert set(tool.counts().values()) == {2}
    assert len(compiled) == 1


def test_threads_with_scopes_of_their_own() -> None:
    """Each thread counts in its own scope what it runs of a function that has been compiled."""
    model = Net().eval()
    run = torch.compile(model, backend=shifting)
    with applied(Counting()):
        run(X)
    tools = [Counting() for _ in range(3)]

    def work(tool: Counting) -> None:
        with amanda.apply(tool):
            for _ in range(3):
                run(X).sum()

    threads = [threading.Thread(target=work, args=(tool,)) for tool in tools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tool in tools:
        assert {n for op_id, n in tool.counts().items() if "/grad/" not in op_id} == {3}


# -- what runs operator by operator ---------------------------------------------


def _refused(run: Callable[[], Any]) -> list[str]:
    with applied(Counting()) as scope, warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        run()
    return [*scope.statistics.compiled.values()]


def test_hooks_on_inputs_are_called_once() -> None:
    """A graph whose inputs have hooks, or retain their gradients, is not run for analyses."""
    calls = []
    run = torch.compile(lambda x: torch.relu(x).sum(), backend=shifting)

    def step() -> None:
        x = X.clone().requires_grad_()
        x.register_hook(lambda g: calls.append(1))
        run(x).backward()

    _refused(step)
    assert calls == [1]


def test_a_compiler_whose_backward_pass_is_not_compiled() -> None:
    """Where a compiler leaves the backward pass to autograd, a tool that looks at backward
    operators sees them operator by operator, and the program computes what it computed."""
    run = torch.compile(Net().eval(), backend=lambda graph, _: graph.forward)
    tool, reference = Counting(), Counting()
    with applied(tool) as scope, warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        for _ in range(3):
            run(X).sum().backward()
    assert [*scope.statistics.compiled.values()] == ["operator by operator"]
    model = Net().eval()
    with applied(reference):
        for _ in range(3):
            model(X).sum().backward()
    assert tool.counts() == reference.counts()


def test_a_compiler_that_fails_leaves_the_program_running() -> None:
    """A compiler that fails, or whose code fails, does not end the program: the graph runs operator
    by operator, each execution is counted once, and the warning names the error."""

    def failing(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise ValueError("no such thing")

    def failing_later(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def run(*args: Any) -> Any:
            args[0].add_(1)
            raise ValueError("no such thing")

        return run

    for backend in (failing, failing_later):
        torch.compiler.reset()
        total = torch.zeros(4)

        def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            total += x.sum(0)
            return torch.relu(x) + torch.rand_like(x)

        tool, run = Counting(), torch.compile(step, backend=backend)
        torch.manual_seed(1)
        with torch.no_grad(), applied(tool) as scope, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = [run(X, total), run(X, total)]
        assert ["fails with ValueError" in str(one.message) for one in said] == [True]
        assert [*scope.statistics.compiled.values()] == ["operator by operator"]
        torch.manual_seed(1)
        other = torch.zeros(4)
        assert fingerprint(found) == fingerprint([step(X, other), step(X, other)]), backend
        assert fingerprint(total) == fingerprint(other)
        assert set(tool.counts().values()) == {1}


def test_custom_operators_are_not_run_twice() -> None:
    """An operator of the program's own may do what cannot be undone."""
    calls = []

    @torch.library.custom_op("amanda_tests::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    noted.register_fake(lambda x: torch.empty_like(x))
    run = torch.compile(lambda x: noted(torch.relu(x)), backend="aot_eager")
    with torch.no_grad():
        _refused(lambda: run(X))
    assert calls == [1]


class Elements(amanda.Tool):
    """Adds up the elements of the inputs and outputs of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, inline.ShapeSum] = {}
        self.add_inst_for_op(self.forward)

    def forward(self, context: amanda.OpContext) -> None:
        new = inline.ShapeSum(lambda shapes: sum(s.numel() for side in shapes for s in side if s))
        one = self.sums.setdefault(context.get_op_id(), new)
        context.insert_before_op(one.before)
        context.insert_after_op(one.after)


def _sizes(backend: Any) -> Any:
    model = Net().eval()
    run = torch.compile(model, backend=backend, dynamic=None) if backend else model
    return [run(torch.ones(n, 4) * n) for n in (2, 3, 5, 7, 3)]


def _reshaped(backend: Any) -> Any:
    """Sizes that are computed, and one that is passed."""

    def both(x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.cat([x, x[: n // 2]]).reshape(-1, 2)
        return torch.relu(y @ y.transpose(0, 1)).sum(0)[None].expand(n + 1, -1) * 2

    run = torch.compile(both, backend=backend, dynamic=True) if backend else both
    return [run(torch.ones(n, 4) * n, n) for n in (4, 6, 10, 6)]


@pytest.mark.parametrize("program", [_sizes, _reshaped], ids=["sizes", "reshaped"])
def test_sizes_that_change(program: Program) -> None:
    """A graph of symbolic sizes runs by its compiler where counters, sums and deferrable routines
    are on it, and these add and see what they do operator by operator."""
    with torch.no_grad():
        wanted = vanilla(program, shifting)
        tool, elements, shapes = Counting(), Elements(), Shapes()
        found, ways = watched(program, shifting, tool, elements, shapes)
        assert found == wanted
    assert all(way.startswith("by ") for way in ways)
    assert ways
    counting, adding, noting = Counting(), Elements(), Shapes()
    with torch.no_grad():
        watched(program, None, counting, adding, noting)
    executed = {op_id: n for op_id, n in tool.counts().items() if n}
    assert executed == counting.counts()
    amounts = {op_id: (one.amount, one.executions) for op_id, one in elements.sums.items()}
    assert amounts == {op_id: (one.amount, one.executions) for op_id, one in adding.sums.items()}
    assert shapes.seen == noting.seen


def test_sizes_that_change_in_training() -> None:
    """Sums over gradients of symbolic sizes keep a graph operator by operator; counters do not."""

    def program(backend: Any) -> Any:
        model = Net().eval()
        run = torch.compile(model, backend=backend, dynamic=True) if backend else model
        found = [run(torch.ones(n, 4) * n).sum() for n in (2, 3, 5, 7, 3)]
        for loss in found:
            loss.backward()
        return [*found, *(p.grad for p in model.parameters())]

    wanted = vanilla(program, shifting)
    found, ways = watched(program, shifting, Counting())
    assert found == wanted
    assert all(way.startswith("by ") for way in ways)
    with pytest.warns(CoverageWarning, match="sizes that do not follow from those of the graph"):
        found, ways = watched(program, shifting, Shapes())
    assert found == vanilla(program, None)
    assert ways == ["operator by operator"]


def test_a_size_that_only_the_graph_knows() -> None:
    """Where a routine gets a tensor whose size depends on values, the graph runs operator by
    operator, and the routine sees the sizes that there are."""

    def program(backend: Any) -> Any:
        run = torch.compile(lambda x: torch.relu(x[x > 2]) * 2, backend=backend, fullgraph=True)
        return [run(torch.arange(float(n))) for n in (4, 6, 5)]

    shapes, eager = Shapes(), Shapes()
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(  # noqa: SLF001 - captures such sizes
            capture_dynamic_output_shape_ops=True
        ),
    ):
        with pytest.warns(CoverageWarning, match="sizes that do not follow"):
            watched(program, "aot_eager", shapes)
        watched(program, "eager", eager)
    assert shapes.seen == eager.seen


def test_the_environment_keeps_functions_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``AMANDA_TORCH_COMPILER=eager`` is for results of eager mode, whatever the tools are."""
    monkeypatch.setenv(COMPILER_VARIABLE, "eager")
    with pytest.warns(CoverageWarning, match="operator by operator"):
        found, ways = watched(train, shifting, Counting())
    assert ways == ["operator by operator"]
    assert found == vanilla(train, "eager")


def test_the_graph_driver_does_the_same() -> None:
    """``torch-graph`` lets the program's compiler have the graphs as well."""
    wanted = vanilla(train, shifting)
    torch.compiler.reset()
    torch.manual_seed(3)
    with amanda.apply(Counting(), drivers=[TorchGraphDriver]) as scope:
        found = train(shifting)
    assert fingerprint([found, torch.get_rng_state()]) == wanted
    assert [way[:3] for way in scope.statistics.compiled.values()] == ["by "]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_tensors_that_a_graph_holds_are_changed_once() -> None:
    """Each step of a compiled optimizer changes once what its graph is not given."""

    def trained(*tools: amanda.Tool) -> str:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        step = torch.compile(optimizer.step, backend=shifting)
        with contextlib.ExitStack() as stack:
            for tool in tools:
                stack.enter_context(applied(tool))
            for _ in range(4):
                optimizer.zero_grad()
                net(X).square().sum().backward()
                step()
        return fingerprint(list(net.parameters()))

    torch.compiler.reset()
    wanted = trained()
    torch.compiler.reset()
    assert trained(Counting()) == wanted


def test_a_function_without_modules_and_backward_passes_keeps_its_compiler() -> None:
    """Where each call of a function has ids of its own, each is analysed, and each gives what the
    compiler gives; tensors that are written count as changed as often as without a tool."""

    def program(backend: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            x += 1
            return torch.relu(x)

        run, x = torch.compile(step, backend=backend) if backend else step, X.clone()
        return [[run(x) for _ in range(40)], x], x._version  # noqa: SLF001 - is to stay

    with torch.no_grad():
        wanted = vanilla(program, shifting)
        tool = Counting()
        found, ways = watched(program, shifting, tool)
    assert found == wanted
    assert [way[:3] for way in ways] == ["by "]
    assert len(tool.counts()) == 81


# -- accumulations behind a compiled backward pass ------------------------------


def plain_step(step: int, run: Any, model: nn.Module) -> None:
    run(X).square().sum().backward()


def decayed_step(step: int, run: Any, model: nn.Module) -> None:
    """The loss uses a parameter as well, in some steps before the model does."""
    first = next(model.parameters())
    decay = first.square().sum() if step % 3 == 1 else 0
    loss = run(X).square().sum()
    if step % 3 == 2:
        decay = first.square().sum()
    (loss + decay).backward()


def chosen_step(step: int, run: Any, model: nn.Module) -> None:
    """In some steps the pass is for chosen inputs, or runs twice over one graph."""
    loss = run(X).square().sum()
    first, *others = model.parameters()
    if step % 4 == 1:
        torch.autograd.grad(loss, [first])
    elif step % 4 == 2:
        loss.backward(retain_graph=True)
        loss.backward()
    elif step % 4 == 3:
        loss.backward(inputs=others)
    else:
        loss.backward()


def added_step(step: int, run: Any, model: nn.Module) -> None:
    """Two calls before one pass, and two passes without an end of the iteration between them."""
    if step % 2:
        (run(X).sum() + run(X + 1).square().sum()).backward()
    else:
        run(X).sum().backward()
        run(X + 1).sum().backward()


def muted_step(step: int, run: Any, model: nn.Module) -> None:
    """In some steps the backward pass, or the forward pass, runs without tools."""
    with amanda.disabled() if step % 4 == 1 else contextlib.nullcontext():
        loss = run(X).square().sum()
    with amanda.disabled() if step % 4 == 3 else contextlib.nullcontext():
        loss.backward()


def exchanged_step(step: int, run: Any, model: Any) -> None:
    """Parameters are replaced, frozen and used again."""
    if step == 6:
        model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    if step in (9, 11):
        model.last.weight.requires_grad_(step == 11)
    run(X).square().sum().backward()


def unused_step(step: int, run: Any, model: Any) -> None:
    """An output without parameters behind it, of which the gradient alone is wanted in a step."""
    x = X.clone().requires_grad_(step % 2 == 0)
    loss = run(x).sum() if step % 3 else run(x)[:1].sum() * 0
    loss.backward()


STEPS = [
    plain_step,
    decayed_step,
    chosen_step,
    added_step,
    muted_step,
    exchanged_step,
    unused_step,
]


def _counts_by_step(step: Callable[[int, Any, nn.Module], None], backend: str) -> Any:
    """Counts after each step, of accumulations alone where passes are for chosen inputs: a compiled
    backward pass runs as a whole."""
    torch.compiler.reset()
    tool, model = Counting(), Net().eval()
    run = torch.compile(model, backend=backend)
    counts, gradients = [], []
    with applied(tool):
        for number in range(14):
            model.zero_grad()
            step(number, run, model)
            every = {op_id: count for op_id, count in tool.counts().items() if count}
            if step is chosen_step:
                every = {op_id: n for op_id, n in every.items() if "AccumulateGrad" in op_id}
            counts.append(every)
            gradients.append([p.grad for p in model.parameters()])
    return counts, fingerprint(gradients)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_accumulations_are_counted_in_every_pass(step: Callable[..., None]) -> None:
    """Whoever else uses the parameters of a compiled function, and whichever passes come to it,
    each step counts what it counts operator by operator."""
    with torch._functorch.config.patch(donated_buffer=False):  # noqa: SLF001 - for two passes
        counts, gradients = _counts_by_step(step, "aot_eager")
    reference, wanted = _counts_by_step(step, "eager")
    assert gradients == wanted
    for number, (found, expected) in enumerate(zip(counts, reference, strict=True)):
        differing = {
            k: (found.get(k), expected.get(k))
            for k in found.keys() | expected.keys()
            if found.get(k) != expected.get(k)
        }
        assert not differing, number


def test_graphs_that_are_called_as_modules_are_no_modules_of_the_program() -> None:
    """The modules in the code of a compiler begin no iterations, and no tool is told of them."""

    def program(backend: Any) -> Any:
        run = torch.compile(lambda x: torch.relu(x) * 2, backend=backend)
        return [run(X) for _ in range(3)]

    tool, reference = Passes(), Passes()
    with torch.no_grad():
        _, ways = watched(program, aot_autograd(fw_compiler=lambda graph, _: graph), tool)
        watched(program, "eager", reference)
    assert [way[:3] for way in ways] == ["by "]
    assert tool.counts() == reference.counts()
    assert tool.told == reference.told


def test_a_module_with_hooks_is_captured_once() -> None:
    """Of what Dynamo guards there is nothing of ours that changes from capture to run: a module
    with hooks is captured and compiled once, as without a tool."""

    def program(backend: Any) -> Any:
        model = Net().eval()
        model.first.register_forward_hook(lambda module, inputs, output: output * 2)
        run = torch.compile(model, backend=backend)
        return [run(X) for _ in range(4)]

    wanted = vanilla(program, shifting)
    found, ways = watched(program, shifting, Counting())
    assert found == wanted
    assert [way[:3] for way in ways] == ["by "]


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
def test_what_a_tool_keeps_from_the_compiler_is_left_to_it_in_the_next_scope() -> None:
    """Where a graph ran operator by operator in one scope, graphs of symbolic sizes run by the
    compiler in the next one, whose tools let them."""
    run = torch.compile(lambda x: torch.relu(x) * 2, backend=shifting, dynamic=True)
    ways = []
    with torch.no_grad():
        for tool, dtype in ((Calls(), torch.float32), (Counting(), torch.float64)):
            with applied(tool) as scope:
                run(X.to(dtype))
            ways.append([*scope.statistics.compiled.values()])
    assert ways[0] == ["operator by operator"]
    assert [way[:3] for way in ways[1]] == ["by "]


class Chain(nn.Module):
    """So many operators in as many modules, with tensors of one shape."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Tanh() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def test_counters_and_sums_go_on_from_what_each_has_counted() -> None:
    """A run adds one to each counter and sum, however many it has and whatever the program has set
    it to; to one that is inserted twice it adds two."""
    alike, other, big = inline.Counter(), inline.Counter(3), inline.Counter(10**20)
    total = inline.Counter()
    known = inline.ShapeSum(lambda _: 5, total)
    unknown = inline.ShapeSum(lambda _: None, total)
    late = inline.ShapeSum(lambda _: 2)
    sums = [deferred_sum(one, [X], [X]) for one in (known, unknown, late)]
    late.add(7, ((), ()))
    later = [alike, inline.Counter(), other, alike, big, *sums, other]
    for _ in range(300):
        call_all(later)
    other.count = 0
    call_all(later)
    assert (alike.count, other.count, big.count) == (602, 2, 10**20 + 301)
    assert [one.executions for one in (known, unknown, late)] == [301, 301, 302]
    assert [one.amount for one in (known, unknown, late)] == [1505, 0, 609]
    assert [one.unknown for one in (known, unknown, late)] == [0, 301, 0]
    assert total.count == 1505
    assert known.last == late.last == ((X.shape,), (X.shape,))


class Returning(amanda.Tool):
    """A deferrable routine at each operator, one of which breaks its promise."""

    def __init__(self, broken: Callable[..., Any]) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.is_broken = False
        self.broken = broken
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.note, op_id=context.get_op_id())

    @amanda.deferrable
    def note(self, tensor: Any, op_id: str) -> Any:
        self.seen.append(op_id)
        return self.broken(tensor) if self.is_broken and op_id.endswith(".2/tanh:0") else None


def _raise(_: Any) -> None:
    raise ValueError("broken")


def _write(tensor: Any) -> None:
    tensor.zero_()


def test_a_deferrable_routine_that_raises_ends_the_run_and_leaves_nothing() -> None:
    """An error of a routine that is called when the code has run names it, those after it are not
    called, and neither the lock of tools nor the thread's state is left changed."""
    tool = Returning(_raise)
    compiled = torch.compile(Chain(4), backend="aot_eager")
    x = X.clone().requires_grad_()
    with applied(tool):
        for _ in range(3):
            compiled(x)
        known = [*dict.fromkeys(tool.seen)]
        tool.seen.clear()
        tool.is_broken = True
        with pytest.raises(ValueError, match="broken") as caught:
            compiled(x)
        assert any("Returning.note" in text for text in caught.value.__notes__)
        assert tool.seen == known[:3]
        assert torch.is_grad_enabled()
        assert not STATE.paused
        assert not TOOL_LOCK.is_owned()
        tool.is_broken = False
        tool.seen.clear()
        compiled(x).sum().backward()
        assert tool.seen[:4] == known


def test_a_deferrable_routine_that_writes_is_warned_of() -> None:
    """A tensor that a deferrable routine writes into is one without values, and a warning names the
    routine each time; the others are called all the same."""
    tool = Returning(_write)
    compiled = torch.compile(Chain(4), backend="aot_eager")
    with torch.no_grad(), applied(tool):
        for _ in range(3):
            wanted = compiled(X)
        tool.is_broken = True
        for _ in range(2):
            tool.seen.clear()
            with pytest.warns(InPlaceWarning, match="Returning.note.*layers.2/tanh"):
                found = compiled(X)
            assert len(tool.seen) == 4
    assert torch.equal(found, wanted)


class Half(nn.Module):
    """Runs one function on itself and, from without its ``forward``, on a module like itself."""

    def __init__(self, other: Half | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


class Pair(Half):
    """Its ``forward`` is compiled by itself, and so is that of the module in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = _applied(self, x)
        return result if self.other is None else result + _applied(self.other, x)


def _run_on(module: Half, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(module.fc(x))


_applied: Any = _run_on


@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_one_graph_runs_with_other_modules_in_one_call(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators have the ids of eager mode also where one call of a module runs a compiled function
    with several modules, even where these share a parameter."""
    pair = Pair(Pair())
    if is_tied:
        assert isinstance(pair.other, Pair)
        pair.other.fc.weight = pair.fc.weight
    wanted, found = Counting(), Counting()
    for tool, function in ((wanted, _run_on), (found, torch.compile(_run_on, backend="aot_eager"))):
        monkeypatch.setattr(f"{__name__}._applied", function)
        with torch.no_grad(), applied(tool):
            for _ in range(6):
                pair(X)
    assert found.counts() == wanted.counts()
    assert {op_id.partition("/")[0] for op_id in found.counters} >= {"Pair.fc", "Pair.other.fc"}


def test_a_known_module_is_found_without_a_look_at_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of a graph in ``forward`` are known by a parameter of the module that is called,
    also by a new one that has taken its place; ids are those of eager mode."""
    half = Half().eval()
    run = torch.compile(half, backend="aot_eager")
    wanted, found = Counting(), Counting()
    changed = nn.Parameter(torch.ones(4, 4))
    with torch.no_grad():
        with applied(wanted):
            for _ in range(9):
                half(X)
        with applied(found):
            run(X), run(X)
            with monkeypatch.context() as patched:
                patched.setattr(_internals, "program_frame", lambda: pytest.fail("it is asked"))
                run(X), run(X)
            half.fc.weight = changed
            given = [run(X) for _ in range(5)]
        assert all(torch.equal(one, half(X)) for one in given)
    assert found.counts() == wanted.counts()


def test_the_eager_compiler_has_graphs_without_gradients_as_they_are() -> None:
    """Deferrable routines and counters follow each run after the first, once per operator; where
    gradients are recorded they run at the operators, with values."""
    devices: list[str] = []

    @amanda.deferrable
    def note(y: torch.Tensor) -> None:
        devices.append(y.device.type)

    tool = Counting()
    tool.add_inst_for_op(lambda context: context.insert_after_op(note))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        expected = model(X)
    compiled = torch.compile(model, backend="eager")
    with applied(tool):
        with torch.no_grad():
            results = [compiled(X) for _ in range(3)]
        assert devices == ["cpu"] * 2 + ["meta"] * 4
        assert {counter.count for counter in tool.counters.values()} == {3}
        devices.clear()
        for _ in range(3):
            compiled(X).sum().backward()
        assert "meta" not in devices
    assert all(torch.equal(result, expected) for result in results)


def test_the_eager_compiler_counts_backward_operators_where_a_graph_switches_gradients_on() -> None:
    """A function that is called without gradients and records some has eager mode's counts."""

    class Executed(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.counters: dict[str, inline.Counter] = {}
            self.add_inst_for_op(self.count)
            self.add_inst_for_op(self.count_backward, backward=True)

        def count(self, context: amanda.OpContext) -> None:
            counter = self.counters.setdefault(context.get_op_id(), inline.Counter())
            context.insert_before_op(counter, inputs=[])

        def count_backward(self, context: amanda.OpContext) -> None:
            counter = self.counters.setdefault(context.get_backward_op_id(), inline.Counter())
            context.insert_before_backward_op(counter, grad_outputs=[])

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return (x @ w).relu().sum()

    found = []
    for function in (loss, torch.compile(loss, backend="eager")):
        weight, tool = torch.ones(4, 4, requires_grad=True), Executed()
        with applied(tool):
            for _ in range(4):
                with torch.no_grad():
                    result = function(X, weight)
                result.backward()
                amanda.new_iteration()
        found.append({name: counter.count for name, counter in tool.counters.items()})
    assert found[0] == found[1]
    assert found[0]["/matmul:0/grad/MmBackward0:0"] == 4
