"""Runs a captured graph operator by operator, as the eager driver runs the program.

The first run of a graph in a module call notices its operators through the thread's interceptor,
which is on, and enters the modules that they belong to: so they have the ids, the analyses and the
actions that they have without ``torch.compile``. What has been learned is bound to the graph's
code. From then on it runs without the interceptor: an operator without actions is called as it is,
one with actions through the eager driver's executor, with its backward operators.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
import torch
from torch import fx, nn

from amanda.engine.plan import ActionPlan
from amanda.errors import CoverageWarning
from amanda.state import ATTACHED
from amanda_torch import _internals
from amanda_torch.compiled.code import GraphCode, Site
from amanda_torch.compiled.direct import DirectCode, Known
from amanda_torch.compiled.first_call import FirstCall
from amanda_torch.compiled.gradients import (
    OtherBackwardError,
    Tally,
    learned,
    other_nodes_said,
    reason_against_gradients,
)
from amanda_torch.compiled.inlining import (
    CompiledCode,
    Inlined,
    Writer,
    is_traceable,
    notes_of,
    reason_against,
)
from amanda_torch.compiled.observers import Observer
from amanda_torch.compiled.operators import Operator
from amanda_torch.compiled.passes import Passes
from amanda_torch.compiled.rehearsal import Rehearsal
from amanda_torch.compiled.rehearsal import reason_against as reason_against_rehearsal
from amanda_torch.eager.execution import KnownOp
from amanda_torch.eager.interceptors import LOCAL, Interceptor, Met
from amanda_torch.eager.op_ids import Cell, Child, Frame
from amanda_torch.operators.names import Kind, kind_of
from amanda_torch.plugin import COMPILER_VARIABLE


class CompiledFunction(Protocol):
    """The function of the program that a graph belongs to.

    Attributes:
        compiler: that which the program has chosen for it.
        is_refused: whether the last graph of it has run operator by operator.
    """

    compiler: Any
    is_refused: bool

    def say(self, reason: str) -> None:
        """Say that a graph runs operator by operator, and why not by its compiler."""


class CapturedGraph:
    """A graph that Dynamo has captured, as the function that runs it in every scope."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        suspended: Callable[[], AbstractContextManager[Any]],
        own: CompiledFunction | None = None,
    ) -> None:
        """Note what can be known before it runs.

        Args:
            module: the graph.
            inputs: symbolic ones, with which Dynamo has a graph compiled.
            suspended: makes the context in which compilers run: without an interceptor.
            own: the function that was compiled; None for a module that was not.

        Raises:
            NotCapturableError: a node of it runs a graph of its own.
        """
        self._code = GraphCode(module)
        self._is_static = not _internals.has_numbers(module.graph)
        self._module = module
        self._inputs = inputs
        self._suspended = suspended
        self._own = own
        self._context = _internals.tracing_context()
        self._vanilla = module.forward
        self._name = f"graph {next(_NUMBERS)}"
        self._rehearsals = (-1, 0)
        self._unbound = 0
        self._as_it_is: Callable[..., Any] | None = None
        if own is not None and not self._is_static and not own.is_refused and self._is_auto():
            # What the compiler assumes of sizes, Dynamo guards, if it is compiled here and now.
            with contextlib.suppress(Exception):
                self._as_it_is = own.compiler(_internals.copied_graph(module), list(inputs))

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph under the scopes of the current thread."""
        interceptor = LOCAL.interceptor
        if interceptor is None or interceptor.is_quiet() or not interceptor.is_listening():
            return self._vanilla(*inputs)
        if interceptor.stale and not interceptor.refresh():
            return self._vanilla(*inputs)
        base = interceptor.frame
        roots = self._code.places.roots(_internals.program_frame())
        is_alone = interceptor.is_alone()
        bindings = base.captured.get(self, ())
        if is_alone:
            for binding in bindings:
                if binding.holds(interceptor, roots):
                    result = binding.run(interceptor, inputs)
                    if binding.waiting is not None:
                        self._go_on(interceptor, binding, binding.waiting)
                    return result
        modules = self._code.places.find(roots)
        # Dynamo passes symbolic sizes as numbers.
        is_static = self._is_static and all(isinstance(each, torch.Tensor) for each in inputs)
        rehearsal = self._rehearsal(interceptor, inputs, is_static) if is_alone else None
        run = NoticingRun(interceptor, self._code, modules, is_static, rehearsal)
        result = run.run(inputs)
        binding = run.binding() if is_alone else None
        first: FirstRun | None = None
        if binding is not None and rehearsal is not None:
            first = self._after_rehearsal(interceptor, binding, rehearsal, run.steps, result)
        compiler = "" if first is None else self._own_name()
        if binding is not None and first is None and is_static:
            compiler = self._compile(interceptor, binding, run.steps)
        if first is not None:
            result, reason = first.run(interceptor, inputs, result)
            if reason:
                compiler = ""
                self._say(reason)
        if binding is None and self._is_auto():
            self._unbound += 1
            if self._unbound > 1:
                self._say(_NOT_SETTLED if is_alone else "another mode is on")
        self._note(interceptor, f"by {compiler}" if compiler else "operator by operator")
        if binding is not None and binding.note_roots(roots):
            # Kept with the module call, and dropped with it when the thread's scopes end.
            kept = [one for one in bindings if one.is_current(interceptor)]
            base.captured[self] = [binding, *kept[: _BINDINGS - 1]]
        return result

    def _note(self, interceptor: Interceptor, way: str) -> None:
        interceptor.note_compiled(self._name, way)

    # -- by the program's compiler, as it is ------------------------------

    def _is_auto(self) -> bool:
        """Whether the program's compiler gets the graph where no routine has to run in it."""
        return asked_compiler() == AUTO and self._own_name() not in _EAGER_COMPILERS

    def _own_name(self) -> str:
        return "eager" if self._own is None else name_of_compiler(self._own.compiler)

    def _say(self, reason: str) -> None:
        if self._own is not None:
            self._own.is_refused = True
            self._own.say(reason)

    def _rehearsal(
        self, interceptor: Interceptor, inputs: Sequence[Any], is_static: bool
    ) -> Rehearsal | None:
        """What the next run, the first one at its place, may be a rehearsal by; None if none."""
        if not self._is_auto() or not (is_static or self._as_it_is is not None):
            return None
        generation, count = self._rehearsals
        count = count + 1 if generation == interceptor.generation else 1
        self._rehearsals = interceptor.generation, count
        if count > _MOST_REHEARSED or _internals.without_modes(
            reason_against_rehearsal, self._code, inputs
        ):
            return None
        return Rehearsal(self._code, inputs, interceptor, is_static)

    def _after_rehearsal(
        self,
        interceptor: Interceptor,
        binding: Binding,
        rehearsal: Rehearsal,
        steps: Sequence[Step],
        outputs: Sequence[Any],
    ) -> FirstRun | None:
        """Let the program's compiler have the graph as it is; None if it is not to be.

        Args:
            outputs: of the run that has been a rehearsal.
        """
        if rehearsal.reason or rehearsal.run_backward(outputs):
            return None
        tally = Tally(interceptor.executor.claimer)
        tally.forward, tally.backward = rehearsal.forward, rehearsal.backward()
        tally.sites, tally.handle = [*rehearsal.sites], rehearsal.handle
        if rehearsal.reason or not rehearsal.can_undo() or not binding.is_current(interceptor):
            return None
        try:
            function = self._compiled_as_it_is()
        except Exception as error:
            self._say(f"{self._own_name()} fails with {type(error).__name__}")
            return None
        name = self._own_name()
        code = CompiledCode(function, self._module, name, (), tally, interceptor)
        first = FirstRun(binding, rehearsal, tally, code)
        first.later = binding.entering(interceptor, code, steps)
        assert self._own is not None
        self._own.is_refused = False
        return first

    def _compiled_as_it_is(self) -> Callable[..., Any]:
        """The code that the program's compiler makes of the graph."""
        if self._as_it_is is None:
            assert self._own is not None
            with self._suspended():
                self._as_it_is = _internals.compile_later(
                    self._context,
                    self._own.compiler,
                    _internals.copied_graph(self._module),
                    self._inputs,
                )
        return self._as_it_is

    # -- with routines in it ----------------------------------------------

    def _go_on(self, interceptor: Interceptor, binding: Binding, waiting: Waiting) -> None:
        """Compile a graph as soon as all is known of its backward operators."""
        waiting.runs += 1
        if compiler := self._compile(interceptor, binding, waiting.steps, waiting.runs):
            self._note(interceptor, f"by {compiler}")

    def _compile(
        self, interceptor: Interceptor, binding: Binding, steps: Sequence[Step], runs: int = 0
    ) -> str:
        """Let a compiler have the graph with its actions; its name if one takes it, else "".

        Not where sizes are symbolic: what a compiler assumes of them would have to be guarded.
        """
        asked, driver = asked_compiler(), _driver()
        is_own = asked in (AUTO, OWN_COMPILER)
        name = self._own_name() if is_own else asked
        if name in _EAGER_COMPILERS or driver is None:
            if asked != AUTO:
                self._say("")
            return ""
        # In PyTorch 2.13 inductor makes code with unbound variables of an operator with effects
        # where a graph with a backward pass also writes into a buffer.
        can_observe = name != "inductor" or not any(step.records for step in steps)
        can_observe = can_observe and asked != AUTO
        reasons = (step.reason_against(can_observe, name) for step in steps)
        reason = next(filter(None, reasons), "")
        binding.waiting = None
        if not reason and not all(step.is_learned() for step in steps):
            if runs < _MOST_WAITED:
                # The code for these runs would not tell what operators have become known.
                binding.direct, binding.waiting = None, Waiting(steps, runs)
                return ""
            reason = "no backward pass has come to all of its backward operators"
        if interceptor.tells and any(step.enters for step in steps):
            reason = "tools are told of the forward passes in it"
        if not reason:
            actions = {step.name: step.inlined() for step in steps if step.acts()}
            try:
                compiler = self._compiler(is_own, name)
                self._write(binding, actions, compiler, name, interceptor, driver.dispatcher)
                return name
            except Exception as error:
                reason = other_nodes_said(error) or f"{name} fails with {type(error).__name__}"
                notes = " ".join(notes_of(error))
                reason += f" ({notes})" if notes else ""
        self._refuse(name, reason)
        return ""

    def _compiler(self, is_own: bool, name: str) -> Any:
        if is_own:
            return None if self._own is None else self._own.compiler
        return _internals.lookup_compiler(name)

    def _write(
        self,
        binding: Binding,
        actions: Mapping[str, Inlined],
        compiler: Any,
        name: str,
        interceptor: Interceptor,
        dispatcher: Any,
    ) -> None:
        """Bind what a compiler makes of the graph with its actions."""
        with self._suspended():
            tally = Tally(interceptor.executor.claimer)
            writer = Writer(dispatcher, self._module, tally)
            module = writer.write(actions)
            written = _internals.copied_graph(module)
            function = _internals.compile_later(
                self._context, compiler, module, self._inputs, with_backward=True
            )
        code = CompiledCode(function, written, name, _routines(actions), tally, interceptor)
        otherwise = binding.function

        def accept() -> None:
            binding.function = code

        def refuse(reason: str) -> None:
            binding.function, binding.observers = otherwise, ()
            self._refuse(name, reason)
            self._note(interceptor, "operator by operator")

        binding.function = FirstCall(code, otherwise, self._code, accept, refuse)
        binding.direct, binding.observers = None, writer.observers

    def _refuse(self, name: str, reason: str) -> None:
        """Say, once, why a graph runs operator by operator, and not with a compiler."""
        if asked_compiler() == AUTO:
            self._say(reason)
        elif reason not in _SAID:
            _SAID.add(reason)
            warnings.warn(
                f"a compiled function runs operator by operator and not with {name}: {reason}",
                CoverageWarning,
                stacklevel=5,
            )


