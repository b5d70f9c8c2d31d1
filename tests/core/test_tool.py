"""Tools, apply and the control scopes, as far as no op has to run; bad input."""

from __future__ import annotations

import collections
from typing import Any

import pytest

import amanda
from amanda.errors import AmandaError, SelectionError
from amanda.interface.action import InstPoint
from amanda.state import STATE
from amanda.testing import loopback as lb


def test_a_subclass_without_super_init() -> None:
    """A subclass that does not call super().__init__() works."""

    class Forgetful(amanda.Tool):
        def __init__(self) -> None:
            self.calls: list[str] = []
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            self.calls.append(context.get_op_id())

    tool = Forgetful()
    tool.depends_on(amanda.Tool())
    with amanda.apply(tool):
        lb.add(lb.tensor(1.0), 2.0)
    assert tool.calls == ["/add:0"]


def test_a_subclass_without_any_registration() -> None:
    """A tool without analyses and without a constructor does nothing."""

    class Idle(amanda.Tool):
        def __init__(self) -> None:
            pass

    with amanda.apply(Idle()):
        assert lb.add(lb.tensor(1.0), 2.0).tolist() == 3.0


@pytest.mark.parametrize(
    ("backward", "require_outputs", "point"),
    [
        (False, False, InstPoint.BEFORE_FORWARD_OP),
        (False, True, InstPoint.AFTER_FORWARD_OP),
        (True, False, InstPoint.BEFORE_BACKWARD_OP),
        (True, True, InstPoint.AFTER_BACKWARD_OP),
    ],
)
def test_registration(backward: bool, require_outputs: bool, point: InstPoint) -> None:
    """The two arguments of add_inst_for_op choose one of the four points."""
    tool = amanda.Tool()
    tool.add_inst_for_op(print, backward=backward, require_outputs=require_outputs)
    assert {p: tool.analyses(p) for p in InstPoint if tool.analyses(p)} == {point: (print,)}


def test_registration_inside_a_scope() -> None:
    """An analysis that is registered inside a scope runs for the ops met from then on."""
    calls: list[str] = []
    tool = amanda.Tool()
    with amanda.apply(tool):
        lb.add(lb.tensor(1.0), 2.0)
        tool.add_inst_for_op(lambda context: calls.append(context.get_op_id()))
        lb.mul(lb.tensor(1.0), 2.0)
    assert calls == ["/mul:0"]


def test_analysis_that_cannot_be_called() -> None:
    """add_inst_for_op of something that cannot be called is a TypeError."""
    with pytest.raises(TypeError, match=r"Tool\.add_inst_for_op\(\) needs a function, got 3"):
        amanda.Tool().add_inst_for_op(3)  # type: ignore[arg-type]


async def _coroutine(context: Any) -> None: ...


def _generator(context: Any) -> Any:
    yield


async def _async_generator(context: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("routine", "reason"),
    [(_coroutine, "not async"), (_generator, "without yield"), (_async_generator, "not async")],
)
@pytest.mark.parametrize("register", ["add_inst_for_op", "add_inst_for_module"])
def test_a_routine_whose_code_a_call_does_not_run(routine: Any, reason: str, register: str) -> None:
    """Coroutine and generator functions, which would do nothing silently, are a TypeError."""
    tool = amanda.Tool()
    with pytest.raises(TypeError, match=f"needs a function .*{reason}.*got <function"):
        getattr(tool, register)(routine)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: amanda.inline.Check(3, print), "a function as is_finite"),  # type: ignore[arg-type]
        (lambda: amanda.inline.Check(bool, None), "a function as found"),  # type: ignore[arg-type]
        (lambda: amanda.inline.ShapeSum("flops"), "a function as weigh"),  # type: ignore[arg-type]
        (lambda: amanda.inline.ShapeSum(len, 0), "a Counter or None as total"),  # type: ignore[arg-type]
        (lambda: amanda.inline.ShapeSum(len, of=len), "a ShapeSum or None as of"),  # type: ignore[arg-type]
        (lambda: amanda.inline.Timer([]), "a Log or None as log"),  # type: ignore[arg-type]
    ],
)
def test_an_inline_routine_of_something_else(make: Any, argument: str) -> None:
    """It is a TypeError where it is made, and not at an operator."""
    with pytest.raises(TypeError, match=rf"\(\) needs {argument}, got "):
        make()


