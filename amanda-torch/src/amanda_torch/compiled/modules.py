"""Captures the outermost modules of programs that are not compiled.

The first two calls of a module run uncaptured. From its third call on it runs as Dynamo has
captured it, as one graph and under Dynamo's guards; :mod:`amanda_torch.compiled.captured` runs the
graph. A call that fits no capture runs uncaptured, and the next one of the same form is captured.
Before a capture is used, its operators are compared, module by module, with those of an uncaptured
call. A module that cannot be captured runs uncaptured; if it is an outermost one, the modules that
it calls are captured instead, if they have :data:`WORTH` operators. After too many refusals no
further attempts are made::

    modules = Modules(suspended, note)
    run = modules.runner(interceptor, module, vanilla)      # None: the module runs as it is

That is for the interceptor ``capture``; :class:`RepeatedModules` is for ``auto``.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, ClassVar

import torch
from torch import fx, nn

from amanda.nested import leaves
from amanda_torch import _internals
from amanda_torch.compiled.binding import Binding
from amanda_torch.compiled.capture import Suspended, capturing, reason_of
from amanda_torch.compiled.captured import CapturedGraph
from amanda_torch.compiled.code import NotCapturableError
from amanda_torch.compiled.noticing import NoticingRun, Step
from amanda_torch.eager import gate
from amanda_torch.eager.frames import Frame
from amanda_torch.eager.interceptors import LOCAL, Interceptor, NoTools
from amanda_torch.eager.module_names import Labels
from amanda_torch.operators.calls import items_of

CALLS = 2
"""Calls of a module that run uncaptured before it is captured."""

CAPTURES = 8
"""Captures of one module, for different forms of call."""

FAILURES = 3
"""Attempts that bring no captured call, one after the other, until a module is left alone."""

REFUSALS_ALIKE = 2
"""Refused attempts of modules of one class, with the same operators and in the same form of call,
until no more of them are tried."""

REFUSALS = 12
"""Refused attempts of an outermost module and those in it until none of them is tried any more, and
as many again for each one that was captured: an attempt takes a second or so."""

WORTH = 16
"""Operators of a module within another one from which on it is captured. The captured call of a
smaller one costs more than it saves."""

EARNED = 3000
"""Calls that save about as much time as a capture takes. Observed (PyTorch 2.13, GPT-2 of 4 layers,
inference): 7 ms for each operator, of which each captured call saves 2.7 us."""

WORTH_UNASKED = 100
"""Operators of an outermost module from which on it is captured without being asked for: a captured
call costs as much as the capture of some ten operators saves."""

Note = Callable[[str, str], None]
"""Called with the name of a module, and the way in which it runs."""

Operators = tuple[Any, ...]
"""The operators of a module call, by name and number, and those of the module calls in it."""


class Modules:
    """Runs the outermost modules of a program as they are captured.

    Args:
        suspended: makes the context in which Dynamo captures: without an interceptor.
        note: told how modules run.

    Attributes:
        iterations_before: iterations of a thread that come before the first one in which
            :meth:`runner` is asked.
        worth: operators of an outermost module from which on it is captured.
    """

    iterations_before: ClassVar[int] = 0
    worth: ClassVar[int] = 0

    def __init__(self, suspended: Suspended, note: Note) -> None:
        self._suspended = suspended
        self._note = note
        self._refusals = Refusals()

    def runner(
        self, interceptor: Interceptor, module: nn.Module, vanilla: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        """The function that runs a module that was just entered; None if it is to run uncaptured.

        Args:
            vanilla: the ``nn.Module.__call__`` that would run it.
        """
        frame = interceptor.frame
        if frame.module is None or frame.module() is not module:
            return None  # a wrapper, of which ids say nothing
        if _is_inner(interceptor, frame) and _internals.in_backward():
            return None  # run again, for a checkpoint
        if interceptor.stale and not interceptor.refresh():
            return None
        reason = _reason_now(interceptor, module, vanilla)
        captured = None
        if not reason:
            captured = _captured(module)
            is_left = bool(captured.reason) and captured.within.were_in_vain()
            if (captured.is_small or is_left) and _is_inner(interceptor, frame):
                interceptor.leave_to_gate(module, frame.caller)  # type: ignore[arg-type]
                return None
            reason = captured.reason
            if reason and not is_left:
                self._leave(interceptor, frame)
            elif captured.has_hooks():
                reason = _HOOKED
                self._leave(interceptor, frame, for_good=False)
            elif captured.calls == CALLS:
                reason = _missing()
        if captured is None or reason:
            self._note(frame.path, f"as they are ({reason})")
            return None
        captured.suspended, captured.refusals = self._suspended, self._refusals
        return functools.partial(self._run, captured, interceptor, module)

    @_internals.unseen_by_warnings
    def _run(
        self,
        captured: CapturedModule,
        interceptor: Interceptor,
        module: nn.Module,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        frame, way = interceptor.frame, "captured"
        if captured.calls < CALLS:
            captured.calls += 1
            # It is compared with the last one of them.
            is_last = captured.calls == CALLS
            missed: Any = captured.form(interceptor, module, args, kwargs) if is_last else _FIRST
            # Not by `vanilla`, whose frame that of the driver's patch stands for.
            result = _internals.PLAIN_CALL(module)(*args, **kwargs)
        else:
            _CALL.missed = None
            result = _internals.call_captured(captured, captured.function, module, args, kwargs)
            missed, _CALL.missed = _CALL.missed, None
        if missed is not None:
            if missed is _OTHER_TENSORS:
                self._note(frame.path, f"as they are ({_WITH_OTHER_TENSORS})")
                return result
            if missed is _FIRST:
                if self.worth or _is_inner(interceptor, frame):
                    return result
            elif interceptor.frame is frame and not interceptor.stale:
                captured.seen[missed] = found = operators_of(frame)
                if _is_inner(interceptor, frame):
                    captured.is_small = _number_of(found) < WORTH
                    if captured.is_small:
                        return result
                elif _number_of(found) < self.worth:
                    self._leave(interceptor, frame)
                    return result
            way = f"as they are ({captured.reason or captured.last_reason or _NEW})"
        elif captured.failures:
            captured.failures = 0
        self._note(frame.path, way)
        return result

    def _leave(self, interceptor: Interceptor, frame: Frame, *, for_good: bool = True) -> None:
        """Leave the module of a frame alone, in this call or for good."""
        interceptor.open(frame)


class RepeatedModules(Modules):
    """Captures outermost modules that are called again and again, in programs that ask for none.

    The first iterations are as many as it takes to earn a capture back. So a program that ends soon
    loses nothing, and one in which no module can be captured loses about as much time as a captured
    one would have saved by then.
    """

    iterations_before = EARNED
    worth = WORTH_UNASKED

    def runner(
        self, interceptor: Interceptor, module: nn.Module, vanilla: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        """As :meth:`Modules.runner`; None under a debugger or profiler.

        A debugger or a profiler would miss those of a captured module.
        """
        if interceptor.frame.is_left or _is_looked_at():
            return None
        return super().runner(interceptor, module, vanilla)

    def _leave(self, interceptor: Interceptor, frame: Frame, *, for_good: bool = True) -> None:
        """Leave the module of a frame alone, and those in it."""
        frame.is_left = for_good


def _is_looked_at() -> bool:
    """Whether a debugger, a profiler or the like is on in this thread."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(map(monitoring.get_tool, range(6)))