class FirstRun:
    """The first run of a graph by the program's compiler, after a rehearsal.

    Args:
        binding: of the graph; it still runs the graph operator by operator.
        rehearsal: which has counted the forward operators of this run.
        tally: counts those of later ones.
        code: what runs the graph.

    Attributes:
        later: what runs it from the second time on: `code`, after the modules have been entered
            that the rehearsal has entered for the first run.
    """

    def __init__(
        self,
        binding: Binding,
        rehearsal: Rehearsal,
        tally: Tally,
        code: Callable[..., Any],
    ) -> None:
        self._binding = binding
        self._rehearsal = rehearsal
        self._tally = tally
        self._otherwise = binding.function, binding.direct
        self._code = self.later = code

    def run(
        self, interceptor: Interceptor, inputs: Sequence[Any], rehearsed: Any
    ) -> tuple[Any, str]:
        """The outputs, and why they were computed operator by operator; "" if they were not.

        Args:
            rehearsed: the outputs of the rehearsal.
        """
        redo = self._rehearsal.undo()
        self._tally.is_first = True
        binding = self._binding
        binding.function, binding.direct = self._code, None
        try:
            result = binding.run(interceptor, inputs)
            binding.function = self.later
            return result, ""
        except OtherBackwardError:
            reason = "its backward pass is not compiled"
        except Exception as error:
            reason = f"its code fails with {type(error).__name__}"
        redo()
        binding.function, binding.direct = self._otherwise
        return rehearsed, reason


