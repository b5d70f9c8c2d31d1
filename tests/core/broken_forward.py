"""Loopback drivers that each break a rule about forward ops or scopes."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import attrs

from amanda.driver import BoundCall, Dispatcher, Namespace, OperatorRun, OpIds
from amanda.inline import Counter
from amanda.inline.steps import Inline
from amanda.interface.points import Point
from amanda.state import LIVE_SCOPES, STATE
from amanda.testing.contract.inline import InlineTests
from amanda.testing.loopback import LoopbackDriver, Tensor, no_grad, ops, tape
from tests.core.faults import fault
from tests.core.loopback_framework import LoopbackFramework

# -- ids ----------------------------------------------------------------------


@fault(
    "test_once_per_op", "test_ids_are_equal_across_iterations", "test_ids_restart_after_backward"
)
class CountsForEver(LoopbackDriver):
    """Its counters never restart."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.ids.restart = lambda: None  # type: ignore[method-assign]


@fault("test_ids_are_unique")
class CountsNothing(LoopbackDriver):
    """Every op of a type has the same id."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.ids.next = lambda name, phase="forward": f"/{name}:0"  # type: ignore[method-assign]


@fault("test_ids_carry_module_paths", "test_ids_of_several_models")
class IgnoresModules(LoopbackDriver):
    """Its ids have no module path."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.ids.within = lambda *_: nullcontext()  # type: ignore[method-assign,assignment]


# -- contexts -----------------------------------------------------------------


@fault(
    "test_runs_at_once", "test_runs_at_once_in_backward", "test_points_of_modules_that_run_at_once"
)
class TellsOfAGraph(LoopbackDriver):
    """It says that its operators are in a graph built ahead, without the capability."""

    runs_at_once = False


# -- inputs -------------------------------------------------------------------


@fault("test_inputs_in_declared_order")
class TakesKeywordsAsTheyCome(LoopbackDriver):
    """Inputs come in the order of the call."""

    def run_operator(
        self, op: Any, name: str, signature: Any, args: Any, kwargs: Any, function: Any
    ) -> Any:
        arguments = signature.bind(args, kwargs)
        named = [(k, v) for k, v in kwargs.items() if isinstance(v, Tensor)]
        if named:
            arguments.inputs[-len(named) :] = [value for _, value in named]
            arguments.names[-len(named) :] = [name for name, _ in named]
        return self.operator_class(self, op, name, arguments, function).run()


@fault("test_absent_optional_input", "test_input_names")
class DropsAbsentInputs(LoopbackDriver):
    """Absent optional inputs do not count."""

    class operator_class(OperatorRun):
        def __init__(self, driver: Any, op: Any, name: str, arguments: Any, function: Any) -> None:
            pairs = zip(arguments.inputs, arguments.names, strict=True)
            kept = [(t, n) for t, n in pairs if t is not None]
            arguments.inputs[:] = [t for t, _ in kept]
            arguments.names[:] = [n for _, n in kept]
            super().__init__(driver, op, name, arguments, function)


@fault("test_a_constant_is_no_parameter")
class TakesAllForParameters(LoopbackDriver):
    """It gives the value of any tensor that no operator has computed."""

    def current_value(self, tensor: Any) -> Any:
        return tensor.alias() if tensor.node is None else None


@fault("test_names_of_parameters")
class NamesData(LoopbackDriver):
    """It has a name for any tensor."""

    def parameter_name(self, tensor: Any) -> str:
        return "name"


@fault("test_each_operator_has_its_own_attributes")
class KeepsTheFirstAttributes(LoopbackDriver):
    """The attributes of the first operator of a type are those of all."""

    known: ClassVar[dict[str, Any]] = {}

    class operator_class(OperatorRun):
        def __init__(self, driver: Any, op: Any, name: str, *args: Any) -> None:
            super().__init__(driver, op, name, *args)
            own = self._call.attributes
            self._call.attributes = KeepsTheFirstAttributes.known.setdefault(name, own)


@fault("test_operators_of_other_types_are_seen_or_counted")
class SeesSevenTypes(LoopbackDriver):
    """It leaves operators of other types than the kit's alone, and does not count them."""

    def _executing(self, vanilla: Any) -> Any:
        seeing = super()._executing(vanilla)

        def execute(op: Any, *args: Any) -> Any:
            return (seeing if op.__name__ in LoopbackFramework.types else vanilla)(op, *args)

        return execute


