"""Routines, checks and numbers by the gate: threads, exceptions, modes of the program."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import ToolTypeError
from amanda.inline import Check, Counter, Log, Timer
from amanda_torch import _internals
from tests.running import in_threads
from tests.torch.gate.programs import intercepted, needs_gate
from tests.torch.gate.tools import Checks, Ids, Returning
from tests.torch.support import Dispatches, applied

pytestmark = [needs_gate, pytest.mark.usefixtures("gated")]


def test_routines_of_threads_take_turns() -> None:
    """No two threads run routines at once, though the gate calls them."""
    inside, most, tool = [0], [0], Returning(lambda *_: None, "before 0")

    def act(*_: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.0005)
        inside[0] -= 1

    tool.act = act

    def compute() -> None:
        x = torch.ones(2)
        with applied(tool):
            for _ in range(20):
                _ = x * 2.0
                amanda.new_iteration()

    in_threads(*[compute] * 3)
    assert most == [1]
    assert tool.seen.count("after 1") == 60


def test_counts_and_times_grow_beyond_small_numbers() -> None:
    """A counter counts on, and a timer adds up, beyond the numbers that Python or C keeps ready; a
    number that the program has read stays what it was."""
    log = Log()
    counter, timer = Counter(250), Timer(log)
    tool, x = amanda.Tool(), torch.ones(2)

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "exp":
            context.insert_after_op(counter, outputs=[])
        elif context.get_op().__name__ == "sin":
            context.insert_before_op(timer.start, inputs=[])
            context.insert_after_op(timer.stop, outputs=[])

    tool.add_inst_for_op(analyse)
    read = []
    with applied(tool):
        for i in range(3000):
            x.exp(), x.sin()
            if i == 1500:
                timer.nanoseconds += 1 << 30
            elif i == 2000:
                timer.nanoseconds += 1 << 60
            read.append((counter.count, timer.nanoseconds))
            amanda.new_iteration()
    assert [count for count, _ in read] == list(range(251, 3251))
    numbers = log.numbers
    spans = [numbers[i + 2] - numbers[i + 1] for i in range(0, len(numbers), 4)]
    sums = itertools.accumulate(spans)
    added = [0] * 1500 + [1 << 30] * 500 + [(1 << 30) + (1 << 60)] * 1000
    assert [time for _, time in read] == [a + b for a, b in zip(sums, added, strict=True)]


def test_checks_are_not_seen() -> None:
    """What a check computes is not an operator: neither tools nor modes of the program see it; it
    records no gradient, makes no node, and gradients are recorded as before."""
    x, tool, ids = torch.ones(2, requires_grad=True), Checks(), Ids(acts=True)
    with applied(tool), applied(ids):
        for _ in range(4):
            ids.ids.clear()
            before = _internals.sequence_number()
            y = x * 2.0 + x
            nodes = _internals.sequence_number() - before
            assert torch.is_grad_enabled()
            with torch.no_grad():
                x.exp()
                assert not torch.is_grad_enabled()
            with torch.inference_mode():
                assert (x * 2.0).is_inference()
            amanda.new_iteration()
        with Dispatches() as mode:
            x * 2.0 + x
    assert nodes == 2
    assert y.requires_grad
    names = [op_id.partition(":")[0] for op_id in ids.ids]
    assert names == ["/mul", "/add", "/exp", "/mul", "/mul", "/add"]
    # There Python looks at the tensors.
    assert not [name for name in mode.seen if "sum" in name]


@pytest.mark.parametrize("name", ["mode", "gate"])
def test_a_check_knows_what_an_operator_has_overwritten(name: str) -> None:
    """Inputs are checked as they were before an operator that writes into them, without gradients,
    too; an operator that returns its input as it is has produced nothing."""
    found: dict[str, list[bool]] = {}
    runs: dict[str, tuple[float, Callable[[torch.Tensor], Any], bool]] = {
        "log_": (-1.0, torch.Tensor.log_, True),
        "mul_": (math.nan, lambda x: x.mul_(2.0), False),
        "exp": (math.nan, torch.Tensor.exp, True),
        "contiguous": (math.nan, torch.Tensor.contiguous, False),
    }

    def analyse(context: amanda.OpContext) -> None:
        seen = found.setdefault(context.get_op().__name__, [])
        note = lambda inputs, outputs, was_finite: seen.append(was_finite)  # noqa: E731
        check = Check(lambda x: bool(x.isfinite().all()), note, overwrites=None)
        context.insert_before_op(check.before)
        context.insert_after_op(check.after)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    given = [[torch.tensor([value]) for value, _, _ in runs.values()] for _ in range(4)]
    with intercepted(name, tool), torch.no_grad():
        for tensors in given:
            for x, (_, run, _) in zip(tensors, runs.values(), strict=True):
                run(x)
            amanda.new_iteration()
    assert found == {kind: [expected] * 4 for kind, (_, _, expected) in runs.items()}


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_what_a_check_raises_reaches_the_program(error: type[Exception]) -> None:
    """An exception of the function that a check calls, forward and backward, leaves modes, gradient
    mode and the next executions as they are; a TypeError keeps its text where an operator such as
    `a / b` would hide it."""
    raised = []

    class Raising(Checks):
        def check(self, op_id: str) -> Check:
            def fail(*_: Any) -> None:
                raised.append(op_id)
                raise error(op_id)

            return Check(self.is_finite, fail, trail=self.trail, name=op_id)

    x = torch.zeros(2, requires_grad=True)
    with applied(Raising()):
        for _ in range(4):
            with pytest.raises((error, ToolTypeError), match="/div:0"):
                torch.ones(2) / torch.zeros(2)
            with pytest.raises(error, match="sqrt"):
                torch.sqrt(x).sum().backward()
            assert torch.is_grad_enabled()
            amanda.new_iteration()
    assert len(raised) == 8


def test_checks_in_threads() -> None:
    """Threads that run one model under checks find what is theirs, and no more."""
    model, tool, count = nn.Linear(2, 2), Checks(), 40
    found: list[list[bool]] = []

    def work(value: float) -> None:
        x = torch.full((1, 2), value)
        found.append([bool(torch.isfinite(model(x).sum())) for _ in range(count)])
        model(x).sum().backward()

    with applied(tool), torch.no_grad():
        in_threads(*[functools.partial(work, v) for v in (1.0, math.inf, 2.0)])
    assert sorted(map(any, found)) == [False, True, True]
    linear = [one for one in tool.errors if one[0].endswith("linear:0")]
    assert len(linear) == count + 1
