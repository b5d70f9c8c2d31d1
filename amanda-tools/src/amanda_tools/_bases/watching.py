"""The engine of ``stats`` and ``sparsity``: selected tensors of selected operators."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import attrs

from amanda import OpContext
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import type_names
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.routines import looking
from amanda_tools._values.moments import BOUNDS, Moments
from amanda_tools._values.numerics import Array, numerics_of

UNINITIALIZED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split()
)
"""Types whose output is what the memory happened to hold."""

KINDS = ("activations", "weights", "gradients")


def known_kinds(_: Any, attribute: Any, value: Sequence[str]) -> None:
    """See that an option names kinds of tensors.

    Raises:
        ValueError: it does not.
    """
    wrong = [kind for kind in value if kind not in KINDS]
    if wrong or not value:
        raise ValueError(f"tensors must be some of {', '.join(KINDS)}, got {'+'.join(value)!r}")


@attrs.frozen(kw_only=True)
class WatchingOptions:
    """What is watched.

    Attributes:
        tensors: some of activations, weights and gradients.
        ops: types of operators; none for all.
        modules: patterns of module paths, such as layer1.*; none for all.
        every: look at each N-th execution of an operator only.
        limit: looks that the series hold; sums have them all.
    """

    tensors: Sequence[str] = attrs.field(default=KINDS, converter=type_names, validator=known_kinds)
    ops: Sequence[str] = attrs.field(default=(), converter=type_names)
    modules: Sequence[str] = attrs.field(default=(), converter=type_names)
    every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    limit: int = attrs.field(default=100_000, validator=attrs.validators.ge(0))


OptionsT = TypeVar("OptionsT", bound=WatchingOptions)


@attrs.frozen
class Look:
    """What one execution's tensor was like, for a series.

    Attributes:
        step: the operator's execution, from 0.
        key: operator's id and tensor, as in the rows.
        mean, std, min, max, sparsity: of this execution.
    """

    step: int
    key: str
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    sparsity: float


@attrs.define(eq=False)
class Watched:
    """One tensor of one operator.

    Attributes:
        op: the operator.
        kind: one of :data:`KINDS`.
        tensor: which of its tensors: ``output0``, ``weight``, ``grad0``.
        moments: what is known of it.
        axis: of a weight the axis of its inputs, where the mapping rules know it.
    """

    op: OpDescription
    kind: str
    tensor: str
    moments: Moments
    axis: int | None = None

    @property
    def key(self) -> str:
        """Tells it from all others."""
        return f"{self.op.id} {self.tensor}"


class WatchingTool(PrintingTool[OptionsT]):
    """Base of the tools that look at the values of tensors while the program runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watched: dict[str, Watched] = {}
        self.series: list[Look] = []
        self.watches = 0
        self.depends_on(MappingTool.standard())
        tensors = self.options.tensors
        if "activations" in tensors or "weights" in tensors:
            self.add_inst_for_op(self._analyse)
        if "gradients" in tensors:
            self.add_inst_for_op(self._analyse_backward, backward=True)

    def note(self, watched: Watched, array: Array) -> None:
        """Called with the values at each look, after they have entered the moments."""

    # -- analyses ---------------------------------------------------------

    def is_selected(self, op: OpDescription) -> bool:
        """Whether an operator is to be watched."""
        if op.type in UNINITIALIZED:
            return False
        patterns = self.options.modules
        in_module = not patterns or any(fnmatch.fnmatchcase(op.module, p) for p in patterns)
        return in_module and op.is_selected(self.options.ops)

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        if not self.is_selected(op):
            return
        if "activations" in self.options.tensors:
            layout = context["data_layout"] or ""
            axis = layout.index("C") if "C" in layout else None
            looks = Looks(self, op, "activations", "output", axis)
            context.insert_after_op(looking(context, looks.run))
        if "weights" in self.options.tensors:
            for role in ("weight", "bias"):
                position = context[f"{role}_index"]
                inputs = context.get_inputs()
                if position is None or position >= len(inputs) or inputs[position] is None:
                    continue
                layout = (context["weight_layout"] or "") if role == "weight" else ""
                axis = layout.index("I") if "I" in layout else None
                looks = Looks(self, op, "weights", role, axis)
                context.insert_before_op(looking(context, looks.run), inputs=[position])

    def _analyse_backward(self, context: OpContext) -> None:
        op = describe(context)
        # The type of a backward operator, or of the forward operator that it belongs to.
        forward = attrs.evolve(op, type=str(context["op_type"] or ""), name="")
        if self.is_selected(op) or self.is_selected(forward):
            context.insert_after_backward_op(Looks(self, op, "gradients", "grad", None).run)

    # -- routines ---------------------------------------------------------

    def look(self, looks: Looks, tensors: Sequence[Any]) -> None:
        """Instrumentation routine: take the values in."""
        for position, tensor in enumerate(tensors):
            if tensor is None or not numerics_of(tensor).is_floating(tensor):
                continue
            watched = self._entry(looks, position, tensor)
            array = numerics_of(tensor).numpy(tensor)
            one = Moments(watched.moments.bounds, watched.moments.unit_axis)
            one.add(array)
            watched.moments.merge(one)
            if len(self.series) < self.options.limit:
                self.series.append(_look_at(looks.step, watched, one))
            self.note(watched, array)

    def _entry(self, looks: Looks, position: int, tensor: Any) -> Watched:
        is_role = looks.kind == "weights"
        name = looks.name if is_role else f"{looks.name}{position}"
        key = f"{looks.op.id} {name}"
        if key not in self.watched:
            bounds = BOUNDS.get(looks.op.type) if looks.kind == "activations" else None
            rank = len(tensor.shape)
            axis = looks.axis if looks.axis is not None else rank - 1 if rank > 1 else None
            moments = Moments(bounds, axis if looks.kind == "activations" else None)
            of_inputs = looks.axis if is_role else None
            self.watched[key] = Watched(looks.op, looks.kind, name, moments, of_inputs)
        return self.watched[key]

    # -- result -----------------------------------------------------------

    def of_kind(self, kind: str) -> Iterator[Watched]:
        """The tensors of one kind."""
        return (watched for watched in self.watched.values() if watched.kind == kind)


class Looks:
    """The routine of one operator: looks at each N-th execution."""

    def __init__(
        self, tool: WatchingTool[Any], op: OpDescription, kind: str, name: str, axis: int | None
    ) -> None:
        self._tool = tool
        self.order = tool.watches
        tool.watches += 1
        self.op = op
        self.kind = kind
        self.name = name
        self.axis = axis
        self.step = -1

    def run(self, *tensors: Any) -> None:
        """Instrumentation routine."""
        self.step += 1
        if self.step % self._tool.options.every == 0:
            self._tool.look(self, tensors)


def _look_at(step: int, watched: Watched, one: Moments) -> Look:
    if one.minimum > one.maximum:
        # None of its elements is finite.
        return Look(step, watched.key, None, None, None, None, one.sparsity)
    extremes = (one.minimum, one.maximum)
    return Look(step, watched.key, one.mean, one.deviation, *extremes, one.sparsity)
