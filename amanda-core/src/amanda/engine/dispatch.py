"""The dispatcher: the side of core that a driver calls for each operator.

A driver of a framework that runs operators at once extends :class:`amanda.engine.eager.EagerDriver`
and does not use this module. Other drivers intercept an operator, form its id and look up its
plan::

    scopes = dispatcher.scopes()
    plan = dispatcher.plan(op_id, scopes)
    if plan is None:                                  # not analysed yet
        execution = dispatcher.begin(OpCall(op, op_id, inputs), scopes)
        plan = execution.plan
    if not plan: run the operator vanilla

and otherwise run ``plan.before`` on the inputs, the operator (or ``plan.replace``),
``execution.finish(outputs)`` if there is an execution, and ``plan.after`` on the outputs, all
with :meth:`Dispatcher.run`. Backward operators go through
:class:`amanda.engine.backward.BackwardExecution`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amanda.engine.garbage import stop_collections
from amanda.engine.notes import note
from amanda.engine.plan import EMPTY_PLAN, ActionPlan, compile_plan
from amanda.engine.points import Points
from amanda.engine.records import Actions, DryRun, OpRecord
from amanda.engine.tool_code import ToolCode
from amanda.errors import RoutineResultError, SelectionError, described
from amanda.interface.action import Action, ActionKind, InstPoint, Owner
from amanda.interface.context import DESCRIPTION
from amanda.interface.driver import Driver
from amanda.interface.tool import REGISTERED, Tool
from amanda.state import STATE, LiveScope, find_active, tool_locked, unwind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amanda.interface.calls import OpCall

_BACKWARD = frozenset(point for point in InstPoint if point.is_backward)
_REPLACEMENTS = frozenset({ActionKind.REPLACE_OP, ActionKind.REPLACE_BACKWARD_OP})


class Dispatcher:
    """Core's side of one driver. Nothing here goes through pluggy or logging.

    Attributes:
        points: runs the routines at derived points.
        tool_code: enters the code of tools.
        dry_run: the dry run whose backward pass runs; None without one.
        analysed: number of analyses of backward operators so far.
        quiet: the running passes of :meth:`quiet_backward`.
    """

    def __init__(self) -> None:
        self.points = Points(self)
        self.tool_code = ToolCode()
        self.dry_run: DryRun | None = None
        self.analysed = 0
        self._driver: Driver | None = None
        self.quiet: dict[object, None] = {}
        self._unboxes = False

    def bind(self, driver: Driver) -> None:
        """Set the driver that this dispatcher serves."""
        self._driver = driver
        self._unboxes = type(driver).unbox is not Driver.unbox
        self.tool_code.bind(driver)

    @property
    def driver(self) -> Driver:
        """The driver that this dispatcher serves."""
        assert self._driver is not None, "Dispatcher.bind() was not called"
        return self._driver

    # -- scopes -----------------------------------------------------------

    def scopes(self) -> tuple[LiveScope, ...]:
        """The scopes that instrument the current thread's operators now."""
        state = STATE
        if state.held:
            find_active(vars(state))
        if state.paused or not state.enabled:
            return ()
        driver, scopes = self._driver, state.scopes
        for scope in scopes:
            if not scope.covers(driver):
                return tuple([scope for scope in scopes if scope.covers(driver)])
        return scopes

    def is_cacheable(self) -> bool:
        """True if plans stay valid until the driver's ``invalidate()`` is called."""
        state = STATE
        # Scopes of generators end without a call when the generator is suspended.
        return state.cache and not state.held

    def is_paused(self) -> bool:
        """True if the current thread runs a tool's code, or is disabled.

        A framework's threads for backward operators have no state of their own: they are paused
        during passes of :meth:`quiet_backward`.
        """
        state = STATE
        if state.held:
            find_active(vars(state))
        if state.paused or not state.enabled:
            return True
        return bool(self.quiet) and not state.scopes

    @contextmanager
    def quiet_backward(self) -> Iterator[None]:
        """Within it, a backward pass of this thread is not instrumented."""
        # Passes run in several threads at once: a count would not be safe.
        this = object()
        try:
            self.quiet[this] = None
            yield
        finally:
            self.quiet.pop(this, None)

    def not_seen(self, reason: str, count: int = 1) -> None:
        """Count executions under the current scopes that cannot be seen."""
        for scope in STATE.scopes:
            if scope.alive:
                scope.statistics.count_not_seen(reason, count)

    def note_compiled(self, part: str, mode: str) -> None:
        """Note how a part of the program's compiled code runs under the current scopes."""
        for scope in STATE.scopes:
            if scope.alive:
                scope.statistics.compiled[part] = mode

    # -- forward operators ------------------------------------------------

    def plan(
        self, op_id: str, scopes: Sequence[LiveScope] | None = None, key: str = ""
    ) -> ActionPlan | None:
        """The plan of an operator; None if a scope has yet to analyse it.

        Args:
            scopes: the answer of :meth:`scopes`, if the driver has asked already.
            key: the key of its records, if it is not `op_id` (:attr:`OpCall.key`).
        """
        scopes = self.scopes() if scopes is None else scopes
        if not scopes:
            return EMPTY_PLAN
        if not STATE.cache:
            return None
        records = []
        for scope in scopes:
            record = scope.cache.get(key or op_id)
            if record is None or not record.complete:
                return None
            records.append(record)
        return compile_plan(op_id, scopes, [record.state.actions for record in records])

    def begin(
        self,
        call: OpCall,
        scopes: Sequence[LiveScope] | None = None,
        later: Set[Owner] = frozenset(),
    ) -> OpExecution:
        """Run the pending analyses of an operator that is about to run.

        Args:
            scopes: the answer of :meth:`scopes`, if the driver has asked already.
            later: tools whose analyses wait for the next execution.

        Raises:
            ReplacementConflictError: two scopes replace the operator.
        """
        return OpExecution(self, call, self.scopes() if scopes is None else scopes, later)

    # -- routines ---------------------------------------------------------

    def run(self, action: Action, values: list[Any]) -> list[Any]:
        """Run a routine on the selected `values`; return the values with its results.

        Returns `values` itself when nothing is changed.

        Raises:
            SelectionError: a selected position does not exist.
            RoutineResultError: the routine returned something unusable (contract rule 5).
        """
        return self.run_all((action,), values)

    def run_all(self, actions: Sequence[Action], values: list[Any]) -> list[Any]:
        """Run the routines of one point in order, each on the results of the previous one.

        Tools' code is entered once, and again after each routine that returns values, since they
        are substituted outside of it. Returns and raises as :meth:`run`.
        """
        enter = self.tool_code.enter
        while actions:
            done, selected, shown, result = enter(self._until_result, actions, values)
            if result is not None:
                values = self.put(actions[done - 1], values, selected, result, shown)
            actions = actions[done:]
        return values

    def _until_result(
        self, actions: Sequence[Action], values: list[Any]
    ) -> tuple[int, Sequence[Any], Sequence[Any], Any]:
        """Call routines until one returns a value.

        Returns:
            The number of called routines; the values that the last one selects; these values in the
            form in which it got them; its result.

        Raises:
            SelectionError: a selected position does not exist.
        """
        selected: Sequence[Any] = ()
        shown: Sequence[Any] = ()
        for done, action in enumerate(actions, 1):
            select = action.select
            # Without a call if all values are selected, or none.
            selected = values if select is None else select and self.selected(action, values)
            isolated = self._unboxes and not action.differentiable
            shown = self.unboxed(selected) if isolated else selected
            result = self.call(action, shown)
            if result is not None:
                return done, selected, shown, result
        return len(actions), selected, shown, None

    def put(
        self,
        action: Action,
        values: list[Any],
        selected: Sequence[Any],
        result: Any,
        shown: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return `values` with the result of a routine in the selected positions.

        Returns `values` itself when nothing is changed.

        Args:
            selected: the values that the action selects.
            result: the routine's result.
            shown: the form in which the routine got them, if it differs.

        Raises:
            RoutineResultError: the routine returned something unusable (contract rule 5).
        """
        indices = range(len(values)) if action.select is None else action.select
        changed = None
        for index, old, given, new in zip(
            indices,
            selected,
            selected if shown is None else shown,
            self.checked(action, result, len(selected)),
            strict=True,
        ):
            if new is None or new is given:
                continue
            changed = list(values) if changed is None else changed
            changed[index] = self.driver.substitute(old, new, action)
            if action.kind is ActionKind.AFTER_OP:
                self.note_substitute(given, changed[index], action.op_id)
        return values if changed is None else changed

    def note_substitute(self, output: Any, substitute: Any, op_id: str) -> None:
        """Notify tools that track tensors that a substitute replaces an output."""
        for scope in self.scopes():
            for tool in scope.followers:
                try:
                    self.call_alone(scope, tool.note_substitute, (output, substitute))
                except BaseException as error:
                    note(error, f"{type(tool).__name__}.note_substitute", op_id)
                    raise

    def unboxed(self, values: Sequence[Any]) -> Sequence[Any]:
        """Tensors as code outside of AD sees them (:meth:`Driver.unbox`)."""
        if not self._unboxes:
            return values
        unbox = self.driver.unbox
        return [None if value is None else unbox(value) for value in values]

    def replace(self, action: Action, values: list[Any], call: OpCall | None = None) -> Any:
        """Run the replacement of an operator, which takes part in AD as the operator would.

        Args:
            call: the replaced execution, if executions of one operator can differ in attributes:
                functions of :meth:`OpContext.get_function` run with its attributes.
        """
        selected = self.selected(action, values)
        thread = vars(STATE)
        undo = thread["undo"]
        mark = len(undo)
        undo.append((thread.__setitem__, ("call", thread["call"])))
        try:
            thread["call"] = call
            return self.tool_code.enter(self.call, action, selected)
        finally:
            unwind(undo, mark)

    def replaced_outputs(
        self, action: Action, values: list[Any], call: OpCall | None = None
    ) -> list[Any]:
        """Run the replacement of an operator; return its output tensors as a flat list.

        Raises:
            RoutineResultError: it returned something else than one or more tensors.
        """
        result = self.replace(action, values, call)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if not outputs or not all(map(self.driver.is_tensor, outputs)):
            raise RoutineResultError(
                f"{action.routine} replaces op {action.op_id} and must return its output tensors, "
                f"got {described(result)}"
            )
        return outputs

    def call(
        self, action: Action, shown: Sequence[Any], function: Callable[..., Any] | None = None
    ) -> Any:
        """Call a routine in tools' code, isolated from AD unless it takes part in it.

        Args:
            shown: its tensors.
            function: function to call instead of the routine; None for the routine.
        """
        called, kwargs = action.func if function is None else function, action.kwargs
        takes_part = action.differentiable or action.kind in _REPLACEMENTS
        assert self._driver is not None
        with self._driver.routine(action, shown, not takes_part):
            try:
                return called(*shown, **kwargs) if kwargs else called(*shown)
            except BaseException as error:
                note(error, action.routine, action.op_id)
                raise

    def selected(self, action: Action, values: list[Any]) -> Sequence[Any]:
        """The values that an action selects.

        Raises:
            SelectionError: a selected position does not exist.
        """
        if action.select is None:
            return list(values)
        indices = action.select
        try:
            return list(map(values.__getitem__, indices))
        except IndexError:
            tensors = action.kind.selects
            raise SelectionError(
                f"{action.routine}: {tensors}={list(indices)} is out of range at op "
                f"{action.op_id}, which has {len(values)} {tensors}"
            ) from None

    def checked(self, action: Action, result: Any, count: int) -> Sequence[Any]:
        """The result of a routine for `count` selected tensors, as a sequence of tensors.

        Raises:
            RoutineResultError: contract rule 5 does not allow it.
        """
        is_tensor = self.driver.is_tensor
        if count == 1 and is_tensor(result):
            return (result,)
        if (
            isinstance(result, (list, tuple))
            and len(result) == count
            and all(item is None or is_tensor(item) for item in result)
        ):
            return result
        several = f"a sequence of {count} tensors"
        wanted = {0: "an empty sequence", 1: "one tensor"}.get(count, several)
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} must return None or {wanted} for its "
            f"{action.kind.selects}, got {described(result)}"
        )

    # -- analyses ---------------------------------------------------------

    def analyse(
        self, scope: LiveScope, record: OpRecord, point: InstPoint, only: set[Owner] | None
    ) -> None:
        """Run the analysis routines of one point; with `only`, of these tools."""
        tools: Sequence[Tool] = ()
        if scope.analyses_at(point):
            tools = scope.tools
            if only is not None:
                tools = [t for t in tools if t in only or not t.analyses_at(point)]
        if tools and (only is None or any(tool.analyses_at(point) for tool in tools)):
            state, undo = record.state, STATE.undo
            mark = len(undo)
            try:
                stop_collections()
                state.point = point
                self.call_alone(scope, run_analyses, (scope, tools, record, point))
            finally:
                state.point = state.tool = None
                unwind(undo, mark)
            if state.actions:
                record.sort(scope.tools)
        record.note_analysed(point)
        if only is None or not (left := record.redo.get(point, set()) - only):
            record.redo.pop(point, None)
        else:
            record.redo[point] = left
        self.analysed += point in _BACKWARD

    def call_alone(
        self, scope: LiveScope, function: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        """Call code of a scope's tools that is not a routine: isolated from AD.

        A driver may override it to be faster (`Driver.dispatcher_class`).
        """
        contexts = self.driver.vanilla(), self.driver.ad_isolated()
        self.tool_code.enter(function, *args, contexts=contexts, scopes=(scope,))


class OpExecution:
    """One execution of a forward operator during which analyses run.

    Attributes:
        plan: the operator's plan, complete once :meth:`finish` has returned.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        call: OpCall,
        scopes: Sequence[LiveScope],
        later: Set[Owner] = frozenset(),
    ) -> None:
        self._dispatcher = dispatcher
        self._call = call
        self._scopes = scopes
        self._later = later
        # For each scope its record, the tools that had to analyse again, by point, and the actions
        # before the operator.
        self._begun: list[tuple[OpRecord, Mapping[InstPoint, set[Owner]], Actions]] = []
        self._is_new = True
        tool_locked(self._analyse_before)
        self.plan = compile_plan(call.op_id, scopes, [actions for *_, actions in self._begun])

    def sees_outputs(self) -> bool:
        """True if there are analyses of the outputs, which may record further actions."""
        for scope in self._scopes:  # noqa: SIM110 - a generator would cost frames
            if scope.analyses_at(InstPoint.AFTER_FORWARD_OP):
                return True
        return False

    def finish(self, outputs: Sequence[Any]) -> ActionPlan:
        """Run the analyses of the outputs; return the complete plan."""
        shown = self._dispatcher.unboxed(outputs)
        actions = tool_locked(self._analyse_after, shown)
        if actions != [begun for *_, begun in self._begun]:
            self.plan = compile_plan(self._call.op_id, self._scopes, actions)
        return self.plan

    def _analyse_before(self) -> None:
        call = self._call
        # Properties: read once.
        key, driver = call.key, self._dispatcher.driver
        for scope in self._scopes:
            record: OpRecord | None = scope.cache.get(key)
            if record is None or not STATE.cache:
                record = OpRecord.of_call(call, driver.namespace, driver.runs_at_once)
                scope.cache.put(key, record)
            else:
                self._is_new = False
            redo = {point: set(tools) for point, tools in record.redo.items()}
            self._analyse(scope, record, InstPoint.BEFORE_FORWARD_OP, None, redo)
            # Copied under the lock: another thread may drop actions while the operator runs.
            self._begun.append((record, redo, dict(record.state.actions)))

    def _analyse_after(self, shown: Sequence[Any]) -> list[Actions]:
        """Run the analyses of the outputs; return the actions of this execution."""
        found = []
        for scope, (record, redo, begun) in zip(self._scopes, self._begun, strict=True):
            self._analyse(scope, record, InstPoint.AFTER_FORWARD_OP, shown, redo)
            found.append(record.actions_with(begun, scope.tools))
        return found

    def _analyse(
        self,
        scope: LiveScope,
        record: OpRecord,
        point: InstPoint,
        outputs: Sequence[Any] | None,
        redo: Mapping[InstPoint, set[Owner]],
    ) -> None:
        """Run the pending analyses of one point.

        Args:
            redo: the tools whose analyses had to run again when the execution began, by point.
                Those of tools that have dropped their actions since wait for the next one.
        """
        only: set[Owner] | None = None
        if point in record.analysed:
            only = redo.get(point, set()) & record.redo.get(point, set())
            if not only:
                return
        waiting = set[Owner]()
        if self._later:
            asked: set[Owner] = set(scope.tools) if only is None else only
            waiting = {tool for tool in asked if tool in self._later}
            only = asked - waiting
        state = record.state
        state.call, state.outputs = self._call, outputs
        if not self._is_new:
            # Executions of one id may differ in arguments: an earlier one may have raised.
            state.attributes, state.names = self._call.attributes, self._call.names
            record.context.pop(DESCRIPTION, None)
        try:
            self._dispatcher.analyse(scope, record, point, only)
            tensors = state.tensors
            if tensors is not None and (
                tensors.inputs is None or (outputs is not None and tensors.outputs is None)
            ):
                state.see(tensors)
        except BaseException:
            scope.cache.discard(self._call.key, record)
            raise
        finally:
            record.state.call = record.state.outputs = None
        if waiting:
            record.redo.setdefault(point, set()).update(waiting)


