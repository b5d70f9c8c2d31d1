"""Base of tools that look at values while the program runs: ``stats``, ``sparsity``, ``dump``.

A subclass declares its options as a subclass of :class:`WatchingOptions`. :class:`WatchingTool`
selects operators and tensors and keeps statistics of each of them in ``watched``; a subclass may
override :meth:`~WatchingTool.examine` for figures of its own, or :meth:`~WatchingTool.observe`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from amanda import OpContext
from amanda.interface.specs import LocalPart, TensorSpec
from amanda.results import Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import type_names
from amanda_tools._bases.phases import MODEL, PhaseOptions, other_phases
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._internals import shown_part
from amanda_tools._operators.compiled_code import make_observer
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.parameters import inputs_of, is_opaque
from amanda_tools._values.gaps import NotLookedAt
from amanda_tools._values.moments import KnownMoments, Moments
from amanda_tools._values.tensors import Array, reader_of

KINDS = ("activations", "weights", "gradients")

Parameter = tuple[str | None, str | None]
"""The path of a parameter, and the beginning of the ids of its model (None if unknown); twice None
for other tensors."""

_GRADIENT = " gradient"
"""The end of the key of a parameter's gradient."""


def check_kinds(_: Any, attribute: Any, value: Sequence[str]) -> None:
    """Validate an option that lists kinds of tensors.

    Raises:
        ValueError: the option is empty, or has an entry that is not in :data:`KINDS`.
    """
    wrong = [kind for kind in value if kind not in KINDS]
    if wrong or not value:
        raise ValueError(f"tensors must be some of {', '.join(KINDS)}, got {'+'.join(value)!r}")


@attrs.frozen(kw_only=True)
class WatchingOptions(PhaseOptions):
    """The options of tools that watch tensors.

    Attributes:
        tensors: some of activations, weights and gradients.
        every: look at each N-th execution of an operator only.
        limit: executions whose figures the series hold; the statistics include all.
    """

    tensors: Sequence[str] = attrs.field(default=KINDS, converter=type_names, validator=check_kinds)
    every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    limit: int = attrs.field(default=100_000, validator=attrs.validators.ge(0))


OptionsT = TypeVar("OptionsT", bound=WatchingOptions)


@attrs.frozen
class Sample:
    """Figures of one tensor at one execution, for the series.

    Attributes:
        step: number of the operator's execution, from 0.
        key: :attr:`WatchedTensor.key`.
        mean, std, min, max: of the finite elements, None without any.
        sparsity: fraction of zeros.
    """

    step: int
    key: str
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    sparsity: float

    @classmethod
    def of(cls, step: int, key: str, moments: Moments) -> Sample:
        """Take the figures of one execution from its moments."""
        if moments.minimum > moments.maximum:
            # None of the elements is finite.
            return cls(step, key, None, None, None, None, moments.sparsity)
        extremes = (moments.minimum, moments.maximum)
        return cls(step, key, moments.mean, moments.deviation, *extremes, moments.sparsity)


@attrs.define(eq=False)
class WatchedTensor:
    """One parameter, gradient of a parameter, or other tensor of one operator, over all executions.

    Attributes:
        key: the path of the parameter, with ``" gradient"`` for its gradient; of other tensors the
            id of the operator and `tensor`. Unique among the watched tensors.
        op: the operator: the first one that reads a parameter.
        kind: one of :data:`KINDS`.
        tensor: name among the operator's tensors: ``output0``, ``weight``, ``grad0``.
        moments: statistics over all executions.
        parameter: path of the parameter that it is, or whose gradient it is; None for others.
        is_whole: whether a gradient is summed over all operators that use the parameter.
        input_axis: axis of the inputs of a weight; None if the mapping rules do not know it.
        whole: the distributed tensor whose local part is watched; None for others.
        window: statistics since the last row of a table of results; None before the first one.
    """

    key: str
    op: OpDescription
    kind: str
    tensor: str
    moments: Moments
    parameter: str | None = None
    is_whole: bool = False
    input_axis: int | None = None
    whole: LocalPart | None = None
    window: Moments | None = None

    @property
    def label(self) -> str:
        """The key as tables show it: a parameter and its gradient have one."""
        return self.key.removesuffix(_GRADIENT if self.parameter else " output0")


