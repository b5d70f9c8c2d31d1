"""The run of a captured graph in which its operators are intercepted, and the facts noted in it.

The interceptor is on, as in eager mode. A :class:`CallRecord` of each call of the graph has the
facts about that call for later runs::

    run = NotedRun(interceptor, code, modules, is_static)
    result = run.run(inputs)
    binding = run.binding()         # None: the next run is intercepted, too
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amanda.engine.plan import ActionPlan
from amanda_torch import _internals
from amanda_torch.compiled.bound_graph import BoundGraph, CounterChange
from amanda_torch.compiled.code import CallSite, GraphCode
from amanda_torch.compiled.deferred import CalledModule
from amanda_torch.compiled.dry_run import GraphDryRun
from amanda_torch.compiled.gradients import learned, reason_against_gradients
from amanda_torch.compiled.inlining import OpActions, is_traceable, only_follows, reason_against
from amanda_torch.compiled.operators import Operator
from amanda_torch.compiled.passes import Passes
from amanda_torch.eager.execution import KnownOp
from amanda_torch.eager.interceptors import Interceptor, Met
from amanda_torch.eager.module_frames import Child, Frame
from amanda_torch.operators.names import Kind, kind_of

_MODULES_NOT_FOUND = "calls of modules in captured graphs whose modules are not found"

_NOT_KEPT: Any = object()
"""Represents an operator without a kept plan."""


class NotedRun:
    """A run in which the interceptor sees each operator.

    Args:
        interceptor: that of the current thread.
        code: of the graph.
        modules: modules of the graph, by the numbers of its module calls.
        is_static: True if all numbers in the graph, including sizes, are constants.
        dry_run: notes counts and calls of the operators; None if the run is no dry run.

    Attributes:
        is_static: True if all numbers in the graph are constants.
        steps: records of its calls.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        code: GraphCode,
        modules: dict[str, nn.Module],
        is_static: bool,
        dry_run: GraphDryRun | None = None,
    ) -> None:
        self.is_static = is_static
        self._dry_run = dry_run
        self._interceptor = interceptor
        self._code = code
        self._modules = modules
        self._base = interceptor.frame
        self._generation = interceptor.generation
        self._start = self._base.counters()
        self._iteration = interceptor.iteration
        self._begins: Child | None = None
        self._entered: list[str] = []
        self._parents: list[Frame] = []
        self._passes = Passes(interceptor)
        self._callers: dict[Frame, Frame] = {}
        self._begun: list[Frame] = []
        self._called: dict[int, CalledModule] = {}
        self._inputs: dict[int, Sequence[Any]] = {}
        self.steps: list[CallRecord] = []

    def run(self, inputs: Sequence[Any]) -> Any:
        """The outputs of the graph."""
        interceptor = self._interceptor
        self._base.forget_plans(interceptor.generation)
        outer, interceptor.met = interceptor.met, []
        try:
            sites = self._code.sites
            functions = [functools.partial(self._site, site) for site in sites]
            result = self._code.function(functions)(*inputs)
            self._leave(0)
            self._passes.learn_outputs(result)
            return result
        finally:
            interceptor.met = outer
            self._passes.give_up()
            self._leave(0)

    def _site(self, site: CallSite, /, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the graph."""
        interceptor = self._interceptor
        # Dynamo notes no module calls with what switches gradients or autocast on and off.
        is_switch = not site.calls and kind_of(site.function) is Kind.IGNORED
        was_in_pass = self._passes.begun is not None
        entered = () if is_switch else self._go(site)
        leaves = was_in_pass and self._passes.begun is None
        if site.function is _internals.module_mark:
            self._mark(site, entered, leaves, *args)
            return None
        met = interceptor.met = []
        # The same in each run: Dynamo guards the initial mode of a graph.
        records = torch.is_grad_enabled()
        start = _internals.sequence_number()
        result = site.function(*args, **kwargs)
        interceptor.met = []
        if self._dry_run is not None:
            self._dry_run.note_operators(met, start, site.name, result)
        if self._passes.begun is not None:
            self._passes.note_computed(result)
        operator = Operator.found(met, args, kwargs, result, self.is_static)
        is_one = isinstance(result, torch.Tensor)
        frame = interceptor.frame
        step = CallRecord(site, frame, entered, leaves, met, operator, is_one, records)
        step.begun, self._begun = self._begun, []
        self.steps.append(step)
        return result

    def _mark(
        self,
        site: CallSite,
        entered: tuple[nn.Module, ...],
        leaves: bool,
        number: int,
        is_exit: bool,
        tensors: Sequence[Any],
    ) -> None:
        """Report a call of a module to tools.

        Args:
            entered, leaves: as of :class:`CallRecord`.
            number, is_exit, tensors: see :func:`_internals.module_mark`.
        """
        interceptor, called = self._interceptor, self._called.get(number)
        frame, records = interceptor.frame, torch.is_grad_enabled()
        is_entered = site.calls[-1].key in self._entered
        # A wrapper without a name in ids has no frame, and is not reported.
        is_wrapper = is_entered and frame is self._parents[-1]
        if is_entered and interceptor.tells_modules and not (is_exit or is_wrapper):
            called = CalledModule(interceptor.module_path(), frame.path, _target(frame))
            self._called[number] = called
        step = CallRecord(site, frame, entered, leaves, [], None, False, records, called)
        self.steps.append(step)
        if called is not None:
            self._passes.mark(called, is_exit, tensors)
            if self._dry_run is not None:
                self._dry_run.note_module(called, is_exit, self._given(number, tensors), tensors)
        elif interceptor.tells_modules and not (is_exit or is_wrapper or self._is_base(site)):
            interceptor.executor.claimer.dispatcher.not_seen(_MODULES_NOT_FOUND)

    def _is_base(self, site: CallSite) -> bool:
        """True if a mark belongs to the module that has been entered before the graph."""
        base, module = self._base.module, self._modules.get(site.calls[0].module)
        return len(site.calls) == 1 and base is not None and base() is module

    def _given(self, number: int, tensors: Sequence[Any]) -> Sequence[Any]:
        """The inputs of a module, the same objects at its entry and at its exit."""
        return self._inputs.setdefault(number, tensors)

    # -- modules ----------------------------------------------------------

    def _go(self, site: CallSite) -> tuple[nn.Module, ...]:
        """Enter the module calls of a site; return the outermost modules among them."""
        calls = [call for call in site.calls if call.module in self._modules]
        if calls and self._base.module is not None:
            # The compiled function is a module's, which has been entered.
            outermost = self._modules[calls[0].module]
            if outermost is self._base.module():
                calls = calls[1:]
        keys = [call.key for call in calls]
        same = 0
        for old, new in zip(self._entered, keys, strict=False):
            if old != new:
                break
            same += 1
        self._leave(same)
        outermost_entered: list[nn.Module] = []
        for call in calls[same:]:
            self._enter(call.key, self._modules[call.module], outermost_entered)
        return tuple(outermost_entered)

    def _enter(self, key: str, module: nn.Module, outermost: list[nn.Module]) -> None:
        interceptor = self._interceptor
        iteration = interceptor.iteration
        if interceptor.frame is interceptor.root:
            outermost.append(module)
        parent = interceptor.enter_module(module)
        if interceptor.iteration != iteration:
            # Ids outside of modules restart: their operators are looked up again.
            self._base.forget_plans(interceptor.generation)
            if not self.steps:
                self._begins = parent.children.get(id(module))
        self._entered.append(key)
        self._parents.append(parent)
        frame = interceptor.frame
        if frame is not parent:
            frame.forget_plans(interceptor.generation)
            self._callers[frame] = parent
            self._begun.append(frame)
            if parent is interceptor.root:
                self._passes.begin(module)

    def _leave(self, depth: int) -> None:
        while len(self._entered) > depth:
            self._entered.pop()
            parent = self._parents.pop()
            if parent is self._interceptor.root:
                self._passes.end()
            self._interceptor.go_to(parent)

    # -- what was learned -------------------------------------------------

    def entering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that enters the outermost modules of the graph, and calls another
        one."""
        for step in reversed(self.steps):
            function = step.entering(self._interceptor, function, self._passes)
        return function

    def binding(self) -> BoundGraph | None:
        """The binding that runs the graph from now on; None if an operator has no kept plan."""
        interceptor = self._interceptor
        if self._generation != interceptor.generation or interceptor.stale:
            return None
        if not all(step.is_known() for step in self.steps):
            return None
        has_restarted = interceptor.iteration != self._iteration
        change = CounterChange.since(self._start, self._base, self._begins, has_restarted)
        acts = any(step.acts() for step in self.steps)
        callers = list(self._callers.items()) if acts else []
        functions = [
            step.function(interceptor, self._passes, acts, before)
            for before, step in zip((None, *self.steps), self.steps, strict=False)
        ]
        run = self._code.function(functions)
        if acts:
            run = _intercepted(interceptor, run)
        return BoundGraph(run, self._base, self._generation, change, callers, self._passes)


class CallRecord:
    """The record of what one call in the graph did in the first run.

    Args:
        site: the call.
        frame: frame of the module call that it belongs to.
        entered: outermost modules that were entered before it.
        leaves: True if it is the first call after a reported forward pass.
        met: the operators that ran in it.
        operator: its only operator; None for several.
        is_one_output: True if it returned one tensor.
        records: True if gradients may be recorded in it.
        called: the call of a module that it reports; None for other calls.

    Attributes:
        name: name of its node.
        frame: the module call that it belongs to.
        begun: module calls that have begun since the last operator.
    """

    def __init__(
        self,
        site: CallSite,
        frame: Frame,
        entered: tuple[nn.Module, ...],
        leaves: bool,
        met: list[Met],
        operator: Operator | None,
        is_one_output: bool,
        records: bool,
        called: CalledModule | None = None,
    ) -> None:
        self.called = called
        self.begun: Sequence[Frame] = ()
        self.name = site.name
        self._site = site
        self.frame = frame
        self._entered = [weakref.ref(module) for module in entered]
        self._leaves = leaves
        # Read now: an id that occurs again in the run, in another iteration, gets a new entry.
        self._knowns = [cell[count] if count < len(cell) else _NOT_KEPT for cell, count, *_ in met]
        self._is_one_output = is_one_output
        self._operator = operator
        self.records = records

    @property
    def enters(self) -> bool:
        """True if it enters outermost modules."""
        return bool(self._entered)

    def is_known(self) -> bool:
        """True if the interceptor has kept the plans of its operators."""
        return all(known is None or isinstance(known, KnownOp) for known in self._knowns)

    def acts(self) -> bool:
        """True if one of its operators has actions.

        An operator that has only backward actions runs vanilla if no gradient is recorded.
        """
        return any(known is not None and (self.records or known.around) for known in self._knowns)

    def only_follows(self) -> bool:
        """True if all routines at its forward operators can run after the compiled graph."""
        return not self.acts() or (self._operator is not None and only_follows(self._plan()))

    def reason_against(self, compiler: str) -> str:
        """The reason why it cannot be compiled with its actions; "" if it can.

        Args:
            compiler: its name.
        """
        if not self.acts():
            return ""
        if self._operator is None:
            return f"{self._site.function.__name__} is made of several operators"
        plan, known = self._plan(), self._knowns[0]
        reason = reason_against(plan, self._is_one_output)
        if not reason and self._has_gradients():
            nodes = learned(plan, known.gradients) or ()
            reason = reason_against_gradients(plan, known.name, nodes, compiler, is_traceable)
        return reason

    def _has_gradients(self) -> bool:
        """True if there are actions at its backward operators, or on its gradients."""
        plan = self._plan()
        return self.records and (plan.claims or plan.acts_on_gradients)

    def is_learned(self) -> bool:
        """True if no analysis of its backward operators is pending."""
        if not (self.acts() and self._has_gradients()):
            return True
        return learned(self._plan(), self._knowns[0].gradients) is not None

    def inlined(self) -> OpActions:
        """The actions on its operator."""
        assert self._operator is not None
        plan, gradients = self._plan(), self._knowns[0].gradients
        if not self._has_gradients():
            return OpActions(plan, self._operator)
        nodes = learned(plan, gradients) if plan.claims else None
        return OpActions(plan, self._operator, gradients, nodes)

    def _plan(self) -> ActionPlan:
        plan: ActionPlan = self._knowns[0].plan
        return plan

    def function(
        self,
        interceptor: Interceptor,
        passes: Passes,
        is_intercepted: bool,
        before: CallRecord | None,
    ) -> Callable[..., Any]:
        """Return the function for this call in later runs.

        Args:
            passes: reports the forward passes that begin and end before it.
            is_intercepted: True if the interceptor is on, and its frame has to be set.
            before: the call before it; None for the first one.
        """
        found = self._site.function
        goes_on = before is not None and before.frame is self.frame
        if self.called is not None:
            found = _marking(interceptor, self.called, self.frame, passes)
        elif is_intercepted and (self.begun or self._entered or not goes_on):
            found = _in_frame(interceptor, found, self.frame, self.begun)
        if self._entered:
            return self.entering(interceptor, found, passes)
        return _leaving(found, passes) if self._leaves else found

    def entering(
        self, interceptor: Interceptor, function: Callable[..., Any], passes: Passes
    ) -> Callable[..., Any]:
        """A function that enters its outermost modules first."""
        return (
            _entering(interceptor, function, self._entered, passes) if self._entered else function
        )


def _target(frame: Frame) -> weakref.ref[nn.Module]:
    """The module of a frame."""
    assert frame.module is not None
    return frame.module


def _marking(
    interceptor: Interceptor, called: CalledModule, frame: Frame, passes: Passes
) -> Callable[..., Any]:
    """Return a function that reports a call of a module to tools."""

    def step(number: int, is_exit: bool, tensors: Sequence[Any]) -> None:
        interceptor.go_to(frame)
        passes.mark(called, is_exit, tensors)

    return step


def _in_frame(
    interceptor: Interceptor, function: Callable[..., Any], frame: Frame, begun: Sequence[Frame]
) -> Callable[..., Any]:
    """Return a function that calls another one in a module's frame, after the calls in `begun` have
    begun."""
    cells = frame.cells

    def step(*args: Any, **kwargs: Any) -> Any:
        for each in begun:
            each.restart()
        interceptor.frame = frame
        interceptor.cells = cells
        return function(*args, **kwargs)

    return step


def _intercepted(interceptor: Interceptor, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a graph with the interceptor on."""

    def run(*inputs: Any) -> Any:
        interceptor.enter()
        try:
            return function(*inputs)
        finally:
            interceptor.exit()

    return run


def _entering(
    interceptor: Interceptor,
    function: Any,
    entered: Sequence[weakref.ref[nn.Module]],
    passes: Passes,
) -> Callable[..., Any]:
    """Return a function that first enters outermost modules, with which an iteration may begin."""

    def step(*args: Any, **kwargs: Any) -> Any:
        for reference in entered:
            interceptor.go_to(interceptor.root)
            module = reference()
            if module is not None and interceptor.enter_module(module) is not interceptor.frame:
                passes.begin(module)
        return function(*args, **kwargs)

    return step


def _leaving(function: Any, passes: Passes) -> Callable[..., Any]:
    """Return a function that first ends a forward pass."""

    def step(*args: Any, **kwargs: Any) -> Any:
        passes.end()
        return function(*args, **kwargs)

    return step