def _is_inner(interceptor: Interceptor, frame: Frame) -> bool:
    """Whether a module call is within that of a module which cannot be captured."""
    return frame.caller is not interceptor.root


def _number_of(operators: Sequence[Any]) -> int:
    """How many they are, with those of the module calls in it."""
    return sum(
        sum(rest if rest and isinstance(rest[0], int) else map(_number_of, rest))
        for _, *rest in operators
    )


_FIRST: Any = object()
"""Stands for the form of a call that is ignored."""

_attribute = object.__getattribute__
"""An attribute of a module, past a look-up of its class's own."""

_OTHER_TENSORS: Any = object()
"""Represents the form of a call with tensors of a subclass, whose attributes are not read."""

_WITH_OTHER_TENSORS = "inputs are of a subclass of Tensor"

_USES_OTHER_TENSORS = "they use tensors of a subclass of Tensor, or a __torch_function__"

_HOOKED = "modules have hooks"

_WARNS = "a function warns of its caller"

_NEW = "they are captured when they are called again in the same form"


def _reason_now(interceptor: Interceptor, module: nn.Module, vanilla: Callable[..., Any]) -> str:
    """Why a module cannot run captured in the present call; "" if it can."""
    if interceptor.tells_modules:
        # A graph has the operators of modules, not their calls.
        return "a tool has routines at modules"
    if not interceptor.is_alone():
        return "another TorchFunctionMode is on"
    if not _internals.is_eager():
        return "a transform, a tracer, a hook on saved tensors or a TorchDispatchMode is on"
    if vanilla is not _internals.MODULE_CALL:
        return "another library has replaced nn.Module.__call__"
    if _internals.has_own_hooks(module) or _internals.has_global_hooks():
        return _HOOKED
    if _internals.COMPILED_CALL(module) is not None:
        return "the program compiles them"
    return ""


