"""Has Dynamo capture compiled functions, whose graphs run under scopes.

A function made by ``torch.compile`` asks Dynamo for the callback that compiles the frames below::

    compiled = torch.compile(f)             # callback of the program: f becomes code of inductor
    with amanda.apply(tool):
        compiled(x)                         # callback_for(...): f becomes a CapturedGraph

:func:`callback_for` makes a callback that leaves the function's own compiled code untouched: Dynamo
keeps the code of each compiler. Captured graphs belong to the function, and further scopes use them
again.
"""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.weak
from torch import fx, nn

from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.compiled.captured import CapturedGraph
from amanda_torch.compiled.code import NotCapturableError, NotMarkableError
from amanda_torch.compiled.compilers import name_of_compiler
from amanda_torch.eager.interceptors import LOCAL
from amanda_torch.plugin import COMPILER_VARIABLE

_OWN = ("amanda.", "amanda_torch.", "amanda_tools.")
"""Packages whose functions are not compiled if they are called between two graphs."""

_HELPERS = "torch._dynamo.utils"
"""The module of functions that the code made by Dynamo calls."""

_LOCK = threading.RLock()
"""Held while Dynamo captures: its process-wide counters are restored afterwards."""

_RECURRENT = "Dynamo: RNN, GRU, or LSTM is called as it is"
"""Reason why a recurrent layer that Dynamo (PyTorch 2.15) calls between two graphs runs eagerly."""

Suspended = Callable[[], AbstractContextManager[Any]]


class Capture:
    """The callback of Dynamo for the frames of one compiled function and of functions that it
    calls.

    Args:
        compiler: the user's.
        marks: whether the calls of modules are marked in what is captured.

    Attributes:
        compiler: the user's.
        marks: True if the calls of modules are marked in what is captured.
        is_refused: see :class:`~amanda_torch.compiled.captured.CompiledFunction`.
    """

    def __init__(self, compiler: Any, marks: bool = False) -> None:
        self.compiler = compiler
        self.marks = marks
        self._refused_under: weakref.ref[Any] | None = None
        self._say: Callable[[Any, str], None] | None = None
        self._convert = _internals.frame_converter(self._captured, marks=marks)
        setattr(self, _internals.FRAME_CALLBACK_OF, self._convert)
        # A graph with one operator, which is intercepted when it is called. Under a transform
        # Dynamo captures for this compiler only, and functions that `torch.cond` calls cannot run
        # uncaptured.
        as_it_is = _internals.lookup_compiler("eager")
        self._convert_as_is = _internals.frame_converter(as_it_is)
        # Subjects that run uncaptured, with the reasons, which each scope reports again.
        self._left: Any = torch.utils.weak.WeakIdKeyDictionary()
        self._suspended: Suspended | None = None

    @property
    def is_refused(self) -> bool:
        """See :class:`CompiledFunction`: scopes differ in their tools."""
        reference, scopes = self._refused_under, STATE.scopes
        return reference is not None and bool(scopes) and reference() is scopes[-1]

    @is_refused.setter
    def is_refused(self, is_refused: bool) -> None:
        scopes = STATE.scopes
        self._refused_under = weakref.ref(scopes[-1]) if is_refused and scopes else None

    def under(self, suspended: Suspended, say: Callable[[Any, str], None]) -> Capture:
        """Return this capture, set to run within the context that `suspended` makes.

        Args:
            say: function that reports a reason; gets the compiler and the reason.
        """
        self._suspended, self._say = suspended, say
        return self

    def say(self, reason: str) -> None:
        """Report that a graph runs operator by operator, and the reason."""
        if self._say is not None:
            self._say(self.compiler, reason)

    def __call__(self, frame: Any, *args: Any) -> Any:
        """Capture a frame; called by Dynamo for a frame without code."""
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OWN):
            # Functions that they call run uncaptured, except for modules, which are the program's.
            return _internals.not_captured(recursive=not name.endswith("eager.module_calls"))
        if name == _HELPERS:
            # PyTorch 2.13 calls the callback for one of them thirty times in a step of a GPT-2.
            # Dynamo's own callback skips them for good, too.
            return _internals.not_captured(always=True)
        subject = _subject(frame)
        left = self._left.get(subject, {}).get(_state_of(subject))
        if left is not None and _internals.is_compiled_code(frame.f_code):
            return self._leave(subject, *left)
        reason, with_all = "", False
        try:
            with self._without_interceptor():
                known = _internals.capture_failures()
                is_operator = _internals.runs_higher_order(frame)
                found = (self._convert_as_is if is_operator else self._convert)(frame, *args)
                said = _new_reason(known, _internals.capture_failures())
            if found is not None and found.guarded_code is not None:
                return found
            if _internals.has_reached_limit(found):
                reason = "Dynamo's limit of recompilations is reached"
            elif not frame.f_code.co_flags & inspect.CO_GENERATOR:
                # Dynamo captures no generators; functions that they call are captured separately.
                reason = said
                if not reason and _internals.is_layer_called_as_is(frame):
                    return self._leave(frame.f_locals["self"], _RECURRENT)
        except Exception as error:
            reason = _reason_of(error)
            with_all = isinstance(_cause(error), NotMarkableError)
        # Noted here and not by Dynamo, whose own code for the function must not change.
        return self._leave(subject, reason, with_all)

    def _leave(self, subject: Any, reason: str, with_all: bool = False) -> Any:
        """Skip a frame; return the value that Dynamo's callback must return.

        Args:
            reason: the reason; "" if there is nothing to capture.
            with_all: True if the functions that it calls run eagerly, too.
        """
        interceptor = LOCAL.interceptor
        if reason and interceptor is not None:
            interceptor.note_compiled(_place(subject), f"eagerly ({reason})")
        self._left.setdefault(subject, {})[_state_of(subject)] = reason, with_all
        _internals.count_eager_as_compiled()
        return _internals.not_captured(recursive=with_all)

    @contextmanager
    def _without_interceptor(self) -> Iterator[None]:
        """The context in which Dynamo captures, and compilers run."""
        assert self._suspended is not None
        with _LOCK, self._suspended(), _internals.captures_uncounted():
            yield

    def _captured(self, module: fx.GraphModule, inputs: Sequence[Any]) -> CapturedGraph:
        return CapturedGraph(module, inputs, self._without_interceptor, self)


