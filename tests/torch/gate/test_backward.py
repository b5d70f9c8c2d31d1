"""Backward operators and accumulations by the gate."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.inline import Counter, Log, Timer
from tests.running import in_threads
from tests.torch.gate.programs import BOTH, intercepted, needs_gate
from tests.torch.gate.tools import Inlined
from tests.torch.support import applied

pytestmark = needs_gate


class Timed(amanda.Tool):
    """A timer around each backward operator, or around those of one type."""

    def __init__(self, log: Log, kind: str = "") -> None:
        super().__init__()
        self.timer, self._kind = Timer(log), kind
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if self._kind in ("", context.get_backward_op().__name__):
            context.insert_before_backward_op(self.timer.start, grad_outputs=[])
            context.insert_after_backward_op(self.timer.stop, grad_inputs=[])


@pytest.mark.usefixtures("gated")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_log_raises_reaches_the_program(error: type[BaseException]) -> None:
    """An exception that C++ cannot be given at a backward operator is raised there nevertheless,
    once, and its traceback names the function that raised it."""

    class Raising(Log):
        def look(self, now: int) -> None:
            self.due = None
            raise error("looked")

    x, log = torch.ones(2, requires_grad=True), Raising()
    with applied(Timed(log)):
        for _ in range(4):
            log.due = 0
            with pytest.raises(error, match="looked") as caught:
                (x * 2.0).exp().sum().backward()
            assert "look" in [entry.name for entry in caught.traceback]
            (x * 2.0).exp().sum().backward()
            amanda.new_iteration()


@pytest.mark.parametrize("interceptor", BOTH)
def test_a_timer_around_a_backward_operator(interceptor: str) -> None:
    """A timer at a backward operator notes each execution that ends, once, and none that raises;
    one that runs within another one, and one in another thread, are measured apart."""
    x, log = torch.ones(2, requires_grad=True), Log()
    tool = Timed(log, "ExpBackward0")

    def passes(inside: Callable[[], object] = lambda: None) -> int:
        before = tool.timer.executions

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            # Between the two routines.
            inside()
            return tensor

        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack),
        ):
            y = x.exp()
        with torch.enable_grad():
            y.sum().backward()
        assert len(log.numbers) == 4 * tool.timer.executions
        return tool.timer.executions - before

    def in_thread() -> None:
        in_threads(passes)

    def raises() -> None:
        raise ZeroDivisionError

    with intercepted(interceptor, tool):
        for _ in range(3):
            assert passes() == 1
            with pytest.raises(ZeroDivisionError):
                passes(raises)
            y = x.exp()
            with torch.no_grad():
                y.add_(1.0)
            with pytest.raises(RuntimeError, match="inplace"):
                y.sum().backward()
            assert passes() == 1
            assert passes(passes) == 2
            assert passes(lambda: passes(passes)) == 3
            assert passes() == 1
            in_thread()
            amanda.new_iteration()
    rows = [log.numbers[at : at + 4] for at in range(0, len(log.numbers), 4)]
    assert tool.timer.nanoseconds == sum(end - start for _, start, end, _ in rows)
    assert all(start <= end for _, start, end, _ in rows)


class CountsAccumulations(amanda.Tool):
    """A counter after every accumulation of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_after_backward_op(self.counter, grad_inputs=[])


@pytest.mark.parametrize("interceptor", BOTH)
def test_accumulations_of_operators_that_are_known(interceptor: str) -> None:
    """The accumulation of a leaf belongs to the first operator that used the leaf, and runs its
    routines once in each pass that comes through an operator of the scope, and in no other."""
    w, model, tool = torch.ones(3, 3, requires_grad=True), nn.Linear(3, 3), CountsAccumulations()
    counts = []
    with intercepted(interceptor, tool):
        for _ in range(5):
            before = tool.counter.count
            h = nn.functional.linear(w.mul(2.0), w) + model(w)
            with amanda.disabled():
                other = w.sum() + model(w).sum()
            other.backward()
            between = tool.counter.count
            h.sum().backward(retain_graph=True)
            once = tool.counter.count
            (h * w).sum().backward()
            counts.append((between - before, once - between, tool.counter.count - once))
            amanda.new_iteration()
    # w, and the weight and the bias of the layer.
    assert counts == [(0, 3, 3)] * 5


