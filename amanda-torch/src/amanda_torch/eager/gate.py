"""The gate: operators without actions run without Python code of the driver.

It is the same :class:`~amanda_torch.eager.interceptors.Interceptor`; the extension calls it only
for other operators, as trampolines.cc of amanda-torch-accel describes. A driver uses the gate if
:func:`choose` returns True::

    if choose():
        switch_on(patches)
        interceptor = gated_class()(dispatcher, labels)
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amanda.engine.notes import note
from amanda.inline.steps import are_paired
from amanda.interface.action import Action
from amanda.interface.settings import chosen
from amanda.python.patching import PatchSet
from amanda.state import STATE, TOOL_LOCK, UNPAUSED, deliver
from amanda_torch import _internals, accel
from amanda_torch.autograd.nodes import OWN_NODES
from amanda_torch.eager.execution import unswallowed
from amanda_torch.eager.interceptors import LOCAL, Interceptor
from amanda_torch.eager.module_names import Labels
from amanda_torch.operators.calls import tensors_of
from amanda_torch.operators.names import IGNORED, VIEW_PROPERTIES, Kind, kind_of, name_of
from amanda_torch.plugin import TorchEagerDriver
from amanda_torch.routines import RoutineDispatcher, as_routine, warn_of_change

WITH_GATE = frozenset({"auto", "gate"})
"""The names of interceptors for which the gate is used, if it can be."""

_UNREPORTED = frozenset({"__new__", "__init_subclass__", "from_numpy"})
"""Builtins that look like operators, and report nothing to a mode."""


# -- whether it is used -------------------------------------------------------


def name_asked() -> str:
    """The interceptor that the environment variable names; ``auto`` without one."""
    return chosen(TorchEagerDriver.interceptor_variable, TorchEagerDriver.interceptors)


def choose() -> bool:
    """True if the gate notices operators, by the environment variable and by what works here."""
    name = name_asked()
    if name not in WITH_GATE:
        return False
    found = reason_unusable()
    if name == "gate" and found:
        _internals.warn_program(
            f"{TorchEagerDriver.interceptor_variable} is gate, which cannot be used ({found}): "
            "operators are noticed by a TorchFunctionMode, which costs more time and sees the same"
        )
    return not found


@functools.cache
def reason_unusable() -> str:
    """The reason why the gate cannot be used in this process; "" if it can. Computed once."""
    for check in (accel.refusal, _configure, _unwritable, _self_test):
        reason = check()
        if reason:
            return reason
    return ""


def _configure() -> str:
    """Pass our classes and PyTorch's builtins to the extension; return why it refuses them, or
    ""."""
    gate = accel.load()
    try:
        gate.configure(_objects(), _internals.MODE_BUILTINS)
        for builtin in operators():
            gate.add(builtin)
        gate.add_mapping(_internals.TENSOR_BASE)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"PyTorch {torch.__version__} is unlike those that it was tested with: {error}"
    return ""


def _objects() -> dict[str, Any]:
    """Objects of amanda and of this package that the extension uses, by name."""
    return {
        "state": STATE,
        "acquire": TOOL_LOCK.acquire,
        "release": TOOL_LOCK.release,
        "unpaused": UNPAUSED,
        "are_paired": are_paired,
        "as_routine": as_routine,
        "raised": _raised,
        "changed": _changed,
        "tensors_of": tensors_of,
        "compiling": _internals.compiling_asked,
        "deliver": deliver,
        "forward_level": _internals.FORWARD_LEVEL,
        "function": _internals.FUNCTION_OBJECT,
        "is_report_of": _is_report_of,
        "mode": Interceptor,
        "own_nodes": OWN_NODES,
        "tensor": torch.Tensor,
        "parameter": nn.Parameter,
    }


def _raised(error: BaseException, action: Action, name: str) -> BaseException:
    """The error to raise after a routine before or after an operator has failed."""
    note(error, action.routine, action.op_id)
    return unswallowed(error, name)


def _changed(action: Action) -> None:
    """Warn, where the program calls the operator, that a routine has changed a tensor in place."""
    warn_of_change(action, stacklevel=3)


def operators() -> Sequence[Any]:
    """PyTorch's builtins that are operators: methods, functions, and properties that are views."""
    # Not dir(): inherited methods belong to other classes, such as object.
    methods = [one for owner in _internals.BUILTIN_METHODS for one in vars(owner).values()]
    functions = [getattr(o, name) for o in _internals.BUILTIN_FUNCTIONS for name in vars(o)]
    left_out, prefixes = IGNORED | _UNREPORTED, ("_record_function", "sym_")
    found = []
    for builtins, cls in (
        (methods, types.MethodDescriptorType),
        (functions, types.BuiltinFunctionType),
    ):
        for builtin in builtins:
            # kind_of(), without a function: there are some thousands.
            if isinstance(builtin, cls):
                name = builtin.__name__
                if name not in left_out and not name.startswith(prefixes):
                    found.append(builtin)
    return [*found, *map(vars(_internals.TENSOR_BASE).__getitem__, VIEW_PROPERTIES)]


def _is_report_of(name: str, func: Any) -> bool:
    """True if PyTorch reports `func` for a builtin of this name.

    PyTorch may report further functions meanwhile, by which it reads the values of arguments.
    """
    if kind_of(func) is not Kind.LEAF:
        return False
    # `a + b` is reported as ``add``, `b + a` of a number as well, `a // b` as ``floor_divide``.
    return name_of(func) == name or (name.startswith("__") and name != "__getitem__")


