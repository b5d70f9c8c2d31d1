"""The base class of drivers for frameworks that run operators at once.

A driver replaces the function of the framework that runs operators, and passes on each call::

    class ToyDriver(EagerDriver):
        def patch(self, patches):
            patches.wrap(toy, "execute", self.executing)

        def executing(self, vanilla):
            def execute(op, *args, **kwargs):
                if not self.is_active:
                    return vanilla(op, *args, **kwargs)
                return self.run_operator(op, op.name, self.signature(op), args, kwargs, ...)
            return execute

Plans, analyses, the order of routines, checks of their results, ids, isolation, past tensors and
thread-local state are done here. With ``Capability.BACKWARD`` the driver adds
:meth:`EagerDriver.with_vjp`, and either :meth:`EagerDriver.differentiate` (functional
differentiation: the gradient of an operator is a function) or, where the framework has a tape,
claims its nodes by :meth:`OperatorRun.claim` and runs them by
:meth:`EagerDriver.run_backward_operator`.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from amanda.engine.backward import (
    BackwardExecution,
    Gradients,
    OperatorGradients,
    OpHandle,
    PastTensor,
    run_backward,
)
from amanda.engine.dispatch import Dispatcher, OpExecution
from amanda.engine.op_ids import OpIds
from amanda.engine.plan import ActionPlan
from amanda.errors import RoutineResultError
from amanda.interface.action import Action
from amanda.interface.binding import Arguments, Signature
from amanda.interface.calls import BackwardCall, BoundCall, NamedOp
from amanda.interface.driver import Driver
from amanda.interface.specs import Phase
from amanda.python.references import Reference, nothing

Tensors = list[Any]
"""Flat tensors of an operator; None for an absent optional one."""

Rebuild = Callable[[Tensors], Any]
Differentiate = Callable[..., tuple[Tensors, Callable[[Gradients], Gradients]]]


class DriverThread(threading.local):
    """State of one thread in an eager driver.

    Attributes:
        vanilla: depth of code that is not instrumented.
        backward: depth of backward passes.
        operator: the running operator, or the running backward operator, which makes nodes if its
            gradients are to be differentiated; None outside of operators.
        phase: phase of operators outside of modules; "" if the driver determines it for each.
        modules: depth of module calls.
    """

    vanilla: int = 0
    backward: int = 0
    phase: Phase | Literal[""] = ""
    modules: int = 0
    operator: OperatorRun | BackwardExecution | None = None


class OperatorRun:
    """One forward operator that runs under its plan.

    Attributes:
        inputs: the flat inputs that the operator computes with.
        names: the declared name of each input.
    """

    def __init__(
        self,
        driver: EagerDriver,
        op: Any,
        name: str,
        arguments: Arguments,
        function: Callable[..., Any],
    ) -> None:
        self._driver = driver
        self._dispatcher = driver.dispatcher
        self._scopes = driver.dispatcher.scopes()
        self._name = name
        self._counts: collections.Counter[str] = collections.Counter()
        self._rebuild: Rebuild = _single_or_tuple
        phase = driver.phase_now(arguments.inputs)
        self.inputs = arguments.inputs
        self.names = arguments.names
        self._call = BoundCall(
            op=op,
            op_id=driver.ids.next(name, phase),
            inputs=self._dispatcher.unboxed(arguments.inputs),
            names=arguments.names,
            attributes=arguments.attributes,
            module=driver.ids.module,
            arguments=arguments,
            function=function,
            current_value=driver.current_value,
            name_of=driver.parameter_name,
            phase=phase,
        )
        past = [self._past(tensor) for tensor in self._call.inputs]
        self._handle = OpHandle(self._call.op_id, self._scopes, past, [])

    def run(self) -> Any:
        """Run the operator; return its result for the user."""
        dispatcher = self._dispatcher
        plan = dispatcher.plan(self._call.op_id, self._scopes)
        analysis: OpExecution | None = None
        if plan is None:
            analysis = dispatcher.begin(self._call, self._scopes)
            plan = analysis.plan
        self.inputs = dispatcher.run_all(plan.before, self.inputs)
        # An analysis of the outputs may still record actions on gradients.
        acts = plan.acts_on_gradients or (analysis is not None and analysis.sees_outputs())
        if self._driver.differentiate is not None and (acts or plan.claims):
            outputs, plan = self._run_differentiated(plan, analysis)
        else:
            outputs, plan = self._run_recorded(plan, analysis, acts)
        return self._rebuild(dispatcher.run_all(plan.after, outputs))

    def claim(self, name: str, input_names: Sequence[str]) -> BackwardExecution:
        """A backward operator of this operator, to be kept with its node.

        Args:
            name: the kind of the backward operator.
            input_names: name of the forward input of each of its gradients; "" where unknown.
        """
        return BackwardExecution(
            self._dispatcher, self._handle, self._backward_call(name, input_names)
        )

    def names_by(self, key: Callable[[Any], Any]) -> dict[Any, str]:
        """The names of the inputs by a key of the tensors, such as their place in the graph."""
        names: dict[Any, str] = {}
        for name, tensor in zip(self.names, self.inputs, strict=True):
            if tensor is not None:
                names.setdefault(key(tensor), name)
        return names

    # -- the operator itself ----------------------------------------------

    def _compute(self, plan: ActionPlan, inputs: Tensors) -> Tensors:
        """Run the operator or its replacement; return the flat outputs."""
        if plan.replace is not None:
            return self._dispatcher.replaced_outputs(plan.replace, inputs, self._call)
        with self._driver.vanilla():
            outputs, self._rebuild = _flat(self._call.run(inputs), self._driver.is_tensor)
        return outputs

    def _run_recorded(
        self, plan: ActionPlan, analysis: OpExecution | None, acts: bool
    ) -> tuple[Tensors, ActionPlan]:
        """Run the operator; the framework records its backward operators."""
        gradients = OperatorGradients(self._dispatcher, self._handle)
        if acts:
            self.inputs = self._passing(self.inputs, gradients.after)
        thread = self._driver.thread
        outer, thread.operator = thread.operator, self if plan.claims else None
        try:
            outputs = self._compute(plan, self.inputs)
        finally:
            thread.operator = outer
        plan = self._finish(plan, analysis, outputs)
        if plan.claims:
            self._driver.claim_nodes(self, outputs)
        if plan.replace_backward is not None:
            outputs = self._handed_on(self._with_replaced_gradients(gradients, outputs))
        elif plan.before_backward:
            outputs = self._handed_on(self._passing(outputs, gradients.before))
        return outputs, plan

    def _run_differentiated(
        self, plan: ActionPlan, analysis: OpExecution | None
    ) -> tuple[Tensors, ActionPlan]:
        """Run the operator with its vector-Jacobian product as its only backward operator."""
        driver, inputs = self._driver, self.inputs
        if not self._wanted(inputs):
            outputs = self._compute(plan, inputs)
            return outputs, self._finish(plan, analysis, outputs)
        assert driver.differentiate is not None
        compute = functools.partial(self._compute, plan)
        outputs, vjp = driver.differentiate(compute, inputs)
        plan = self._finish(plan, analysis, outputs)
        call = self._backward_call(f"{self._name}_backward", self.names)
        backward = functools.partial(
            run_backward, self._dispatcher, self._handle, call, driver.unseen(vjp)
        )
        return self._handed_on(self._connected(outputs, inputs, backward)), plan

    def _finish(
        self, plan: ActionPlan, analysis: OpExecution | None, outputs: Tensors
    ) -> ActionPlan:
        """Return the complete plan, once the outputs are known."""
        shown = self._dispatcher.unboxed(outputs)
        # Calls of backward operators hold this list.
        self._handle.outputs += [self._past(tensor) for tensor in shown]  # type: ignore[operator]
        return plan if analysis is None else analysis.finish(outputs)

    def _handed_on(self, outputs: Tensors) -> Tensors:
        """Note that `outputs`, which have a graph of ours, replace the computed outputs.

        The user holds them, so that backward analyses can read them.
        """
        past: Any = self._handle.outputs
        for entry, tensor in zip(past, self._dispatcher.unboxed(outputs), strict=True):
            if entry is not None:
                entry.add_stand_in(self._reference(tensor))
        return outputs

    def _past(self, tensor: Any) -> PastTensor | None:
        if tensor is None:
            return None
        driver = self._driver
        return PastTensor(self._reference(tensor), driver.current_value, driver.parameter_name)

    def _reference(self, tensor: Any) -> Callable[[], Any]:
        try:
            return self._driver.reference(tensor)
        except TypeError:
            # Without weak references, as of a scalar of NumPy, the tensor counts as released.
            return _gone

    # -- gradients --------------------------------------------------------

    def _backward_call(self, name: str, input_names: Sequence[str]) -> BackwardCall:
        count = self._counts[name]
        self._counts[name] += 1
        return BackwardCall(
            op=NamedOp(name),
            op_id=f"{self._call.op_id}/grad/{name}:{count}",
            names=input_names,
            inputs=self._handle.inputs,
            outputs=self._handle.outputs,
        )

    def _passing(self, tensors: Tensors, function: Callable[[Gradients], Gradients]) -> Tensors:
        """`tensors`, with their gradients going through `function`."""
        wanted = self._wanted(tensors)
        if not wanted:
            return tensors

        count = len(tensors)  # the closure stays with the graph and must hold no tensor

        def vjp(gradients: Gradients) -> Gradients:
            spread: Gradients = [None] * count
            for position, gradient in zip(wanted, gradients, strict=True):
                spread[position] = gradient
            passed = function(spread)
            return [passed[position] for position in wanted]

        sources = [tensors[position] for position in wanted]
        passing = list(tensors)
        made = self._driver.connected(sources, sources, vjp)
        for position, tensor in zip(wanted, made, strict=True):
            passing[position] = tensor
        return passing

    def _wanted(self, tensors: Tensors) -> list[int]:
        """The positions of the tensors that need a gradient."""
        wants = self._driver.wants_gradient
        return [i for i, tensor in enumerate(tensors) if tensor is not None and wants(tensor)]

    def _with_replaced_gradients(self, gradients: OperatorGradients, outputs: Tensors) -> Tensors:
        """Return `outputs` whose gradients bypass the operator's own backward operators.

        In a backward pass after the scope the operator's own ones run, as without Amanda.
        """
        count = len(self.inputs)

        def function(grad_outputs: Gradients) -> Gradients:
            grad_outputs = gradients.before(grad_outputs)
            supplied = gradients.replaced(grad_outputs, count)
            if supplied is None:
                return [*grad_outputs, *[None] * count]
            return [*[None] * len(grad_outputs), *supplied]

        return self._connected(outputs, [*outputs, *self.inputs], function)

    def _connected(
        self, outputs: Tensors, sources: Tensors, vjp: Callable[[Gradients], Gradients]
    ) -> Tensors:
        """Return `outputs` whose gradients pass through `vjp` to the `sources` that need a
        gradient."""
        wanted = self._wanted(sources)
        if not wanted or not outputs:
            return outputs

        def selected(gradients: Gradients) -> Gradients:
            passed = vjp(gradients)
            return [passed[position] for position in wanted]

        return self._driver.connected(outputs, [sources[i] for i in wanted], selected)


class EagerDriver(Driver):
    """A driver of a framework that runs operators at once.

    Subclasses replace functions of the framework in :meth:`Driver.patch`.

    Attributes:
        operator_class: runs one operator under its plan; a driver may extend it.
        ids: forms operator ids; counters are thread-local.
        thread: state of the current thread.
    """

    operator_class: ClassVar[type[OperatorRun]] = OperatorRun

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.dispatcher: Dispatcher = dispatcher
        self.ids = OpIds(self.framework)
        self.thread = DriverThread()
        self._signatures: dict[Any, Signature] = {}

    # -- to be provided by a driver ---------------------------------------

    def current_value(self, tensor: Any) -> Any:
        """The value of a parameter, buffer, variable or constant; None for other tensors."""
        return None

    def parameter_name(self, tensor: Any) -> str | None:
        """The path of a parameter as the framework's users know it; None for other tensors."""
        return None

    def shape_of(self, tensor: Any) -> Any:
        """The shape of a tensor; a substitute needs the same shape for its gradient to pass."""
        return getattr(tensor, "shape", None)

    def reference(self, tensor: Any) -> Callable[[], Any]:
        """A function that returns `tensor` while it is alive, then None, and does not keep it
        alive.

        Backward analyses read forward tensors through it. To be overridden if tensors take no weak
        references, but an object with the same lifetime does, such as their buffer: it may return
        another tensor on that.

        Raises:
            TypeError: there is no such function; the tensor counts as released.
        """
        return Reference(tensor, nothing)

    def wants_gradient(self, tensor: Any) -> bool:
        """True if operators on `tensor` are recorded for differentiation now."""
        return False

    def with_vjp(
        self, outputs: Tensors, inputs: Tensors, vjp: Callable[[Gradients], Gradients]
    ) -> Tensors:
        """Return tensors with the values of `outputs` whose gradients pass through `vjp` to
        `inputs`.

        Needed with ``Capability.BACKWARD``. Called within :meth:`vanilla`.

        Args:
            outputs: one or more tensors.
            inputs: one or more tensors that need a gradient.
            vjp: function to call in a backward pass with the gradients of all outputs, None for
                missing ones; returns one gradient for each input, None for no gradient.
        """
        raise NotImplementedError(f"{self.name} has no with_vjp()")

    def straight_through(self, value: Any, old: Any) -> Any:
        """Return `value`, whose gradient passes unchanged to `old`, which it replaces."""
        return self.connected([value], [old], list)[0] if self.wants_gradient(old) else value

    def connected(
        self, outputs: Tensors, inputs: Tensors, vjp: Callable[[Gradients], Gradients]
    ) -> Tensors:
        """The result of :meth:`with_vjp`, whose own operators are not instrumented."""
        with self.vanilla():
            return self.with_vjp(outputs, inputs, vjp)

    differentiate: ClassVar[Differentiate | None] = None
    """``differentiate(self, function, inputs)``, for functional differentiation.

    Gives the outputs of ``function(inputs)``, a flat list, apart from any graph, and their
    vector-Jacobian product: a function from the gradients of the outputs (None where there is
    none) to the gradients of the inputs. An operator then has one backward operator."""

    def claim_nodes(self, operator: OperatorRun, outputs: Tensors) -> None:
        """Claim backward operators that are found in the graph of `outputs`.

        Called after an operator if tools analyse its backward operators; for frameworks in which
        the creation of nodes cannot be intercepted.
        """

    def phase_outside(self, inputs: Tensors) -> Phase:
        """The phase of an operator outside of modules and of :meth:`in_phase`.

        The default is forward: a loss, or a program without modules.
        """
        return "forward"

    # -- life cycle -------------------------------------------------------

    def exit_thread(self) -> None:
        """Forget counters: the next scope of this thread begins with new ones."""
        self.ids.forget()

    def new_iteration(self) -> None:
        """Restart the counters of ids in this thread."""
        self.ids.restart()

    @contextmanager
    def vanilla(self) -> Iterator[None]:
        """Within it, this thread's operators are not instrumented."""
        thread = self.thread
        outer = thread.vanilla
        try:
            thread.vanilla = outer + 1
            yield
        finally:
            thread.vanilla = outer

    # -- for patches ------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """True if the operators of this thread are instrumented."""
        thread = self.thread
        return not (thread.vanilla or thread.backward) and bool(self.dispatcher.scopes())

    def signature(
        self, function: Any, tensors: Sequence[str] | None = None, known: Any = None
    ) -> Signature:
        """The declared parameters of an operator, cached by `function`.

        Args:
            function: the operator, hashable.
            tensors: names of the parameters that take tensors, if known.
            known: the signature, or the function with the signature, if not `function`.
        """
        signature = self._signatures.get(function)
        if signature is None:
            declared = function if known is None else known
            signature = Signature(declared, self.is_tensor, tensors)
            self._signatures[function] = signature
        return signature

    def run_operator(
        self,
        op: Any,
        name: str,
        signature: Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        function: Callable[..., Any],
    ) -> Any:
        """Run an operator under its plan.

        Args:
            op: the answer of ``get_op()`` to tools.
            name: its name, for ids.
            signature: binds `args` and `kwargs`.
            function: the vanilla operator, called with arguments of this form.

        Returns:
            The result of `function`, with the tensors that routines have returned.
        """
        try:
            arguments = signature.bind(args, kwargs)
        except TypeError:
            # The call is wrong: the operator raises the error that the user knows.
            with self.vanilla():
                return function(*args, **kwargs)
        return self.operator_class(self, op, name, arguments, function).run()

    def phase_now(self, inputs: Tensors) -> Phase:
        """The phase of the operator that is about to run."""
        thread = self.thread
        if thread.modules:
            return "forward"
        return thread.phase or self.phase_outside(inputs)

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Within it, operators outside of modules and of backward passes belong to `phase`."""
        thread = self.thread
        outer = thread.phase
        thread.phase = phase
        try:
            yield
        finally:
            thread.phase = outer

    @contextmanager
    def module_call(
        self, module: Any, named_modules: Callable[[], Any], inputs: Sequence[Any] = ()
    ) -> Iterator[Callable[[Any], Any]]:
        """A call of a module, whose path is part of the ids of its operators.

        Yields a function to be called with the result of the module, which it returns.

        Args:
            inputs: inputs of the module, for tools with routines at modules.
        """
        if not self.is_active:
            yield lambda result: result
            return
        thread, scopes = self.thread, self.dispatcher.scopes()
        trains = None if thread.modules else self.trains(module)
        with (
            self.ids.within(module, named_modules),
            self.dispatcher.points.module_call(
                scopes,
                module,
                list(inputs),
                self._tensors_in,
                trains,
                module=self.ids.module,
                id=self.ids.prefix,
            ) as returned,
        ):
            thread.modules += 1
            try:
                yield returned
            finally:
                thread.modules -= 1

    def _tensors_in(self, value: Any) -> Sequence[Any]:
        return self.dispatcher.unboxed(_flat(value, self.is_tensor)[0])

    def trains(self, module: Any) -> bool:
        """True if a module is called for training: gradients of its result may be computed."""
        return True

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """The step of an optimizer, whose end is the end of an iteration."""
        if not self.is_active:
            yield
            return
        points, has_stepped = self.dispatcher.points, False
        told = points.optimizer_begins()
        try:
            with self.in_phase("optimizer"):
                yield
            has_stepped = True
        finally:
            points.optimizer_ends(told, has_stepped)

    @contextmanager
    def backward_pass(self, continues: bool = False) -> Iterator[None]:
        """A backward pass: its operators are not forward operators, its end ends an iteration.

        Args:
            continues: True if the program computes with the gradients, as to differentiate them:
                such a pass ends no iteration, nor does a pass within a module.
        """
        thread, points = self.thread, self.dispatcher.points
        continues = continues or thread.modules > 0
        told = () if thread.backward or thread.vanilla else points.backward_begins(continues)
        failed = True
        thread.backward += 1
        try:
            yield
            failed = False
        finally:
            thread.backward -= 1
            if not (thread.backward or thread.vanilla):
                if not continues:
                    self.new_iteration()
                points.backward_ends(told, continues, failed)

    def run_backward_operator(
        self,
        claimed: BackwardExecution | None,
        grad_outputs: Gradients,
        vanilla: Callable[[Gradients], Sequence[Any]],
    ) -> Any:
        """Run a backward operator under its routines.

        Args:
            claimed: from :meth:`OperatorRun.claim`; without it the operator runs vanilla, and
                is counted as not seen if tools look at backward operators.
            vanilla: the framework's own backward operator.
        """
        if claimed is not None:
            thread = self.thread
            outer, thread.operator = thread.operator, claimed
            claimed.made.clear()
            try:
                return claimed.run(grad_outputs, self.unseen(vanilla))
            finally:
                thread.operator = outer
        self.count_unclaimed()
        return vanilla(grad_outputs)

    def count_unclaimed(self) -> None:
        """Count a backward operator that runs vanilla as not seen, if tools look at them."""
        scopes = () if self.thread.vanilla else self.dispatcher.scopes()
        if any(scope.analyses_backward() for scope in scopes):
            self.dispatcher.not_seen("backward ops of no forward op in the scope")

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        """Return `new`, whose gradient passes straight through to `old` (contract rule 7).

        Raises:
            RoutineResultError: the shapes differ.
        """
        if old is None or action.differentiable:
            return new
        if self.shape_of(new) != self.shape_of(old):
            raise RoutineResultError(
                f"{action.routine} at op {action.op_id} must return tensors of the shapes it "
                f"got, expected {self.shape_of(old)}, got {self.shape_of(new)}; record it under "
                "amanda.ad_enabled() if the gradient is to follow the new shape"
            )
        return self.straight_through(self.unbox(new), old)

    def unseen(self, vanilla: Callable[[Gradients], Sequence[Any]]) -> Callable[[Gradients], Any]:
        """Return `vanilla`, with its own operators not instrumented."""

        def run(gradients: Gradients) -> Any:
            with self.vanilla():
                return vanilla(gradients)

        return run


def _flat(result: Any, is_tensor: Callable[[Any], bool]) -> tuple[Tensors, Rebuild]:
    """The tensors of an operator's result, and a function that rebuilds the result with other
    tensors."""
    if result is not None and is_tensor(result):
        return [result], lambda outputs: outputs[0]
    if not isinstance(result, (list, tuple)):
        return [], lambda outputs: result
    kind: Any = type(result)
    items: list[Any] = [None if item is not None and is_tensor(item) else item for item in result]
    positions = [i for i, item in enumerate(result) if item is not None and is_tensor(item)]

    def rebuild(outputs: Tensors) -> Any:
        for position, output in zip(positions, outputs, strict=True):
            items[position] = output
        filled: Any = kind(*items) if hasattr(kind, "_make") else kind(items)
        return filled

    return [result[position] for position in positions], rebuild


def _gone() -> None:
    return None


def _single_or_tuple(outputs: Tensors) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