def _subject(frame: Any) -> Any:
    """The code of a frame; in Dynamo's own wrapper the wrapped function, since all wrapped
    functions share the wrapper's code."""
    wrapped = frame.f_locals.get("fn")
    if not frame.f_globals.get("__name__", "").startswith("torch._dynamo") or wrapped is None:
        return frame.f_code
    wrapped = getattr(wrapped, "__func__", wrapped)
    return wrapped if hasattr(wrapped, "__weakref__") else frame.f_code


def _state_of(subject: Any) -> Any:
    """The modes that determine whether Dynamo can capture a subject: a module may run as one fused
    operator in inference, but not in training."""
    if not isinstance(subject, nn.Module):
        return None
    return getattr(subject, "training", None), torch.is_grad_enabled()


def _place(subject: Any) -> str:
    """The name of a subject in messages: the place of its code, or the class of a PyTorch layer."""
    code = getattr(subject, "__code__", subject)
    if isinstance(code, types.CodeType):
        return f"{code.co_filename}:{code.co_firstlineno}"
    return type(subject).__name__


def _new_reason(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The construct that Dynamo could not capture in a frame; "" if there was nothing to capture.

    Args:
        before, after: results of :func:`_internals.capture_failures`.
    """
    found = next((reason for reason, n in after.items() if n > before.get(reason, 0)), "")
    return _said_by_dynamo(found)


def _said_by_dynamo(explanation: str) -> str:
    line, _, _ = explanation.partition("\n")
    return f"Dynamo: {line}" if line else ""


def _cause(error: BaseException) -> BaseException:
    """The cause of an error of Dynamo: an error of its compiler, or of our code that it calls."""
    found: BaseException = getattr(error, "inner_exception", error)
    asked = found.__context__
    return asked if isinstance(asked, NotCapturableError) else found


def _reason_of(error: BaseException) -> str:
    """The reason why Dynamo has captured nothing of a function."""
    cause = _cause(error)
    if isinstance(cause, NotCapturableError):
        return str(cause)
    if _internals.is_unsupported(cause) and (said := _said_by_dynamo(str(cause))):
        return said
    return f"Dynamo fails with {type(cause).__name__}"


def say_captured(compiler: Any, reason: str) -> None:
    """Warn that a compiled function runs operator by operator.

    Args:
        compiler: the user's.
        reason: the reason; "" if the compiler would do the same.
    """
    name = name_of_compiler(compiler)
    # Options of inductor that a mode sets are included: 2.13 does not keep the mode's name.
    options = ", ".join(getattr(compiler, "config", None) or ())
    without = f"{name}, whose mode or options ({options}) do nothing," if options else f"{name},"
    because = f" since {reason}" if reason else ""
    _internals.warn_program(
        "a function compiled with torch.compile runs as it is captured, operator by operator and "
        f"without its compiler {without} under amanda.apply(){because}: tools see its operators, "
        f"and results are those of eager mode; {COMPILER_VARIABLE}=own gives graphs to {name} "
        "also where dump, stats, sparsity or diff look at tensors"
    )


_CAPTURES: weakref.WeakKeyDictionary[Any, Capture] = weakref.WeakKeyDictionary()
_MARKING: weakref.WeakKeyDictionary[Any, Capture] = weakref.WeakKeyDictionary()
"""Captures by the callback of the compiled function, without and with marks of module calls."""

_KNOWN: weakref.WeakSet[Capture] = weakref.WeakSet()
"""Reasons that have been reported: each is reported once."""


def callback_for(
    callback: Any, suspended: Suspended, say: Callable[[Any, str], None], marks: bool = False
) -> Capture:
    """Return the callback that captures, in place of a compiled function's own.

    Args:
        marks: see :class:`Capture`.
        suspended: makes the context in which frames are captured, without an interceptor.
        say: called with the compiler and the reason if a function runs operator by operator.
    """
    captures = _MARKING if marks else _CAPTURES
    found = captures.get(callback)
    if found is None:
        compiler = _internals.compiler_of(callback)
        # As in Dynamo, functions that are compiled anew at each call are captured once.
        alike = [known for known in tuple(_KNOWN) if known.marks is marks]
        equal = (known for known in alike if _is_equal(known.compiler, compiler))
        found = captures[callback] = next(equal, None) or Capture(compiler, marks)
        _KNOWN.add(found)
    return found.under(suspended, say)


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
