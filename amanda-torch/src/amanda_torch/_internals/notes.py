"""Notes of Dynamo while it captures: calls of modules, stacks, the loss."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch

COMPILER = "torch._dynamo"
COMPILER_MODULE = "torch._dynamo.eval_frame"
COMPILER_CALLBACK = "_callback_from_stance"
"""The function of `COMPILER_MODULE` that Dynamo asks, at each call of a compiled function, for the
compiler to use: None runs the function eagerly."""

COMPILER_MODES = "utils.set_torch_function_mode_stack"
"""The function in `COMPILER` by which captured code sets the function modes of its thread, where it
has entered or left one, to those that were on when it was captured, and the changes."""

COMPILER_CAPTURES = {"optimize": "guard_export_fn", "optimize_assert": "export"}
"""The functions of `COMPILER_MODULE` by which ``torch._dynamo.explain`` and ``export`` capture a
function, with the keyword that tells their calls from those of ``torch.compile``."""

COMPILER_MODULES = "torch._dynamo.variables.nn_module"
COMPILER_MODULE_CALL = "unpatched_nn_module_call"
"""The ``nn.Module.__call__`` in `COMPILER_MODULES` that Dynamo looks through, to ``forward``. It
captures the code of any other one."""

MADE_MODULE = "made"
"""Stands for the expression that leads to a module, if the captured code makes the module."""


class _Made:
    """The source of a module, from which Dynamo reads the expression that leads to it."""

    name = MADE_MODULE


@torch.fx.node.has_side_effect
def module_mark(call: int, is_exit: bool, tensors: Sequence[Any]) -> None:
    """Marks the places in a captured graph where a module is called, and where it returns.

    Args:
        call: the number of the call: the same at both places, and unique in the graph.
        tensors: the arguments of the module, or its results.
    """


class _Marks:
    """Has Dynamo write :func:`module_mark` into what it captures; to be used with Dynamo's lock.

    Attributes:
        is_on: whether marks are written.
        refused: the reason why the captured code cannot be marked; "" if it can.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.refused = ""
        self.calls: list[_MarkedCall] = []

    def note_stack(self, tx: Any, module: Any) -> None:
        """Dynamo has noted the call of a module for the nodes that follow."""
        call = self.calls[-1] if self.calls else None
        if self.is_on and call is not None and call.module is module and call.entry is None:
            call.begin(tx)


class _MarkedCall:
    """A call of a module that Dynamo captures.

    Attributes:
        module: the module.
        entry: the node of its mark; None before it is written.
    """

    def __init__(self, module: Any, given: Sequence[Any]) -> None:
        self.module = module
        self._given = given
        self.entry: Any = None

    def begin(self, tx: Any) -> None:
        """Write the mark of its entry; Dynamo's stack of modules holds the module already."""
        self.entry = self._write(tx, next(_MARK_NUMBERS), False, self._given)

    def end(self, tx: Any, result: Any) -> None:
        """Write the mark of its exit; the stack still holds the module."""
        stack = None if self.entry is None else self.entry.meta.get("nn_module_stack")
        if stack is None:
            MODULE_MARKS.refused = "Dynamo does not note the calls of a module"
            return
        node = self._write(tx, self.entry.args[0], True, [result])
        node.meta["nn_module_stack"] = dict(stack)

    def _write(self, tx: Any, number: int, is_exit: bool, values: Sequence[Any]) -> Any:
        proxies: list[Any] = []
        try:
            for value in values:
                proxies += _proxies_in(tx, value)
        except Exception as error:
            MODULE_MARKS.refused = (
                "Dynamo gives no information about an input or output of a module "
                f"({type(error).__name__})"
            )
        args = number, is_exit, proxies
        return tx.output.create_proxy("call_function", module_mark, args, {}).node


_MARK_NUMBERS = itertools.count()
MODULE_MARKS = _Marks()


