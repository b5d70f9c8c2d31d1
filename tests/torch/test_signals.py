"""Handlers of signals and finalizers of the program while code of tools runs."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.state import STATE
from tests.torch.support import Counter, On, applied

NET = nn.Linear(3, 1)


def step() -> torch.Tensor:
    """A training step of the program's."""
    assert not STATE.paused
    (gradient,) = torch.autograd.grad(NET(torch.ones(2, 3)).sum(), NET.weight)
    return gradient


@pytest.fixture
def handled() -> Iterator[list[Any]]:
    """The gradients of steps that a handler of SIGALRM makes."""
    gradients: list[Any] = []

    def handle(number: int, frame: Any) -> None:
        assert frame is not None
        gradients.append(step())

    outer = signal.signal(signal.SIGALRM, handle)
    try:
        yield gradients
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer)


def _wait() -> None:
    """Run for a while in Python, in the course of which a signal comes."""
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass


def _in_analysis(context: amanda.OpContext) -> None:
    _wait()


def _in_routine(context: amanda.OpContext) -> None:
    context.insert_before_op(lambda *inputs: _wait())


def _in_backward_routine(context: amanda.OpContext) -> None:
    context.insert_after_backward_op(lambda *gradients: _wait())


@pytest.mark.parametrize("place", [_in_analysis, _in_routine, _in_backward_routine])
@pytest.mark.parametrize("modes", [0, 1])
def test_a_training_step_in_a_handler(
    place: Callable[[amanda.OpContext], None], modes: int, handled: list[Any]
) -> None:
    """A handler that interrupts code of a tool runs after it, with the program's own gradient mode,
    and tools see its operators."""
    x = torch.ones(2, 3, requires_grad=True)
    counter = Counter()
    with applied(counter, On(sin=place)):
        for _ in range(2):
            with torch.overrides.BaseTorchFunctionMode() if modes else torch.enable_grad():
                x.sin().sum().backward()
    assert handled
    assert all(torch.equal(gradient, torch.full((1, 3), 2.0)) for gradient in handled)
    assert counter.ops["linear"] == len(handled)


def test_a_handler_that_raises_in_code_of_a_tool(handled: list[Any]) -> None:
    """Its exception ends the program's code, and leaves nothing of the tool's behind."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    x = torch.ones(2, requires_grad=True)
    with applied(On(sin=_in_routine)):
        signal.signal(signal.SIGALRM, stop)
        assert signal.getsignal(signal.SIGALRM) is stop
        with pytest.raises(TimeoutError):
            x.sin()
        assert torch.is_grad_enabled()
        assert (STATE.paused, STATE.undo) == (0, [])
    assert signal.getsignal(signal.SIGALRM) is stop


def test_handlers_outside_of_code_of_tools_run_at_once(handled: list[Any]) -> None:
    """The program sets and finds its own handlers within a scope."""
    before = signal.getsignal(signal.SIGALRM)
    with applied(amanda.Tool()):
        assert signal.getsignal(signal.SIGALRM) is before
        signal.raise_signal(signal.SIGALRM)
        assert len(handled) == 1
        assert signal.signal(signal.SIGALRM, signal.SIG_IGN) is before
        signal.raise_signal(signal.SIGALRM)
        thread = threading.Thread(target=signal.getsignal, args=(signal.SIGALRM,))
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    assert len(handled) == 1


class Garbage:
    """A part of a cycle that the program has dropped."""

    gradients: list[Any] = []  # noqa: RUF012 - shared on purpose

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.gradients.append(step())


def test_a_training_step_in_a_finalizer_of_garbage() -> None:
    """A collection that an analysis would cause comes after it; the collector is as before."""

    def look(context: amanda.OpContext) -> None:
        Garbage()
        assert len([[number] for number in range(5000)]) == 5000
        assert not Garbage.gradients

    threshold = gc.get_threshold()
    gc.set_threshold(100)
    Garbage.gradients.clear()
    try:
        with applied(On(sin=look)):
            torch.ones(2, requires_grad=True).sin()
            assert gc.isenabled()
        assert len([[number] for number in range(5000)]) == 5000
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert [gradient.tolist() for gradient in Garbage.gradients] == [[[2.0] * 3]]
