"""The code of a captured graph with routines written into it, as soon as its operators are known.

Of an operator whose routines take tensors, or nothing, and are isolated from AD, the code calls
them itself, with no function between; an operator of which tools look at backward operators alone,
and want nothing there, becomes the plain call that it is in the graph. All that could make a
difference is asked once for each run of the graph::

    direct = DirectCode(code, sites, interceptor)
    function = direct.function(inputs)      # None: each operator runs by the executor
"""

from __future__ import annotations

import ast
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
import torch
from torch import nn

from amanda.engine.dispatch import charge
from amanda.engine.notes import note
from amanda.engine.plan import ActionPlan
from amanda.inline import Check, checked_by, is_counter, summed_by
from amanda.interface.action import Action
from amanda.state import STATE, TOOL_LOCK, UNPAUSED
from amanda_torch import _internals
from amanda_torch.compiled.code import GraphCode, Method, Site, Statement
from amanda_torch.compiled.deferred import Deferred, is_deferrable
from amanda_torch.compiled.derived import DerivedGraph, Trial
from amanda_torch.compiled.operators import Argument, Operator
from amanda_torch.eager.execution import KnownOp, unswallowed, with_outputs, written_outputs
from amanda_torch.eager.frames import Frame
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.operators.calls import Place, item_at, tensors_of
from amanda_torch.operators.dtypes import SUMMED
from amanda_torch.operators.names import is_in_place
from amanda_torch.routines import RoutineDispatcher, selected, warn_of_change

RUNS = frozenset({1, 2, 3, 5, 9})
"""After how many runs the code is made anew, if more is known of the operators: their inputs are
described in the second execution, their backward operators are known after two or three passes."""

TRIALS = 4
"""Runs of which the nodes are noted, until a backward pass proves what they show."""

MOST_VALUES = 64
"""Tensors that the gate takes at a point."""

