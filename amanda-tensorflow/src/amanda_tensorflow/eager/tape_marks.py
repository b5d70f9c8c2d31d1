"""Marks: what a tape's record of an operator carries, so that its gradient finds the operator.

TensorFlow hands the attributes of a recorded operator to its gradient function, also one that the
operator does not have. The driver adds one, ``_amanda``, whose value is a :class:`Mark`
(:mod:`amanda_tensorflow.gradient_map.recording` takes it out again).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs

from amanda.engine.backward import OpHandle
from amanda.engine.dispatch import Dispatcher
from amanda.interface.action import Action, ActionKind
from amanda.state import LiveScope
from amanda_tensorflow.eager.plan_cache import AnyScope, Cells
from amanda_tensorflow.gradient_map.recording import MARK


def released() -> None:
    """Stand-in for a weak reference to a forward tensor that is not kept."""


class Mark(OpHandle):
    """The execution of a forward operator that a record on a tape belongs to.

    Attributes:
        kind: the forward operator's type.
        names: declared names of its inputs.
        generation: the thread's generation of plans when the operator ran.
        whole: True for the record of the whole operator; False for the record of one of
            the operators that a replacement of it runs.
        shared: True for the mark of all later executions of an operator without actions.
        shapes: those of the gradients of its inputs, where a tool supplies them; else None.
    """

    __slots__ = ("__weakref__", "generation", "kind", "names", "shapes", "shared", "whole")

    def __init__(
        self,
        op_id: str,
        kind: str,
        names: Sequence[str],
        scopes: Sequence[LiveScope],
        inputs: Sequence[Any],
        generation: int,
    ) -> None:
        super().__init__(op_id, scopes, inputs)
        self.kind = kind
        self.names = names
        self.generation = generation
        self.whole = True
        self.shared = False
        self.shapes: Sequence[Any] | None = None

    def with_inputs(self, count: int) -> Mark:
        """A mark of the same operator for a record with `count` inputs; it refers to no tensor."""
        mark = Mark(self.op_id, self.kind, self.names, (), [released] * count, self.generation)
        mark.scopes = self.scopes
        return mark


class SharedMark:
    """The mark of executions of an operator without actions; kept in its plan.

    In the first iteration each execution has a mark of its own, through which backward analyses
    find its tensors. From the next backward pass on, all executions share one mark.

    Attributes:
        mark: the shared mark; it refers to no tensor.
        marked: the attribute that carries it, its name and its value.
        passes: how many backward passes had begun when the operator was first marked.
    """

    def __init__(self, mark: Mark, passes: int) -> None:
        self.mark = mark.with_inputs(len(mark.inputs))
        self.mark.shared = True
        self.marked = MARK, self.mark
        self.passes = passes


def live_actions(dispatcher: Dispatcher, mark: Mark, kind: ActionKind) -> list[Action]:
    """The whole-operator actions of one kind; none while the thread is paused or disabled."""
    return [] if dispatcher.is_paused() else mark.actions(kind)


class OpGradients:
    """One thread's knowledge of the backward operators of one forward operator.

    Attributes:
        cells: the cells of its backward operators.
        scopes: the same cells for every name scope.
        names: by type and number of a backward operator, the forward input whose gradient each
            of its outputs is, as an earlier run has shown.
        last: of a replaced operator, the mark and the backward pass that its backward operators
            were numbered for last.
    """

    def __init__(self) -> None:
        self.cells: Cells = {}
        self.scopes = AnyScope(self.cells)
        self.names: dict[tuple[str, int], list[str]] = {}
        self.last: tuple[Any, int] | None = None


@attrs.frozen(eq=False)
class Sum:
    """A sum of gradients, kept until the operator whose output gradient it is gets it.

    Attributes:
        result: weak reference to the sum.
        terms: the gradients that were added.
    """

    result: weakref.ref[Any]
    terms: list[Any]


@attrs.frozen(eq=False)
class RecomputedPlace:
    """The place at which a function of ``tf.recompute_grad`` ran in the forward pass.

    Attributes:
        scope: the name scope.
        places: the calls of Keras layers that were running.
        counters: the counters of operator ids when it began.
    """

    scope: str
    places: tuple[Any, ...]
    counters: dict[str, dict[str, int]]
