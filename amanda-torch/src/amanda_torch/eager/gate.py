"""The gate: operators that no tool wants run past the driver without Python.

It is the same :class:`~amanda_torch.eager.interceptors.Interceptor`, asked by C only where there is
something to ask; the C extension, of the distribution amanda-torch-accel, describes how. A driver
takes it where :func:`choose` says so::

    if choose():
        switch_on(patches)
        interceptor = gated_class()(dispatcher, labels)
"""

from __future__ import annotations

import array
import functools
import inspect
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from amanda import inline
from amanda.engine.backward import OpHandle
from amanda.engine.notes import note
from amanda.errors import CoverageWarning
from amanda.interface.action import Action
from amanda.interface.extensions import Extension, chosen
from amanda.python.patching import PatchSet
from amanda.python.references import Reference, nothing
from amanda.state import STATE, TOOL_LOCK, UNPAUSED
from amanda_torch import _internals
from amanda_torch.autograd.claims import Claimer
from amanda_torch.autograd.gradient_graphs import KnownGradients, KnownGraph
from amanda_torch.autograd.hooks import Accumulation, NodeHooks
from amanda_torch.autograd.nodes import KINDS
from amanda_torch.driver import LoadedDriver
from amanda_torch.eager.execution import KnownOp, unswallowed
from amanda_torch.eager.frames import Child, Frame
from amanda_torch.eager.interceptors import NO_OPERATOR, Interceptor, NoTools
from amanda_torch.eager.module_names import Labels
from amanda_torch.operators.calls import tensors_of
from amanda_torch.operators.dtypes import SUMMED
from amanda_torch.operators.layouts import Layout
from amanda_torch.operators.names import VIEW_PROPERTIES, Kind, kind_of, name_of
from amanda_torch.plugin import TorchEagerDriver
from amanda_torch.routines import (
    BackwardRoutines,
    RoutineDispatcher,
    as_routine,
    look,
    warn_of_change,
)

WITH_GATE = frozenset({"auto", "gate"})
"""The names of interceptors for which the gate is used, if it can be."""

EXTENSION = Extension("amanda-torch", "amanda_torch_accel", interface=17, newest_python=(3, 14))

_UNREPORTED = frozenset({"from_numpy"})
"""Builtins that look like operators, and report nothing to a mode."""

_REPORTED_FIRST = frozenset({"__eq__", "apply_", "new", "new_tensor", "type"})
"""Builtins that PyTorch reports before it looks at the arguments: what does not fit counts, too."""


# -- whether it is used -------------------------------------------------------


def name_asked() -> str:
    """The interceptor that the environment variable names; ``auto`` without one."""
    return chosen(TorchEagerDriver.interceptor_variable, TorchEagerDriver.interceptors)


def choose() -> bool:
    """Whether the gate notices operators, by the environment variable and by what works here."""
    name = name_asked()
    if name not in WITH_GATE:
        return False
    found = reason_unusable()
    if name == "gate" and found:
        warnings.warn(
            f"{TorchEagerDriver.interceptor_variable} is gate, which cannot be used ({found}): "
            "operators are noticed by a TorchFunctionMode, which costs more time and sees the same",
            CoverageWarning,
            stacklevel=2,
        )
    return not found


@functools.cache
def reason_unusable() -> str:
    """Why the gate cannot be used in this process; "" if it can. Made once."""
    for check in (refusal, _configure, _unwritable, _self_test):
        reason = check()
        if reason:
            return reason
    return ""


def refusal() -> str:
    """The reason not to load the gate, as far as it is known without a try; "" for none."""
    return EXTENSION.refusal(LoadedDriver.untested_version())


def extension() -> Any:
    """The C extension."""
    return EXTENSION.load()


def _configure() -> str:
    """Tell the extension of our classes and of PyTorch's builtins."""
    gate = extension()
    try:
        gate.configure(
            Interceptor,
            Frame,
            Child,
            KnownOp,
            NO_OPERATOR,
            _is_report_of,
            (*_internals.MODE_BUILTINS, torch.is_grad_enabled),
        )
        gate.configure_inlined(_inlined())
        natives = _internals.native_functions()
        if natives is not None:
            gate.configure_native(*natives)
        gate.configure_nodes(_internals.sample_nodes())
        tensors = _internals.native_tensors()
        if tensors is not None:
            gate.configure_tensors(*tensors)
        versions = _internals.native_versions()
        if versions is not None:
            gate.configure_versions(*versions)
        shapes = _internals.native_shapes()
        if shapes is not None:
            gate.configure_shapes(*shapes)
        _configure_hooks(gate)
        for builtin in operators():
            gate.add(builtin, builtin.__name__ in _REPORTED_FIRST)
        gate.add_mapping(_internals.TENSOR_BASE)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"PyTorch {torch.__version__} is unlike those that it was tested with: {error}"
    return ""


