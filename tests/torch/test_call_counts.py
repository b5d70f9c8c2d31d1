"""How many Python functions of ours one operator runs through.

A count of frames does not depend on the machine. The bounds are what the paths of data came
to when they were made straight, with a little room; whoever raises one should know why.
"""

from __future__ import annotations

import collections
import gc
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import amanda
import amanda_tools
import amanda_torch
from amanda.interface.tool import NOTED
from amanda_torch.eager.gate import reason_unusable
from tests.benchmarks.watching import Watch
from tests.counting import called
from tests.torch.support import Counter, ForwardCounter, applied

OURS = tuple(str(Path(package.__file__).parent) for package in (amanda, amanda_torch, amanda_tools))
X = torch.ones(2, 4)

IS_GATED = os.environ.get("AMANDA_TORCH_INTERCEPTOR", "auto") != "mode" and not reason_unusable()


def bound(gate: int, mode: int) -> int:
    """The bound for the interceptor that is used."""
    return gate if IS_GATED else mode


NEW = 3
"""Calls of a module after which all is known of it."""


@attrs.frozen
class Run:
    """The functions of ours that were called, in order."""

    codes: list[CodeType]

    def __len__(self) -> int:
        return len(self.codes)

    def count(self, name: str) -> int:
        """How often functions and methods of this name were called."""
        return sum(code.co_name == name for code in self.codes)

    def after(self, name: str) -> Run:
        """The calls after the first one of this name."""
        names = [code.co_name for code in self.codes]
        return Run(self.codes[names.index(name) + 1 :])

    def __str__(self) -> str:
        calls = collections.Counter(code.co_qualname for code in self.codes)
        return "\n".join(f"{count:5} {name}" for name, count in calls.most_common())


def profiled(function: Callable[[], Any]) -> tuple[Any, Run]:
    """Call a function; its result and its calls, among which resumed generators count."""
    with called(OURS) as codes:
        result = function()
    return result, Run(codes)


class AtBothEnds(Counter):
    """Routines before and after each forward and backward operator; they return nothing."""

    def forward(self, context: amanda.OpContext) -> None:
        super().forward(context)
        context.insert_after_op(_ignore)

    def backward(self, context: amanda.OpContext) -> None:
        super().backward(context)
        context.insert_after_backward_op(_ignore)


class ForwardAtBothEnds(ForwardCounter, AtBothEnds):
    """The same on forward operators alone."""


def _ignore(*_: Any) -> None:
    pass


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())


@attrs.frozen
class Steps:
    """One iteration: its forward and its backward pass, and the operators that ran in each."""

    forward: Run
    backward: Run
    ops: int
    backward_ops: int


def iterations(tool: Counter, count: int = NEW + 1) -> list[Steps]:
    """Some iterations of a small model under a tool."""
    model, done = two_layers(), []
    with applied(tool):
        for _ in range(count):
            tool.ops.clear()
            tool.backward_ops.clear()
            loss, forward = profiled(lambda: model(X).sum())
            ops = tool.ops.total()
            _, backward = profiled(loss.backward)
            done.append(Steps(forward, backward, ops, tool.backward_ops.total()))
    return done


@pytest.mark.parametrize(
    ("tool", "bound"),
    [(ForwardCounter, bound(2, 10)), (ForwardAtBothEnds, bound(3, 13))],
    ids=["before", "both"],
)
def test_forward(tool: type[Counter], bound: int) -> None:
    """A known forward operator with routines runs through few functions, its modules included."""
    steady = iterations(tool())[-1]
    assert steady.ops == 5
    assert len(steady.forward) <= bound * steady.ops, f"\n{steady.forward}"


@pytest.mark.parametrize(
    ("tool", "bound"),
    [(Counter, bound(16, 19)), (AtBothEnds, bound(23, 26))],
    ids=["before", "both"],
)
def test_backward(tool: type[Counter], bound: int) -> None:
    """A known backward operator with routines runs through few functions, those that find
    and hook it in the forward pass included."""
    steady = iterations(tool())[-1]
    alone = iterations(ForwardCounter() if tool is Counter else ForwardAtBothEnds())[-1]
    assert steady.backward_ops == 11
    claims = len(steady.forward) - len(alone.forward)
    assert claims + len(steady.backward) <= bound * steady.backward_ops, f"\n{steady.backward}"


def test_a_graph_that_no_backward_pass_uses() -> None:
    """An operator of fifteen nodes costs no more functions than one of a few, until a backward
    pass comes to it."""
    cell, state = nn.LSTMCell(4, 4), (X, X)
    with applied(Counter()):
        for _ in range(NEW):
            cell(X, state)
            amanda.new_iteration()
        _, run = profiled(lambda: cell(X, state))
    assert len(run) <= 90, f"\n{run}"


def test_forward_passes_without_a_backward_pass() -> None:
    """Programs that forget ``torch.no_grad()``: analyses of backward operators stay pending, and
    the gate notes each execution without Python."""
    model = two_layers()
    with applied(Watch(backward=True)):
        for _ in range(NEW + 1):
            model(X)
        _, run = profiled(lambda: model(X))
    assert len(run) <= bound(9, 132), f"\n{run}"


