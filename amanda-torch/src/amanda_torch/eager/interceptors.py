"""Intercepts the operators of one thread, through a ``TorchFunctionMode``.

An :class:`Interceptor` serves one thread. It follows the module calls of the thread (see
:class:`~amanda_torch.eager.op_ids.Tracker`), and hands operators with actions or pending analyses
to an :class:`~amanda_torch.eager.execution.Executor`. If a scope covers the current thread, its
interceptor is ``LOCAL.interceptor``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from amanda.engine.op_ids import MANY, SHARING, shared_id
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.nodes import count_foreign
from amanda_torch.eager.execution import Executor, KnownOp
from amanda_torch.eager.fused_modules import FusedModules
from amanda_torch.eager.module_frames import Cell
from amanda_torch.eager.module_names import Labels
from amanda_torch.eager.op_ids import Tracker
from amanda_torch.eager.phases import is_plainly_recorded, makes, phase_outside
from amanda_torch.operators.names import Kind, function_name, kind_of, name_of
from amanda_torch.operators.replaced_functions import original_of
from amanda_torch.routines import RoutineDispatcher

if TYPE_CHECKING:
    from amanda.interface.specs import Phase
    from amanda.state import LiveScope

_UNKNOWN: Any = object()
"""Entry of a cell for an operator whose plan has not been looked up."""

NO_OPERATOR: Any = []
"""The cell of functions that are no operators."""


_mode_depth = _internals.mode_depth

Met = tuple[Cell, int, Any, tuple[Any, ...], dict[str, Any], Any, Any]
"""An executed operator: its cell, its position there, its function, arguments, key, result."""


class Interceptor(Tracker, TorchFunctionMode):
    """Intercepts the operators of one thread.

    Args:
        sees_transforms: whether operators under functorch transforms are intercepted.
        sees_composites: whether operators that PyTorch's functions in Python call are intercepted.

    Attributes:
        stale: whether to call :meth:`refresh` before the next operator: `outdated` or `muted`.
        outdated: True if plans may be out of date. Any thread sets it; its own thread acts on it.
        muted: depth of code in this thread that runs vanilla.
        thread: ``vars()`` of the thread's :class:`amanda.state.ThreadState`.
        executor: runs the operators with actions or pending analyses.
        ident: identifier of its thread.
        ended: True if its thread's last scope has ended: the interceptor will be removed.
        met: list to which operators are added when their plan is looked up; None to note none.
        uncompiled: in force from the first to the last scope of its thread, if the first one was
            opened within a compiled function.
    """

    note_report: Callable[[Any], bool] | None = None
    """Counts a report of PyTorch's; True if no work is left for it. None without the gate, which
    calls most operators."""

    def __init__(
        self,
        dispatcher: RoutineDispatcher,
        labels: Labels,
        sees_transforms: bool = True,
        sees_composites: bool = True,
    ) -> None:
        Tracker.__init__(self, labels)
        TorchFunctionMode.__init__(self)
        self.stale = True
        self.outdated = True
        self.muted = 0
        # Faster than by STATE, which looks up the thread at each access.
        self.thread = vars(STATE)
        self.executor = Executor(dispatcher, self)
        self._dispatcher = dispatcher
        self._sees_transforms = sees_transforms
        self._sees_composites = sees_composites
        self._replan = True
        self._above: int | None = None
        self._entered: weakref.WeakKeyDictionary[LiveScope, int] = weakref.WeakKeyDictionary()
        self._kinds: dict[Any, Kind] = {}
        self.ident = threading.get_ident()
        self.ended = False
        self._is_on = False
        self.fused = FusedModules(self, dispatcher)
        self.met: list[Met] | None = None
        self.uncompiled = _internals.Uncompiled()

    # -- on and off -------------------------------------------------------

    def enter(self, above: int = 0) -> None:
        """Start to intercept the current thread's operators, below `above` other modes."""
        self._is_on = True
        if not above:
            _internals.push_mode(self)
            return
        modes = list(_internals.modes())
        modes.insert(max(0, len(modes) - above), self)
        _internals.set_modes(modes)

    def exit(self) -> int:
        """Remove this mode from the thread's stack; return how many modes were above it."""
        modes = _internals.modes()
        above = modes[::-1].index(self) if self in modes else 0
        # An interrupt may have left it there more than once.
        _internals.set_modes([mode for mode in modes if mode is not self])
        self._is_on = False
        return above

    def is_alone(self) -> bool:
        """True if it is the only function mode of the thread."""
        return _mode_depth() == 1 and _internals.mode_at(0) is self

    def is_listening(self) -> bool:
        """True if operators called now would be intercepted."""
        return self in _internals.modes()

    def mute(self) -> None:
        """Run vanilla until :meth:`unmute`."""
        self.muted += 1
        # A backward pass inside puts this mode on again.
        self.stale = True
        if self.muted == 1 and self.is_listening():
            self._above = self.exit()

    def unmute(self) -> None:
        """Intercept operators again."""
        self.muted -= 1
        if not self.muted:
            self.stale = self.outdated
            if self._above is not None:
                above, self._above = self._above, None
                self.enter(above)

    def is_quiet(self) -> bool:
        """True if the thread runs muted code or a tool's."""
        return bool(self.muted or self.thread["paused"])

    def note_compiled(self, part: str, mode: str) -> None:
        """See :meth:`amanda.engine.dispatch.Dispatcher.note_compiled`."""
        self._dispatcher.note_compiled(part, mode)

    # -- scopes -----------------------------------------------------------

    def enter_scopes(self) -> None:
        """Note where in the thread's autograd history its new scopes begin."""
        self.stale = self.outdated = True
        for scope in reversed(STATE.scopes):
            if scope in self._entered and not STATE.held:
                break  # with all that are outside of it
            # Nodes with lower numbers are of operators that ran before the scope.
            self._entered.setdefault(scope, _internals.sequence_number())

    def begin_backward(self, roots: Sequence[Any]) -> None:
        """At a scope's first backward pass, count its operators that ran before the scope as not
        seen."""
        for scope, start in list(self._entered.items()):
            if scope.alive and start >= 0 and scope.analyses_backward():
                with _internals.reading(roots):
                    foreign = count_foreign(roots, start)
                self._entered[scope] = -1
                if foreign:
                    reason = "backward operators whose forward ran outside of the scope"
                    scope.statistics.count_not_seen(reason, foreign)

    def end(self) -> None:
        """Stop for good: its thread, the current one, has left its last scope."""
        self.ended = self.stale = self.outdated = True
        # PyTorch has popped the mode within an operator, and pushes it again afterwards.
        if self._is_on and not self.is_listening():
            _internals.call_soon(remove_leftovers)
        self.exit()
        self.clear()

    def end_elsewhere(self) -> None:
        """Stop for good: another thread has ended the last scope of its thread.

        Only its thread can remove the mode: the main thread at once, others at their next operator.
        """
        self.ended = self.stale = self.outdated = True
        if self.ident == threading.main_thread().ident:
            # Dynamo would trace the mode if the next operator is a compiled function.
            _internals.call_in_main_thread(remove_leftovers)

    def clear(self) -> None:
        """Drop the scopes, and all facts learned under them."""
        super().clear()
        self.executor.claimer.clear()
        self.active = ()
        self._above = None
        self._entered.clear()

    def refresh(self) -> bool:
        """Look up the scopes that apply now; False if this thread runs vanilla."""
        if self.ended:
            _internals.call_soon(remove_leftovers)
            return False
        if self.muted:
            return False
        self.stale = self.outdated = False
        # Read after the flags are lowered: another thread raises them last.
        replan, self._replan = self._replan, False
        active = self._dispatcher.scopes()
        if not any(scope.alive for scope in STATE.scopes):
            self.stale = self.outdated = self._replan = True
            return False
        if replan or active != self.active or not STATE.cache:
            self.active = active
            self.fused.forget()
            self.forget_plans()
            points = self._dispatcher.points
            self.tells = points.is_wanted(active)
            tells_modules = self.tells and points.wants_modules(active)
            if tells_modules != self.tells_modules:
                self.tell_modules(tells_modules)
        if STATE.held:
            # A generator may be suspended at any time: check at each operator.
            self.stale = self.outdated = True
        if not self._sees_transforms:
            self.stale = self.outdated = True
            return not _internals.in_functorch()
        return True

    def replan(self) -> None:
        """Look up all plans anew, since recorded actions or scopes have changed."""
        self._replan = True
        self.outdated = True
        self.stale = True

    # -- operators --------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note_report = self.note_report
        if note_report is not None and note_report(func):
            return None
        kwargs = kwargs or {}
        if self.stale and not self.refresh():
            return func(*args, **kwargs)
        cell = self.cells.get(func)
        if cell is None:
            return self._uncommon(func, types, args, kwargs)
        if cell is NO_OPERATOR:
            return func(*args, **kwargs)
        if type(cell) is tuple:
            return self._run_outside(func, name_of(func), args, kwargs)
        count = cell[0] + 1
        cell[0] = count
        try:
            known = cell[count]
        except IndexError:
            known = _UNKNOWN
        if known is None:
            return func(*args, **kwargs)
        if known is _UNKNOWN:
            return self._run_unknown(cell, count, func, name_of(func), args, kwargs)
        return self.executor.run_known(known, func, args, kwargs)

    def _uncommon(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that is new in this frame, or written in Python."""
        kind = self._kinds.get(func)
        if kind is None:
            original = original_of(func)
            if original is not None:
                # The program's own function, which has been called, calls it.
                func = original
            kind = kind_of(func)
            if original is None:
                self._kinds[func] = kind
        if kind is Kind.IGNORED:
            self.cells[func] = NO_OPERATOR
            return func(*args, **kwargs)
        if func is _internals.FUNCTORCH_FUNCTION:
            cls = args[0]
            name = function_name(cls)
            cell = self.frame.names.setdefault(name, [0])
            call = functools.partial(func, cls)
            return self.run_leaf(cell, call, name, args[1:], kwargs, cls)
        name = name_of(func)
        if kind is Kind.LEAF:
            if _internals.is_registered(func) and _is_below_autograd():
                # The backward operator around it has been seen.
                return func(*args, **kwargs)
            frame = self.frame
            # Within modules phases need not be determined.
            if (frame.is_checked or frame.asides) and self.asks(name):
                return self._run_outside(func, name, args, kwargs)
            return self.run_leaf(frame.cell_for(func, name), func, name, args, kwargs)
        if _internals.caller_frame(2).f_code is _internals.PYTHON_EVENT:
            if not self._sees_composites:
                return self.run_muted(func, args, kwargs)
            if not _internals.PLAIN_TENSORS.issuperset(types):
                # A subclass overrides it: PyTorch calls the override next, with our mode on.
                return NotImplemented
            return self._descend(func, types, args, kwargs)
        # A C-level function that reports itself as its Python twin is the operator. It must
        # not be found in `cells`, where the calls of the twin would find it, too.
        cell = self.frame.names.setdefault(name, [0])
        return self.run_leaf(cell, func, name, args, kwargs)

    def _run_outside(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operator outside of modules, where the operators of each phase are counted
        separately."""
        many = self.root.names.get(name)
        if many is not None and many[0] >= MANY:
            # An operator with a shared id: its phase is not determined.
            return self.run_leaf(many, func, name, args, kwargs)
        if self.has_recorded and self.has_run and is_plainly_recorded(name, args):
            cell = self.root.cell_for(func, name)
            # The gate calls Python for a cell that is not a list.
            self.root.cells[func] = (cell,)
            return self.run_leaf(cell, func, name, args, kwargs)
        # Reading tensors would be recorded by a tracer.
        phase = "forward" if _internals.is_traced() else self._phase(name, args, kwargs)
        root, frame = self.root, self.outside(phase)
        cell = frame.names.setdefault(name, [0])
        if frame is root:
            if not self.has_run:
                self.checked[func] = name
            result = self.run_leaf(cell, func, name, args, kwargs)
            if not torch.is_grad_enabled():
                self.note_outside(result, phase)
            return result
        self.go_to(frame)
        try:
            result = self.run_leaf(cell, func, name, args, kwargs)
        finally:
            if self.frame is frame:
                self.go_to(root)
        if phase == "other" and not makes(name, args):
            self.note_outside(result, phase)
        return result

    def _phase(self, name: str, args: Any, kwargs: Any) -> Phase:
        """The phase of an operator outside of modules."""
        if kwargs.get("requires_grad") is True:
            # It creates a weight.
            name = "requires_grad_"
        values = (*args, *kwargs.values()) if kwargs else args
        outer = _internals.modes()
        try:
            if outer:
                _internals.hide_modes()
            with _internals.reading(values):
                return phase_outside(name, values, self)
        finally:
            if outer:
                _internals.set_modes(outer)

    def run_muted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; within it the thread runs vanilla."""
        self.mute()
        try:
            return func(*args, **kwargs)
        finally:
            self.unmute()

    def _descend(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a function written in Python; the operators that it calls are intercepted."""
        _internals.push_mode(self)
        try:
            # The function may warn at its caller's line. The stack is: caller, function, torch's
            # override handler, and three methods of this mode.
            return _internals.call_in_place(
                _internals.call_composite,
                (func, types, args, kwargs),
                {},
                _internals.caller_frame(3).f_back.f_back,
            )
        finally:
            _internals.pop_mode()

    def run_function(self, cls: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        """Run an ``autograd.Function`` as an operator, named after its class."""
        call = functools.partial(_internals.apply_function, cls)
        return self.run_unreported(call, function_name(cls), args, kwargs, cls)

    def run_unreported(self, call: Any, name: str, args: Any, kwargs: Any, key: Any = None) -> Any:
        """Run an operator that does not report itself to modes."""
        if self.stale and not self.refresh():
            return call(*args, **kwargs)
        # By the name alone: a program may define the class anew at each call.
        cell = self.frame.names.setdefault(name, [0])
        # PyTorch pops a mode while it handles an operator; no mode was popped on the way here.
        self.mute()
        try:
            return self.run_leaf(cell, call, name, args, kwargs, key)
        finally:
            self.unmute()

    def run_leaf(
        self, cell: Cell, func: Any, name: str, args: Any, kwargs: Any, key: Any = None
    ) -> Any:
        """Count an operator and run it according to its plan."""
        count = cell[0] + 1
        cell[0] = count
        known = cell[count] if count < len(cell) else _UNKNOWN
        if known is None:
            if self.note_report is not None:
                # At the program's line, which warnings name. The gate itself calls most operators;
                # with the mode it would be done for each, which takes longer.
                return _internals.call_in_place(func, args, kwargs)
            return func(*args, **kwargs)
        if known is _UNKNOWN:
            return self._run_unknown(cell, count, func, name, args, kwargs, key)
        return self.executor.run_known(known, func, args, kwargs, key)

    def _run_unknown(
        self, cell: Cell, count: int, func: Any, name: str, args: Any, kwargs: Any, key: Any = None
    ) -> Any:
        """Run an operator that is new in this thread."""
        frame = self.frame
        if count > MANY and (frame is self.root or frame.phase in SHARING):
            op_id = shared_id(frame.path, name, count - 1, torch.__name__)
            return self._run_shared(op_id, func, name, args, kwargs, key)
        op_id = f"{frame.path}/{name}:{count - 1}"
        return self._run_new(cell, count, op_id, func, name, args, kwargs, key)

    def _run_shared(
        self, op_id: str, func: Any, name: str, args: Any, kwargs: Any, key: Any
    ) -> Any:
        """Run one of the operators that share an id."""
        cell = self.frame.names.setdefault(op_id, [0])
        # Each has an entry of its own in `met`.
        known = cell[1] if len(cell) > 1 and self.met is None else _UNKNOWN
        if known is _UNKNOWN:
            return self._run_new(cell, 1, op_id, func, name, args, kwargs, key)
        if known is None:
            return _internals.call_in_place(func, args, kwargs)
        return self.executor.run_known(known, func, args, kwargs, key)

    def _run_new(
        self,
        cell: Cell,
        count: int,
        op_id: str,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        key: Any,
    ) -> Any:
        """Run an operator whose plan this thread has not looked up, and keep the facts about it."""
        if _internals.is_traced():
            # A tracer would record the routines as a part of the model.
            return func(*args, **kwargs)
        generation, executor = self.generation, self.executor
        plan = self._dispatcher.plan(op_id, self.active)
        is_trial = self.fused.is_trial
        known = None
        if plan is not None and (is_trial or not plan):
            result = _internals.call_in_place(func, args, kwargs)
        else:
            known = KnownOp(op_id, name, executor, plan)
            if is_trial:
                later = self.fused.watching
                return executor.run_described(known, func, args, kwargs, key, later=later)
            run = executor.run_described if plan is None else executor.run_known
            result = run(known, func, args, kwargs, key)
            known = known if known.plan else None
        if self.met is not None:
            self.met.append((cell, count, func, args, kwargs, key, result))
            if known is not None:
                # Captured code reads them, and adds to them.
                self.executor.gradients_of(known)
        # Not if the operator has opened a scope, or its analysis has called reanalyse().
        if generation == self.generation and self._dispatcher.is_cacheable():
            cell.extend([_UNKNOWN] * (count + 1 - len(cell)))
            cell[count] = known
        return result


class Local(threading.local):
    """State of the current thread.

    Attributes:
        interceptor: intercepts the thread's operators; None outside of scopes.
    """

    interceptor: Interceptor | None = None


LOCAL = Local()


def remove_leftovers() -> bool:
    """Remove the current thread's interceptors whose scopes have ended; return True if there was
    one."""
    modes = _internals.modes()
    left = [mode for mode in modes if isinstance(mode, Interceptor) and mode.ended]
    if left:
        _internals.set_modes([mode for mode in modes if mode not in left])
    if LOCAL.interceptor is not None and LOCAL.interceptor.ended:
        LOCAL.interceptor.clear()
        LOCAL.interceptor = None
    return bool(left)


class muted:  # noqa: N801 - reads as a statement
    """Run the current thread vanilla within it.

    Args:
        only_reads: True if the code only reads tensors: classes that override operators are not
            called.
    """

    __slots__ = ("_interceptor", "_running")

    def __init__(self, only_reads: bool = False) -> None:
        runs = _internals.READING.is_on and not only_reads
        self._running = _internals.running() if runs else None

    def __enter__(self) -> None:
        if self._running is not None:
            self._running.__enter__()
        self._interceptor = LOCAL.interceptor
        if self._interceptor is not None:
            self._interceptor.mute()

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.__exit__()
        if self._interceptor is not None:
            self._interceptor.unmute()


def _is_below_autograd() -> bool:
    """True if a backward operator runs Python code that is called in place of its kernels: of a
    mode or of a class of tensors."""
    frame = _internals.caller_frame(2) if _internals.in_backward() else None
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False