def _configure_hooks(gate: Any) -> None:
    """Have autograd call hooks without objects of gradients, if that is found out and works."""
    natives = _internals.native_hooks()
    if natives is None or not gate.configure_hooks(_internals.sample_nodes(), *natives):
        return
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.ones(3, requires_grad=True)
        square = leaf * 3.0 * leaf
        probe = gate.probe(square.grad_fn)
        square.sum().backward()
    called = probe.before, probe.after, probe.by_method
    if called != (1, 1, 0) or leaf.grad is None or leaf.grad.tolist() != [6.0, 6.0, 6.0]:
        gate.configure_hooks()


def _inlined() -> dict[str, Any]:
    """The classes and functions by which C recognizes and runs routines."""
    return {
        "counter": inline.Counter,
        "timer": inline.Timer,
        "log": inline.Log,
        "start": inline.Timer.start,
        "clock": time.perf_counter_ns,
        "native": threading.get_native_id,
        "look": look,
        "memory": inline.MemoryUse,
        "change": inline.MemoryChange,
        "ended": inline.MemoryChange.after,
        "as_routine": as_routine,
        "check": inline.Check,
        "before": inline.Check.before,
        "sums": inline.ShapeSum,
        "add_after": inline.ShapeSum.after,
        "tensors": (torch.Tensor, nn.Parameter),
        "sum": _internals.TENSOR_BASE.sum,
        "item": _internals.TENSOR_BASE.item,
        "dtype": _internals.TENSOR_BASE.dtype.__get__,
        "summed": SUMMED,
        "set_recording": _internals.set_grad_enabled,
        "plain": _internals.TRANSFORMERS,
        "graph": KnownGraph,
        "gradients": KnownGradients,
        "hooks": NodeHooks,
        "routines": BackwardRoutines,
        "tensor": torch.Tensor,
        "state": STATE,
        "sequence": _internals.sequence_number,
        "checks": _internals.RECORDERS,
        "handle": OpHandle,
        "kinds": KINDS,
        "function": _internals.FUNCTION_NODE,
        "node": _internals.current_node,
        "task": _internals.graph_task,
        "accumulation": Accumulation,
        "reference": Reference,
        "nothing": nothing,
        "resume": Claimer.resume,
        "layout": Layout,
        "action": Action,
        "version": _internals.VERSION,
        "tensors_of": tensors_of,
        "acquire": TOOL_LOCK.acquire,
        "release": TOOL_LOCK.release,
        "unpaused": UNPAUSED,
        "raised": _raised,
        "changed": _changed,
        "numbers": array.array("q", (1, 2, 3)),
    }


def _raised(error: BaseException, action: Action, name: str) -> BaseException:
    """The error to raise where a routine has failed before or after an operator."""
    note(error, action.routine, action.op_id)
    return unswallowed(error, name)


def _changed(action: Action) -> None:
    """Warn, where the program calls the operator, that a routine has changed a tensor in place."""
    warn_of_change(action, stacklevel=3)


def operators() -> Iterator[Any]:
    """PyTorch's builtins that are operators: methods, functions, and properties that are views."""
    for owner in _internals.BUILTIN_METHODS:
        # Not dir(): what is inherited belongs to others, to object for instance.
        for name, found in vars(owner).items():
            if isinstance(found, types.MethodDescriptorType) and _is_operator(name, found):
                yield found
    for owner in _internals.BUILTIN_FUNCTIONS:
        for name in vars(owner):
            found = getattr(owner, name)
            if isinstance(found, types.BuiltinFunctionType) and _is_operator(name, found):
                yield found
    for name in VIEW_PROPERTIES:
        yield vars(_internals.TENSOR_BASE)[name]


def _is_operator(name: str, builtin: Any) -> bool:
    if name in ("__new__", "__init_subclass__") or name in _UNREPORTED:
        return False
    return kind_of(builtin) is Kind.LEAF