def _unwritable() -> str:
    """The reason why the memory to be patched cannot be written to; "" if it can."""
    try:
        with open("/proc/self/maps") as file:
            lines = [line.split(maxsplit=2) for line in file]
    except OSError as error:
        return f"the process's memory map cannot be read: {error}"
    ranges = []
    for span, rights, _ in lines:
        if "w" in rights:
            start, _, end = span.partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    places = sorted([address for _, address, _ in accel.load().places()])
    for first, last in sorted(ranges):
        places = [place for place in places if not first <= place < last]
    return "PyTorch's tables of functions cannot be written to" if places else ""


# -- on and off ---------------------------------------------------------------


class _Switch:
    """The gate as an attribute that a :class:`~amanda.driver.PatchSet` sets and puts back."""

    @property
    def is_on(self) -> bool:
        """True if calls are intercepted."""
        return bool(accel.load().is_installed())

    @is_on.setter
    def is_on(self, value: bool) -> None:
        if value:
            accel.load().install()
        else:
            accel.load().restore()
            # It would keep the tools alive.
            accel.load().forget()


SWITCH = _Switch()


def switch_on(patches: PatchSet, dispatcher: RoutineDispatcher | None = None) -> None:
    """Intercept the calls of PyTorch's builtins, of ``torch.ops``, and of functions that mute
    others.

    Args:
        dispatcher: the dispatcher for which the extension claims backward operators; None for none.
    """
    gate = accel.load()
    if dispatcher is not None:
        patches.set(dispatcher, "native", gate, create=True)
    for cls in _internals.OPERATOR_CLASSES:
        patches.wrap(cls, "__call__", _reported)
    for name, found in list(vars(torch.Tensor).items()):
        # They report themselves, so that a mode does not see the operators that they call
        # (`print(x)`).
        if (
            isinstance(found, types.FunctionType)
            and kind_of(found) is Kind.IGNORED
            and _reports(found)
        ):
            patches.wrap(torch.Tensor, name, _reported)
    if _internals.COLLECTIVES is not None:
        patches.wrap(_internals.COLLECTIVES, "has_torch_function", _listening)
        patches.wrap(_internals.COLLECTIVES, "handle_torch_function", _reported)
    patches.set(SWITCH, "is_on", True)


def _reported(vanilla: Callable[..., Any]) -> Any:
    """Wrap a function in Python that reports itself to modes, so that it always reports itself to
    ours."""
    ask = accel.load().ask

    @functools.wraps(vanilla)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ask(vanilla, args, kwargs)

    found: Callable[..., Any] = _internals.not_counted_by_warnings(call)
    return found


def _listening(vanilla: Callable[..., Any]) -> Any:
    """Wrap the check by which collectives choose to report themselves."""

    def has_torch_function(*given: Any, **wrong: Any) -> bool:
        found, interceptor = vanilla(*given, **wrong), LOCAL.interceptor
        return found or (interceptor is not None and interceptor.is_listening())

    return has_torch_function


def _reports(function: types.FunctionType) -> bool:
    """True if a function in Python reports its calls to modes.

    ``Tensor.__hash__`` does not: dict and set call it once or twice for each parameter in
    ``zero_grad``.
    """
    names = inspect.unwrap(function).__code__.co_names
    return any("torch_function" in name for name in (*names, *function.__code__.co_names))


@functools.cache
def gated_class() -> type[Interceptor]:
    """The class of interceptors that the gate calls."""

    class GatedInterceptor(Interceptor):
        """An interceptor that the gate calls."""

        note_report = accel.load().note_report

    return GatedInterceptor


# -- the self-test ------------------------------------------------------------


class _NoTools(RoutineDispatcher):
    """A dispatcher without scopes: every operator has an empty plan."""

    def is_cacheable(self) -> bool:
        """True, whatever the scope to be opened has switched off."""
        return True


def _forms() -> Sequence[Callable[[torch.Tensor], Any]]:
    """One call of each kind of builtin."""
    add, exp = torch.add, torch.ones(()).exp
    return (
        lambda x: torch.add(x, x),
        lambda x: add(input=x, other=x),
        lambda x: x + 1.0,
        lambda x: 1.0 - x,
        lambda x: x.abs(),
        lambda x: exp(),
        lambda x: x[0],
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x.T,
        # Not linear() or softmax(), which start threads that would be left behind.
        nn.functional.softplus,
        torch.ops.aten.relu.default,
        torch.ops.aten.relu,
        nn.functional.softsign,
        lambda x: x == "x",
        lambda x: (x.dim(), len(x), x.shape, float(x.sum()), str(x)),
    )


def _notices(cls: type[Interceptor]) -> list[list[str]]:
    """The operators that an interceptor sees of each form, in the first and second execution."""
    noticed: list[list[str]] = []
    for form in _forms():
        x = torch.ones(2, 2)
        interceptor = cls(_NoTools(), Labels())
        interceptor.stale = False
        # While phases are determined, all calls are left to Python.
        interceptor.root.check(False)
        for _ in range(2):
            interceptor.enter()
            try:
                form(x)
            finally:
                interceptor.exit()
            names = interceptor.root.names
            noticed.append([f"{name} {cell[0]}" for name, cell in sorted(names.items())])
            # C counts the second execution, as no tool acts.
            interceptor.root.restart()
    return noticed


def _self_test() -> str:
    """Check that the gate sees the same operators as a mode, and leaves no trace; return the reason
    if not, else ""."""
    gate = accel.load()
    expected = _notices(Interceptor)
    before = gate.places()
    patches = PatchSet()
    try:
        switch_on(patches)
        found = _notices(gated_class())
    except Exception as error:
        return f"its self-test fails: {type(error).__name__}: {error}"
    finally:
        patches.undo()
    if gate.places() != before:
        return "its self-test fails: PyTorch is not as it was"
    for want, got in zip(expected, found, strict=True):
        if want != got:
            return f"its self-test fails: it notices {got or 'nothing'} instead of {want}"
    return ""
