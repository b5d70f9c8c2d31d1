"""Compiled functions that run operator by operator under a tool, and what is said of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

import amanda
from amanda.errors import CoverageWarning
from amanda_torch.plugin import COMPILER_VARIABLE
from tests.torch.compiled.support import Calls, Counting, Net, X, shifting, train, vanilla, watched
from tests.torch.support import applied, fingerprint


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


def test_hooks_on_inputs_are_called_once() -> None:
    """A graph whose inputs have hooks, or retain their gradients, is not run for analyses."""
    calls = []
    run = torch.compile(lambda x: torch.relu(x).sum(), backend=shifting)

    def step() -> None:
        x = X.clone().requires_grad_()
        x.register_hook(lambda g: calls.append(1))
        run(x).backward()

    with applied(Counting()), warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        step()
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
    with torch.no_grad(), applied(Counting()), warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        run(X)
    assert calls == [1]


def test_the_environment_keeps_functions_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``AMANDA_TORCH_COMPILER=eager`` is for results of eager mode, whatever the tools are."""
    monkeypatch.setenv(COMPILER_VARIABLE, "eager")
    with pytest.warns(CoverageWarning, match="operator by operator"):
        found, ways = watched(train, shifting, Counting())
    assert ways == ["operator by operator"]
    assert found == vanilla(train, "eager")


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