@pytest.mark.usefixtures("gated")
def test_a_form_that_changes_is_noticed() -> None:
    """An operator of many nodes whose gradient graph takes another form has its own backward
    operators each time, and a leaf that is new is found."""
    cell, x = nn.LSTMCell(3, 3), torch.ones(2, 3)
    seen: list[int] = []
    tool = Inlined()
    with applied(tool):
        for needs_x, needs_h in ((False, False), (False, True), (True, False), (True, True)) * 3:
            one = x.clone().requires_grad_(needs_x)
            h = torch.ones(2, 3, requires_grad=needs_h)
            before = tool.counter.count
            cell(one, (h, torch.ones(2, 3)))[0].sum().backward()
            seen.append(tool.counter.count - before)
            assert (one.grad is not None) == needs_x
    assert seen[:4] == seen[4:8] == seen[8:]
    assert seen[1] > seen[0] < seen[2] < seen[3]


@pytest.mark.usefixtures("gated")
def test_hooks_of_the_program_stay_its_own() -> None:
    """A hook that the program registers on a node that ours are on can be removed by its handle,
    before and after ours were registered."""
    x, called = torch.ones(2, requires_grad=True), []
    with applied(Inlined()):
        for _ in range(3):
            y = (x * 2.0).exp()
            node = y.grad_fn
            handles = [
                node.register_prehook(lambda g: called.append("before")),
                node.register_hook(lambda i, o: called.append("after")),
                node.register_hook(lambda i, o: called.append("removed")),
            ]
            handles[2].remove()
            y.sum().backward()
            amanda.new_iteration()
    assert called == ["before", "after"] * 3


def kept(model: nn.Module, steps: int, each: Callable[[torch.Tensor], None] | None = None) -> None:
    """Train as most loops do: the graph of each step is alive until the next one has been made."""
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        if each is not None:
            each(loss)
        loss.backward()


@pytest.mark.parametrize("name", BOTH)
def test_accumulations_that_live_on_act_once_in_each_step(name: str) -> None:
    """Also where the gate takes them over, a routine at them runs once for each step."""
    model, tool = nn.Linear(4, 4), amanda.Tool()
    ran: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(doubled, name=context.get_backward_op_id())

    def doubled(gradient: torch.Tensor, name: str) -> torch.Tensor:
        ran.append(name)
        return gradient * 2

    tool.add_inst_for_op(analyse, backward=True)
    kept(model, 1)
    vanilla = [parameter.grad.clone() for parameter in model.parameters()]
    with intercepted(name, tool):
        for _ in range(2):
            kept(model, 5)
        assert set(collections.Counter(ran).values()) == {10}
        for parameter, gradient in zip(model.parameters(), vanilla, strict=True):
            assert torch.equal(parameter.grad, gradient * 2)
    kept(model, 2)
    assert len(ran) == 20
    for parameter, gradient in zip(model.parameters(), vanilla, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.usefixtures("gated")
def test_hooks_of_the_program_keep_their_place_at_an_accumulation() -> None:
    """An accumulation that has hooks of the program beside ours is left to Python, so that all run
    in the order in which they were registered."""
    model, tool = nn.Linear(4, 4, bias=False), amanda.Tool()
    order: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(lambda gradient: order.append("tool"))

    tool.add_inst_for_op(analyse, backward=True)
    handles: list[Any] = []

    def hook(loss: torch.Tensor) -> None:
        if not handles:
            node = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
            handles.append(node.register_prehook(lambda *_: order.append("program")))

    with applied(tool):
        kept(model, 4, hook)
    assert order == ["tool", "program"] * 4
    handles[0].remove()
