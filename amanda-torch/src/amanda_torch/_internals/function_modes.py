"""Modes of ``__torch_function__``, and the classes of tensors that override it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from amanda.python.nested import leaves
from amanda.state import STATE, Undo, unwind
from amanda_torch._internals.symbols import symbol

# The public interface pushes a mode by a with-statement only, and a scope begins and ends in
# different functions.
push_mode: Callable[[Any], None] = symbol("torch._C._push_on_torch_function_stack")
pop_mode: Callable[[], Any] = symbol("torch._C._pop_torch_function_stack")
mode_depth: Callable[[], int] = symbol("torch._C._len_torch_function_stack")
mode_at: Callable[[int], Any] = symbol("torch._C._get_function_stack_at")

call_composite = symbol("torch._C._skip_one_hop_torch_function")
"""The C function behind ``torch.overrides.redispatch_function``: a Python frame less per call."""

PYTHON_EVENT = torch.overrides.handle_torch_function.__code__
"""The code that reports a Python-level function to a mode; C-level ones come straight from C."""

caller_frame: Callable[[int], Any] = sys._getframe
"""The frame that many levels above the caller. Only the frame shows whether an event comes from
:data:`PYTHON_EVENT` or from C: ``func`` can be the same in both."""


MODE_BUILTINS = (
    push_mode,
    pop_mode,
    mode_depth,
    mode_at,
    symbol("torch._C.DisableTorchFunction.__enter__"),
    symbol("torch._C.DisableTorchFunction.__exit__"),
    torch.device.__enter__,
    torch.device.__exit__,
)
"""All functions by which Python reads and changes a thread's stack of modes."""


def modes() -> Sequence[Any]:
    """The function modes of the current thread, outermost first."""
    depth = mode_depth()
    return [mode_at(index) for index in range(depth)] if depth else ()


def hide_modes() -> None:
    """Take all function modes off the current thread."""
    while mode_depth():
        pop_mode()


def show_modes(hidden: Sequence[Any]) -> None:
    """Put hidden modes back."""
    for mode in hidden:
        push_mode(mode)


def set_modes(wanted: Sequence[Any]) -> None:
    """Replace the function modes of the current thread by these."""
    hide_modes()
    show_modes(wanted)


def restore_modes(hidden: Sequence[Any]) -> None:
    """Put hidden modes back above those that have been switched on meanwhile, as by
    ``torch.set_default_device()``; it may run twice."""
    if mode_depth():
        others = [mode for mode in modes() if not any(mode is one for one in hidden)]
        set_modes((*others, *hidden))
        return
    for mode in hidden:
        push_mode(mode)


def leave_modes(undo: list[Undo]) -> None:
    """Take all function modes off the current thread; unwinding `undo` puts them back."""
    # modes() and hide_modes() written out: this runs at each routine of backward operators.
    undo.append((restore_modes, (tuple(map(mode_at, range(mode_depth()))),)))
    while mode_depth():
        pop_mode()


def without_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with no function mode on."""
    if not mode_depth():
        return function(*args)
    undo = STATE.undo
    mark = len(undo)
    try:
        leave_modes(undo)
        return function(*args)
    finally:
        unwind(undo, mark)


_without_overrides = symbol("torch._C.DisableTorchFunctionSubclass")
no_overrides: Callable[[], AbstractContextManager[Any]] = _without_overrides
"""No ``__torch_function__`` of a tensor's class is called within it. It costs a tenth of a
microsecond, and may be entered once."""

_with_overrides = symbol("torch._C._EnableTorchFunction")
_overrides_are_on = symbol("torch._C._is_torch_function_enabled")
_inherited = symbol("torch._C._disabled_torch_function_impl")

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""The classes of tensors that override no operator."""

PLAIN = PLAIN_TENSORS | {type(None), bool, int, float, str}
"""Types of arguments and results that neither override operators nor contain an object that
does."""


def overrides(value: Any) -> bool:
    """True if a value is, or holds, a tensor with a ``__torch_function__`` of its class's own."""
    cls = type(value)
    if cls in PLAIN_TENSORS:
        return False
    if isinstance(value, torch.Tensor):
        return cls.__torch_function__ is not _inherited
    if not isinstance(value, (list, tuple)) or PLAIN.issuperset(map(type, value)):
        return False
    # Containers, and values that override.
    return any(
        isinstance(leaf, torch.Tensor) and overrides(leaf) for leaf in leaves(value, _sequence)
    )


def _sequence(value: Any) -> Iterable[Any] | None:
    return value if isinstance(value, (list, tuple)) else None


def refuses_reads(value: Any) -> bool:
    """True if a tensor's class raises for nearly every function, reads included.

    ``ExpandedWeight`` is of this kind (2.13); PyTorch imports it for gradients per sample only.
    """
    return type(value).__module__.startswith("torch.nn.utils._expanded_weights.")


def refuse_identity(values: Iterable[Any]) -> bool:
    """True if no ``autograd.Function`` of the driver's may stand before some of these tensors.

    A class that overrides operators would not find its tensor behind the function. For nested
    tensors of the strided layout PyTorch raises in every ``autograd.Function`` (2.13).
    """
    for value in values:
        if type(value) in PLAIN_TENSORS:
            if value.is_nested and value.layout is torch.strided:
                return True
        elif value is not None and (overrides(value) or is_strided_nested(value)):
            return True
    return False


def is_strided_nested(value: Any) -> bool:
    """True if a value is a nested tensor of the older of the two layouts."""
    return isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided


class _Reading(threading.local):
    is_on = False
    is_refused = False


READING = _Reading()
"""``is_on`` says whether the current thread is within :class:`reading`."""


class reading:  # noqa: N801 - reads as a statement
    """Within it, the driver's reads of tensors reach no ``__torch_function__`` of a class.

    Args:
        values: the tensors; if none of them overrides, nothing is done.
    """

    __slots__ = ("_guard", "_is_refused", "_mark")

    def __init__(self, values: Sequence[Any]) -> None:
        overriding: list[Any] = []
        if not PLAIN.issuperset(map(type, values)):
            overriding = list(filter(overrides, values))
        is_needed = bool(overriding) and _overrides_are_on()
        self._guard = _without_overrides() if is_needed else None
        self._is_refused = is_needed and any(map(refuses_reads, overriding))

    def __enter__(self) -> None:
        if self._guard is not None:
            undo = STATE.undo
            self._mark = len(undo)
            undo.append((self._leave, (self._guard,)))
            self._guard.__enter__()
            READING.is_on = True
            READING.is_refused = self._is_refused

    def __exit__(self, *_: object) -> None:
        if self._guard is not None:
            unwind(STATE.undo, self._mark)

    @staticmethod
    def _leave(guard: AbstractContextManager[Any]) -> None:
        READING.is_on = READING.is_refused = False
        guard.__exit__(None, None, None)


class running:  # noqa: N801 - reads as a statement
    """Within it, code of the program, or of a tool that acts, runs; it undoes :class:`reading`."""

    __slots__ = ("_guard", "_mark")

    def __enter__(self) -> None:
        self._guard = _with_overrides() if READING.is_on else None
        if self._guard is not None:
            undo = STATE.undo
            self._mark = len(undo)
            undo.append((self._leave, (self._guard,)))
            self._guard.__enter__()
            READING.is_on = False

    def __exit__(self, *_: object) -> None:
        if self._guard is not None:
            unwind(STATE.undo, self._mark)

    @staticmethod
    def _leave(guard: AbstractContextManager[Any]) -> None:
        guard.__exit__(None, None, None)
        READING.is_on = True