@functools.cache
def _missing() -> str:
    # Not asked before: it imports Dynamo, which takes two seconds.
    gone = _internals.missing(compiler=True)
    return f"PyTorch has no {', '.join(gone)}" if gone else ""


class _Call(threading.local):
    """The call of a captured module that the current thread runs.

    Attributes:
        missed: its form, where no capture was used.
    """

    missed: Any = None


_CALL = _Call()


class Refusals:
    """The refused attempts to capture modules, by a key that similar modules share.

    They live longer than the program's classes may, and hold none of them.
    """

    def __init__(self) -> None:
        self._reasons: weakref.WeakKeyDictionary[type, dict[Any, list[str]]] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, cls: type[nn.Module], kind: Any, reason: str) -> None:
        """Note that a module of a class and a kind was refused, and why."""
        self._reasons.setdefault(cls, {}).setdefault(kind, []).append(reason)

    def reason_against(self, cls: type[nn.Module], kind: Any) -> str:
        """Why one more module of a class and a kind is not tried; "" if it is."""
        reasons = self._reasons.get(cls, {}).get(kind, [])
        return reasons[-1] if len(reasons) >= REFUSALS_ALIKE else ""


class Attempts:
    """The attempts to capture an outermost module and those in it.

    Attributes:
        captured: how many were captured.
        refused: how many were not.
        reason: why the last of these was not.
    """

    def __init__(self) -> None:
        self.captured = self.refused = 0
        self.reason = ""

    def note_refused(self, reason: str) -> None:
        """Note one that was refused, and why."""
        self.refused += 1
        self.reason = reason

    def have_ended(self) -> bool:
        """Whether there are to be no more: too many were refused for what was captured."""
        return self.refused >= REFUSALS * (1 + self.captured)

    def were_in_vain(self) -> bool:
        """Whether they have ended, and nothing was captured."""
        return self.have_ended() and not self.captured


