"""Marks on tensors and gradient records that lead a gradient to its forward operator."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs

from amanda.engine.backward import OpHandle
from amanda.engine.dispatch import Dispatcher
from amanda.interface.action import Action, ActionKind
from amanda.state import LiveScope
from amanda_tensorflow.eager.plan_cache import Cells


def gone() -> None:
    """Stands for a tensor that nobody holds."""


class Mark(OpHandle):
    """What a record of the tape carries: the execution that it belongs to.

    Attributes:
        kind: the forward operator's type.
        names: declared names of its inputs.
        generation: the thread's generation of plans when it ran.
        whole: whether the record is the whole operator's; False for the
            operators of a replacement, of which each has a record.
        shared: whether it is that of several executions, of an operator without actions.
    """

    __slots__ = ("__weakref__", "generation", "kind", "names", "shared", "whole")

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

    def with_inputs(self, count: int) -> Mark:
        """The same operator, for records with so many inputs; it knows of no tensor."""
        mark = Mark(self.op_id, self.kind, self.names, (), [gone] * count, self.generation)
        mark.scopes = self.scopes
        return mark

    def actions(self, kind: ActionKind) -> list[Action]:
        """The actions of one kind on the whole operator, in the scopes that are open."""
        return [action for _, record in self.records() for action in record.actions(kind)]


class Claim:
    """What marks the executions of one operator; kept with its plan.

    The first executions have a mark each, by which a backward analysis finds
    their tensors. From the next backward pass on, all share one.

    Attributes:
        mark: the mark that is shared; it knows of no tensor.
        passes: how many backward passes had begun when the operator was first marked.
    """

    __slots__ = ("mark", "passes")

    def __init__(self, mark: Mark, passes: int) -> None:
        self.mark = mark.with_inputs(len(mark.inputs))
        self.mark.shared = True
        self.passes = passes


def live_actions(dispatcher: Dispatcher, mark: Mark, kind: ActionKind) -> list[Action]:
    """The actions of one kind that apply to a backward pass running now."""
    return [] if dispatcher.is_paused() else mark.actions(kind)


class _AnyScope(dict[str, Cells]):
    """Cells that do not depend on the name scope."""

    def __init__(self, cells: Cells) -> None:
        super().__init__()
        self.cells = cells

    def __missing__(self, scope: str) -> Cells:
        return self.cells


class OpGradients:
    """What one thread knows of the backward operators of one forward operator.

    Attributes:
        cells: type to cell; a plan of None says that nothing is to be done.
        scopes: the same for all name scopes.
        names: names of outputs that earlier runs have told.
        last: the execution whose gradient functions were counted last, and its pass.
    """

    __slots__ = ("cells", "last", "names", "scopes")

    def __init__(self) -> None:
        self.cells: Cells = {}
        self.scopes = _AnyScope(self.cells)
        self.names: dict[tuple[str, int], list[str]] = {}
        self.last: tuple[Any, int] | None = None


@attrs.frozen(eq=False)
class Sum:
    """A sum of gradients that waits for the operator whose output gradient it is."""

    result: weakref.ref[Any]
    terms: list[Any]


@attrs.frozen(eq=False)
class Place:
    """Where a function ran for the first time.

    Attributes:
        scope: the name scope.
        counters: the counters of operator ids when it began.
    """

    scope: str
    counters: dict[str, dict[str, int]]
