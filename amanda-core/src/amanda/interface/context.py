"""The instrumentation context: inspection and instrumentation API of one operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from amanda.errors import (
    CapabilityError,
    ContextExpiredError,
    PassedPointError,
    ReplacementConflictError,
    SelectionError,
)
from amanda.interface.action import Action, ActionKind, InstPoint, Owner
from amanda.interface.calls import OpFunction, ParameterName
from amanda.interface.namespace import Namespace
from amanda.interface.specs import OpTensors, Phase, TensorSpec, specs_of
from amanda.state import STATE

if TYPE_CHECKING:
    from amanda.interface.calls import BackwardCall, OpCall, Variable

Selection = int | str | Sequence[int | str] | None
Routine = Callable[..., Any]

_LATE: Mapping[InstPoint, frozenset[ActionKind]] = {
    InstPoint.BEFORE_FORWARD_OP: frozenset(),
    InstPoint.AFTER_FORWARD_OP: frozenset({ActionKind.BEFORE_OP, ActionKind.REPLACE_OP}),
    InstPoint.BEFORE_BACKWARD_OP: frozenset(
        {ActionKind.BEFORE_OP, ActionKind.AFTER_OP, ActionKind.REPLACE_OP}
    ),
    InstPoint.AFTER_BACKWARD_OP: frozenset(ActionKind) - {ActionKind.AFTER_BACKWARD_OP},
}

_REPLACEMENTS = frozenset({ActionKind.REPLACE_OP, ActionKind.REPLACE_BACKWARD_OP})


DESCRIPTION = object()
"""Key of a context: the description of its operator in the execution that is analysed."""


@attrs.define(eq=False, repr=False)
class OpState:
    """The data behind an :class:`OpContext`, filled by the engine.

    Tensors are set before an analysis runs and cleared afterwards.

    Attributes:
        op, op_id: the forward operator and its id.
        backward_op, backward_op_id: the backward operator and its id, None in a forward context.
        attributes: the forward operator's non-tensor arguments by name, in the execution that was
            analysed last.
        names: the declared name of each forward input, likewise.
        module: path of the module that runs the operator.
        node: name of the operator in its graph; "" without a graph, or if it is the id.
        phase: what the operator belongs to.
        tensors: the specs of its tensors; None until they are read.
        actions: the recorded actions by kind, in running order.
        call: the running execution of the forward operator, None outside of its analyses.
        outputs: its outputs, None before it has run.
        backward: the running execution of the backward operator, None outside of its analyses.
        gradients: the gradients that the backward operator consumes, and the gradients that
            it produces; None where they do not exist yet.
        point: the point whose analyses run, None if none do.
        tool: the tool whose analysis runs.
    """

    op: Any
    op_id: str
    node: str = ""
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    names: Sequence[str] = ()
    module: str = ""
    phase: Phase = "forward"
    backward_op: Any = None
    backward_op_id: str | None = None
    tensors: OpTensors | None = None
    actions: dict[ActionKind, tuple[Action, ...]] = attrs.field(factory=dict)
    call: OpCall | None = None
    outputs: Sequence[Any] | None = None
    backward: BackwardCall | None = None
    gradients: tuple[Sequence[Any] | None, Sequence[Any] | None] = (None, None)
    point: InstPoint | None = None
    tool: Owner | None = None

    @classmethod
    def of_call(cls, call: OpCall) -> OpState:
        """The state of the forward operator that `call` executes."""
        return cls(
            call.op, call.op_id, call.own_key, call.attributes, call.names, call.module, call.phase
        )

    def of_backward(self, op: Any, op_id: str) -> OpState:
        """The state of a backward operator of this forward operator."""
        about = self.op, self.op_id, self.node, self.attributes
        return OpState(*about, (), self.module, "backward", op, op_id)

    def see(self, tensors: OpTensors) -> None:
        """Note the tensors that are known now and were not noted yet."""
        if tensors.is_old:
            tensors.inputs, tensors.outputs, tensors.is_old = None, None, False
        if self.backward_op_id is not None:
            given, produced = self.gradients
            if self.backward is not None:
                given, produced = self.backward.shown(given, produced)
        else:
            call, outputs = self.call, self.outputs
            given = None if call is None or tensors.inputs is not None else call.shown_inputs()
            produced = None
            if call is not None and outputs is not None and tensors.outputs is None:
                produced = call.shown_outputs(outputs)
        if tensors.inputs is None and given is not None:
            tensors.inputs = specs_of(given)
        if tensors.outputs is None and produced is not None:
            tensors.outputs = specs_of(produced)

    @property
    def where(self) -> str:
        """Id of the operator that is analysed, for messages."""
        return self.backward_op_id or self.op_id

    @property
    def blame(self) -> str:
        """The tool whose analysis runs, as the beginning of a message; "" outside of analyses."""
        return f"{type(self.tool).__name__}: " if self.tool is not None else ""

    def open_call(self) -> OpCall:
        """The running execution.

        Raises:
            ContextExpiredError: no analysis of this operator is running.
        """
        if self.call is None:
            raise _expired(self.op_id)
        return self.call

    def open_backward(self) -> BackwardCall:
        """The running execution of the backward operator.

        Raises:
            ContextExpiredError: no analysis of this backward operator is running.
        """
        if self.backward is None:
            raise _expired(self.where)
        return self.backward


def _is_selection(items: Any) -> bool:
    """True if `items` is a sequence of positions and names."""
    return isinstance(items, (list, tuple, range)) and all(
        isinstance(item, (int, str)) and not isinstance(item, bool) for item in items
    )


def _known(names: Sequence[str], count: int | None, kind: str) -> str:
    """The number and the names of the tensors that can be selected, for messages."""
    number = f"{count} {kind}" if count is not None else f"an unknown number of {kind}"
    named = ", ".join(name for name in names if name)
    return f"{number} ({named})" if named else number


def _expired(op_id: str) -> ContextExpiredError:
    return ContextExpiredError(
        f"the tensors of op {op_id} can be read only while its analysis routine runs; select "
        "them for an instrumentation routine instead"
    )


class OpContext(dict[Any, Any]):
    """The inspection and instrumentation API of one operator, the argument of analysis routines.

    The keys of the mapping belong to the tools; an unset key reads as None. Tensors can be read
    only while an analysis routine runs; the operator, its ids, its attributes and the keys stay
    readable.

    Attributes:
        namespace: where the operator runs, e.g. ``pytorch/2.13/eager``.
        runs_at_once: True if the operator runs when the program calls it, so that its tensors have
            values and its routines run with it; False if it is part of a graph that is built
            ahead and run later, any number of times (``Capability.STATIC_GRAPH``).
    """

    __slots__ = ("__weakref__", "_state", "namespace", "runs_at_once")

    def __init__(self, state: OpState, namespace: str, runs_at_once: bool = True) -> None:
        super().__init__()
        self.runs_at_once = runs_at_once
        # One object for all operators of a driver.
        self.namespace = namespace if isinstance(namespace, Namespace) else Namespace(namespace)
        self._state = state

    # -- the mapping ------------------------------------------------------

    def __missing__(self, key: Any) -> None:
        return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._state.where}: {dict(self)!r}>"

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, OpContext) else dict(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    # -- inspection -------------------------------------------------------

    def is_forward(self) -> bool:
        """True if this is the context of a forward operator."""
        return True

    def is_backward(self) -> bool:
        """True if this is the context of a backward operator."""
        return self._state.backward_op_id is not None

    def get_op(self) -> Any:
        """The forward operator, as its framework represents it."""
        return self._state.op

    def get_op_id(self) -> str:
        """The forward operator's id."""
        return self._state.op_id

    def get_attrs(self) -> dict[str, Any]:
        """The forward operator's non-tensor arguments, name to value."""
        return dict(self._state.attributes)

    def get_module(self) -> str:
        """Path of the module that runs the operator (``layer1.0.conv1``), or ""."""
        return self._state.module

    def get_phase(self) -> Phase:
        """The phase of the program in which the operator first ran (contract rule 15)."""
        return self._state.phase

    def get_tensor_specs(self) -> OpTensors:
        """Shapes, element types and devices of the operator's tensors at its first execution.

        They stay readable. Outputs are unknown before the operator has run. A backward context has
        the specs of gradients, which a driver may know before the operator has run. No tensor is
        held or created for them.
        """
        state = self._state
        if state.tensors is None:
            state.tensors = OpTensors()
        state.see(state.tensors)
        return state.tensors

    def get_node_name(self) -> str:
        """The name of the forward operator in its graph, with the loop or branch around it
        (``step/while/body/MatMul``); its id without a graph."""
        return self._state.node or self._state.op_id

    def get_input_names(self) -> list[str]:
        """The declared name of each forward input, "" where it has none."""
        return list(self._state.names)

    def get_inputs(self) -> Sequence[Any]:
        """The forward input tensors, flat; None for an absent optional one.

        Raises:
            ContextExpiredError: no analysis of this operator is running.
        """
        call = self._state.call or self._state.open_call()
        return list(call.inputs)

    def get_input_specs(self) -> Sequence[TensorSpec | None]:
        """Shapes, element types and devices of the forward inputs; None for an absent one.

        Unlike :meth:`get_inputs`, it creates no tensor: reading the tensors of a graph copies it.

        Raises:
            ContextExpiredError: no analysis of this operator is running.
        """
        call = self._state.call or self._state.open_call()
        return specs_of(call.shown_inputs())

    def get_outputs(self) -> Sequence[Any] | None:
        """The forward output tensors; None before the operator has run.

        Raises:
            ContextExpiredError: no analysis of this operator is running.
        """
        state = self._state
        if state.call is None:
            state.open_call()
        return None if state.outputs is None else list(state.outputs)

    def get_value(self, index: int) -> Any:
        """The current value of input `index` if it is a parameter, a registered
        buffer, a variable or a graph constant; None for any other input.

        Raises:
            SelectionError: the operator has no such input.
            ContextExpiredError: no analysis of this operator is running.
        """
        call = self._state.call or self._state.open_call()
        return call.value(self._input(call, index))

    def get_variable(self, index: int) -> Variable | None:
        """The variable that input `index` was read from, or that it is a handle of; to be written
        later.

        Its ``key`` is equal for all uses of the variable; its ``view`` identifies the view
        (reshaped, transposed). None without a variable, in backward contexts, and in PyTorch, where
        :meth:`get_value` returns the parameter itself.

        Raises:
            SelectionError: the operator has no such input.
            ContextExpiredError: no analysis of this operator is running.
        """
        call = self._state.call or self._state.open_call()
        return call.variable(self._input(call, index))

    def get_parameter_name(self, index: int) -> str | None:
        """The path of the parameter that input `index` is, in the framework's terms.

        In PyTorch the name in ``named_parameters()`` of the outermost module that runs, wrappers
        such as DDP, FSDP and ``torch.compile`` aside (``h.0.attn.c_attn.weight``), in TensorFlow
        the ``path`` of a weight of a Keras layer (``net/one/kernel``) or the name of another
        variable that is trained, and ``w@1`` for a second variable of that name. An input that is a
        reshaped, transposed or cast view of a parameter has the parameter's name. In a backward
        context, the parameter whose gradient output `index` is, or that an operator without outputs
        accumulates.

        Returns:
            None for other tensors, such as PyTorch's buffers and the state of optimizers, for a
            parameter that no module holds, and where the driver has no names.

        Raises:
            SelectionError: the operator has no such input.
            ContextExpiredError: no analysis of this operator is running.
        """
        name = self._parameter_name(index)
        return None if name is None else str(name)

    def get_parameter_model(self, index: int) -> str | None:
        """The beginning of the ids of the model that holds the parameter of
        :meth:`get_parameter_name`: ``Net``, ``Net@1``.

        Two models may have parameters of one path, also in operators outside of them.

        Returns:
            None for other tensors, and if the driver does not know it.

        Raises:
            SelectionError: the operator has no such input.
            ContextExpiredError: no analysis of this operator is running.
        """
        name = self._parameter_name(index)
        return name.model if isinstance(name, ParameterName) else None

    def _parameter_name(self, index: int) -> str | None:
        call = self._state.call or self._state.open_call()
        return call.parameter_name(self._input(call, index))

    def get_function(self) -> OpFunction:
        """A function of the operator's flat inputs that runs it with its attributes.

        In a replacement it runs the original operator, with the attributes of the replaced
        execution. It holds no tensor.

        Raises:
            CapabilityError: the driver cannot run a single operator again, or other processes take
                part in this one.
            ContextExpiredError: no analysis of this operator is running.
        """
        call = self._state.open_call()
        if call.is_collective():
            raise CapabilityError(
                f"op {call.op_id} is a collective: it cannot be run again by this process alone"
            )
        return OpFunction(call.op_id, call.freeze())

    def get_backward_op(self) -> Any:
        """The backward operator; None in a forward context."""
        return None

    def get_backward_op_id(self) -> str | None:
        """The backward operator's id; None in a forward context."""
        return None

    def get_grad_outputs(self) -> Sequence[Any] | None:
        """The gradients that the backward operator consumes; None in a forward context."""
        return None

    def get_grad_inputs(self) -> Sequence[Any] | None:
        """The gradients that the backward operator produces; None before it has run
        and in a forward context."""
        return None

    def get_grad_input_names(self) -> list[str]:
        """For each produced gradient, the declared name of the forward input that it belongs to.

        "" if the driver does not know the input, and for a gradient of no forward input. Empty in
        a forward context.
        """
        return []

    # -- instrumentation --------------------------------------------------

    def insert_before_op(self, func: Routine, inputs: Selection = None, **kwargs: Any) -> None:
        """Run ``func(*inputs, **kwargs)`` before each execution of the operator.

        Args:
            func: the instrumentation routine; it returns None, or new values
                for the selected tensors (contract rule 5).
            inputs: positions or names of the inputs to pass; None for all.
            kwargs: further arguments for the routine.
        """
        self._record(ActionKind.BEFORE_OP, func, inputs, kwargs)

    def insert_after_op(self, func: Routine, outputs: Selection = None, **kwargs: Any) -> None:
        """Run ``func(*outputs, **kwargs)`` after each execution of the operator."""
        self._record(ActionKind.AFTER_OP, func, outputs, kwargs)

    def replace_op(self, func: Routine, inputs: Selection = None, **kwargs: Any) -> None:
        """Run ``func(*inputs, **kwargs)`` instead of the operator, as a part of AD."""
        self._record(ActionKind.REPLACE_OP, func, inputs, kwargs)

    def insert_before_backward_op(
        self, func: Routine, grad_outputs: Selection = None, **kwargs: Any
    ) -> None:
        """Run ``func(*grad_outputs, **kwargs)`` before each execution of the backward op.

        From a forward analysis it acts on the gradients of the operator's outputs.
        """
        self._record(ActionKind.BEFORE_BACKWARD_OP, func, grad_outputs, kwargs)

    def insert_after_backward_op(
        self, func: Routine, grad_inputs: Selection = None, **kwargs: Any
    ) -> None:
        """Run ``func(*grad_inputs, **kwargs)`` after each execution of the backward op.

        From a forward analysis it acts on the gradients of the operator's inputs.
        """
        self._record(ActionKind.AFTER_BACKWARD_OP, func, grad_inputs, kwargs)

    def replace_backward_op(
        self, func: Routine, grad_outputs: Selection = None, **kwargs: Any
    ) -> None:
        """Run ``func(*grad_outputs, **kwargs)`` instead of the backward op.

        From a forward analysis `func` supplies the operator's whole
        vector-Jacobian product: one gradient per input.
        """
        self._record(ActionKind.REPLACE_BACKWARD_OP, func, grad_outputs, kwargs)

    # -- used by the dispatcher -------------------------------------------

    def _selectable(self, kind: ActionKind) -> tuple[list[str], int | None]:
        """The names and the number of the tensors from which an action of this kind selects."""
        if kind.selects == "inputs" or kind is ActionKind.AFTER_BACKWARD_OP:
            return list(self._state.names), len(self._state.names) or None
        outputs = self._state.outputs
        if outputs is None:
            return [], None
        names = ["output"] if len(outputs) == 1 else [f"output{i}" for i in range(len(outputs))]
        return names, len(outputs)

    def _role(self, name: str, kind: str) -> int | None:
        """The position of a role that a mapping rule has set (``weight_index``)."""
        return self[f"{name}_index"] if kind in ("inputs", "grad_inputs") else None

    def _input(self, call: OpCall, index: int) -> int:
        """The position of an input, counted from the first one."""
        return self._position(index, list(call.names), len(call.inputs), "inputs")

    def _position(self, item: int | str, names: list[str], count: int | None, kind: str) -> int:
        """The position of a tensor that is selected by position or name.

        Raises:
            SelectionError: there is no such tensor.
        """
        where = f"op {self._state.where}"
        if isinstance(item, str):
            role = self._role(item, kind)
            if role is None and item not in names:
                known = _known(names, count, kind)
                raise SelectionError(f"no {kind} named {item!r} at {where}, which has {known}")
            return names.index(item) if role is None else role
        if not isinstance(item, int):
            raise SelectionError(
                f"{self._state.blame}{kind}=[{item!r:.60}] at {where}: a position (int) or a name "
                "(str) is selected"
            )
        if count is None:
            return item
        if not -count <= item < count:
            known = _known(names, count, kind)
            raise SelectionError(
                f"{self._state.blame}{kind}=[{item}] is out of range at {where}, which has {known}"
            )
        return item % count

    def _select(self, kind: ActionKind, selection: Selection) -> tuple[int, ...] | None:
        """The positions of the tensors that an action selects; None for all.

        Raises:
            SelectionError: there is no such tensor, or one is selected twice.
        """
        if selection is None:
            return None
        if type(selection) in (list, tuple) and not selection:
            # The case of each new operator that is counted or timed.
            return ()
        items = [selection] if isinstance(selection, (int, str)) else selection
        if not _is_selection(items):
            raise SelectionError(
                f"{self._state.blame}{kind.selects}={selection!r:.60} at op "
                f"{self._state.where}: select one position (int) or name (str), or a list of these"
            )
        names, count = self._selectable(kind)
        found = (self._position(item, names, count, kind.selects) for item in items)
        # Counted from the end in each execution: executions may differ in the number of tensors.
        selected = tuple(
            item if isinstance(item, int) and item < 0 else position
            for item, position in zip(items, found, strict=True)
        )
        if len(set(selected)) < len(selected) and kind not in _REPLACEMENTS:
            # A routine returns one tensor for each selected one.
            raise SelectionError(
                f"{self._state.blame}{kind.selects}={selection!r:.60} at op {self._state.where} "
                "selects a tensor twice; a tensor can have one replacement only"
            )
        return selected

    def _record(
        self, kind: ActionKind, func: Routine, selection: Selection, kwargs: dict[str, Any]
    ) -> None:
        state = self._state
        # OpState.where, without a function.
        where = state.backward_op_id or state.op_id
        if state.point is None or state.tool is None:
            raise ContextExpiredError(
                f"{kind.value}() on op {where} outside of an analysis routine: actions can be "
                "recorded only while an analysis of this operator runs"
            )
        if not callable(func):
            raise TypeError(
                f"{state.blame}{kind.value}() on op {where} needs a function, got {func!r}"
            )
        if kind in _LATE[state.point]:
            raise PassedPointError(
                f"{state.blame}{kind.value}() on op {where} comes too late: its point has "
                f"passed in an analysis at {state.point.value}; register the analysis with "
                "require_outputs=False" + self._forward_hint(kind)
            )
        ad = STATE.ad
        action = Action(
            kind=kind,
            tool=state.tool,
            func=func,
            select=self._select(kind, selection),
            kwargs=kwargs,
            differentiable=state.tool.differentiable if ad is None else ad,
            op_id=where,
        )
        actions = state.actions.get(kind, ())
        if actions and kind in _REPLACEMENTS:
            raise replaced_twice(actions[0], action)
        state.actions[kind] = (*actions, action)

    def _forward_hint(self, kind: ActionKind) -> str:
        assert self._state.point is not None
        forward = kind in (ActionKind.BEFORE_OP, ActionKind.AFTER_OP, ActionKind.REPLACE_OP)
        return " and backward=False" if self._state.point.is_backward and forward else ""


def replaced_twice(first: Action, second: Action) -> ReplacementConflictError:
    """The error for two replacements of one operator."""
    return ReplacementConflictError(
        f"op {second.op_id} is replaced twice, by {first.routine} and by {second.routine}; "
        "apply one of these tools at a time, or let one of them leave the operator out"
    )