class CapturedModule:
    """Dynamo's captures of one module, and the callback for frames.

    It belongs to the module and not to a scope, holds no reference to it, and is dropped with it.

    Attributes:
        function: calls the module's ``forward``. Dynamo keeps what it captures with its code, which
            no other function has.
        calls: how often the module ran as it is before it was captured.
        seen: the operators of calls that ran as they are, by their form.
        reason: why it is left alone; "" as long as it is not.
        last_reason: why the last attempt to capture it failed.
        failures: attempts since a captured call ran.
        is_small: whether it is not worth it within another module.
        attempts: those of it and the modules in it, where it is an outermost one.
        within: those of the outermost module in which it was last tried.
        suspended: makes the context in which Dynamo captures.
        refusals: those of all modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self.function = _own_function()
        self.calls = 0
        self.seen: dict[Any, Operators] = {}
        self.reason = ""
        self.last_reason = ""
        self.failures = 0
        self.is_small = False
        self.within = self.attempts = Attempts()
        self.suspended: Suspended | None = None
        self.refusals = Refusals()
        self._captures = 0
        self._methods: dict[tuple[type[Any], str], Any] = {}
        self._codes: frozenset[types.CodeType] = frozenset()
        code = self.function.__code__
        # Not a method of this object, which the reference would keep; and found now, since a
        # module may outlive the globals of this one at the end of the process.
        forget = _internals.forget_captured
        self._module = weakref.ref(module, lambda _: forget(code))
        self._expected: Operators = ()
        self._class: type[Interceptor] = Interceptor
        # Where the gate looks for hooks, Dynamo does not.
        self._modules_in: tuple[weakref.ref[nn.Module], ...] = ()
        self._hook_dicts: Set[int] = frozenset()
        self._convert = _internals.frame_converter(
            self._backend,
            eager=True,
            refuse=_refuse_tensor,
            is_checked=self._is_checked if _finder_of_hooks() is not None else None,
        )
        setattr(self, _internals.FRAME_CALLBACK_OF, self._convert)

    def is_outdated(self) -> bool:
        """Whether a captured method of a class has been replaced.

        Dynamo guards functions of modules and of instances, and no methods of classes (2.13).
        """
        # Its own loop: this runs at every captured call.
        for (cls, name), method in self._methods.items():
            found = getattr(cls, name, None)
            if found is not method and getattr(found, "__func__", None) is not method:
                return True
        return False

    def has_hooks(self) -> bool:
        """Whether a module in it has hooks, which Dynamo does not guard."""
        find = _finder_of_hooks()
        return find is not None and find(self._modules_in, _internals.OWN_HOOKS)

    def _is_checked(self, hooks: Any) -> bool:
        return id(hooks) in self._hook_dicts

    def drop(self) -> None:
        """Drop the captures; calls that are running go on."""
        _internals.forget_captured(self.function.__code__)

    def form(self, interceptor: Interceptor, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A key of calls that, as a rule, run the same operators: no sizes and no values.

        That of calls with tensors of a subclass is ``_OTHER_TENSORS``: they are not captured. What
        reads such a tensor, as Dynamo does to guard and to trace, may be code of the program.
        """
        if _holds_other_tensors((args, kwargs)):
            return _OTHER_TENSORS
        interceptor.mute()
        try:
            # Frozen TorchScript modules have none, and a class may look attributes up itself.
            training = _attribute(module, "__dict__").get("training")
            return (training, torch.is_grad_enabled(), _form(args), _form(kwargs))
        finally:
            interceptor.unmute()

    def __call__(self, frame: Any, *args: Any) -> Any:
        """Capture a frame; called by Dynamo for one that it has no code for."""
        interceptor, module = LOCAL.interceptor, self._module()
        if frame.f_code is not self.function.__code__ or interceptor is None or module is None:
            # A function that the captured code calls, to make its result.
            return _internals.not_captured(recursive=True)
        given = frame.f_locals
        form = self.form(interceptor, module, given["args"], given["kwargs"])
        if form is _OTHER_TENSORS:
            _CALL.missed = form
            return _internals.not_captured(recursive=True)
        expected = self.seen.pop(form, None)
        if expected is not None:
            self.within, self._class = _attempts_in(interceptor), type(interceptor)
            found = self._attempt(frame, args, expected, _kind(module, form, expected))
            if found is not None:
                self.seen[form] = expected
                return found
        self._count_attempt()
        _CALL.missed = form
        return _internals.not_captured(recursive=True)

    def _attempt(self, frame: Any, args: Any, expected: Operators, kind: Any) -> Any:
        """Capture a frame, unless that is refused without an attempt."""
        module = self._module()
        assert module is not None
        if self.within.have_ended():
            self.reason = self.last_reason = self.within.reason
            return None
        cls = type(module)
        reason = _reason_against(module) or self.refusals.reason_against(cls, kind)
        if reason:
            self.last_reason = reason
            return None
        found = self._capture(frame, args, expected)
        if found is None:
            self.refusals.note(cls, kind, self.last_reason)
            self.within.note_refused(self.last_reason)
            return None
        self.within.captured += 1
        self._captures += 1
        self._methods.update(_methods_of(map(type, module.modules()), self._codes))
        self._modules_in = _references((*self._modules_in, *map(weakref.ref, module.modules())))
        return found

    def _capture(self, frame: Any, args: Any, expected: Operators) -> Any:
        assert self.suspended is not None
        module = self._module()
        assert module is not None
        self._hook_dicts = {
            id(hooks) for below in module.modules() for hooks in _internals.hook_dicts(below)
        }
        try:
            with capturing(self.suspended):
                self._expected = expected
                found = self._convert(frame, *args)
        except Exception as error:
            self.last_reason = reason_of(error)
            return None
        finally:
            self._expected, self._hook_dicts = (), frozenset()
        if found is None or found.guarded_code is None:
            self.last_reason = "Dynamo leaves it alone"
            return None
        return _internals.captured_alone(found)

    def _count_attempt(self) -> None:
        self.failures += 1
        if self._captures >= CAPTURES:
            self.reason = f"its calls differ: {CAPTURES} captures do not fit them all"
        elif self.failures > FAILURES:
            self.reason = self.last_reason or "no two of its calls have the same form"

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> CapturedGraph:
        """Called by Dynamo with what it has captured."""
        module = self._module()
        assert module is not None
        self._codes = frozenset(_internals.traced_code())
        if any(code.co_name == "__torch_function__" for code in self._codes):
            # Dynamo does what it does without the nodes of autograd that PyTorch adds.
            raise NotCapturableError(_USES_OTHER_TENSORS)
        if _internals.warned_in_capture():
            # In a graph it would warn of a line of ours, and not each time.
            raise NotCapturableError(_WARNS)
        return ModuleGraph(graph, inputs, module, self.function, self._expected, self._class)


