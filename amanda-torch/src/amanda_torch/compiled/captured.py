"""Runs a captured graph under the scopes of the thread.

Dynamo compiles a function to bytecode that calls a graph, here a :class:`CapturedGraph`::

    def forward(self, x):                   # before
        return self.linear(x).relu()

    def forward(self, x):                   # after; the graph calls linear and relu
        return captured_graph(self.linear.weight, self.linear.bias, x)[0]

The first run of a graph in a module call passes its operators to the thread's interceptor, and
enters their modules, so that ids, analyses and actions are those without ``torch.compile``. The
result is a :class:`~amanda_torch.compiled.bound_graph.BoundGraph`. From then on the graph runs
without looking up its module calls, in one of three forms:

- If no routine has to run between operators, the program's compiler gets the graph unchanged. The
first run is a :class:`~amanda_torch.compiled.dry_run.GraphDryRun` then, which is undone. - If
routines can be written into the graph, a compiler gets it with them. - Otherwise, and with the
compiler "eager" if gradients are recorded, it runs operator by operator with the interceptor on, as
in eager mode.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import fx

from amanda.python.references import Reference, nothing
from amanda_torch import _internals
from amanda_torch.compiled.bound_graph import BoundGraph, Waiting
from amanda_torch.compiled.code import GraphCode, NotMarkableError
from amanda_torch.compiled.compilers import (
    AUTO,
    EAGER_COMPILERS,
    OWN_COMPILER,
    asked_compiler,
    name_of_compiler,
)
from amanda_torch.compiled.deferred import Deferred
from amanda_torch.compiled.dry_run import GraphDryRun
from amanda_torch.compiled.dry_run import reason_against as reason_against_dry_run
from amanda_torch.compiled.first_call import first_call, run_after_dry_run
from amanda_torch.compiled.first_run import CallRecord, NotedRun
from amanda_torch.compiled.gradients import RunCounts, other_nodes_said
from amanda_torch.compiled.inlining import CompiledCode, OpActions, Writer, notes_of
from amanda_torch.compiled.sizes import BySize, Sized, SymbolicSizes
from amanda_torch.eager.interceptors import LOCAL, Interceptor


class CompiledFunction(Protocol):
    """The compiled function that a graph belongs to.

    Attributes:
        compiler: the program's compiler for it.
        is_refused: True if its last graph has run operator by operator.
    """

    compiler: Any
    is_refused: bool

    def say(self, reason: str) -> None:
        """Report that a graph runs operator by operator, and why not by its compiler."""


class CapturedGraph:
    """A captured graph, as the function that runs it in every scope."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        suspended: Callable[[], AbstractContextManager[Any]],
        own: CompiledFunction,
    ) -> None:
        """Collect the facts that do not depend on a run.

        Args:
            module: the graph.
            inputs: the program's inputs in the capture.
            suspended: makes the context in which compilers run, without an interceptor.
            own: the compiled function.

        Raises:
            NotCapturableError: a node of it runs a graph of its own.
        """
        self._code = GraphCode(module)
        self._has_marks = any(s.function is _internals.module_mark for s in self._code.sites)
        if _internals.MODULE_MARKS.is_on and _internals.MODULE_MARKS.refused:
            raise NotMarkableError(_internals.MODULE_MARKS.refused)
        if self._has_marks:
            module = _internals.without_marks(module)
        self._is_static = not _internals.has_numbers(module.graph)
        self._module = module
        # Tensors of the program: the code may live longer.
        self._inputs = [Reference(x, nothing) if isinstance(x, torch.Tensor) else x for x in inputs]
        self._suspended = suspended
        self._own = own
        self._context = _internals.tracing_context()
        self._vanilla = module.forward
        self._name = f"graph {next(_NUMBERS)}"
        self._unbound = 0
        self._sizes: SymbolicSizes | None = None
        self._as_it_is: Callable[..., Any] | None = None
        self._reason = "its sizes are symbolic"
        if not (self._is_static or own.is_refused) and self._is_auto():
            self._compile_with_sizes()

    def _compile_with_sizes(self) -> None:
        """Compile the graph while Dynamo captures it: Dynamo guards the assumptions about sizes."""
        try:
            made = self._own.compiler(_internals.copied_graph(self._module), self._example_inputs())
            self._as_it_is = _internals.undisabled(made)
        except Exception as error:
            self._reason = self._failure(error)

    def _example_inputs(self) -> list[Any]:
        """The inputs of the capture; fake tensors for deleted ones."""
        placeholders = (n for n in self._module.graph.nodes if n.op == "placeholder")
        found = []
        for node, held in zip(placeholders, self._inputs, strict=True):
            value = held() if isinstance(held, Reference) else held
            found.append(node.meta["example_value"] if value is None else value)
        return found

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph under the scopes of the current thread."""
        interceptor = LOCAL.interceptor
        if interceptor is None or interceptor.is_quiet():
            return self._vanilla(*inputs)
        is_alone = interceptor.is_alone()
        if not (is_alone or interceptor.is_listening()):
            return self._vanilla(*inputs)
        if interceptor.stale and not interceptor.refresh():
            return self._vanilla(*inputs)
        binding = self._binding(interceptor) if is_alone else None
        if binding is None:
            return self._run_intercepted(interceptor, inputs, is_alone)
        result = binding.run(interceptor, inputs)
        if binding.waiting is not None:
            self._go_on(interceptor, binding, binding.waiting)
        return result

    def _binding(self, interceptor: Interceptor) -> BoundGraph | None:
        """The binding that can run the graph now; None if there is none."""
        known: Sequence[BoundGraph] = interceptor.frame.captured.get(self, ())
        roots = self._roots() if known else []
        fitting = (one for one in known if one.has_roots(roots) and one.holds(interceptor))
        return next(fitting, None)

    def _run_intercepted(
        self, interceptor: Interceptor, inputs: Sequence[Any], is_alone: bool
    ) -> Any:
        """Run the graph with the interceptor on, and bind the facts about it for later runs.

        Args:
            is_alone: True if no other mode is on; otherwise nothing is bound.
        """
        base, roots = interceptor.frame, self._roots()
        modules = self._code.places.find(roots)
        # Dynamo passes symbolic sizes as numbers.
        is_static = self._is_static and all(isinstance(each, torch.Tensor) for each in inputs)
        dry_run = self._dry_run(interceptor, inputs, is_static) if is_alone else None
        run = NotedRun(interceptor, self._code, modules, is_static, dry_run)
        result, compiler = run.run(inputs), ""
        binding = run.binding() if is_alone else None
        if binding is None:
            self._count_unbound(is_alone)
        else:
            self._unbound = 0
            result, compiler = self._hand_over(interceptor, binding, dry_run, run, inputs, result)
        self._note(interceptor, f"by {compiler}" if compiler else "operator by operator")
        if binding is not None and binding.note_roots(roots):
            # Kept in the module's frame, which is dropped when the thread's scopes end.
            bindings = base.captured.get(self, ())
            kept = [one for one in bindings if one.is_current(interceptor)]
            base.captured[self] = [binding, *kept[: _BINDINGS - 1]]
        return result

    def _count_unbound(self, is_alone: bool) -> None:
        if self._is_auto():
            # Another thread may have entered a scope meanwhile, once or twice.
            self._unbound += 1
            if self._unbound > _MOST_WAITED:
                self._say(_NOT_SETTLED if is_alone else "another mode is on")

    def _hand_over(
        self,
        interceptor: Interceptor,
        binding: BoundGraph,
        dry_run: GraphDryRun | None,
        run: NotedRun,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
    ) -> tuple[Any, str]:
        """Give the graph to a compiler after its first run, if one takes it.

        Args:
            outputs: outputs of that run.

        Returns:
            The outputs for the program, and the name of the compiler; "" without one.
        """
        first = None
        if dry_run is not None:
            first = self._after_dry_run(interceptor, binding, dry_run, run, outputs)
        if first is not None:
            outputs, reason = first(interceptor, inputs, outputs)
            if reason:
                self._say(reason)
            return outputs, "" if reason else self._own_name()
        if run.is_static:
            return outputs, self._compile(interceptor, binding, run.steps)
        if self._is_auto():
            self._say((dry_run.reason if dry_run is not None else "") or self._reason)
        return outputs, ""

    def _roots(self) -> list[Any]:
        """The objects from which its modules are found."""
        places = self._code.places
        if not places.has_roots:
            return []
        frame = _internals.program_frame()
        return places.roots(frame.f_locals, frame.f_globals)

    def _note(self, interceptor: Interceptor, mode: str) -> None:
        interceptor.note_compiled(self._name, mode)

    # -- by the program's compiler, as it is ------------------------------

    def _is_auto(self) -> bool:
        """True if the program's compiler gets the graph where no routine has to run in it."""
        return asked_compiler() == AUTO and not self._runs_operators()

    def _runs_operators(self) -> bool:
        """True if the program's compiler runs the graph operator by operator."""
        return self._own_name() in EAGER_COMPILERS

    def _own_name(self) -> str:
        return name_of_compiler(self._own.compiler)

    def _failure(self, error: Exception) -> str:
        return f"{self._own_name()} fails with {type(error).__name__}"

    def _say(self, reason: str) -> None:
        self._own.is_refused = True
        self._own.say(reason)

    def _dry_run(
        self, interceptor: Interceptor, inputs: Sequence[Any], is_static: bool
    ) -> GraphDryRun | None:
        """A dry run for the first run at a place; None if none is needed or possible."""
        if asked_compiler() != AUTO or not (is_static or self._as_it_is is not None):
            return None
        if self._runs_operators() and torch.is_grad_enabled():
            return None  # Routines at backward operators require their nodes.
        if _internals.without_modes(reason_against_dry_run, self._code, inputs):
            return None
        if not is_static and self._sizes is None:
            self._sizes = SymbolicSizes(self._module.graph)
        return GraphDryRun(self._code, inputs, interceptor, None if is_static else self._sizes)

    def _after_dry_run(
        self,
        interceptor: Interceptor,
        binding: BoundGraph,
        dry_run: GraphDryRun,
        run: NotedRun,
        outputs: Sequence[Any],
    ) -> Callable[..., tuple[Any, str]] | None:
        """The counts with which the program's compiler can run the graph unchanged; None if it
        cannot.

        Args:
            run: the dry run.
            outputs: outputs of the graph in the dry run.
        """
        if self._runs_operators() and any(step.records for step in run.steps):
            # The graph switches gradients on: routines at backward operators require their nodes.
            return None
        if dry_run.reason or dry_run.run_backward(outputs):
            return None
        counts = self._counts_of(interceptor, dry_run)
        if dry_run.reason or not binding.is_current(interceptor):
            return None
        if self._runs_operators():
            # Its code is the graph, which has run once by now.
            code = CompiledCode(self._vanilla, self._module, "eager", (), counts, interceptor)
            binding.function = run.entering(code)
            return None
        if not dry_run.can_undo():
            return None
        try:
            function = self._compiled_as_it_is()
        except Exception as error:
            self._say(self._failure(error))
            return None
        name = self._own_name()
        code = CompiledCode(function, self._module, name, (), counts, interceptor)
        self._own.is_refused = False
        later = run.entering(code)
        return functools.partial(run_after_dry_run, binding, dry_run, counts, code, later)

    def _counts_of(self, interceptor: Interceptor, dry_run: GraphDryRun) -> RunCounts:
        """The additions of later runs to counters and sums, derived from the additions of a dry
        run."""
        counts = RunCounts(interceptor.executor.claimer)
        counts.backward = _without_sizes(dry_run.backward())
        counts.forward = _without_sizes(dry_run.forward)
        if len(counts.forward) < len(dry_run.forward) and self._sizes is not None:
            counts.by_size = BySize(self._sizes, dry_run.forward)
        counts.sites, counts.handle = [*dry_run.sites], dry_run.handle
        return counts

    def _compiled_as_it_is(self) -> Callable[..., Any]:
        """The compiled code of the unchanged graph."""
        if self._as_it_is is None:
            with self._suspended():
                # One thread compiles at a time; this one may have waited for another one's result.
                if self._as_it_is is None:
                    made = _internals.compile_later(
                        self._context,
                        self._own.compiler,
                        _internals.copied_graph(self._module),
                        self._example_inputs(),
                    )
                    self._as_it_is = _internals.undisabled(made)
        return self._as_it_is

    # -- with routines in it ----------------------------------------------

    def _go_on(self, interceptor: Interceptor, binding: BoundGraph, waiting: Waiting) -> None:
        """Compile a graph as soon as all of its backward operators are analysed."""
        waiting.runs += 1
        if compiler := self._compile(interceptor, binding, waiting.steps, waiting.runs):
            self._note(interceptor, f"by {compiler}")

    def _compile(
        self,
        interceptor: Interceptor,
        binding: BoundGraph,
        steps: Sequence[CallRecord],
        runs: int = 0,
    ) -> str:
        """Give the graph with its actions to a compiler; return the compiler's name, or "" if none
        takes it.

        Not with symbolic sizes: a compiler's assumptions about them would need guards.
        """
        asked = asked_compiler()
        is_own = asked in (AUTO, OWN_COMPILER)
        name = self._own_name() if is_own else asked
        if name in EAGER_COMPILERS:
            if asked != AUTO:
                self._say("")
            return ""
        binding.waiting = None
        reason = _reason_against_actions(steps, name)
        if not reason and not all(step.is_learned() for step in steps):
            if runs < _MOST_WAITED:
                binding.waiting = Waiting(steps, runs)
                return ""
            reason = "no backward pass has come to all of its backward operators"
        reason = _reason_against_points(steps, interceptor) or reason
        if not reason:
            compiler = self._own.compiler if is_own else None
            reason = self._reason_not_written(binding, steps, compiler, name, interceptor)
        if reason:
            self._refuse(name, reason)
        return "" if reason else name

    def _reason_not_written(
        self,
        binding: BoundGraph,
        steps: Sequence[CallRecord],
        compiler: Any,
        name: str,
        interceptor: Interceptor,
    ) -> str:
        """Bind the compiled code of the graph with its actions; return the reason if that fails, or
        "".

        Args:
            compiler: the program's compiler; None for the compiler of that name.
        """
        actions = {step.name: step.inlined() for step in steps if step.acts()}
        try:
            compiler = _internals.lookup_compiler(name) if compiler is None else compiler
            self._write(binding, actions, compiler, name, interceptor)
        except Exception as error:
            reason = other_nodes_said(error) or f"{name} fails with {type(error).__name__}"
            notes = " ".join(notes_of(error))
            return f"{reason} ({notes})" if notes else reason
        return ""

    def _write(
        self,
        binding: BoundGraph,
        actions: Mapping[str, OpActions],
        compiler: Any,
        name: str,
        interceptor: Interceptor,
    ) -> None:
        """Bind the compiled code of the graph with its actions."""
        with self._suspended():
            claimer = interceptor.executor.claimer
            counts = RunCounts(claimer)
            module = Writer(claimer.dispatcher, self._module, counts).write(actions)
            written = _internals.copied_graph(module)
            function = _internals.compile_later(
                self._context, compiler, module, self._example_inputs(), with_backward=True
            )
        code = CompiledCode(function, written, name, _routines(actions), counts, interceptor)
        otherwise = binding.function

        def accept() -> None:
            binding.function = code

        def refuse(reason: str) -> None:
            binding.function = otherwise
            self._refuse(name, reason)
            self._note(interceptor, "operator by operator")

        binding.function = first_call(code, otherwise, self._code, accept, refuse)

    def _refuse(self, name: str, reason: str) -> None:
        """Report, once, why a graph runs operator by operator and not by a compiler."""
        if asked_compiler() == AUTO:
            self._say(reason)
        elif reason not in _SAID:
            _SAID.add(reason)
            _internals.warn_program(
                f"a compiled function runs operator by operator and not with {name}: {reason}"
            )