@fault("test_an_operator_runs_once")
class RunsTwice(LoopbackDriver):
    """It runs each operator once more, to look at its outputs."""

    class operator_class(OperatorRun):
        def run(self) -> Any:
            self._call.run(self.inputs)
            return super().run()


@fault("test_select_inputs_by_role")
class NamesAnotherFramework(LoopbackDriver):
    """Its operators are those of another framework."""

    namespace = Namespace("pytorch/2.13/eager")  # type: ignore[assignment]


@fault("test_a_step_of_the_optimizer_ends_an_iteration")
class TakesStepsForAPhase(LoopbackDriver):
    """The operators of an optimizer have a phase, and its step ends no iteration."""

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        with self.in_phase("optimizer"):
            yield


@fault("test_modules_are_entered_and_left_with_their_tensors")
class LeavesWithoutOutputs(LoopbackDriver):
    """Modules are left without outputs."""

    def _calling_module(self, vanilla: Any) -> Any:
        def call(module: Any, *args: Any) -> Any:
            with self.module_call(module, module.named_modules, args):
                return vanilla(module, *args)

        return call


@fault("test_modules_are_left_where_an_operator_raises")
class CompletesFailedPasses(LoopbackDriver):
    """It does not say that a module has raised."""

    @contextmanager
    def module_call(self, *args: Any) -> Iterator[Any]:
        error = None
        with super().module_call(*args) as returned:
            try:
                yield returned
            except ValueError as raised:
                error = raised
        if error is not None:
            raise error


@fault("test_value_of_a_parameter")
class KnowsNoParameters(LoopbackDriver):
    """It never knows a value."""

    def current_value(self, tensor: Any) -> None:
        return None


@fault("test_attributes")
class HidesAttributes(LoopbackDriver):
    """It tells no attributes."""

    class operator_class(OperatorRun):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._call.attributes = {}


# -- routines -----------------------------------------------------------------


@fault(
    "test_forward_routines_run_every_time", "test_routine_of_an_after_analysis_runs_the_first_time"
)
class SkipsTheFirstExecution(LoopbackDriver):
    """Routines run from the second execution of an op on."""

    class operator_class(OperatorRun):
        def run(self) -> Any:
            if self._dispatcher.plan(self._call.op_id) is not None:
                return super().run()
            analysis = self._dispatcher.begin(self._call)
            result = self._call.run(self.inputs)
            analysis.finish([result])
            return result


@fault("test_routine_fails", "test_wrong_return_before")
class SwallowsErrors(LoopbackDriver):
    """Errors of routines do not reach the user."""

    class operator_class(OperatorRun):
        def run(self) -> Any:
            given = self.inputs
            try:
                return super().run()
            except Exception:
                return self._call.run(given)


@fault("test_replacement_takes_part_in_ad")
class ReplacesWithoutGradient(LoopbackDriver):
    """A replaced op has no gradient."""

    class operator_class(OperatorRun):
        def _compute(self, plan: Any, inputs: Any) -> Any:
            with no_grad() if plan.replace else nullcontext():
                return super()._compute(plan, inputs)


@fault("test_wrong_return_of_a_replacement")
class AcceptsAnyReplacement(LoopbackDriver):
    """It does not look at what a replacement returns."""

    class operator_class(OperatorRun):
        def _compute(self, plan: Any, inputs: Any) -> Any:
            if plan.replace is None:
                return super()._compute(plan, inputs)
            result = self._dispatcher.replace(plan.replace, inputs)
            return [tape.tensor(0.0) if result is None else result]


@fault("test_tools_run_vanilla")
class InstrumentsTools(LoopbackDriver):
    """The tools' own ops are ops like others."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        dispatcher.scopes = lambda: tuple(s for s in STATE.scopes if s.alive)  # type: ignore[method-assign]

    def vanilla(self) -> AbstractContextManager[Any]:
        return nullcontext()


# -- scopes -------------------------------------------------------------------


@fault("test_patches_are_undone", "test_nested_scopes_undo_patches")
class ForgetsAPatch(LoopbackDriver):
    """One of its patches stays."""

    def attach(self) -> None:
        super().attach()
        ops.rng_state = functools.partial(ops.rng_state)


@fault("test_thread_started_before")
class CoversAllThreads(LoopbackDriver):
    """Every thread is instrumented."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        dispatcher.scopes = lambda: () if STATE.paused else tuple(LIVE_SCOPES)  # type: ignore[method-assign]


