"""Lets Dynamo capture compiled functions, and run what it has captured under a scope.

A function made by ``torch.compile`` asks Dynamo for the callback that compiles the frames below::

    compiled = torch.compile(f)             # callback of the program: f becomes code of inductor
    with amanda.apply(tool):
        compiled(x)                         # callback_for(...): f becomes a CapturedGraph

:func:`callback_for` makes a callback that keeps the function's own compiled code apart: Dynamo
keeps the code of each compiler. Captured graphs belong to the function and not to a scope; the next
scope uses them again.
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
"""Packages whose functions Dynamo is not to compile if they are called between two graphs."""

_HELPERS = "torch._dynamo.utils"
"""The module of functions that the code made by Dynamo calls."""

_LOCK = threading.RLock()
"""Held while Dynamo captures, whose counters of the process are put back after it."""

_RECURRENT = "Dynamo: RNN, GRU, or LSTM is called as it is"
"""Why a recurrent layer runs eagerly that Dynamo (PyTorch 2.15) calls between two graphs."""

Suspended = Callable[[], AbstractContextManager[Any]]


class Capture:
    """The callback of Dynamo for frames of one compiled function, and of those that it calls.

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
        # Of a graph that runs one operator, seen as it is called. Under a transform Dynamo captures
        # for this compiler alone, and what `torch.cond` calls cannot run uncaptured.
        as_it_is = _internals.lookup_compiler("eager")
        self._convert_as_is = _internals.frame_converter(as_it_is)
        # What is left alone, and why: said again in each scope.
        self._left: Any = torch.utils.weak.WeakIdKeyDictionary()
        self._suspended: Suspended | None = None

    @property
    def is_refused(self) -> bool:
        """See the class: in another scope there are other tools."""
        reference, scopes = self._refused_under, STATE.scopes
        return reference is not None and bool(scopes) and reference() is scopes[-1]

    @is_refused.setter
    def is_refused(self, is_refused: bool) -> None:
        scopes = STATE.scopes
        self._refused_under = weakref.ref(scopes[-1]) if is_refused and scopes else None

    def under(self, suspended: Suspended, say: Callable[[Any, str], None]) -> Capture:
        """This capture, set to run within the context that `suspended` makes.

        Args:
            say: see :meth:`say`; it is given the compiler, too.
        """
        self._suspended, self._say = suspended, say
        return self

    def say(self, reason: str) -> None:
        """Say that a graph runs operator by operator, and why."""
        if self._say is not None:
            self._say(self.compiler, reason)

    def __call__(self, frame: Any, *args: Any) -> Any:
        """Capture a frame; called by Dynamo for one that it has no code for."""
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OWN):
            # What they call runs as it is, but for modules: those are the program's.
            return _internals.not_captured(recursive=not name.endswith("eager.module_calls"))
        if name == _HELPERS:
            # PyTorch 2.13 comes to one of them thirty times in a step of a GPT-2. Its own callback
            # leaves them for good, too.
            return _internals.not_captured(always=True)
        subject = _subject(frame)
        left = self._left.get(subject, {}).get(_state_of(subject))
        if left is not None and _internals.is_compiled_code(frame.f_code):
            return self._leave(subject, *left)
        reason, with_all = "", False
        try:
            with self._without_interceptor():
                known = _internals.not_taken()
                is_operator = _internals.runs_higher_order(frame)
                found = (self._convert_as_is if is_operator else self._convert)(frame, *args)
                said = _new_reason(known, _internals.not_taken())
            if found is not None and found.guarded_code is not None:
                return found
            if _internals.has_reached_limit(found):
                reason = "Dynamo's limit of recompilations is reached"
            elif not frame.f_code.co_flags & inspect.CO_GENERATOR:
                # Dynamo takes no generators, and what they call on its own.
                reason = said
                if not reason and _internals.is_layer_called_as_is(frame):
                    return self._leave(frame.f_locals["self"], _RECURRENT)
        except Exception as error:
            reason = _reason_of(error)
            with_all = isinstance(_cause(error), NotMarkableError)
        # Noted here and not by Dynamo, whose own code for the function is to stay as it is.
        return self._leave(subject, reason, with_all)

    def _leave(self, subject: Any, reason: str, with_all: bool = False) -> Any:
        """Skip a frame; return the value that Dynamo's callback must return.

        Args:
            reason: "" where there is nothing to capture.
            with_all: whether the functions that it calls run eagerly, too.
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
    """The code that a frame runs; in Dynamo's own wrapper the wrapped function, since all wrapped
    functions share the wrapper's code."""
    wrapped = frame.f_locals.get("fn")
    if not frame.f_globals.get("__name__", "").startswith("torch._dynamo") or wrapped is None:
        return frame.f_code
    wrapped = getattr(wrapped, "__func__", wrapped)
    return wrapped if hasattr(wrapped, "__weakref__") else frame.f_code


def _state_of(subject: Any) -> Any:
    """The modes on which it depends whether Dynamo can take a subject: in inference a module may
    run as one fused operator, and in training not."""
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
    """The construct that Dynamo could not capture in a frame that it leaves alone; "" if there was
    nothing to capture.

    Args:
        before, after: what :func:`_internals.not_taken` gives.
    """
    found = next((reason for reason, n in after.items() if n > before.get(reason, 0)), "")
    return _said_by_dynamo(found)


def _said_by_dynamo(explanation: str) -> str:
    line, _, _ = explanation.partition("\n")
    return f"Dynamo: {line}" if line else ""


def _cause(error: BaseException) -> BaseException:
    """The error behind one of Dynamo's: of its compiler, or of code of ours that it calls."""
    found: BaseException = getattr(error, "inner_exception", error)
    asked = found.__context__
    return asked if isinstance(asked, NotCapturableError) else found


def _reason_of(error: BaseException) -> str:
    """Why Dynamo has captured nothing of a function."""
    cause = _cause(error)
    if isinstance(cause, NotCapturableError):
        return str(cause)
    if _internals.is_unsupported(cause) and (said := _said_by_dynamo(str(cause))):
        return said
    return f"Dynamo fails with {type(cause).__name__}"


def say_captured(compiler: Any, reason: str) -> None:
    """Say that a compiled function runs operator by operator.

    Args:
        compiler: the user's.
        reason: "" if the compiler would do the same.
    """
    name = name_of_compiler(compiler)
    # Those of inductor that a mode sets are among them: 2.13 keeps no name of the mode.
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
"""By the callbacks of compiled functions, without and with marks of the calls of modules."""

_KNOWN: weakref.WeakSet[Capture] = weakref.WeakSet()
"""Each once."""


def callback_for(
    callback: Any, suspended: Suspended, say: Callable[[Any, str], None], marks: bool = False
) -> Capture:
    """The callback that captures, in place of a compiled function's own one.

    Args:
        marks: as of :class:`Capture`.
        suspended: makes the context in which frames are captured: without an interceptor.
        say: called with the compiler of a function that runs operator by operator, and the reason.
    """
    captures = _MARKING if marks else _CAPTURES
    found = captures.get(callback)
    if found is None:
        compiler = _internals.compiler_of(callback)
        # As Dynamo has it, functions compiled anew at each call are captured once.
        alike = [known for known in tuple(_KNOWN) if known.marks is marks]
        equal = (known for known in alike if _is_equal(known.compiler, compiler))
        found = captures[callback] = next(equal, None) or Capture(compiler, marks)
        _KNOWN.add(found)
    return found.under(suspended, say)


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