_BINDINGS = 64
"""Bindings of a graph in one module call, at most: for positions and modules."""

_MOST_WAITED = 8
"""Runs of a graph after which it is not compiled if analyses of backward operators are pending."""

_NOT_SETTLED = "what tools do with it changes from run to run"

_SAID: set[str] = set()

_NUMBERS = itertools.count()


def _reason_against_actions(steps: Sequence[CallRecord], name: str) -> str:
    """Return why the actions on a graph cannot be compiled; "" if they can.

    Args:
        name: of the compiler.
    """
    # Actions that could run after the graph are the reason only if there is no other.
    by_weight = sorted(steps, key=CallRecord.only_follows)
    reasons = (step.reason_against(name) for step in by_weight)
    return next(filter(None, reasons), "")


def _reason_against_points(steps: Sequence[CallRecord], interceptor: Interceptor) -> str:
    """Return the routines at passes or modules that require the calls of modules in a graph; ""
    without any."""
    if interceptor.tells and any(step.enters for step in steps):
        return "tools are told of the forward passes in it"
    if interceptor.tells_modules and any(step.called for step in steps):
        return "a tool has routines at modules"
    return ""


def _routines(actions: Mapping[str, OpActions]) -> set[str]:
    """The names of the routines on a graph."""
    plans = [inlined.plan for inlined in actions.values()]
    found = [action for plan in plans for action in (*plan.before, plan.replace, *plan.after)]
    return {action.routine for action in found if action is not None}


def _without_sizes(every: Sequence[Deferred | Sized]) -> list[Deferred]:
    """The additions that do not depend on sizes."""
    return [one for one in every if not isinstance(one, Sized)]