@fault(
    "test_suspended_generator",
    "test_switch_of_a_suspended_generator",
    "test_tasks_have_their_own_scopes_and_switches",
)
class InstrumentsTheCaller(LoopbackDriver):
    """A suspended generator's scope covers whoever runs meanwhile."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        dispatcher.scopes = (  # type: ignore[method-assign]
            lambda: () if STATE.paused or not STATE.enabled else STATE.scopes
        )


# -- transparency -------------------------------------------------------------


@fault("test_forward_only", "test_watching_changes_nothing")
class RoundsResults(LoopbackDriver):
    """Results differ in the last places."""

    class operator_class(OperatorRun):
        def run(self) -> Any:
            result = super().run()
            if isinstance(result, Tensor):
                result.data[:] = [x + 1e-12 for x in result.data]
            return result


@fault("test_random_numbers")
class DrawsRandomNumbers(LoopbackDriver):
    """It draws from the user's random numbers."""

    class operator_class(OperatorRun):
        def run(self) -> Any:
            ops.GENERATOR.random()
            return super().run()


@fault("test_tools_die", "test_a_pending_backward_keeps_no_tool", "test_many_scopes_leave_nothing")
class RemembersPlans(LoopbackDriver):
    """What it has seen stays in a global table."""

    seen: list[Any] = []  # noqa: RUF012 - that is the fault

    class operator_class(OperatorRun):
        def run(self) -> Any:
            result = super().run()
            RemembersPlans.seen.append(self._dispatcher.plan(self._call.op_id))
            return result


@fault("test_models_die")
class RemembersModels(LoopbackDriver):
    """It holds every model that it meets."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.models: list[Any] = []

    def module_call(self, module: Any, named_modules: Any) -> Any:
        self.models.append(module)
        return super().module_call(module, named_modules)


@fault("test_tensors_without_weak_references", "test_tensors_without_dimensions")
class RefersWeaklyToAll(LoopbackDriver):
    """It takes for granted that every tensor takes a weak reference."""

    class operator_class(OperatorRun):
        def _past(self, tensor: Any) -> Any:
            return None if tensor is None else weakref.ref(tensor)


# -- replacements, functions of operators, user's operators --------------------


@fault("test_function_has_the_attributes_of_its_execution")
class ReplaysTheFirstCall(LoopbackDriver):
    """A replacement sees the attributes of the first execution in all later ones."""

    class operator_class(OperatorRun):
        def _compute(self, plan: Any, inputs: Any) -> Any:
            if plan.replace is None:
                return super()._compute(plan, inputs)
            return list(self._dispatcher.replace(plan.replace, inputs))


@fault("test_a_function_of_an_op_keeps_no_tensor")
class FreezesWithTensors(LoopbackDriver):
    """The function of an operator holds the call with its inputs."""

    class operator_class(OperatorRun):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._call = _KeepingCall(**attrs.asdict(self._call, recurse=False))


class _KeepingCall(BoundCall):
    def freeze(self) -> Any:
        return self.run


@fault("test_ops_of_the_user_inside_the_scope")
class KnowsTheOperatorsOfItsStart(LoopbackDriver):
    """It sees the operators that were there when it was attached."""

    def attach(self) -> None:
        self.known = [item for item in gc.get_objects() if isinstance(item, ops.LoopbackOp)]
        super().attach()

    def run_operator(self, op: Any, name: str, *args: Any) -> Any:
        if any(op is known for known in self.known):
            return super().run_operator(op, name, *args)
        _, args, kwargs, _ = args
        return op.compute(*args, **kwargs)


# -- threads ------------------------------------------------------------------


@fault("test_ids_of_a_thread", "test_ids_across_a_backward_of_another_thread")
class CountsForAllThreads(LoopbackDriver):
    """Its counters are shared by all threads."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        members = {k: v for k, v in vars(OpIds).items() if k not in ("__dict__", "__weakref__")}
        self.ids = type("SharedIds", (), members)()


@fault("test_scope_left_in_another_thread")
class RemembersThreads(LoopbackDriver):
    """It keeps what a thread has begun until that thread itself ends it."""

    begun: ClassVar[set[int]] = set()

    def enter_thread(self) -> None:
        self.is_new = threading.get_ident() not in self.begun
        self.begun.add(threading.get_ident())

    def exit_thread(self) -> None:
        super().exit_thread()
        self.begun.discard(threading.get_ident())

    @property
    def is_active(self) -> bool:
        return self.is_new and super().is_active