def _proxies_in(tx: Any, value: Any) -> list[Any]:
    """The tensors in the arguments or results of a module that Dynamo captures.

    They are in the order of :func:`amanda_torch.operators.calls.tensors_in`.
    """
    value = value.realize() if hasattr(value, "realize") else value
    kind = value.python_type()
    if issubclass(kind, torch.Tensor):
        return [value.as_proxy()]
    items: Sequence[Any] = ()
    if issubclass(kind, (list, tuple)):
        items = value.unpack_var_sequence(tx)
    elif issubclass(kind, Mapping):
        items = value.call_method(tx, "values", [], {}).unpack_var_sequence(tx)
    elif dataclasses.is_dataclass(kind):
        # PyTorch 2.15 has the first method, 2.13 the second.
        get = getattr(value, "tp_getattro_impl", None) or value.var_getattr
        items = [get(tx, field.name) for field in dataclasses.fields(kind)]
    return [proxy for item in items for proxy in _proxies_in(tx, item)]


def _noting_calls(vanilla: Any) -> Any:
    """Dynamo's capture of a module's call, extended to modules that the captured code makes."""

    @functools.wraps(vanilla)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.source and not MODULE_MARKS.is_on:
            return vanilla(self, tx, args, kwargs)
        if not MODULE_MARKS.is_on:
            with _record_call(tx, self.value):
                return vanilla(self, tx, args, kwargs)
        call = _MarkedCall(self.value, [*args, *kwargs.values()])
        MODULE_MARKS.calls.append(call)
        try:
            result = vanilla(self, tx, args, kwargs)
        finally:
            MODULE_MARKS.calls.pop()
        call.end(tx, result)
        return result

    return call_function


def _noting_stacks(vanilla: Any) -> Any:
    """Dynamo's note of a module's call for the nodes within, with marks if these are on."""

    @contextmanager
    @functools.wraps(vanilla)
    def record_nn_module_stack(module_key: str, source: Any, tx: Any, mod: Any) -> Iterator[None]:
        with vanilla(module_key, source, tx, mod):
            MODULE_MARKS.note_stack(tx, mod)
            yield

    return record_nn_module_stack


def _noting_loss(vanilla: Any) -> Any:
    """Dynamo's capture of ``nn.CrossEntropyLoss(...)``, which it replaces by a function."""

    @functools.wraps(vanilla)
    def call_cross_entropy_loss(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        MODULE_MARKS.refused = "it makes a module"
        variable = vanilla(self, tx, args, kwargs)
        compute, loss = variable.fn, torch.nn.CrossEntropyLoss()

        def compute_within(*args: Any, **kwargs: Any) -> Any:
            with _record_call(tx.output.current_tx, loss):
                return compute(*args, **kwargs)

        variable.fn = compute_within
        return variable

    return call_cross_entropy_loss


def _record_call(tx: Any, module: torch.nn.Module) -> AbstractContextManager[Any]:
    record: Any = vars(sys.modules[COMPILER_MODULES])["record_nn_module_stack"]
    return cast(AbstractContextManager[Any], record(str(id(module)), _Made, tx, module))


COMPILER_NOTES: dict[str, dict[str, Callable[[Any], Any]]] = {
    COMPILER_MODULES: {
        "UnspecializedNNModuleVariable.call_function": _noting_calls,
        "record_nn_module_stack": _noting_stacks,
    },
    "torch._dynamo.variables.user_defined": {
        "UserDefinedClassVariable._call_cross_entropy_loss": _noting_loss
    },
}
"""The functions to wrap, where they exist, so that Dynamo notes all calls of modules.

By itself it leaves out the calls of modules to which no expression leads, such as
``nn.CrossEntropyLoss()`` in a forward (2.13)."""

FRAMES_UP = "_frames_up"
"""The parameter of a tracer that says how many Python frames are between it and the program."""

COMPILED_MODULE = "_orig_mod"
"""Where a module compiled with ``torch.compile`` keeps the module itself."""
COMPILED_MODULE_SETUP = "OptimizedModule._initialize"
"""The method that binds the call of the module that is compiled."""