def test_gradient_hooks_do_not_meet_our_mode() -> None:
    """No routine of a backward operator, and nothing around it, comes back as an operator."""
    steady = iterations(AtBothEnds())[-1]
    assert steady.backward.count("run_backward") == 1
    assert steady.backward.after("run_backward").count("__torch_function__") == 0


def test_nothing_is_asked_twice() -> None:
    """At its first execution an operator's scopes are looked up and its plan is made once."""
    first = iterations(ForwardCounter(), 1)[0].forward
    assert first.count("scopes") <= 1
    assert first.count("compile_plan") == 5


@pytest.mark.parametrize(
    ("tool", "forward", "backward"),
    [(ForwardCounter, 112, 0), (Counter, 148, 112)],
    ids=["forward", "both"],
)
def test_the_first_execution(tool: type[Counter], forward: int, backward: int) -> None:
    """An operator that is new, forward or backward, runs through few functions until it is known,
    the modules that call it included."""
    with applied(tool()):
        # What is remembered of operators in a process.
        two_layers()(X).sum().backward()
    first = iterations(tool(), 1)[0]
    assert len(first.forward) <= forward * first.ops, f"\n{first.forward}"
    if backward:
        assert len(first.backward) <= backward * first.backward_ops, f"\n{first.backward}"


def pairs(count: int) -> nn.Module:
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(4, 4), nn.ReLU())])


def activations(count: int) -> nn.Module:
    return nn.Sequential(*[nn.ReLU() for _ in range(2 * count)])


@pytest.mark.parametrize(("model", "bound"), [(pairs, 207), (activations, 124)])
def test_the_first_execution_under_flops(model: Callable[[int], nn.Module], bound: int) -> None:
    """A new operator that ``flops`` analyses and counts runs through few functions, those of the
    tool included, and through fewer where no tensor wants a gradient."""
    flops, count = amanda.tools.load("flops"), 20
    with applied(flops()):
        # What is remembered of operators in a process.
        model(1)(X)
    layers = model(count)
    with applied(flops()):
        _, first = profiled(lambda: layers(X))
    assert len(first) <= bound * 2 * count, f"\n{first}"


@pytest.mark.parametrize(
    # Of each product there are two tuples of steps, and a step for each action. Bound methods as
    # hooks would be two more of each operator and each parameter.
    ("model", "bound"),
    [(pairs, 48), (activations, 15)],
)
def test_a_new_operator_is_few_objects(model: Callable[[int], nn.Module], bound: int) -> None:
    """What is kept of a new operator is few objects for the garbage collector to visit, whose full
    collections are a large part of the first step of a large model otherwise."""
    flops, count = amanda.tools.load("flops"), 20

    def visited() -> int:
        # Python 3.14 visits a dict, too, in which there is nothing to follow.
        return sum(
            type(one) is not dict or any(map(gc.is_tracked, (*one, *one.values())))
            for one in gc.get_objects()
        )

    def made(number: int) -> int:
        layers = model(number)
        with applied(flops()):
            gc.collect()
            known = visited()
            result = layers(X)
            gc.collect()
            found = visited() - known
        assert result.requires_grad == (model is pairs)
        return found

    made(1)
    # What is kept of a model, or once in a process, is in both; an object of something else may
    # come or go in one of them.
    grown = statistics.median(made(2 * count) - made(count) for _ in range(5))
    assert grown <= bound * 2 * count


IS_GATED = os.environ.get("AMANDA_TORCH_INTERCEPTOR", "auto") != "mode" and not reason_unusable()


@pytest.mark.parametrize(
    ("training", "bound"),
    [(True, bound(24, 144)), (False, bound(22, 30))],
    ids=["train", "infer"],
)
def test_a_cell_in_a_loop(training: bool, bound: int) -> None:
    """A module that is called in a loop of the program, so that each call is an iteration, runs
    through few functions however many operators were met."""
    # What is done once in so many iterations is among them.
    cell, count = nn.LSTMCell(4, 4), NOTED

    def loop() -> None:
        state = (X, X)
        for _ in range(count):
            state = cell(X, state)
        if training:
            state[0].sum().backward()

    with torch.set_grad_enabled(training), applied(amanda.tools.load("count")()):
        for _ in range(NEW):
            loop()
        _, run = profiled(loop)
    assert len(run) <= bound * count, f"\n{run}"


@pytest.mark.skipif(not IS_GATED, reason="operators are not run by the gate")
def test_a_step_under_nan() -> None:
    """What ``nan`` looks at costs no function of ours with the gate, as long as it is finite: those
    of a step are of the step, and of the loss outside of modules."""
    model = pairs(20)
    with applied(amanda.tools.load("nan")()):
        for _ in range(NEW):
            model(X).sum().backward()
        loss, forward = profiled(lambda: model(X).sum())
        _, backward = profiled(loss.backward)
    assert len(forward) <= 80, f"\n{forward}"
    assert len(backward) <= 50, f"\n{backward}"