def _is_report_of(name: str, func: Any) -> bool:
    """Whether PyTorch reports `func` for a builtin of this name.

    Arguments may be tensors that PyTorch asks for their values meanwhile, which it reports, too.
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
    ranges = [
        tuple(int(end, 16) for end in span.split("-")) for span, rights, _ in lines if "w" in rights
    ]
    places = sorted(address for _, _, address, _, _ in extension().sites())
    for start, end in sorted(ranges):
        places = [place for place in places if not start <= place < end]
    return "PyTorch's tables of functions cannot be written to" if places else ""


# -- on and off ---------------------------------------------------------------


class _Switch:
    """The gate as an attribute that a :class:`~amanda.driver.PatchSet` sets and puts back."""

    @property
    def is_on(self) -> bool:
        """Whether calls are noticed."""
        return bool(extension().is_installed())

    @is_on.setter
    def is_on(self, value: bool) -> None:
        if value:
            extension().install()
        else:
            extension().restore()


SWITCH = _Switch()


def switch_on(patches: PatchSet, dispatcher: RoutineDispatcher | None = None) -> None:
    """Notice the calls of PyTorch's builtins, of ``torch.ops``, and of what is muted.

    Args:
        dispatcher: the hooks that it has registered are run by the gate, too.
    """
    gate = extension()
    if dispatcher is not None:
        patches.wrap(torch.autograd.Function, _internals.REGISTER_HOOK, gate.hook_registrar)
        patches.set(dispatcher, "native", gate, create=True)
    for cls in _internals.OPERATOR_CLASSES:
        patches.wrap(cls, "__call__", gate.operator_call)
    for name, found in list(vars(torch.Tensor).items()):
        # They report themselves, so that a mode does not notice what they call (`print(x)`).
        if (
            isinstance(found, types.FunctionType)
            and kind_of(found) is Kind.IGNORED
            and _reports(found)
        ):
            patches.wrap(torch.Tensor, name, gate.reported)
    patches.set(SWITCH, "is_on", True)


def _reports(function: types.FunctionType) -> bool:
    """Whether a function in Python tells modes of its calls, as ``Tensor.__hash__`` does not: dict
    and set ask it once or twice for each parameter in ``zero_grad``."""
    names = inspect.unwrap(function).__code__.co_names
    return any("torch_function" in name for name in (*names, *function.__code__.co_names))


def module_call(vanilla: Callable[..., Any], wrapped: Callable[..., Any]) -> Any:
    """``nn.Module.__call__``: enters the frame of a module in C if it was called there before.

    Args:
        vanilla: PyTorch's own.
        wrapped: the driver's, for all other calls.
    """
    return extension().module_call(vanilla, wrapped)


@functools.cache
def gated_class() -> type[Interceptor]:
    """The class of interceptors whose events the extension awaits."""
    return type(
        "GatedInterceptor",
        (Interceptor,),
        {
            "__doc__": "An interceptor that is asked by the gate.",
            "__module__": __name__,
            "is_gated": True,
            "__torch_function__": extension().event(Interceptor.__torch_function__),
        },
    )


# -- the self-test ------------------------------------------------------------


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
        # Not linear() or softmax(), for which threads are started, which would be left behind.
        nn.functional.softplus,
        torch.ops.aten.relu.default,
        torch.ops.aten.relu,
        nn.functional.softsign,
        lambda x: x == "x",
        lambda x: (x.dim(), len(x), x.shape, float(x.sum()), str(x)),
    )


def _notices(cls: type[Interceptor]) -> list[list[str]]:
    """The operators that an interceptor sees of each form, at the first and second execution."""
    noticed: list[list[str]] = []
    for form in _forms():
        x = torch.ones(2, 2)
        interceptor = cls(NoTools(), Labels())  # type: ignore[arg-type]
        interceptor.stale = False
        # Where operators are asked for their phase, all calls are left to Python.
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
    """Whether the gate notices what a mode does, and leaves no trace."""
    gate = extension()
    expected = _notices(Interceptor)
    before = [row[:4] for row in gate.sites()]
    patches = PatchSet()
    try:
        switch_on(patches)
        found = _notices(gated_class())
    except Exception as error:
        return f"its self-test fails: {type(error).__name__}: {error}"
    finally:
        patches.undo()
    if [row[:4] for row in gate.sites()] != before:
        return "its self-test fails: PyTorch is not as it was"
    for want, got in zip(expected, found, strict=True):
        if want != got:
            return f"its self-test fails: it notices {got or 'nothing'} instead of {want}"
    return ""