AUTO = "auto"
"""The compiler without it: the program's own one, where no routine has to run between operators."""

_EAGER_COMPILERS = frozenset({"eager", "eager_noexcept", "eager_debug"})
"""Those that run a graph operator by operator."""


def asked_compiler() -> str:
    """What the environment says."""
    return os.environ.get(COMPILER_VARIABLE, AUTO)


OWN_COMPILER = "own"
"""The name by which it asks for the compiler that the program has chosen for a function."""

_BINDINGS = 16
"""Positions in one module call, and modules, for which a graph is bound."""

_MOST_WAITED = 8
"""Runs of a graph after which it is not compiled if analyses of backward operators are pending."""

_NOT_SETTLED = "what tools do with it changes from run to run"

_MOST_REHEARSED = 32
"""Rehearsals of one graph under the same plans: one that runs at ever other places in an iteration
would be rehearsed at each."""

_SAID: set[str] = set()

_NUMBERS = itertools.count()

_NOT_KEPT: Any = object()
"""Stands for what the interceptor has not kept of an operator."""


def name_of_compiler(compiler: Any) -> str:
    """How messages call a compiler of ``torch.compile``."""
    name = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None)
    return str(name or type(compiler).__name__)


def _routines(actions: Mapping[str, Inlined]) -> set[str]:
    """The names of the routines on a graph."""
    plans = [inlined.plan for inlined in actions.values()]
    found = [action for plan in plans for action in (*plan.before, plan.replace, *plan.after)]
    return {action.routine for action in found if action is not None}