@functools.cache
def _finder_of_hooks() -> Callable[[tuple[Any, ...], tuple[str, ...]], bool] | None:
    """The gate's; None without a gate.

    On the hooks of each module Dynamo spends nearly half of the time of its guards (PyTorch 2.13,
    GhostNet of 412 modules, cold caches: 0.7 ms of 1.7, where a call takes 11; the gate 0.16).
    """
    return None if gate.reason_unusable() else gate.extension().any_has


def _references(references: Iterable[weakref.ref[nn.Module]]) -> tuple[Any, ...]:
    """References to modules, each once, without those that have died."""
    found = ((reference(), reference) for reference in references)
    return tuple({id(each): known for each, known in found if each is not None}.values())


def _attempts_in(interceptor: Interceptor) -> Attempts:
    """The attempts to capture the outermost module that runs."""
    frame = interceptor.frame
    while frame.caller is not None and frame.caller is not interceptor.root:
        frame = frame.caller
    module = None if frame.module is None else frame.module()
    return Attempts() if module is None else _captured(module).attempts


def _kind(module: nn.Module, form: Any, operators: Operators) -> Any:
    """A key for modules of one class that Dynamo, as a rule, can capture all or none of."""
    own = (vars(inner).get("forward") for inner in module.modules())
    forwards = frozenset(weakref.ref(getattr(f, "__code__", type(f))) for f in own if f is not None)
    return forwards, _without_classes(form), operators


