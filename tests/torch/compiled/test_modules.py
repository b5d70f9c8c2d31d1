"""Compiled functions under tools with routines at modules."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import CoverageWarning
from amanda.interface.points import PointContext
from tests.torch.compiled.support import Calls, Counting, X, shifting
from tests.torch.support import applied, fingerprint


def _specs(tensors: Any) -> Any:
    return tensors and [(tuple(t.shape), str(t.dtype), str(t.device)) for t in tensors]


class Points(amanda.Tool):
    """Notes the calls of modules, and the operators between them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.add_inst_for_op(self.forward)
        for is_exit in (False, True):
            self.add_inst_for_module(self.passed, exit=is_exit)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.ran, op_id=context.get_op_id(), outputs=[])

    @amanda.deferrable
    def ran(self, op_id: str) -> None:
        self.seen.append(op_id)

    @amanda.deferrable
    def passed(self, point: PointContext) -> None:
        facts = point.point.name, point.module, point.id, point.iteration
        target = type(point.target).__name__
        self.seen.append((*facts, target, _specs(point.inputs), _specs(point.outputs)))


class PointsNow(Points):
    """The same, with routines that are not deferrable."""

    def passed(self, point: PointContext) -> None:  # type: ignore[override]
        self.seen.append(_specs(point.inputs))


class Part(nn.Module):
    """Has a module without operators, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.same = nn.Linear(4, 4), nn.ReLU(), nn.Identity()

    def forward(self, x: torch.Tensor, scale: Any = None, *, more: Any = ()) -> torch.Tensor:
        y = self.act(self.first(x))
        return self.same(self.act(y - 0.1)) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([Part(), Part()])
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x, 2.0, more=[{"a": x, "b": None}, (x,)])
        return self.last(self.drop(x))


Pair = namedtuple("Pair", "one other")


@dataclass
class Record:
    one: torch.Tensor
    other: Any = None


class Gives(nn.Module):
    """Gives tensors in a container."""

    def __init__(self, form: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.form, self.scale = form, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.scale(x), torch.relu(x))


class Within(nn.Module):
    """Calls a module that gives containers."""

    def __init__(self, form: Callable[[Any, Any], Any], item: Callable[[Any], Any]) -> None:
        super().__init__()
        self.gives, self.item = Gives(form), item

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.item(self.gives(x)).sum()


class Breaks(nn.Module):
    """The graph breaks within a module that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(4, 4), _Broken(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.part(self.before(x)))


class _Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.ReLU(), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        if y.sum() > -1:
            y = y + 1
        return self.other(y)


Program = Callable[[Any], Any]


def _compiled(function: Any, backend: Any) -> Any:
    return torch.compile(function, backend=backend) if backend else function


def train(backend: Any) -> Any:
    """Some steps of training."""
    model = Net()
    run, optimizer = _compiled(model, backend), torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = run(X).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(p.detach() for p in model.parameters())]


def whole_step(backend: Any) -> Any:
    """A function that calls models, in evaluation and with gradients."""
    one, other = Net().eval(), nn.Linear(2, 3)
    run = _compiled(lambda x: torch.relu(other(one(x))).sum(), backend)
    found = []
    for n in range(3):
        found.append(run(X + n))
        found[-1].backward()
    with torch.no_grad():
        found += [run(X), run(X)]
    return [*found, *(p.grad for p in one.parameters())]


def breaks(backend: Any) -> Any:
    """A graph that breaks within a module."""
    run = _compiled(Breaks(), backend)
    with torch.no_grad():
        return [run(X) for _ in range(3)]


FORMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda a, b: (a, [b, None]), lambda y: y[0] + y[1][0]),
    "dict": (lambda a, b: {"b": b, "a": a}, lambda y: y["a"] + y["b"]),
    "ordered": (lambda a, b: OrderedDict(b=b, a=a), lambda y: y["a"] + y["b"]),
    "namedtuple": (Pair, lambda y: y.one + y.other),
    "dataclass": (lambda a, b: Record(a, [b]), lambda y: y.one + y.other[0]),
}


def containers(form: str) -> Program:
    """A module that calls one which gives tensors in a container."""

    def run(backend: Any) -> Any:
        torch.manual_seed(0)
        compiled = _compiled(Within(*FORMS[form]), backend)
        with torch.no_grad():
            return [compiled(X) for _ in range(3)]

    run.__name__ = form
    return run


def layer(backend: Any) -> Any:
    """A module of PyTorch, whose call Dynamo captures with it."""
    torch.manual_seed(0)
    run = _compiled(nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.ReLU()), backend)
    with torch.no_grad():
        return [run(X) for _ in range(3)]


def sizes(backend: Any) -> Any:
    """Inputs of several sizes."""
    model = Net().eval()
    run = _compiled(model, backend)
    with torch.no_grad():
        return [run(torch.ones(n, 4) * n) for n in (2, 3, 5, 7)]


PROGRAMS = [train, sizes, whole_step, breaks, layer, *map(containers, FORMS)]