def _driver() -> Any:
    return next((d for d in ATTACHED.values() if getattr(d, "captures", False)), None)


class NoticingRun:
    """A run in which the interceptor notices each operator.

    Args:
        interceptor: that of the current thread.
        code: of the graph.
        modules: those of the graph, by the numbers of its module calls.
        is_static: whether all numbers in the graph are constants, sizes among them.
        rehearsal: notes what follows from the operators; None if nobody wants to know.

    Attributes:
        steps: what its calls have done.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        code: GraphCode,
        modules: dict[str, nn.Module],
        is_static: bool,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._is_static = is_static
        self._rehearsal = rehearsal
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
        self.steps: list[Step] = []

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
            self._leave(0)

    def _site(self, site: Site, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the graph."""
        interceptor = self._interceptor
        # Dynamo notes no module calls with what switches gradients or autocast on and off.
        is_switch = not site.calls and kind_of(site.function) is Kind.IGNORED
        was_in_pass = self._passes.is_in_one
        entered = () if is_switch else self._go(site)
        leaves = was_in_pass and not self._passes.is_in_one
        met = interceptor.met = []
        # The same in each run: Dynamo guards the mode that a graph begins in.
        records = torch.is_grad_enabled()
        start = _internals.sequence_number()
        result = site.function(*args, **kwargs)
        interceptor.met = []
        if self._rehearsal is not None:
            self._rehearsal.note_operators(met, start)
        if self._passes.is_in_one:
            self._passes.note_computed(result)
        operator = Operator.found(met, args, kwargs, result, self._is_static)
        is_one = isinstance(result, torch.Tensor)
        frame = interceptor.frame
        self.steps.append(Step(site, frame, entered, leaves, met, operator, is_one, records))
        return result

    # -- modules ----------------------------------------------------------

    def _go(self, site: Site) -> tuple[nn.Module, ...]:
        """Enter the module calls of a site; those of outermost modules that were entered."""
        calls = [call for call in site.calls if call.module in self._modules]
        if calls and self._base.module is not None:
            # The function that was compiled is a module's: it has been entered.
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
            # Ids outside of modules begin anew: they are met again, and not passed as known.
            self._base.forget_plans(interceptor.generation)
            if not self.steps:
                self._begins = parent.children.get(id(module))
        self._entered.append(key)
        self._parents.append(parent)
        frame = interceptor.frame
        if frame is not parent:
            frame.forget_plans(interceptor.generation)
            self._callers[frame] = parent
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

    def binding(self) -> Binding | None:
        """What runs the graph from now on; None if not all is known of its operators."""
        interceptor = self._interceptor
        if self._generation != interceptor.generation or interceptor.stale:
            return None
        if not all(step.is_known() for step in self.steps):
            return None
        functions = [step.function(interceptor, self._passes) for step in self.steps]
        has_restarted = interceptor.iteration != self._iteration
        span = Span.since(self._start, self._base, self._begins, has_restarted)
        acts = any(step.acts() for step in self.steps)
        callers = list(self._callers.items()) if acts else []
        run = self._code.function(functions)
        binding = Binding(run, self._base, self._generation, span, callers, self._passes)
        if self._is_static and not any(step.enters for step in self.steps):
            calls = [
                step.known(function) for step, function in zip(self.steps, functions, strict=True)
            ]
            binding.direct = DirectCode(self._code, calls, interceptor)
        return binding