def _without_classes(form: Any) -> Any:
    """The form of a call with weak references in place of classes."""
    if isinstance(form, tuple):
        return tuple(map(_without_classes, form))
    return weakref.ref(form) if isinstance(form, type) else form


def _reason_against(module: nn.Module) -> str:
    """Why a module cannot be captured, found without Dynamo; "" if nothing is."""
    if any(map(_internals.has_own_hooks, module.modules())):
        return _HOOKED
    tensors = (*module.parameters(), *module.buffers())
    if not all(type(tensor) in _internals.PLAIN_TENSORS for tensor in tensors):
        return "parameters or buffers are of a subclass of Tensor"
    return ""


def _methods_of(
    classes: Iterable[type[Any]], codes: Set[types.CodeType]
) -> Iterator[tuple[tuple[type[Any], str], types.FunctionType]]:
    """The methods that have some code, of classes and of those that their modules define.

    Each as a class and a name, and the function.
    """
    loaded = [module for module in [*sys.modules.values()] if isinstance(module, types.ModuleType)]
    by_file = {vars(module).get("__file__"): module for module in loaded}
    others = (_class_of(code, by_file.get(code.co_filename)) for code in codes)
    for cls in {*classes, *filter(None, others)}:
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            found.update(vars(base))
        for name, value in found.items():
            if value is vars(nn.Module).get(name):
                continue
            method = value.__func__ if isinstance(value, classmethod) else value
            if isinstance(method, types.FunctionType) and method.__code__ in codes:
                yield (cls, name), method


def _class_of(code: types.CodeType, module: types.ModuleType | None) -> type[Any] | None:
    """The class of a method that has some code; None if its module has no such class."""
    found: Any = module
    for name in code.co_qualname.split(".")[:-1]:
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) else None


_NUMBERS = itertools.count()


def _own_function() -> types.FunctionType:
    # Dynamo notes by file, line and name of a function which sizes it was called with, and makes
    # sizes symbolic that have changed (2.13): those of one model say nothing about another one.
    code = _forward.__code__.replace(co_name=f"forward_{next(_NUMBERS)}")
    return types.FunctionType(code, {"__name__": __name__, "__builtins__": builtins}, "forward")


@_internals.unseen_by_warnings
def _forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.forward(*args, **kwargs)


_MODULE = _forward.__code__.co_varnames[0]
"""The variable of it that holds the module."""


def _holds_other_tensors(value: Any) -> bool:
    """Whether a value is, or holds, a tensor of a subclass; nothing is read of it."""
    return any(
        isinstance(leaf, torch.Tensor) and type(leaf) not in _internals.PLAIN_TENSORS
        for leaf in leaves(value, items_of)
    )


def _refuse_tensor(cls: type[Any]) -> None:
    """Called before Dynamo looks at a tensor of a subclass, wherever a module has it from."""
    if cls not in _internals.PLAIN_TENSORS:
        raise NotCapturableError(_USES_OTHER_TENSORS)


def _form(value: Any) -> Any:
    # Flat, since what is nested may be deep, or hold itself: then it has the number of its place.
    form: list[Any] = []
    waiting, seen = [value], dict[int, tuple[int, Any]]()
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if item is None or kind is bool:
            form.append(item)
        elif kind in _internals.PLAIN_TENSORS or isinstance(item, torch.Tensor):
            form.append((kind, item.dim(), item.dtype, item.requires_grad))
        elif not isinstance(item, (tuple, list, dict)):
            form.append(kind)
        elif id(item) in seen:
            form.append(seen[id(item)][0])
        else:
            seen[id(item)] = len(seen), item
            form.append((kind, *map(str, item)) if isinstance(item, dict) else (kind, len(item)))
            waiting.extend(reversed(item.values() if isinstance(item, dict) else item))
    return tuple(form)