class WatchingTool(PrintingTool[OptionsT]):
    """Base class: watches selected tensors of selected operators.

    Attributes:
        watched: the tensors by :attr:`WatchedTensor.key`, in the order in which they came.
        series: figures of single executions, up to the option ``limit``.
        routines: number of routines inserted so far.
        executions: by operator id, kind and name of tensors the executions so far, in all scopes
            and in all copies of a graph.
        not_looked_at: tensors whose numbers were not read.
        zeros_only: of all moments, see :class:`Moments`.
        by_parameter: whether a parameter is observed once, however many operators read it, and its
            gradient once, as the sum.
    """

    zeros_only = False
    by_parameter = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watched: dict[str, WatchedTensor] = {}
        self.series: list[Sample] = []
        self.routines = 0
        self.executions = collections.Counter[tuple[str, str, str]]()
        self._known = KnownMoments(zeros_only=self.zeros_only)
        # The first model; by key of a parameter the operator that read it first in the last step.
        self._model = ""
        self._readers: dict[str, tuple[str, int]] = {}
        # By forward operator the last figures of gradients within it, and keys of those that have
        # the elements of a parameter's gradient.
        self._inner: dict[str, dict[str, Moments]] = {}
        self._copies: set[str] = set()
        self.not_looked_at = NotLookedAt()
        self.depends_on(MappingTool.standard())
        tensors = self.options.tensors
        if "activations" in tensors or "weights" in tensors:
            self.add_inst_for_op(self._analyse)
        if "gradients" in tensors:
            self.add_inst_for_op(self._analyse_backward, backward=True)

    def examine(self, watched: WatchedTensor, array: Array, now: Moments) -> None:
        """Process the values and moments of one execution; does nothing unless overridden."""

    # -- analyses ---------------------------------------------------------

    def is_selected(self, op: OpDescription) -> bool:
        """True if the tensors of this operator are watched."""
        return "uninitialized" not in row_of(op.type).traits

    def has_activations(self, op: OpDescription) -> bool:
        """True if the outputs of an operator are activations: the model computes them, and they are
        no values of parameters."""
        return op.phase == "forward" and "no_activation" not in row_of(op.type).traits

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        if not self.is_selected(op):
            return
        if "activations" in self.options.tensors and self.has_activations(op):
            layout = context["data_layout"] or ""
            axis = layout.index("C") if "C" in layout else None
            routine = WatchingRoutine(self, op, "activations", "output", axis, len(layout))
            context.insert_after_op(make_observer(context, routine.run))
        if "weights" in self.options.tensors:
            roles = {context["weight_index"]: "weight", context["bias_index"]: "bias"}
            # Operators that only move a parameter do not count as its readers.
            uses = op.phase == "forward" and row_of(op.type).group != "view"
            names = context.get_input_names()
            for position, tensor in enumerate(inputs_of(context)):
                if tensor is not None and (position in roles or (uses and not is_opaque(tensor))):
                    declared = names[position]
                    # The items of a list share a name.
                    own = declared if names.count(declared) == 1 else f"{declared}{position}"
                    self._watch_weight(context, op, position, roles.get(position, own))

    def _watch_weight(
        self, context: OpContext, op: OpDescription, position: int, name: str
    ) -> None:
        """Watch an input that has a role, or is a parameter that no operator has read before."""
        parameter = _parameter(context, position)
        has_role = position in (context["weight_index"], context["bias_index"])
        if not (parameter[0] or has_role):
            return
        # An operator of a graph may not be executed.
        is_known = parameter[0] and context.runs_at_once
        if is_known and self._is_read_before(op, self.key_of(op, name, parameter)):
            return
        layout = (context["weight_layout"] or "") if name == "weight" and has_role else ""
        axis = layout.index("I") if "I" in layout else None
        routine = WatchingRoutine(self, op, "weights", name, axis, parameters=[parameter])
        context.insert_before_op(make_observer(context, routine.run), inputs=[position])

    def _analyse_backward(self, context: OpContext) -> None:
        op = describe(context)
        if not self.is_selected(op):
            return
        names = context.get_grad_input_names()
        parameters = [_parameter(context, i) for i in range(max(1, len(names)))]
        # An operator whose gradients belong to none of its inputs sums the parameter's gradients.
        is_whole = self.by_parameter and bool(parameters[0][0]) and not any(names)
        routine = WatchingRoutine(
            *(self, op, "gradients", "grad"), parameters=parameters, inputs=names, is_whole=is_whole
        )
        if is_whole and not names:
            context.insert_before_backward_op(routine.run)
        else:
            context.insert_after_backward_op(routine.run)

    # -- routines ---------------------------------------------------------

    def is_repeated(self, place: tuple[str, str, str]) -> bool:
        """True if an execution, by its key in :attr:`executions`, is neither counted nor seen."""
        return False

    def observe(self, routine: WatchingRoutine, tensors: Sequence[Any]) -> None:
        """Instrumentation routine: add the values of one execution to the statistics."""
        for position, tensor in enumerate(tensors):
            if tensor is None or self._is_elsewhere(routine, position):
                continue
            if not reader_of(tensor).is_readable_float(tensor):
                is_handle = routine.kind == "weights" and is_opaque(tensor)
                self.not_looked_at.note(tensor, "weight behind a handle" if is_handle else "")
                continue
            watched = self._watched_tensor(routine, position, tensor)
            array = reader_of(tensor).numpy_view(tensor)
            moments = watched.moments
            now = self._known.of(array, moments.bounds, moments.unit_axis)
            moments.merge(now)
            if watched.window is not None:
                watched.window.merge(now)
            if len(self.series) < self.options.limit:
                self.series.append(Sample.of(routine.step, watched.key, now))
            self.examine(watched, array, now)
            if routine.kind == "gradients":
                self._join(routine, position, watched, now)

    def key_of(self, op: OpDescription, name: str, parameter: Parameter) -> str:
        """Return the key of a tensor of an operator.

        Args:
            op: the operator.
            name: of the tensor.
            parameter: the parameter that it is, or whose gradient it is.
        """
        path, model = parameter
        if not path:
            return f"{op.id} {name}"
        # Several models of PyTorch may have parameters of the same path.
        self._model = self._model or model or ""
        label = path if model in (None, self._model) else f"{model}: {path}"
        return label + _GRADIENT if op.direction == "backward" else label

    def _is_read_before(self, op: OpDescription, key: str) -> bool:
        """True if another operator was the first in this step to read the parameter of a key; the
        first operator is noted as its reader."""
        reader, step = self._readers.get(key, ("", -1))
        if step != self.steps:
            reader, _ = self._readers[key] = op.id, self.steps
        return self.by_parameter and reader != op.id

    def _is_elsewhere(self, routine: WatchingRoutine, position: int) -> bool:
        """True for a tensor whose figures are in the row of a parameter."""
        key = routine.key(position)
        if routine.kind == "weights" and routine.parameter(position)[0]:
            return self._is_read_before(routine.op, key)
        watched = self.watched.get(key)
        is_part = watched is not None and watched.is_whole and not routine.is_whole
        return is_part or key in self._copies

    def _join(
        self, routine: WatchingRoutine, position: int, watched: WatchedTensor, now: Moments
    ) -> None:
        """Drop the rows of gradients within an operator that become the gradient of a parameter.

        These gradients are transposed or reshaped: they have the same elements, and one object for
        their figures. Gradients of zeros cannot be told apart.
        """
        if now.zeros == now.elements:
            return
        inner = self._inner.setdefault(routine.op.forward, {})
        if not watched.parameter:
            if position >= len(routine.inputs) or not routine.inputs[position]:
                inner[watched.key] = now
            return
        for key in [key for key, figures in inner.items() if figures is now]:
            del inner[key]
            self._copies.add(key)
            self._remove_row(key)

    def _remove_row(self, key: str) -> None:
        self.watched.pop(key, None)
        self.series = [sample for sample in self.series if sample.key != key]

    def _watched_tensor(
        self, routine: WatchingRoutine, position: int, tensor: Any
    ) -> WatchedTensor:
        key, name = routine.key(position), routine.tensor_name(position)
        if routine.is_whole and key in self.watched and not self.watched[key].is_whole:
            # The gradients of single operators, before the first sum was seen.
            self._remove_row(key)
        if key not in self.watched:
            is_weight = routine.kind == "weights"
            is_activation = routine.kind == "activations"
            rank = len(tensor.shape)
            # Without a known layout the last axis counts as that of the units.
            last = rank - 1 if rank > 1 else None
            # Data may come without the batch axis of their layout.
            axis = last if routine.axis is None else routine.axis - max(0, routine.rank - rank)
            bounds = row_of(routine.op.type).bounds if is_activation else None
            unit_axis = axis if is_activation else None
            moments = Moments(bounds, unit_axis, zeros_only=self.zeros_only)
            parameter, _ = routine.parameter(position)
            self.watched[key] = WatchedTensor(
                *(key, routine.op, routine.kind, name, moments, parameter, routine.is_whole),
                input_axis=routine.axis if is_weight else None,
                whole=TensorSpec(shown_part(tensor)).whole,
            )
        return self.watched[key]

    # -- result -----------------------------------------------------------

    def listed(self, kind: str) -> list[WatchedTensor]:
        """Return the watched tensors of one kind that tables and charts show."""
        return [w for w in self.watched.values() if w.kind == kind and self.is_shown(w.op.phase)]

    def groups(self) -> Iterable[tuple[str, list[tuple[WatchedTensor, WatchedTensor | None]]]]:
        """Yield the groups of rows that tables show, each with its noun: activations; parameters,
        each with its gradient if that was seen; gradients of other tensors."""
        gradients = {w.key: w for w in self.listed("gradients")}
        yield "activation", [(w, None) for w in self.listed("activations")]
        weights = self.listed("weights")
        yield "parameter", [(w, gradients.pop(f"{w.key}{_GRADIENT}", None)) for w in weights]
        yield "other gradient" if weights else "gradient", [(w, None) for w in gradients.values()]

    def is_shown(self, phase: str) -> bool:
        """True if tables list the tensors of operators of this phase."""
        return self.options.phases == "all" or phase in MODEL

    def outside_of_model(self) -> Iterable[Table]:
        """Yield a table with a line for each phase whose tensors other tables leave out."""
        rows = {w.op.id: w.op.row() for w in self.watched.values()}
        yield from other_phases(self.name, rows.values(), self.options)

    def window_rows(self) -> Iterable[Mapping[str, Any]]:
        """Return one row per tensor that was looked at since the last call, with its elements."""
        rows = []
        for w in self.watched.values():
            now = w.window or w.moments
            w.window = Moments(zeros_only=self.zeros_only)
            if now.executions:
                figure = f"{w.tensor}.zeros" if self.zeros_only else w.tensor
                about = {**w.op.identity(), "phase": w.op.phase, "figure": figure}
                rows.append({**about, **now.samples()})
        return rows

    def tensor_rows(self) -> list[dict[str, Any]]:
        """Return one row per watched tensor: operator, ``kind``, ``tensor``, ``parameter`` and all
        figures."""
        return [
            {
                **w.op.row(),
                "kind": w.kind,
                "tensor": w.tensor,
                "parameter": w.parameter,
                **(w.whole.row() if w.whole is not None else {}),
                **w.moments.row(),
            }
            for w in self.watched.values()
        ]


