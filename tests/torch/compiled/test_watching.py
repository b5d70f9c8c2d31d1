"""Compiled functions under tools that let the program's compiler have its graphs as they are."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import amanda
from amanda.errors import CoverageWarning
from tests.running import in_threads
from tests.torch.compiled.support import (
    Counting,
    Net,
    Passes,
    Program,
    Shapes,
    X,
    shifting,
    train,
    vanilla,
    watched,
)
from tests.torch.support import Watcher, applied, fingerprint


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


def hooked(backend: Any) -> Any:
    """A module with hooks, of which Dynamo guards nothing that changes from capture to run."""
    model = Net().eval()
    model.first.register_forward_hook(lambda module, inputs, output: output * 2)
    run = torch.compile(model, backend=backend)
    return [run(X) for _ in range(4)]


PROGRAMS = [whole_step, evaluation, in_place, inference, graph_breaks, one_output, twice, hooked]


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

    in_threads(*[functools.partial(work, tool) for tool in tools])
    for tool in tools:
        assert {n for op_id, n in tool.counts().items() if "/grad/" not in op_id} == {3}


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


def test_the_eager_compiler_counts_backward_operators_where_a_graph_switches_gradients_on() -> None:
    """A function that is called without gradients and records some has eager mode's counts."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return (x @ w).relu().sum()

    found = []
    for function in (loss, torch.compile(loss, backend="eager")):
        weight, tool = torch.ones(4, 4, requires_grad=True), Counting()
        with applied(tool):
            for _ in range(4):
                with torch.no_grad():
                    result = function(X, weight)
                result.backward()
                amanda.new_iteration()
        found.append(tool.counts())
    assert found[0] == found[1]
    assert found[0]["/matmul:0/grad/MmBackward0:0"] == 4