# -- whether a graph does the same --------------------------------------------


class ModuleGraph(CapturedGraph):
    """The graph of a module's forward, compared with an uncaptured call.

    Args:
        module: it.
        function: what Dynamo has captured, which calls the module.
        expected: the operators of that call.
        interceptor_class: that of the scope's interceptors. The gate takes builtins to report
            nothing that it is not told of.

    Raises:
        NotCapturableError: the graph is not sure to do the same.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        module: nn.Module,
        function: types.FunctionType,
        expected: Operators,
        interceptor_class: type[Interceptor],
    ) -> None:
        super().__init__(graph, inputs, _no_context)
        self._class = interceptor_class
        # They are for compilers, which are not asked.
        self._inputs, self._context = (), None
        # No other module runs this code, and no other function.
        self._called, self._function = weakref.ref(module), weakref.ref(function)
        if any(node.op == "get_attr" for node in graph.graph.nodes):
            # Operators in place would write into them below.
            raise NotCapturableError("the graph holds tensors")
        if self._operators(module, _internals.symbolic_inputs(graph.graph)) != expected:
            raise NotCapturableError("Dynamo captures other operators")

    def _roots(self) -> list[Any]:
        """As of the function that is called: what captured code runs in is a frame of Dynamo's."""
        # Modules below that of the call are also found as globals of the program's modules.
        variables = getattr(self._function(), "__globals__", {})
        return self._code.places.roots({_MODULE: self._called()}, variables)

    def _is_forward_of(self, base: Frame) -> bool:
        """False: its modules are found without a look at a frame."""
        return False

    def _note(self, interceptor: Interceptor, way: str) -> None:
        """Nothing: no code of the program is compiled."""

    def _compile(
        self, interceptor: Interceptor, binding: Binding, steps: Sequence[Step], runs: int = 0
    ) -> str:
        """None: the program has asked for no compiler, whose results are others."""
        return ""

    def _operators(self, module: nn.Module, inputs: Sequence[Any]) -> Operators:
        """The operators that an interceptor will notice, found with tensors without values."""
        interceptor = self._class(NoTools(), Labels())  # type: ignore[arg-type]
        interceptor.stale = False
        modules = self._code.places.find(self._roots())
        with torch.set_grad_enabled(torch.is_grad_enabled()), _internals.without_values(inputs):
            interceptor.enter_module(module)
            frame = interceptor.frame
            interceptor.enter()
            try:
                NoticingRun(interceptor, self._code, modules, is_static=False).run(inputs)
            finally:
                interceptor.exit()
        return operators_of(frame)


def operators_of(frame: Frame) -> Operators:
    """The operators of the module call that has just run in a frame.

    Modules whose calls run none, such as ``nn.Identity``, are left out: a graph does not have them.
    """
    names = sorted((name, cell[0]) for name, cell in frame.names.items() if cell[0])
    calls = (
        (child.name, *(operators_of(called) for called in child.frames[: child.calls]))
        for child in frame.children.values()
    )
    return (*names, *sorted(call for call in calls if any(call[1:])))


def _no_context() -> Any:
    raise RuntimeError("no compiler has a captured module")


# -- by module ----------------------------------------------------------------

_CAPTURED: tuple[Any, Any] = (
    torch.utils.weak.WeakIdKeyDictionary(),
    torch.utils.weak.WeakIdKeyDictionary(),
)
"""By module; the second for inference mode, which Dynamo's guards do not tell from ``no_grad``."""


def _captured(module: nn.Module) -> CapturedModule:
    by_module = _CAPTURED[torch.is_inference_mode_enabled()]
    found: CapturedModule | None = by_module.get(module)
    if found is not None and found.is_outdated():
        found.drop()
        found = None
    if found is None:
        found = by_module[module] = CapturedModule(module)
    return found