class Step:
    """What a site has done in the first run.

    Args:
        site: the call.
        frame: the module call that it belongs to.
        entered: outermost modules that were entered before it.
        leaves: whether it is the first one after a forward pass, of which tools are told.
        met: the operators that the interceptor met.
        operator: the one that it stands for; None if it stands for several.
        is_one_output: whether it returned one tensor.
        records: whether gradients may be recorded in it.

    Attributes:
        name: of the call's node.
        records: see above.
    """

    def __init__(
        self,
        site: Site,
        frame: Frame,
        entered: tuple[nn.Module, ...],
        leaves: bool,
        met: list[Met],
        operator: Operator | None,
        is_one_output: bool,
        records: bool,
    ) -> None:
        self.name = site.name
        self._site = site
        self._frame = frame
        self._entered = [weakref.ref(module) for module in entered]
        self._leaves = leaves
        self._cells = [(cell, count) for cell, count, *_ in met]
        # Not looked up later: an id that occurs again in an iteration of the same run is met anew.
        self._knowns = [
            cell[count] if count < len(cell) else _NOT_KEPT for cell, count in self._cells
        ]
        self._is_one_output = is_one_output
        self._operator = operator
        self.records = records

    @property
    def enters(self) -> bool:
        """Whether outermost modules were entered before it."""
        return bool(self._entered)

    def known(self, function: Callable[..., Any]) -> Known:
        """What has been learned of it.

        Args:
            function: that of :meth:`function`.
        """
        found = [one for one in self._knowns if one is not None]
        return Known(
            site=self._site,
            acts=self.acts(),
            function=function,
            known=found[0] if self._operator is not None and found else None,
            plans=[one.plan for one in found],
            operator=self._operator,
            frame=self._frame,
            is_one_output=self._is_one_output,
            records=self.records,
        )

    def is_known(self) -> bool:
        """Whether the interceptor knows how to run each of its operators."""
        return all(known is None or isinstance(known, KnownOp) for known in self._knowns)

    def acts(self) -> bool:
        """Whether one of its operators does not run plainly vanilla.

        One of which only backward operators are looked at does, where it can have none.
        """
        return any(
            known is not None and (self.records or not known.is_claim) for known in self._knowns
        )

    def reason_against(self, can_observe: bool, compiler: str) -> str:
        """Why what it does cannot be compiled; "" if it can.

        Args:
            can_observe: whether routines that are not traceable may run when the code does.
            compiler: its name.
        """
        if not self.acts():
            return ""
        if self._operator is None:
            return f"{self._site.function.__name__} is made of several operators"
        plan, known = self._plan(), self._knowns[0]
        reason = reason_against(plan, self._is_one_output, can_observe)
        if not reason and self._has_gradients():
            nodes = learned(plan, known.gradients) or ()
            reason = reason_against_gradients(plan, known.name, nodes, compiler, is_traceable)
        return reason

    def _has_gradients(self) -> bool:
        """Whether there is something to do at its backward operators, or at its gradients."""
        plan = self._plan()
        return self.records and (plan.claims or plan.acts_on_gradients)

    def is_learned(self) -> bool:
        """Whether no analysis of its backward operators is pending."""
        if not (self.acts() and self._has_gradients()):
            return True
        return learned(self._plan(), self._knowns[0].gradients) is not None

    def inlined(self) -> Inlined:
        """The actions on its operator."""
        assert self._operator is not None
        plan, gradients = self._plan(), self._knowns[0].gradients
        if not self._has_gradients():
            return Inlined(plan, self._operator)
        nodes = learned(plan, gradients) if plan.claims else None
        return Inlined(plan, self._operator, gradients, nodes)

    def _plan(self) -> ActionPlan:
        plan: ActionPlan = self._knowns[0].plan
        return plan

    def function(self, interceptor: Interceptor, passes: Passes) -> Callable[..., Any]:
        """The function that does the same without the interceptor, where that can be.

        Args:
            passes: tells tools of the forward passes that begin and end before it.
        """
        found = self._site.function
        if self.acts():
            if self._operator is None:
                found = _noticed(interceptor, found, self._frame, self._cells)
            else:
                found = _known(interceptor, self._knowns[0], self._operator, self._frame)
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