@fault("test_each_thread_is_vanilla_on_its_own")
class IsVanillaInAllThreads(LoopbackDriver):
    """Where one thread runs vanilla, all do."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        shared = SimpleNamespace(vanilla=0, backward=0, operator=None)
        self.thread = shared  # type: ignore[assignment]


@fault("test_each_thread_is_isolated_on_its_own")
class IsolatesAllThreads(LoopbackDriver):
    """Where one thread is isolated from AD, all are."""

    isolated = 0

    @contextmanager
    def ad_isolated(self) -> Iterator[None]:
        self.isolated += 1
        with no_grad():
            yield
        self.isolated -= 1

    def run_operator(self, *args: Any) -> Any:
        with no_grad() if self.isolated else nullcontext():
            return super().run_operator(*args)


# -- interrupts ---------------------------------------------------------------


@fault("test_an_interrupt_leaves_nothing_behind")
class LeavesAPatchAfterAnInterrupt(LoopbackDriver):
    """An interrupt in an operator leaves a function of the framework replaced."""

    def run_operator(self, *args: Any) -> Any:
        try:
            return super().run_operator(*args)
        except KeyboardInterrupt:
            vanilla = ops.rng_state
            ops.rng_state = lambda: vanilla()
            raise


# -- inlined routines ---------------------------------------------------------


class _Uncounting(Dispatcher):
    def call(self, action: Any, selected: Any) -> Any:
        owner = getattr(action.func, "__self__", action.func)
        return None if isinstance(owner, Inline) else super().call(action, selected)


@fault(*(name for name in vars(InlineTests) if name.startswith("test_")))
class CountsNoCounters(LoopbackDriver):
    """It takes counters to be counted, timers to be timed, checks to be made, and does nothing."""

    dispatcher_class = _Uncounting


@fault("test_a_substitute_is_told")
class TellsOfNoSubstitutes(LoopbackDriver):
    """Tools that follow tensors are not told which ones take the place of outputs."""

    class dispatcher_class(Dispatcher):
        def note_substitute(self, output: Any, substitute: Any) -> None:
            pass


@fault("test_subclasses")
class TakesSubclassesForCounters(LoopbackDriver):
    """It takes what is derived from a counter for a counter."""

    class dispatcher_class(Dispatcher):
        def call(self, action: Any, selected: Any) -> Any:
            if isinstance(action.func, Counter):
                action.func.count += 1
                return None
            return super().call(action, selected)


# -- derived points and phases ------------------------------------------------


@fault("test_a_backward_pass_begins_and_ends")
class TellsNoBackwardPasses(LoopbackDriver):
    """Tools are not told of backward passes."""

    @contextmanager
    def backward_pass(self, continues: bool = False) -> Iterator[None]:
        self.thread.backward += 1
        yield
        self.thread.backward -= 1
        if not continues:
            self.new_iteration()


@fault("test_gradients_of_gradients_are_one_iteration")
class EndsIterationsEarly(LoopbackDriver):
    """A pass whose gradients are differentiated ends an iteration."""

    def backward_pass(self, continues: bool = False) -> Any:
        return super().backward_pass()


@fault("test_a_gradient_within_a_function_ends_no_iteration")
class EndsIterationsOfFunctions(EndsIterationsEarly):
    """So does a pass in a function that is differentiated."""

    differentiates_functions = True


@fault("test_operators_run_between_entry_and_exit_of_their_module", "test_iterations_are_numbered")
class TellsNoModules(LoopbackDriver):
    """Ids have modules, but tools are not told of their calls."""

    @contextmanager
    def module_call(self, module: Any, named_modules: Any, inputs: Any = ()) -> Iterator[Any]:
        with self.ids.within(module, named_modules):
            yield lambda result: result


@fault("test_modules_are_left_where_an_operator_raises")
class LeavesModulesOpen(LoopbackDriver):
    """Tools are not told of the exit of a module that raises."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        tell = dispatcher.points.module

        def module(scopes: Any, point: Point, **facts: Any) -> None:
            if point is Point.MODULE_ENTRY or facts["outputs"] is not None:
                tell(scopes, point, **facts)

        dispatcher.points.module = module


@fault("test_operators_of_modules_are_of_the_forward_phase")
class TakesModelsForSetup(LoopbackDriver):
    """Every operator is taken for one that builds the model."""

    def phase_now(self, inputs: Any) -> Any:
        return "setup"


@fault("test_an_id_has_one_phase")
class CountsPhasesTogether(LoopbackDriver):
    """Its ids do not tell the phases of operators apart."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        vanilla = self.ids.next
        self.ids.next = lambda name, phase="forward": vanilla(name)  # type: ignore[method-assign]