def run_analyses(
    scope: LiveScope, tools: Sequence[Tool], record: OpRecord, point: InstPoint
) -> None:
    """Run the analysis routines of one point, with ``before_analyses`` and ``after_analyses`` of
    tools.

    Args:
        tools: the tools, in order, some or all of the scope's.
    """
    context, state, op_filter = record.context, record.state, scope.op_filter
    tool: Tool | None = None
    running: Callable[[Any], Any] | None = None
    try:
        # At each new operator: a function for each routine would cost a frame.
        registered, turns = REGISTERED.count, scope.turns(point)
        for tool in tools:
            state.tool, (running, routines, _) = tool, turns[id(tool)]
            if running is not None:
                running(context)
                running = None
            if registered != REGISTERED.count:
                # An analysis has added another one, perhaps of this tool.
                registered, turns = REGISTERED.count, scope.turns(point)
                routines = turns[id(tool)][1]
            # Called when the first tool has an analysis: the mapping rules have run by then.
            if routines and (op_filter is None or record.is_selected(op_filter)):
                for running in routines:
                    running(context)
        for tool in tools:
            state.tool, running = tool, turns[id(tool)][2]
            if running is not None:
                running(context)
        running = None
    except BaseException as error:
        if running is not None:
            name = f"{type(tool).__name__}.{getattr(running, '__name__', running)}"
            note(error, name, state.where)
        raise
    if op_filter is not None:
        record.restrict(op_filter)


def create_driver(cls: type[Driver]) -> Driver:
    """A new driver of a registered class, with a dispatcher of its own; it is not attached."""
    loaded = cls.loaded()
    dispatcher = (loaded.dispatcher_class or Dispatcher)()
    driver = loaded(dispatcher)
    dispatcher.bind(driver)
    return driver
