"""The first run of a graph that is then given unchanged to the program's compiler.

Analyses need operators whose tensors have values, which compiled code lacks. So a graph first runs
operator by operator, forward and backward. The effects of this run are undone, and the program gets
the outputs of the compiled code::

    dry_run = GraphDryRun(code, inputs, interceptor, sizes)
    result = run(inputs)                            # analyses and routines of forward operators
    if not dry_run.run_backward(result):          # analyses of backward operators, no routines
        added = dry_run.forward, dry_run.backward()
        dry_run.undo()
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch

from amanda.engine.backward import OpHandle
from amanda.engine.plan import ActionPlan
from amanda.engine.records import OpRecord
from amanda.engine.tool_code import paused
from amanda.inline import ShapeSum
from amanda.inline.steps import StepKind, lowered
from amanda.interface.action import Action, ActionKind
from amanda.interface.points import Point
from amanda.state import Lock
from amanda_torch import _internals
from amanda_torch.autograd.executions import Past
from amanda_torch.autograd.nodes import is_accumulation, new_nodes
from amanda_torch.compiled.code import GraphCode, Method
from amanda_torch.compiled.deferred import (
    CalledModule,
    Deferred,
    deferred_point,
    deferred_routine,
    deferred_sum,
    is_deferrable_routine,
    is_marked_deferrable,
    stand_in,
)
from amanda_torch.compiled.gradients import LeafSite, is_deferred
from amanda_torch.compiled.saved_state import SavedState
from amanda_torch.compiled.sizes import Sized, SymbolicSizes
from amanda_torch.eager.execution import KnownOp
from amanda_torch.eager.interceptors import Interceptor, Met
from amanda_torch.operators.calls import TorchCall, tensors_of
from amanda_torch.operators.names import name_of
from amanda_torch.routines import RoutineDispatcher, selected

_SIZES_UNKNOWN = "a routine wants sizes that do not follow from those of the graph's inputs"

_LOCK = Lock()
"""Held by the thread that runs a backward pass for analyses: the dispatcher has one dry run."""

_OWN_NAMESPACES = frozenset({"aten", "prims", "prim"})
"""Namespaces of operators without effects except their results and declared writes."""


@attrs.define
class Executed:
    """A backward operator that the dry run has executed.

    Attributes:
        record: its record in one scope.
        grad_outputs, grad_inputs: descriptions of the consumed and the produced gradients.
    """

    record: OpRecord
    grad_outputs: Sequence[Any]
    grad_inputs: Sequence[Any] = ()


class GraphDryRun:
    """A run of a graph that can be undone.

    Attributes:
        forward: additions of its forward operators to counters and sums.
        sites: the operators that use leaves.
        handle: handle of one of the operators; None if no tool analyses backward operators.
        reason: reason why routines have to run at each execution of the graph; "" without one.
    """

    def __init__(
        self,
        code: GraphCode,
        inputs: Sequence[Any],
        interceptor: Interceptor,
        sizes: SymbolicSizes | None,
    ) -> None:
        """Save the state that the run may change.

        Args:
            code: code of the graph, for which :func:`reason_against` is "".
            inputs: inputs of the run.
            interceptor: the current thread's interceptor.
            sizes: symbolic sizes of the graph; None without any.
        """
        self.forward: list[Deferred | Sized] = []
        self.sites: list[LeafSite] = []
        self.handle: OpHandle | None = None
        self.reason = ""
        self._is_static = sizes is None
        self._executed: dict[int, Executed] = {}
        self._interceptor = interceptor
        self._dispatcher: RoutineDispatcher = interceptor.executor.claimer.dispatcher
        self._start = _internals.sequence_number()
        self._tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        self._numbers = {id(x): n for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
        self._before: SavedState = self._quietly(SavedState, code, inputs)
        self._run = None if sizes is None else self._quietly(sizes.note_run, inputs, code.held)

    def _quietly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of Amanda whose operators are not intercepted."""
        return self._interceptor.run_muted(function, args, {})

    # -- forward ----------------------------------------------------------

    def note_operators(self, met: Sequence[Met], start: int, name: str, result: Any) -> None:
        """Note the additions and routines of the operators of one call of the graph, right after
        it.

        Args:
            met: the operators of the call.
            start: the number of the next autograd node before it.
            name: name of the call's node.
        """
        if self._run is not None:
            self._quietly(self._run.note, name, result)
        self._quietly(self._note_operators, met, start)

    def _note_operators(self, met: Sequence[Met], start: int) -> None:
        for cell, count, func, args, kwargs, key, result in met:
            known = cell[count] if count < len(cell) else None
            if type(known) is not KnownOp:
                continue
            outputs = tensors_of(result)
            call = functools.partial(TorchCall.of, func, name_of(func), "", args, kwargs, key=key)
            self._note_plan(known.plan, call, outputs)
            if not known.claims:
                continue
            self.handle = known.gradients.handle
            nodes = new_nodes(outputs, start)
            variables = [node.variable for node in nodes if is_accumulation(node)]
            leaves = [self._numbers[id(x)] for x in variables if id(x) in self._numbers]
            if len(leaves) < len(variables):
                self.reason = self.reason or "an operator uses a leaf that the graph is not given"
            if leaves:
                past = Past(call().inputs, outputs, self._interceptor.references())
                self.sites.append(LeafSite(known.gradients, leaves, past))

    def note_module(
        self, called: CalledModule, is_exit: bool, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """Note that the call or the return of a module has been reported to tools."""
        point = Point.MODULE_EXIT if is_exit else Point.MODULE_ENTRY
        for scope in self._dispatcher.scopes():
            for tool, routine in scope.routines_at(point):
                if not is_marked_deferrable(routine):
                    name = f"{type(tool).__name__}.{getattr(routine, '__name__', routine)}"
                    self.reason = self.reason or f"{name} runs at each call of a module"
        make = functools.partial(deferred_point, self._dispatcher, point, called)
        found = self._made(make, inputs, outputs if is_exit else None, meta=False)
        self._note_made(found, self.forward)

    def _made(
        self, make: Callable[..., Deferred], *groups: Sequence[Any] | None, meta: bool = True
    ) -> Deferred | Sized | None:
        """The result of `make` for these tensors in any run; None if a size is unknown in some
        runs."""
        if self._run is None:
            return make(*groups)
        sized: Sized | None = self._run.sized(make, *groups, meta=meta)
        return sized

    def _note_plan(
        self, plan: ActionPlan, call: Callable[[], TorchCall], outputs: Sequence[Any]
    ) -> None:
        whole = (*plan.before_backward, *plan.after_backward)
        for action in (plan.replace, plan.replace_backward, *whole):
            if action is not None:
                self._refuse(action)
        if plan.around:
            inputs = call().inputs
            self._note_routines(plan.before, plan.after, inputs, outputs, self.forward)

    def _note_routines(
        self,
        before: Sequence[Action],
        after: Sequence[Action],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        added: list[Deferred | Sized],
    ) -> None:
        """Note the routines around an operator.

        Args:
            inputs, outputs: the tensors of the operator.
            added: list that gets their additions and calls.
        """
        begun: dict[ShapeSum, Sequence[Any]] = {}
        for action in before:
            step = lowered(action)
            if step.kind is StepKind.SHAPE_SUM:
                begun[step.routine] = selected(action, inputs)
            else:
                self._note_routine(action, inputs, added)
        for action in after:
            step = lowered(action)
            if step.kind is StepKind.SHAPE_SUM and step.routine in begun:
                make = functools.partial(deferred_sum, step.routine)
                made = self._made(make, begun[step.routine], selected(action, outputs))
                self._note_made(made, added)
            else:
                self._note_routine(action, outputs, added)

    def _note_routine(
        self, action: Action, tensors: Sequence[Any], added: list[Deferred | Sized]
    ) -> None:
        if is_deferred(action):
            added.append(action.func)
        elif is_deferrable_routine(action):
            make = functools.partial(deferred_routine, self._dispatcher, action)
            self._note_made(self._made(make, tensors), added)
        else:
            self._refuse(action)

    def _note_made(self, made: Deferred | Sized | None, added: list[Deferred | Sized]) -> None:
        if made is None:
            self.reason = self.reason or _SIZES_UNKNOWN
        else:
            added.append(made)

    def _refuse(self, action: Action) -> None:
        self.reason = self.reason or f"{action.routine} runs at each execution"

    # -- backward ---------------------------------------------------------

    def run_backward(self, outputs: Sequence[Any]) -> str:
        """Run the backward pass of the graph, with gradients of ones.

        Args:
            outputs: of the graph.

        Returns:
            The reason why it has not run to its end; "" if it has, or if there is no backward pass.
        """
        wanted = [x for x in self._tensors if x.requires_grad]
        roots = [y for y in outputs if isinstance(y, torch.Tensor) and self._is_new(y)]
        if not (wanted and roots):
            return ""
        try:
            _LOCK.hold(self._quietly, self._run_backward, roots, wanted)
        except Exception as error:
            return f"a backward pass for analyses fails with {type(error).__name__}"
        return ""

    def _is_new(self, output: torch.Tensor) -> bool:
        if not output.requires_grad or output.grad_fn is None:
            return False
        return bool(_internals.node_sequence(output.grad_fn) >= self._start)

    def _run_backward(self, roots: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        dispatcher = self._dispatcher
        with ExitStack() as stack:
            stack.enter_context(paused())
            for kind in {x.device.type for x in self._tensors}:
                # Autograd runs a backward pass under the modes in which operators were recorded.
                stack.enter_context(torch.autocast(kind, enabled=False))
            dispatcher.dry_run = self
            stack.callback(setattr, dispatcher, "dry_run", None)
            ones = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, wanted, ones, retain_graph=True, allow_unused=True)

    def note(
        self, backward: OpRecord, grad_outputs: Sequence[Any], grad_inputs: Sequence[Any] | None
    ) -> None:
        """See :class:`amanda.engine.records.DryRun`."""
        found = self._executed.get(id(backward))
        if found is None:
            found = self._executed[id(backward)] = Executed(backward, _shaped(grad_outputs))
        if grad_inputs is not None:
            found.grad_inputs = _shaped(grad_inputs)

    def backward(self) -> list[Deferred | Sized]:
        """The additions of the backward operators to counters and sums; may set :attr:`reason`."""
        added: list[Deferred | Sized] = self._quietly(self._added_in_backward)
        return added

    def _added_in_backward(self) -> list[Deferred | Sized]:
        found: list[Deferred | Sized] = []
        for one in self._executed.values():
            record = one.record
            for action in record.actions(ActionKind.REPLACE_BACKWARD_OP):
                self._refuse(action)
            self._note_routines(
                record.actions(ActionKind.BEFORE_BACKWARD_OP),
                record.actions(ActionKind.AFTER_BACKWARD_OP),
                one.grad_outputs,
                one.grad_inputs,
                found,
            )
        return found

    # -- afterwards -------------------------------------------------------

    def can_undo(self) -> bool:
        """True if all changes of the run are known."""
        return bool(self._quietly(self._before.is_complete))

    def undo(self) -> Callable[[], None]:
        """Undo all changes; returns a function that applies them again."""
        redo: Callable[[], None] = self._quietly(self._before.restore)
        return lambda: self._quietly(redo)


def reason_against(code: GraphCode, inputs: Sequence[Any]) -> str:
    """The reason why a run of a graph cannot be undone; "" if it can."""
    if not _internals.is_eager():
        return "a mode, transform or hook on saved tensors of the program is on"
    for site in code.sites:
        if not (site.function is _internals.module_mark or _is_pytorchs(site.function)):
            return f"{name_of(site.function)} is not an operator of PyTorch"
    for value in (*inputs, *code.held):
        if isinstance(value, torch.Tensor):
            if type(value) not in _internals.PLAIN:
                return f"an input is a {type(value).__name__}"
            if value.requires_grad and _internals.has_tensor_hooks(value):
                return "an input has hooks, or retains its gradient"
    return ""


def _is_pytorchs(function: Callable[..., Any]) -> bool:
    if isinstance(function, Method):
        return True
    if _internals.is_registered(function):
        return _internals.namespace_of(function) in _OWN_NAMESPACES
    module = getattr(function, "__module__", None) or ""
    if getattr(function, "__objclass__", None) is not None or module in _PYTHONS:
        return True
    return module.partition(".")[0] == "torch" and not module.startswith("torch.distributed")


_PYTHONS = frozenset({"", "builtins", "math", operator.add.__module__})


def _shaped(tensors: Sequence[Any]) -> Sequence[Any]:
    return [None if tensor is None else stand_in(tensor) for tensor in tensors]