@pytest.mark.parametrize("item", [None, 1.5, (1,)])
@pytest.mark.parametrize("method", ["get_value", "get_variable"])
def test_a_position_that_is_none(method: str, item: Any) -> None:
    """An input that is asked for by no position is a SelectionError that names the operator."""
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: getattr(context, method)(item))
    with amanda.apply(tool), pytest.raises(SelectionError, match=r"inputs=\[.*\] at op /add:0"):
        lb.add(lb.tensor(1.0), 2.0)


@pytest.mark.parametrize("thing", [3, "flops", None, print])
def test_apply_of_no_tool(thing: Any) -> None:
    """apply of something that is not a tool is a TypeError saying so."""
    with pytest.raises(TypeError, match=r"amanda\.apply\(\) needs amanda\.Tool instances, got"):
        amanda.apply(thing)


def test_a_class_in_place_of_a_tool() -> None:
    """apply and depends_on of a class are a TypeError that names it, or shows the instance."""

    class Mine(amanda.Tool):
        pass

    with pytest.raises(TypeError, match=r"got the class Mine; pass an instance: Mine\(\)"):
        amanda.apply(Mine)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Mine\.depends_on\(\) got the class Mine"):
        Mine().depends_on(Mine)  # type: ignore[arg-type]


def test_drivers_as_a_string() -> None:
    """drivers= of one string is a TypeError that shows the list."""
    with pytest.raises(TypeError, match=r"\['loopback'\]"):
        amanda.apply(amanda.Tool(), drivers="loopback")


def test_apply_of_nothing() -> None:
    """apply without tools does nothing."""
    with amanda.apply() as scope:
        assert lb.add(lb.tensor(1.0), 2.0).tolist() == 3.0
    assert scope.statistics.ops_instrumented == 0


@pytest.mark.parametrize(
    ("enter", "leave", "switch", "inside", "outside"),
    [
        (amanda.disabled, amanda.enabled, "enabled", False, True),
        (amanda.cache_disabled, amanda.cache_enabled, "cache", False, True),
        (amanda.ad_enabled, amanda.ad_disabled, "ad", True, False),
    ],
)
def test_control_scopes(enter: Any, leave: Any, switch: str, inside: bool, outside: bool) -> None:
    """The control scopes nest, and restore what was before, one within the other."""
    before = getattr(STATE, switch)
    with enter():
        assert getattr(STATE, switch) is inside
        with leave():
            assert getattr(STATE, switch) is outside
            with enter():
                assert getattr(STATE, switch) is inside
        assert getattr(STATE, switch) is inside
    assert getattr(STATE, switch) is before


@pytest.mark.parametrize("scope", [amanda.disabled, amanda.cache_disabled, amanda.ad_enabled])
def test_control_scopes_end_with_an_exception(scope: Any) -> None:
    """A control scope that an exception leaves is over."""
    state = STATE
    before = state.enabled, state.cache, state.ad
    with pytest.raises(KeyError), scope():
        raise KeyError
    assert (state.enabled, state.cache, state.ad) == before


def test_traceable_marks() -> None:
    """traceable marks a routine and gives it back."""

    def routine() -> None:
        """Do nothing."""

    assert amanda.traceable(routine) is routine
    assert routine.amanda_traceable is True  # type: ignore[attr-defined]


@pytest.mark.parametrize("mark", [amanda.traceable, amanda.deferrable])
@pytest.mark.parametrize("func", [len, [].count, collections.Counter().update])
def test_routines_that_take_no_mark(mark: Any, func: Any) -> None:
    """Builtin functions and bound methods are called by a function that is marked."""
    routine = mark(func)
    assert getattr(routine, f"amanda_{mark.__name__}") is True
    assert routine.__name__ == func.__name__
    assert routine("1") == func("1")


def test_new_iteration_without_scope() -> None:
    """new_iteration outside of any scope does nothing."""
    amanda.new_iteration()


def test_every_error_is_an_amanda_error() -> None:
    """Each error of the module errors can be caught as AmandaError or is a warning."""
    from amanda import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert classes
    assert all(issubclass(c, AmandaError | errors.AmandaWarning) for c in classes)


def test_selection_error_is_an_index_error() -> None:
    """A selection out of range can be caught as IndexError, an unknown name as LookupError."""
    from amanda.errors import SelectionError, UnknownNameError

    assert issubclass(SelectionError, IndexError)
    assert issubclass(UnknownNameError, LookupError)