def told(program: Program, backend: Any, *tools: amanda.Tool) -> tuple[str, list[str]]:
    """What a program gives under tools, and how its graphs ran."""
    torch.compiler.reset()
    torch.manual_seed(3)
    with applied(*tools) if tools else contextlib.nullcontext() as scope:
        found = program(backend)
    assert scope is None or not scope.statistics.not_seen
    return fingerprint([found, torch.get_rng_state()]), (
        [*scope.statistics.compiled.values()] if scope else []
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_tools_are_told_of_the_modules_in_compiled_functions(program: Program) -> None:
    """Where all routines at modules are deferrable, a compiled function runs the code of its
    compiler, and they are called as in eager mode: with the same modules, tensors of the same
    shapes, and in the same order with each other and with routines at operators."""
    wanted, _ = told(program, shifting)
    tool, eager = Points(), Points()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CoverageWarning)
        found, ways = told(program, shifting, tool)
    assert found == wanted
    assert all(way.startswith("by ") for way in ways)
    assert ways
    told(program, None, eager)
    assert tool.seen == eager.seen


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_tools_are_told_of_modules_operator_by_operator(program: Program) -> None:
    """Where another routine keeps a graph operator by operator, routines at modules are called at
    once, with the tensors themselves."""
    tool, eager = Points(), Points()
    _, ways = told(program, shifting, tool, Calls())
    assert {*ways} == {"operator by operator"}
    told(program, None, eager)
    assert tool.seen == eager.seen


@pytest.mark.parametrize("is_inner", [False, True])
def test_tools_are_not_told_of_wrappers_in_compiled_functions(is_inner: bool) -> None:
    """A wrapper that ids do not name is no module for tools, as in eager mode."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped, self.last = nn.DataParallel(nn.Linear(4, 4)), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.wrapped(x))

    net, x = Outer() if is_inner else nn.DataParallel(nn.Linear(4, 4)), torch.ones(2, 4)
    tool, eager = Points(), Points()
    with amanda.apply(eager):
        net(x)
    function = torch.compile(lambda x: net(x), backend="eager")
    with amanda.apply(tool) as scope:
        function(x)
    assert scope.statistics.compiled
    assert not scope.statistics.not_seen
    assert tool.seen == eager.seen


def test_routines_at_modules_that_are_not_deferrable() -> None:
    """With them compiled functions run eagerly, which is said, and tools see what they see then."""
    tool, eager = PointsNow(), PointsNow()
    with pytest.warns(CoverageWarning, match="routines at modules that are not deferrable"):
        found, ways = told(train, shifting, tool)
    assert [way.partition(" ")[0] for way in ways] == ["eagerly"]
    assert found == told(train, None, eager)[0]
    assert tool.seen == eager.seen


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
def test_a_module_that_raises_in_a_graph_has_been_left() -> None:
    """As in eager mode tools are told of the exits of the modules that an error passes."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Fails()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fails(x) * 2

    def program(backend: Any) -> list[str]:
        run, found = _compiled(Outer(), backend), []
        for index in (1, 1, 7, 1):
            try:
                run(torch.tensor([index]))
            except Exception as error:
                found.append(type(error).__name__)
        return found

    tool, eager = Points(), Points()
    told(program, "eager", tool)
    told(program, None, eager)
    assert tool.seen == eager.seen


def test_a_module_that_the_function_makes_runs_as_it_is() -> None:
    """Of a module that captured code makes there is nothing to tell of: the function runs eagerly,
    with all that it calls, and tools are told of its modules."""

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.CrossEntropyLoss()(self.part(x), torch.zeros(3, dtype=torch.long))

    def program(backend: Any) -> Any:
        torch.manual_seed(0)
        run = _compiled(Makes(), backend)
        with torch.no_grad():
            return [run(X), run(X)]

    tool, eager = Points(), Points()
    found, ways = told(program, shifting, tool)
    assert found == told(program, None, eager)[0]
    assert all(way.startswith("eagerly") for way in ways)
    assert tool.seen == eager.seen


def test_what_was_captured_for_other_tools_is_kept_apart() -> None:
    """Scopes with and without routines at modules take turns over one compiled function."""
    model = Net().eval()
    run, seen, counts = torch.compile(model, backend=shifting), [], []
    with torch.no_grad():
        run(X)
        for _ in range(2):
            tool, counting = Points(), Counting()
            with applied(tool) as scope:
                run(X), run(X)
            assert all(way.startswith("by ") for way in scope.statistics.compiled.values())
            with applied(counting):
                run(X), run(X)
            seen.append([one for one in tool.seen if isinstance(one, tuple)])
            counts.append(counting.counts())
    assert seen[0] == seen[1]
    assert len([one for one in seen[0] if one[0] == "MODULE_ENTRY"]) == 2 * 13
    assert counts[0] == counts[1]
    assert {*counts[0].values()} == {2}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_forward_pass_in_a_graph_has_its_outermost_module(backend: str) -> None:
    """In the first run of the graph and in later ones; its inputs are not told."""
    net, begun, tool = nn.Linear(4, 4), list[Any](), amanda.Tool()
    tool.add_inst_for_pass(lambda point: begun.append((point.target, [*point.inputs])))
    run = torch.compile(lambda x: net(x) + 1, backend=backend)
    with applied(tool), torch.no_grad():
        for _ in range(3):
            run(X)
    assert begun == [(net, [])] * 3