_CHOOSING = frozenset({"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Operators whose nodes depend on switches of the program that Dynamo may not guard."""


@attrs.frozen(eq=False)
class Known:
    """The facts about one call of a graph.

    Attributes:
        site: the call.
        acts: whether one of its operators does not run plainly vanilla.
        function: runs the call with all that is to be done.
        known: its operator; None if it has none or several.
        plans: the plans of all its operators.
        operator: how that is called.
        frame: the module call that it belongs to.
        is_one_output: whether it returns one tensor.
        records: whether gradients may be recorded in it.
    """

    site: Site
    acts: bool
    function: Callable[..., Any]
    known: KnownOp | None
    plans: Sequence[ActionPlan]
    operator: Operator | None
    frame: Frame
    is_one_output: bool
    records: bool

    def only_watches(self) -> bool:
        """Whether no routine of it takes part in AD, acts on gradients or replaces an operator."""
        for plan in self.plans:
            if not (plan.is_claim or (plan.is_isolated and (plan.is_blind or plan.is_around))):
                return False
        return True

    def is_idle(self, is_static: bool) -> bool:
        """Whether nothing is to be done at its backward operators, in all executions.

        To be asked after a run of the graph: other graphs run operators of the same ids. Autograd
        makes the same nodes each time, as Dynamo guards all that they depend on, unless sizes are
        symbolic.
        """
        if not self.acts or not self.records:
            return True
        if self.known is None or not is_static:
            return False
        name, gradients = self.known.name, self.known.gradients
        graph = gradients.graph
        is_busy = graph is not None and (graph.is_quick or not graph.is_idle)
        # One that has returned its input has no nodes, and the form of another operator.
        has_none = graph is not None and not graph.form
        return (
            not is_busy
            and (has_none or gradients.form is not None)
            and name not in _CHOOSING
            and not is_in_place(name, {})
        )

    def may_be_derived(self) -> bool:
        """Whether executions of its backward operators may be derived from backward passes."""
        known = self.known
        return (
            self.records
            and known is not None
            and known.claims
            and known.name not in _CHOOSING
            and not known.plan.acts_on_gradients
            and not is_in_place(known.name, {})
        )

    def is_learned(self) -> bool:
        """Whether all is known of its backward operators, so that one run can show the rest."""
        graph = None if self.known is None else self.known.gradients.graph
        return graph is not None and graph.hooks is not None

    def is_direct(self, is_static: bool) -> bool:
        """Whether its routines can be written into the code."""
        known, operator = self.known, self.operator
        if known is None or operator is None or not known.plan.is_isolated:
            return False
        plan = known.plan
        if not is_static and any(summed_by(action.func) for action in plan.after):
            return False
        if plan.is_blind or plan.is_claim:
            return True
        layout = known.layout
        return (
            plan.is_around
            and layout is not None
            and not (layout.is_in_place and self.records)
            and (self.is_one_output or not plan.after)
        )


class DirectCode:
    """The codes of one graph, each with more written into it than the one before.

    Args:
        code: the graph.
        calls: what is known of its calls.
        interceptor: of the thread that runs it.
        is_static: whether its sizes are the same in all runs. Where they are not, nothing that one
            run shows of nodes and shapes says anything about another one.
    """

    def __init__(
        self,
        code: GraphCode,
        calls: Sequence[Known],
        interceptor: Interceptor,
        is_static: bool,
    ) -> None:
        self._code = code
        self._is_static = is_static
        self._calls = calls
        self._interceptor = interceptor
        self._dispatcher: RoutineDispatcher = interceptor.executor.claimer.dispatcher
        self._changes = self._dispatcher.changes
        self._runs = 0
        self._form: Any = None
        self._function: Callable[..., Any] | None = None
        self._leaves: list[tuple[int, bool]] = []
        self._owners: list[str] = []
        may_try = is_static and any(call.may_be_derived() for call in calls)
        self._trials = 0 if may_try else TRIALS
        self._trial: Trial | None = None
        self._derived: DerivedGraph | None = None
        self._derived_function: Callable[..., Any] = _nothing
        self._derived_form: Any = None

    def function(self, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """The code for the next run; None if there is none for it."""
        function = self._function
        if function is None or self._changes != self._dispatcher.changes:
            return None
        for index, is_leaf in self._leaves:
            if inputs[index].is_leaf is not is_leaf:
                return None
        if len(UNPAUSED) != 1 or not _internals.is_eager() or torch.is_inference_mode_enabled():
            return None
        if self._owners:
            iterations = self._interceptor.executor.claimer.iterations
            iterations.update(dict.fromkeys(self._owners, self._interceptor.iteration))
        return function

    def run(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """The outputs of the graph.

        Args:
            function: what runs it where there is no code.
        """
        code = self.function(inputs)
        trial = self._trial
        if trial is not None and trial.is_proven and code is not None:
            if self._derived_form is not self._form:
                self._derive(trial, self._form)
            derived = self._derived
            if derived is not None and derived.can_run(inputs):
                return self._run_derived(derived, inputs)
        elif self._trials < TRIALS and self._may_try():
            return self._run_trial(inputs)
        return (code or function)(*inputs)

    def _run_derived(self, derived: DerivedGraph, inputs: Sequence[Any]) -> Any:
        start = _internals.sequence_number()
        result = self._derived_function(*inputs)
        if not derived.claim(result, start, self._interceptor.iteration):
            self._trial, self._trials = None, TRIALS
        return result

    def _may_try(self) -> bool:
        """Whether the nodes of the next run can be noted."""
        if not any(call.may_be_derived() and call.is_learned() for call in self._calls):
            # No backward pass has come here: most probably none will.
            self._trials += 1
            return False
        return (
            _internals.is_eager()
            and len(UNPAUSED) == 1
            and self._changes == self._dispatcher.changes
        )

    def _run_trial(self, inputs: Sequence[Any]) -> Any:
        """The outputs of a run of which the nodes are noted."""
        self._trials += 1
        if self._trial is not None:
            self._trial.forget_leaves()
        trial = Trial(self._interceptor.executor.claimer, inputs)
        functions = [
            trial.noting(number, call.function, call.known.gradients)
            if call.known is not None and call.may_be_derived()
            else call.function
            for number, call in enumerate(self._calls)
        ]
        result = self._code.function(functions)(*inputs)
        trial.end(result)
        self._trial = trial
        return result

    def _derive(self, trial: Trial, form: Sequence[tuple[bool, bool]]) -> None:
        """Make the code that needs fewer hooks.

        Args:
            trial: one that a backward pass has proven.
            form: that of the code that is there.
        """
        wanted = [n for n, (is_idle, is_direct) in enumerate(form) if is_direct and not is_idle]
        derived = DerivedGraph(self._dispatcher, trial, wanted)
        self._derived, self._derived_form = None, form
        if derived.operators:
            plain = derived.operators
            self._derived = derived
            self._derived_function = self._written(
                [(is_idle or n in plain, is_direct) for n, (is_idle, is_direct) in enumerate(form)]
            )

    def note_run(self, inputs: Sequence[Any]) -> None:
        """The graph has run: make code for the next run, if that can be better now."""
        self._runs += 1
        if self._runs in RUNS:
            self._make(inputs)

    def _make(self, inputs: Sequence[Any]) -> None:
        calls = self._calls
        # Values that routines have made may be of another type than those that were described.
        may_write = all(call.only_watches() for call in calls) and not any(
            isinstance(x, torch.Tensor) and x.is_inference() for x in inputs
        )
        is_static = self._is_static
        form = [
            (call.is_idle(is_static), may_write and call.acts and call.is_direct(is_static))
            for call in calls
        ]
        if form == self._form:
            return
        self._form = form
        self._function = self._written(form)
        # An operator in place may have made another one of it, which is then never found.
        self._leaves = [
            (index, x.is_leaf)
            for index, x in enumerate(inputs)
            if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter)
        ]
        # Others have no leaf of which a later operator may ask who owns it.
        owners = self._interceptor.executor.claimer.owners()
        self._owners = [
            call.known.op_id
            for call, (is_idle, _) in zip(calls, form, strict=True)
            if is_idle and call.known is not None and call.known.op_id in owners
        ]

    def _written(self, form: Sequence[tuple[bool, bool]]) -> Callable[..., Any]:
        """The code, by what is known of each call: whether it is idle, and direct."""
        writer = _Writer(self._code, self._dispatcher, self._interceptor)
        for call, (is_idle, is_direct) in zip(self._calls, form, strict=True):
            writer.add(call, is_idle, is_direct)
        return writer.function()


class _Writer:
    """Writes the code of one graph.

    Attributes:
        names: the globals that the code uses.
    """

    def __init__(
        self, code: GraphCode, dispatcher: RoutineDispatcher, interceptor: Interceptor
    ) -> None:
        self._code = code
        self._dispatcher = dispatcher
        self._interceptor = interceptor
        self._functions: list[Callable[..., Any]] = []
        self._blocks: dict[int, str] = {}
        self._points: list[tuple[Known, Sequence[Action]]] = []
        self._deferred = Deferred(dispatcher.native)
        self.names: dict[str, Any] = {
            "amanda_thread": vars(STATE),
            "amanda_acquire": TOOL_LOCK.acquire,
            "amanda_release": TOOL_LOCK.release,
            "amanda_clock": time.perf_counter,
            "amanda_record": _internals.set_grad_enabled,
            "amanda_sequence": _internals.sequence_number,
            "amanda_charge": _charge,
            "amanda_failed": self._failed,
        }

    def add(self, call: Known, is_idle: bool, is_direct: bool) -> None:
        """Write the next call of the graph."""
        number = len(self._functions)
        statement = self._code.statements[number]
        known = call.known
        is_plain = not call.acts or (is_idle and known is not None and known.is_claim)
        if is_direct and statement is not None:
            self._functions.append(call.site.function)
            self._blocks[number] = self._block(number, call, statement, is_idle)
        elif is_plain:
            self._functions.append(call.site.function)
            if statement is not None and isinstance(call.site.function, Method):
                self._blocks[number] = _plain(call.site, statement, self._code.markers[number])
        else:
            self._functions.append(call.function)

    def function(self) -> Callable[..., Any]:
        """The code."""
        names = {**self.names, **self._deferred.names}
        return self._code.rewritten(self._functions, self._blocks, self._frame(), names)

    def _frame(self) -> str:
        """The code around the statements of the graph; "..." stands for these."""
        beginning, ending = self._deferred.beginning(), self._deferred.ending()
        handler: list[str] = []
        if self._points:
            beginning += ["amanda_at, amanda_seconds, amanda_began = -1, 0.0, 0.0"]
            ending += ["if amanda_seconds: amanda_charge(amanda_seconds)"]
            handler += ["except BaseException as amanda_error:", "    if amanda_at < 0: raise"]
            handler += ["    amanda_failed(amanda_error, amanda_at, amanda_began)"]
        if "amanda_point" in self.names:
            ending += ["amanda_charge(amanda_spent())"]
        if not ending:
            return ""
        last = ["finally:", *(f"    {line}" for line in ending)]
        return "\n".join([*beginning, "try:", "    ...", *handler, *last])

    # -- one operator -----------------------------------------------------

    def _block(self, number: int, call: Known, statement: Statement, is_idle: bool) -> str:
        """The statements of an operator and its routines."""
        known = call.known
        assert known is not None
        assert call.operator is not None
        plan = known.plan
        lines = self._operator(number, call, statement, is_idle)
        values = [_expression(place, call.operator, statement) for place in call.operator.places]
        if is_deferrable(plan):
            return "\n".join(self._deferred.around(plan, lines, values, statement.target))
        if (check := _check_of(plan)) is not None:
            return "\n".join(
                [*lines, *self._checked(number, call, statement.target, values, check)]
            )
        if plan.after:
            one = [statement.target]
            point, found = self._point(number, call, "after", plan.after, one)
            lines += point
            if found:
                self.names[f"amanda_after_{number}"] = functools.partial(self._after, call)
                changed = statement.text(f"amanda_after_{number}", found, statement.target)
                lines += ["if amanda_found is not None:", f"    {changed}"]
        if plan.before:
            first, found = self._point(number, call, "before", plan.before, values)
            if found:
                self.names[f"amanda_before_{number}"] = functools.partial(self._before, call)
                changed = statement.text(f"amanda_before_{number}", found)
                inner = [f"    {line}" for line in lines]
                lines = ["if amanda_found is None:", *inner, "else:", f"    {changed}"]
            lines = [*first, *lines]
        return "\n".join(lines)

    def _point(
        self, number: int, call: Known, name: str, actions: Sequence[Action], values: Sequence[str]
    ) -> tuple[list[str], str]:
        """The statements that run the routines of one point, as the dispatcher runs them.

        Returns:
            Them, and an expression for how many have run and what the last one has returned, if
            that is something; "" if it never is.
        """
        if _are_counters(actions):
            lines = [self._place(call, actions), "amanda_acquire()"]
            for index, action in enumerate(actions):
                self.names[f"amanda_{name}_{number}_{index}"] = action.func
                lines.append(f"amanda_{name}_{number}_{index}.count += 1")
            return [*lines, "amanda_release()", "amanda_at = -1"], ""
        native = self._dispatcher.native
        # What no routine takes need not be a tensor: an operator of several outputs has a tuple.
        taken = values if any(action.select != () for action in actions) else ()
        if native is None or len(taken) > MOST_VALUES:
            return self._python_point(number, call, name, actions, taken)
        self.names.update(amanda_point=native.run_point, amanda_spent=native.take_spent)
        self.names[f"amanda_known_{number}"] = call.known
        self.names[f"amanda_actions_{name}_{number}"] = tuple(actions)
        which = f"amanda_known_{number}, amanda_actions_{name}_{number}"
        given = ", ".join([which, "amanda_thread", str(call.records), *taken])
        return [f"amanda_found = amanda_point({given})"], "amanda_found"

    def _python_point(
        self, number: int, call: Known, name: str, actions: Sequence[Action], taken: Sequence[str]
    ) -> tuple[list[str], str]:
        """The same without the gate.

        Args:
            taken: the expressions that the routines select from.
        """
        is_one = len(actions) == 1
        given = selected(actions[0], taken) if is_one else taken
        self.names[f"amanda_run_{name}_{number}"] = _routine_of(actions)
        versions = " + ".join(f"{value}._version" for value in given if value != "None")
        lines = [self._place(call, actions), "amanda_thread['paused'] = 1"]
        lines += ["amanda_record(False)"] if call.records else []
        lines += [f"amanda_versions = {versions}"] if versions else []
        lines += [
            "amanda_acquire()",
            "amanda_began = amanda_clock()",
            f"amanda_found = amanda_run_{name}_{number}({', '.join(given)})",
        ]
        if versions:
            self.names[f"amanda_warn_{name}_{number}"] = functools.partial(
                warn_of_change, actions[-1]
            )
            lines += [
                f"if {versions} != amanda_versions:",
                f"    amanda_warn_{name}_{number}()",
            ]
        lines += ["amanda_seconds += amanda_clock() - amanda_began", "amanda_release()"]
        lines += ["amanda_record(True)"] if call.records else []
        lines += ["amanda_thread['paused'] = 0", "amanda_at = -1"]
        return lines, "(1, amanda_found)" if is_one else "amanda_found"

    def _place(self, call: Known, actions: Sequence[Action]) -> str:
        """The statement that says whose routines run from now on."""
        self._points.append((call, actions))
        return f"amanda_at = {len(self._points) - 1}"

    def _checked(
        self, number: int, call: Known, output: str, inputs: Sequence[str], check: Check
    ) -> list[str]:
        """The statements after an operator that find its output finite, as most are: then what is
        left of the check is its trail. Of another output its routines are asked."""
        known = call.known
        assert known is not None
        self.names.update(
            amanda_is_finite=math.isfinite,
            amanda_plain=_internals.PLAIN_TENSORS,
            amanda_summed=SUMMED,
        )
        self.names[f"amanda_ask_{number}"] = functools.partial(self._ask, known.plan, check)
        lines = [self._place(call, known.plan.after)]
        lines += ["amanda_record(False)"] if call.records else []
        # The sum of finite numbers may overflow: only a finite sum is an answer.
        has_sum = f"{output}.__class__ in amanda_plain and {output}.dtype in amanda_summed"
        lines += [
            "amanda_began = amanda_clock()",
            "try:",
            f"    amanda_is_clean = {has_sum} and amanda_is_finite({output}.sum().item())",
            # There is no sum, or it has no number: nested, on the meta device.
            "except RuntimeError:",
            "    amanda_is_clean = False",
        ]
        if check.trail is not None:
            self.names[f"amanda_trail_{number}"] = functools.partial(check.trail.append, check.name)
            lines += [
                "if amanda_is_clean:",
                "    amanda_acquire()",
                f"    amanda_trail_{number}()",
                "    amanda_release()",
            ]
        lines += ["amanda_seconds += amanda_clock() - amanda_began"]
        lines += ["amanda_record(True)"] if call.records else []
        given = "".join(f"{value}, " for value in inputs)
        return [
            *lines,
            "amanda_at = -1",
            f"if not amanda_is_clean: amanda_ask_{number}({output}, ({given}))",
        ]

    def _operator(self, number: int, call: Known, statement: Statement, is_idle: bool) -> list[str]:
        """The statements that run an operator, without its routines."""
        known = call.known
        assert known is not None
        plain = self._called(number, call, statement)
        if is_idle or not (known.claims and call.records):
            return [plain]
        self.names[f"amanda_claimed_{number}"] = self._claimed(call)
        native = self._dispatcher.native
        if native is None:
            return [statement.text(f"amanda_claimed_{number}", "None")]
        self.names[f"amanda_known_{number}"] = known
        self.names["amanda_claim"] = native.claim
        self.names["amanda_mode"] = self._interceptor
        claim = (
            f"amanda_claim(amanda_mode, amanda_known_{number}, {statement.target}, amanda_first)"
        )
        slow = f"amanda_claimed_{number}"
        given = ", ".join([f"amanda_first, {statement.target}", *statement.given()])
        return [
            "amanda_first = amanda_sequence()",
            plain,
            f"if not {claim}: {slow}({given})",
        ]

    def _called(self, number: int, call: Known, statement: Statement) -> str:
        """The statement that calls an operator: not a function of PyTorch's around it, if any."""
        operator = call.operator
        if operator is None or operator.is_direct:
            return _plain(call.site, statement, self._code.markers[number])
        given = []
        for key, argument in [*enumerate(operator.args), *operator.kwargs.items()]:
            if argument.key is None:
                text = f"amanda_value_{number}_{key}"
                self.names[text] = argument.value
            else:
                text = ast.unparse(_given(argument.key, statement))
            given.append(text if isinstance(key, int) else f"{key}={text}")
        self.names[f"amanda_operator_{number}"] = operator.func
        return f"{statement.target} = amanda_operator_{number}({', '.join(given)})"

    def _claimed(self, call: Known) -> Callable[..., Any]:
        """Claims the backward operators of an operator where the gate cannot.

        It is given the number of the next node before the operator has run, and its result; or None
        where it is to run the operator, too.
        """
        interceptor, known, operator = self._interceptor, call.known, call.operator
        assert known is not None
        assert operator is not None
        executor, frame, cells = interceptor.executor, call.frame, call.frame.cells
        dispatcher = self._dispatcher

        def claimed(start: int | None, /, *args: Any, **kwargs: Any) -> Any:
            interceptor.frame = frame
            interceptor.cells = cells
            given = args if start is None else args[1:]
            if not operator.is_direct:
                given, kwargs = operator.arguments(given, kwargs)
            if start is None:
                return executor.run_claimed(known, operator.func, given, kwargs, operator.key)
            native, key = dispatcher.native, operator.key
            pending = known, key or operator.func, given, kwargs, args[0], start
            if native is not None and native.claim_pending(interceptor, *pending):
                return None
            return executor.claimed(known, operator.func, given, kwargs, args[0], start, key)

        return claimed

    # -- what is rare -----------------------------------------------------

    def _before(self, call: Known, found: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operator after a routine before it has returned something."""
        known, operator, interceptor = call.known, call.operator, self._interceptor
        assert known is not None
        assert operator is not None
        interceptor.frame, interceptor.cells = call.frame, call.frame.cells
        args, kwargs = operator.arguments(args, kwargs)
        values = _values(operator, args, kwargs)
        done, returned = found
        values = self._dispatcher.go_on(known.plan.before, done, values, returned)
        executor = interceptor.executor
        return executor.run(known, operator.func, args, kwargs, operator.key, values)

    def _after(self, call: Known, found: Any, result: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result of an operator after a routine after it has returned something."""
        known, operator = call.known, call.operator
        assert known is not None
        assert operator is not None
        args, kwargs = operator.arguments(args, kwargs)
        values, outputs = _values(operator, args, kwargs), tensors_of(result)
        done, returned = found
        changed = self._dispatcher.go_on(known.plan.after, done, outputs, returned)
        if changed is outputs:
            return result
        is_written = known.layout is not None and known.layout.is_in_place
        written = written_outputs(is_written, isinstance(operator.key, type), values, outputs)
        return with_outputs(known.plan, written, values, result, outputs, changed)

    def _ask(self, plan: ActionPlan, check: Check, output: Any, inputs: Sequence[Any]) -> None:
        """Run the second routine of a check, as if the first one had run."""
        check.supply(inputs, is_new=True)
        self._dispatcher.run_all(plan.after, [output])

    def _failed(self, error: BaseException, at: int, began: float) -> NoReturn:
        """Undo what goes with a tool's code, as far as it was done, and raise the error."""
        (call, actions), thread = self._points[at], vars(STATE)
        thread["paused"] = 0
        if call.records:
            _internals.set_grad_enabled(True)
        if TOOL_LOCK.is_owned():
            charge(thread["scopes"], time.perf_counter() - began if began else 0.0)
            TOOL_LOCK.release()
        known = call.known
        assert known is not None
        if len(actions) == 1:
            note(error, actions[0].routine, known.op_id)
        raise unswallowed(error, known.name)


def _routine_of(actions: Sequence[Action]) -> Callable[..., Any]:
    """The routines of one point of an operator as one function.

    That of a single one takes what it selects, and gives what it has returned. That of several
    takes the tensors that they select from, runs them until one returns something, and gives how
    many have run and what the last one has returned; or None.
    """
    if len(actions) == 1:
        action = actions[0]
        return functools.partial(action.func, **action.kwargs) if action.kwargs else action.func

    def run(*values: Any) -> tuple[int, Any] | None:
        for number, action in enumerate(actions):
            try:
                chosen = selected(action, values) if action.select != () else ()
                result = action.func(*chosen, **action.kwargs)
            except BaseException as error:
                note(error, action.routine, action.op_id)
                raise
            if result is not None:
                return number + 1, result
        return None

    return run


def _values(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [item_at(place, args, kwargs) for place in operator.places]


def _are_counters(actions: Sequence[Action]) -> bool:
    for action in actions:
        if not is_counter(action.func) or action.select != () or action.kwargs:
            return False
    return True


def _check_of(plan: ActionPlan) -> Check | None:
    """The check that is all that runs around an operator, where it does not look at inputs."""
    if not len(plan.before) == len(plan.after) == 1:
        return None
    before, after = plan.before[0], plan.after[0]
    first, check = checked_by(before.func), checked_by(after.func)
    if check is None or first is not check or check.overwrites is not False:
        return None
    is_plain = all(one.select is None and not one.kwargs for one in (before, after))
    is_pair = (before.func, after.func) == (check.before, check.after)
    return check if is_plain and is_pair else None


def _plain(site: Site, statement: Statement, marker: str) -> str:
    """The unchanged statement of a site of the graph.

    Args:
        marker: the global by which its function is called.
    """
    if isinstance(site.function, Method):
        target, *rest = statement.given()
        return f"{statement.target} = {target}.{site.function.__name__}({', '.join(rest)})"
    return statement.text(marker)


def _expression(place: Place, operator: Operator, statement: Statement) -> str:
    """The expression of one input of an operator."""
    if isinstance(place, str):
        return "None"
    (where, key), path = place
    argument: Argument = operator.args[key] if where == "arg" else operator.kwargs[key]
    if argument.key is None:
        return repr(argument.value)
    found = _given(argument.key, statement)
    text, steps = "", list(path)
    while steps and isinstance(found, (ast.List, ast.Tuple)):
        found = found.elts[steps.pop(0)]
    text = ast.unparse(found)
    return text + "".join(f"[{step!r}]" for step in steps)


def _given(key: int | str, statement: Statement) -> ast.expr:
    """The expression that a statement passes at a position or by a keyword."""
    return statement.arguments[key] if isinstance(key, int) else statement.keywords[key]


def _nothing(*inputs: Any) -> Any:
    """Stands for code that there is not."""
    raise RuntimeError("there is no such code")


def _charge(seconds: float) -> None:
    TOOL_LOCK.hold(charge, vars(STATE)["scopes"], seconds)
