"""Interceptors: how the calls of operators are noticed.

The seam: an interceptor serves one thread, tracks where it is (:class:`Tracker`),
and hands operators that are not plainly vanilla to an :class:`Executor`.
:class:`ModeInterceptor` works everywhere; a faster one may be put in its place
by :func:`create`.
"""

from __future__ import annotations

import abc
import functools
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.errors import CoverageWarning
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.nodes import count_foreign
from amanda_torch.eager.execution import Executor
from amanda_torch.operators.names import Kind, kind_of, name_of
from amanda_torch.thread.modules import Cell, Labels, Tracker

if TYPE_CHECKING:
    from amanda.state import LiveScope

_MANY = 10_000
_OVERRIDING_NOTHING = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_UNKNOWN: Any = ActionPlan("not analysed yet")
_NO_OPERATOR: Any = []


class Interceptor(Tracker, abc.ABC):
    """The seam between the driver and the way in which operators are noticed.

    Attributes:
        stale: look before the next operator: `outdated` or `muted`.
        outdated: plans may be out of date; set by any thread, acted on by its own.
        muted: depth of code in this thread that runs vanilla.
        thread: the state of its thread, see :class:`amanda.state.ThreadState`.
        executor: runs the operators that are not plainly vanilla.
    """

    def __init__(self, dispatcher: Dispatcher, labels: Labels) -> None:
        super().__init__(labels, dispatcher.not_seen)
        self.stale = True
        self.outdated = True
        self.muted = 0
        self.thread = vars(STATE)
        self.executor = Executor(dispatcher, self)
        self._dispatcher = dispatcher
        self._active: tuple[Any, ...] = ()
        self._entered: weakref.WeakKeyDictionary[LiveScope, int] = weakref.WeakKeyDictionary()

    @abc.abstractmethod
    def enter(self, above: int = 0) -> None:
        """Start to notice the current thread's operators, below `above` modes."""

    @abc.abstractmethod
    def exit(self) -> int:
        """Stop, wherever in the thread's modes this interceptor sits: below how many."""

    @abc.abstractmethod
    def is_alone(self) -> bool:
        """Whether it listens and no other mode does."""

    @abc.abstractmethod
    def is_listening(self) -> bool:
        """Whether operators called now would be noticed."""

    def enter_scopes(self) -> None:
        """Note where in the thread's autograd history its new scopes begin."""
        self.stale = self.outdated = True
        for scope in STATE.scopes:
            self._entered.setdefault(scope, _internals.sequence_number())

    def begin_backward(self, roots: Sequence[Any]) -> None:
        """Count, at a scope's first backward pass, what has run before the scope."""
        for scope, start in list(self._entered.items()):
            if scope.alive and start >= 0 and scope.analyses_backward():
                foreign = count_foreign(roots, start)
                self._entered[scope] = -1
                if foreign:
                    reason = "backward operators whose forward ran outside of the scope"
                    scope.statistics.not_seen[reason] += foreign

    def clear(self) -> None:
        """Let go of the scopes, and of all that was recorded under them."""
        super().clear()
        self.executor.claimer.clear()
        self._active = ()
        self._entered.clear()

    def mute(self) -> None:
        """Run vanilla until :meth:`unmute`."""
        self.muted += 1
        self.stale = True

    def unmute(self) -> None:
        """End what :meth:`mute` has begun."""
        self.muted -= 1
        if not self.muted:
            self.stale = self.outdated

    def is_quiet(self) -> bool:
        """Whether what runs now is vanilla, or a tool's code."""
        return bool(self.muted or self.thread["paused"])

    def refresh(self) -> bool:
        """Find out what applies now; False if this thread runs vanilla altogether."""
        if self.muted:
            return False
        self.stale = self.outdated = False
        scopes = STATE.scopes
        if not any(scope.alive for scope in scopes):
            self.stale = self.outdated = True
            return False
        active = self._dispatcher.scopes()
        if active != self._active or not STATE.cache:
            self._active = active
            self.forget_plans()
        if any(scope.is_bound for scope in scopes):
            # A suspended generator gives no notice: look again at each operator.
            self.stale = self.outdated = True
        return True

    def replan(self) -> None:
        """Recorded actions or scopes have changed: ask for all plans anew."""
        self._active = (None,)
        self.stale = self.outdated = True

    def run_function(self, cls: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        """An ``autograd.Function`` is an operator, named after its class."""
        call = functools.partial(_internals.apply_function, cls)
        if self.stale and not self.refresh():
            return call(*args, **kwargs)
        name = cls.__name__
        cell = self.frame.cell_for(cls, name)
        # No mode was popped on the way here: what we do ourselves must not be noticed.
        self.mute()
        try:
            return self.run_leaf(cell, call, name, args, kwargs, cls)
        finally:
            self.unmute()

    def run_leaf(
        self, cell: Cell, func: Any, name: str, args: Any, kwargs: Any, key: Any = None
    ) -> Any:
        """Count an operator and run it according to its plan."""
        count = cell[0] + 1
        cell[0] = count
        plan = cell[count] if count < len(cell) else _UNKNOWN
        if plan is None:
            return func(*args, **kwargs)
        return self.run_planned(plan, cell, count, func, name, args, kwargs, key)

    def run_planned(
        self,
        plan: ActionPlan,
        cell: Cell,
        count: int,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        key: Any = None,
    ) -> Any:
        """Run an operator whose plan is not empty or not known, and keep its plan."""
        if plan.is_claim:
            return self.executor.run_claimed(plan, func, args, kwargs, name)
        if plan.is_blind:
            return self.executor.run_blind(plan, func, args, kwargs, name)
        if plan.is_around:
            return self.executor.run_around(plan, func, args, kwargs, name, key)
        if _internals.is_traced():
            return func(*args, **kwargs)
        if plan is not _UNKNOWN:
            return self.executor.run(plan, func, name, plan.op_id, args, kwargs, key)[0]
        if count == _MANY and self.frame is self.root:
            warnings.warn(
                f"{_MANY} {name} operators outside of modules without an end of an iteration: "
                "each has an id and actions of its own; call amanda.new_iteration() in the loop",
                CoverageWarning,
                stacklevel=3,
            )
        generation = self.generation
        op_id = f"{self.frame.path}/{name}:{count - 1}"
        known = self._dispatcher.plan(op_id)
        if known is not None and not known:
            result = func(*args, **kwargs)
        else:
            result, known = self.executor.run(known, func, name, op_id, args, kwargs, key)
        if generation == self.generation and self._dispatcher.is_cacheable():
            cell.extend([_UNKNOWN] * (count + 1 - len(cell)))
            cell[count] = known or None
        return result


class ModeInterceptor(Interceptor, TorchFunctionMode):
    """Notices operators through a ``TorchFunctionMode``, PyTorch's public way."""

    def __init__(self, dispatcher: Dispatcher, labels: Labels) -> None:
        Interceptor.__init__(self, dispatcher, labels)
        self._kinds: dict[Any, Kind] = {}

    def enter(self, above: int = 0) -> None:
        modes = [_internals.pop_mode() for _ in range(above)]
        _internals.push_mode(self)
        for mode in reversed(modes):
            _internals.push_mode(mode)

    def exit(self) -> int:
        modes = []
        while _internals.mode_depth():
            mode = _internals.pop_mode()
            if mode is self:
                break
            modes.append(mode)
        for mode in reversed(modes):
            _internals.push_mode(mode)
        return len(modes)

    def is_alone(self) -> bool:
        return _internals.mode_depth() == 1 and _internals.mode_at(0) is self

    def is_listening(self) -> bool:
        depth = _internals.mode_depth()
        return any(_internals.mode_at(i) is self for i in range(depth))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stale and not self.refresh():
            return func(*args, **kwargs) if kwargs else func(*args)
        cell = self.cells.get(func)
        if cell is None:
            return self._uncommon(func, types, args, kwargs or {})
        if cell is _NO_OPERATOR:
            return func(*args, **kwargs) if kwargs else func(*args)
        count = cell[0] + 1
        cell[0] = count
        try:
            plan = cell[count]
        except IndexError:
            plan = _UNKNOWN
        if plan is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if plan.is_claim:
            return self.executor.run_claimed(plan, func, args, kwargs or {})
        if plan.is_blind:
            return self.executor.run_blind(plan, func, args, kwargs or {})
        if plan.is_around:
            return self.executor.run_around(plan, func, args, kwargs or {})
        return self.run_planned(plan, cell, count, func, name_of(func), args, kwargs or {})

    def _uncommon(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What has not been met in this frame, or is a Python-level function."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = kind_of(func)
        if kind is Kind.IGNORED:
            self.cells[func] = _NO_OPERATOR
            return func(*args, **kwargs)
        if func is _internals.FUNCTORCH_FUNCTION:
            cls = args[0]
            cell = self.frame.names.setdefault(cls.__name__, [0])
            call = functools.partial(func, cls)
            return self.run_leaf(cell, call, cls.__name__, args[1:], kwargs, cls)
        name = name_of(func)
        if kind is Kind.LEAF:
            return self.run_leaf(self.frame.cell_for(func, name), func, name, args, kwargs)
        if sys._getframe(2).f_code is _internals.PYTHON_EVENT:
            if not _OVERRIDING_NOTHING.issuperset(types):
                # A subclass overrides it: PyTorch asks that next, with our mode on.
                return NotImplemented
            return self._descend(func, types, args, kwargs)
        # A C-level function that reports itself as its Python twin is the leaf. It
        # must not be found in `cells`, where the twin's own events would find it too.
        cell = self.frame.names.setdefault(name, [0])
        return self.run_leaf(cell, func, name, args, kwargs)

    def _descend(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a Python-level function with its inner operators noticed."""
        _internals.push_mode(self)
        try:
            return _internals.call_composite(func, types, args, kwargs)
        finally:
            _internals.pop_mode()


def create(dispatcher: Dispatcher, labels: Labels) -> Interceptor:
    """An interceptor for the current thread."""
    return ModeInterceptor(dispatcher, labels)
