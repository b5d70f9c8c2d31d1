"""Interrupts as a context of ours begins: nothing leaves it then but itself."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import pytest
import torch
from torch._dynamo import decorators
from torch._dynamo.variables import torch as variables
from torch._subclasses import fake_tensor

import amanda
from amanda.state import STATE, unwind
from amanda.testing import interrupts
from amanda_torch import _internals
from amanda_torch.plugin import TorchEagerDriver
from amanda_torch.routines import RoutineDispatcher
from tests.torch.support import ForwardCounter, applied


class Overriding(torch.Tensor):
    """A tensor that has a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__torch_function__(*args, **kwargs)


def _reading() -> AbstractContextManager[None]:
    return _internals.reading([torch.ones(1).as_subclass(Overriding)])


def _isolated() -> AbstractContextManager[Any]:
    return TorchEagerDriver.loaded()(RoutineDispatcher()).ad_isolated()


def _state() -> tuple[Any, ...]:
    """What the contexts change."""
    overriding = [torch.ones(1).as_subclass(Overriding)]
    return (
        torch.is_grad_enabled(),
        # Whether the class is asked.
        type(torch.relu(*overriding)),
        _internals.READING.is_on,
        logging.getLogger("torch._subclasses.fake_tensor").level,
        variables.tracing_state_functions,
        id(fake_tensor.FakeTensorMode.cache),
        decorators.mark_static_address,
        torch.cuda.get_rng_state,
        torch.xpu.set_rng_state,
    )


@pytest.mark.parametrize("make", [_reading, _isolated])
def test_an_interrupt_as_a_context_begins_leaves_nothing_changed(
    make: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Also where the call that changes something has returned: the end of the scope undoes it."""
    entered: list[AbstractContextManager[Any]] = []

    def enter() -> None:
        context = make()
        context.__enter__()
        entered.append(context)

    def is_entry(code: CodeType) -> bool:
        return "amanda_torch" in code.co_filename and code.co_name == "__enter__"

    before = _state()
    found = interrupts.points(enter, is_entry)
    assert _state() != before
    entered.pop().__exit__(None, None, None)
    assert _state() == before
    assert len(found) >= 3
    for point in found:
        assert interrupts.run(enter, is_entry, point)
        unwind(STATE.undo, 0)
        assert (str(point), _state()) == (str(point), before)


def test_an_interrupt_as_a_capture_begins_leaves_the_compiler_vanilla() -> None:
    """What a capture of compiled code changes in Dynamo is put back."""

    def capture() -> None:
        # Dynamo itself is not given a frame.
        with contextlib.suppress(TypeError):
            _internals.frame_converter(print)()

    def is_ours(code: CodeType) -> bool:
        return code.co_filename.endswith("_internals/compiler.py")

    capture()
    before, found = _state(), interrupts.points(capture, is_ours)
    begin = [*itertools.takewhile(lambda point: "_marked+" not in point.place[2], found)]
    assert 10 < len(begin) < len(found)
    # Further executions of a line may be of its end.
    for point in [point for point in begin if not point.runs]:
        assert interrupts.run(capture, is_ours, point)
        assert (str(point), _state()) == (str(point), before)


def test_an_interrupt_as_the_driver_is_attached_leaves_no_finder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for Keras, and for parts of PyTorch, waits no longer."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "keras"]:
        monkeypatch.delitem(sys.modules, name)
    names = "eager/keras_calls.py", "eager/tracers.py", "registry/import_hook.py"

    def program() -> None:
        with applied(ForwardCounter()):
            pass

    def is_waiting(code: CodeType) -> bool:
        return code.co_filename.endswith(names)

    program()
    finders, found = list(sys.meta_path), interrupts.points(program, is_waiting)
    waiting = [point for point in found if "import_hook" in point.place[0]]
    assert len(waiting) > 5
    for point in waiting:
        assert interrupts.run(program, is_waiting, point)
        assert (str(point), sys.meta_path) == (str(point), finders)
    assert amanda.state.ATTACHED == {}
    assert _internals.mode_depth() == 0