def _known(
    interceptor: Interceptor, known: KnownOp, operator: Operator, frame: Frame
) -> Callable[..., Any]:
    """Runs one operator with its actions."""
    run, cells, func, key = known.run, frame.cells, operator.func, operator.key

    def step(*args: Any, **kwargs: Any) -> Any:
        interceptor.frame = frame
        interceptor.cells = cells
        return run(known, func, args, kwargs, key)

    def step_within(*args: Any, **kwargs: Any) -> Any:
        interceptor.frame = frame
        interceptor.cells = cells
        args, kwargs = operator.arguments(args, kwargs)
        return run(known, func, args, kwargs, key)

    return step if operator.is_direct else step_within


def _noticed(
    interceptor: Interceptor, function: Any, frame: Frame, cells: Sequence[tuple[Cell, int]]
) -> Callable[..., Any]:
    """Runs a function with the interceptor on, which meets the operators that it calls."""
    first: dict[int, tuple[Cell, int]] = {}
    for cell, count in cells:
        first.setdefault(id(cell), (cell, count - 1))
    starts = list(first.values())

    def step(*args: Any, **kwargs: Any) -> Any:
        interceptor.go_to(frame)
        for cell, start in starts:
            cell[0] = start
        _internals.push_mode(interceptor)
        try:
            return function(*args, **kwargs)
        finally:
            _internals.pop_mode()

    return step


def _entering(
    interceptor: Interceptor,
    function: Any,
    entered: Sequence[weakref.ref[nn.Module]],
    passes: Passes,
) -> Callable[..., Any]:
    """Enters outermost modules first, with which an iteration may begin."""

    def step(*args: Any, **kwargs: Any) -> Any:
        for reference in entered:
            interceptor.go_to(interceptor.root)
            module = reference()
            if module is not None and interceptor.enter_module(module) is not interceptor.frame:
                passes.begin(module)
        return function(*args, **kwargs)

    return step


def _leaving(function: Any, passes: Passes) -> Callable[..., Any]:
    """Ends a forward pass first."""

    def step(*args: Any, **kwargs: Any) -> Any:
        passes.end()
        return function(*args, **kwargs)

    return step