@attrs.define(eq=False)
class WatchingRoutine:
    """The routine at one point of one operator; observes each N-th execution.

    Attributes:
        op: the operator.
        kind: one of :data:`KINDS`.
        axis: axis of the units of activations, or of the inputs of weights; None if unknown.
        rank: number of axes of the layout that `axis` counts in; 0 without a layout.
        parameters: for each tensor the parameter that it is, or whose gradient.
        inputs: of a backward operator, for each gradient the name of the forward input.
        is_whole: whether it gets a parameter's gradient summed over the operators that use it.
        order: number of this routine among all of the tool.
        step: number of the current execution, from 0.

    Args:
        tool: the tool to show the tensors to.
        name: beginning of the tensors' names; of weights the whole name.
    """

    _tool: WatchingTool[Any]
    op: OpDescription
    kind: str
    _name: str
    axis: int | None = None
    rank: int = 0
    parameters: Sequence[Parameter] = ()
    inputs: Sequence[str] = ()
    is_whole: bool = False
    order: int = attrs.field(init=False)
    step: int = attrs.field(default=-1, init=False)
    _keys: dict[int, str] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.order = self._tool.routines
        self._tool.routines += 1

    def run(self, *tensors: Any) -> None:
        """Instrumentation routine."""
        executions, place = self._tool.executions, (self.op.id, self.kind, self._name)
        if self._tool.is_repeated(place):
            return
        self.step = executions[place]
        executions[place] += 1
        if self.step % self._tool.options.every == 0:
            self._tool.observe(self, tensors)

    def tensor_name(self, position: int) -> str:
        """Return the name of the tensor at a position: ``output0``, ``weight``, ``grad1``."""
        return self._name if self.kind == "weights" else f"{self._name}{position}"

    def parameter(self, position: int) -> Parameter:
        """Return the parameter that a tensor is, or whose gradient it is."""
        return self.parameters[position] if position < len(self.parameters) else (None, None)

    def key(self, position: int) -> str:
        """Return the key of a tensor, see :class:`WatchedTensor`."""
        key = self._keys.get(position)
        if key is None:
            name, parameter = self.tensor_name(position), self.parameter(position)
            key = self._keys[position] = self._tool.key_of(self.op, name, parameter)
        return key


def _parameter(context: OpContext, index: int) -> Parameter:
    return context.get_parameter_name(index), context.get_parameter_model(index)