class Span:
    """What a run of a graph does to the counters of the module call that it is in.

    Args:
        counts: of an operator's cell before and after the run, where they differ.
        calls: of a module, likewise.
        begins: the module whose call begins an iteration at once: then no count before matters.
        is_outside: whether it is in no module call: a module called in it may begin an iteration.
    """

    __slots__ = ("_begins", "_calls", "_counts", "_is_outside")

    def __init__(
        self,
        counts: Sequence[tuple[Cell, int, int]],
        calls: Sequence[tuple[Child, int, int]],
        begins: Child | None,
        is_outside: bool,
    ) -> None:
        self._counts = counts
        self._calls = calls
        self._begins = begins
        self._is_outside = is_outside

    @classmethod
    def since(
        cls,
        start: tuple[dict[str, int], dict[int, int]],
        frame: Frame,
        begins: Child | None,
        has_restarted: bool,
    ) -> Span:
        """That of a run that has just ended.

        Args:
            start: the counters before it, as :meth:`Frame.counters` gives them.
            has_restarted: whether an iteration has begun within it: a counter may then be what it
                was before and have counted.
        """
        counts = [
            (cell, start[0].get(name, 0), cell[0])
            for name, cell in frame.named_cells()
            if has_restarted or start[0].get(name, 0) != cell[0]
        ]
        calls = [
            (child, start[1].get(key, 0), child.calls)
            for key, child in frame.children.items()
            if has_restarted or start[1].get(key, 0) != child.calls
        ]
        return cls(counts, calls, begins, frame.phase is not None)

    def can_begin(self, interceptor: Interceptor) -> bool:
        """Whether a run that begins now does the same."""
        if self._begins is not None:
            return interceptor.was_called(self._begins)
        for cell, count, _ in self._counts:
            if cell[0] != count:
                return False
        for child, calls, _ in self._calls:
            if child.calls != calls or (self._is_outside and interceptor.was_called(child)):
                return False
        return True

    def end(self) -> None:
        """Set the counters to those after the run."""
        for cell, _, count in self._counts:
            cell[0] = count
        for child, _, calls in self._calls:
            child.calls = calls


@attrs.define
class Waiting:
    """A graph whose backward operators have yet to be analysed.

    Attributes:
        steps: what its calls have done.
        runs: since it has waited.
    """

    steps: Sequence[Step]
    runs: int


class Binding:
    """Runs a graph in one module call, with what is known of its operators.

    Args:
        function: the graph's code.
        base: the module call that runs it.
        generation: of the plans that are bound.
        callers: each module call of the graph, and the one that it returns to.
        passes: tells tools of the forward passes in the graph.

    Attributes:
        direct: code with routines written into it; None where there is none.
        observers: those of a compiler's code, which calls them by number.
        waiting: what is to be compiled once all is known of its backward operators.
    """

    __slots__ = (
        *("_base", "_callers", "_generation", "_passes", "_roots", "_span"),
        *("direct", "function", "observers", "waiting"),
    )

    def __init__(
        self,
        function: Callable[..., Any],
        base: Frame,
        generation: int,
        span: Span,
        callers: Sequence[tuple[Frame, Frame]],
        passes: Passes,
    ) -> None:
        self.function = function
        self._passes = passes
        self._base = base
        self._generation = generation
        self._span = span
        self._callers = callers
        self._roots: list[weakref.ref[Any]] = []
        self.direct: DirectCode | None = None
        self.waiting: Waiting | None = None
        self.observers: Sequence[Observer] = ()

    def entering(
        self, interceptor: Interceptor, function: Callable[..., Any], steps: Sequence[Step]
    ) -> Callable[..., Any]:
        """A function that enters the outermost modules that the graph calls, and runs another."""
        for step in reversed(steps):
            function = step.entering(interceptor, function, self._passes)
        return function

    def note_roots(self, roots: Sequence[Any]) -> bool:
        """Note the objects by which the graph's modules are found; whether that can be done."""
        try:
            self._roots = [weakref.ref(root) for root in roots]
        except TypeError:
            return False
        return True

    def is_current(self, interceptor: Interceptor) -> bool:
        """Whether its plans hold."""
        return self._generation == interceptor.generation

    def holds(self, interceptor: Interceptor, roots: Sequence[Any]) -> bool:
        """Whether it can run the graph now."""
        if self._generation != interceptor.generation:
            return False
        for reference, root in zip(self._roots, roots, strict=True):
            if reference() is not root:
                return False
        return self._span.can_begin(interceptor)

    def run(self, interceptor: Interceptor, inputs: Sequence[Any]) -> Any:
        """The outputs of the graph."""
        above = interceptor.exit()
        try:
            for frame, parent in self._callers:
                frame.caller = parent
            if self.direct is not None:
                result = self.direct.run(self.function, inputs)
            else:
                result = self.function(*inputs)
            self._passes.end()
            self._passes.note_outputs(result)
            self._span.end()
            if self.direct is not None:
                self.direct.note_run(inputs)
            return result
        finally:
            self._passes.end()
            interceptor.go_to(self._base)
            interceptor.enter(above)
