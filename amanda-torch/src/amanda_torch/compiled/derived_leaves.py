"""The accumulations of parameters in a captured graph whose backward operators are added up.

All graphs that use a parameter share its accumulation, which executes once in a pass, and which
belongs to the operator that used the parameter first in an iteration. The operators of the graph
hook no accumulation and leave no mark there. Instead:

- a run looks for marks that others have left, from the nodes of its outputs on, unless nothing can
  have changed since the run before it. Where there is one, the hooks beside it count, and are told
  of the pass, as they are by operators with hooks (:meth:`Leaves.found`);
- an operator outside of the graph that uses the same parameter has the accumulation marked and
  hooked before it looks at it, for it finds a :class:`LateClaims` of amanda_torch.autograd.leaves
  in place of the owner's iteration (:meth:`Leaves.mark`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from amanda.inline import Counter, ShapeSum
from amanda.references import Reference
from amanda_torch.autograd import passes
from amanda_torch.autograd.claims import Claimer
from amanda_torch.autograd.gradient_graphs import KnownGradients
from amanda_torch.autograd.hooks import Accumulation, NodeHooks, note_reached
from amanda_torch.autograd.leaves import is_marked, mark_of

Marks = Sequence[tuple[int, Sequence[Accumulation]]]
"""Identities of leaves, with the objects that count their accumulations and listen to passes."""


@attrs.frozen(eq=False)
class Leaf:
    """A parameter, and the operator of a graph that owns its accumulation.

    Attributes:
        variable: a weak reference to it.
        index: of the graph's input that it is.
        known: what is known of the operator's gradients.
        number: of it among the leaves that the operator owns.
    """

    variable: weakref.ref[torch.Tensor]
    index: int
    known: KnownGradients
    number: int

    @property
    def op_id(self) -> str:
        """The id of the operator."""
        return self.known.handle.op_id

    def hooks(self, claimer: Claimer) -> NodeHooks | None:
        """The hooks of the accumulation; None if an analysis is pending."""
        return claimer.shared_leaf_hooks(self.known, self.number)


class Leaves:
    """The leaves of one graph whose accumulations are added up.

    Args:
        claimer: that of the thread that runs the graph.
        leaves: by the identities of the parameters.
        used: by the number of a node in a run, the identities of those that its edges lead to.
        way: from the nodes of the outputs, in the order of their numbers, to the leaves: see
            :attr:`~amanda_torch.autograd.gradient_graphs.GraphShape.ways`; the identity of a leaf
            instead of the number of its node.

    Attributes:
        iteration: that in which the graph last ran.
        added: by identity, the counters and sums of an accumulation.
        used: see above.
    """

    def __init__(
        self,
        claimer: Claimer,
        leaves: Mapping[int, Leaf],
        used: Mapping[int, Sequence[int]],
        way: Sequence[tuple[int, int, int | None]],
    ) -> None:
        self.iteration = -1
        self.used = used
        self.added: dict[int, Sequence[Counter | ShapeSum]] = {}
        self._claimer = claimer
        self._leaves = leaves
        self._way = way
        self._indices = [leaf.index for leaf in leaves.values()]
        self._keys = list(leaves)
        # Another tensor may have the identity of one that is gone.
        self._gone: list[Any] = []
        gone = self._gone.append
        variables = [
            variable for leaf in leaves.values() if (variable := leaf.variable()) is not None
        ]
        self._watched = [Reference(variable, gone) for variable in variables]
        self._owner_changes = -1
        self._owners = dict.fromkeys((leaf.op_id for leaf in leaves.values()), self)
        self._last: weakref.ref[Any] | None = None
        self._marks: Marks = ()
        self._seen = -1

    def can_run(self, inputs: Sequence[Any]) -> bool:
        """Whether a run with these inputs uses the same leaves, of the same owners."""
        if self._gone or [*map(id, map(inputs.__getitem__, self._indices))] != self._keys:
            return False
        claimer = self._claimer
        if self._owner_changes != claimer.owner_changes:
            for leaf in self._leaves.values():
                variable = leaf.variable()
                if variable is None or claimer.owner_of(variable) != leaf.op_id:
                    return False
            self._owner_changes = claimer.owner_changes
        return claimer.is_alone()

    @property
    def changes(self) -> int:
        """How often accumulations may have got hooks."""
        return self._claimer.late_changes

    def is_untouched(self) -> bool:
        """Whether the owners have not run with hooks since such a graph last ran."""
        iterations = self._claimer.iterations
        # Its own loop: this runs at each run, and at each pass.
        for op_id in self._owners:  # noqa: SIM110
            if type(iterations.get(op_id)) is not Leaves:
                return False
        return True

    def note_run(self, run: Any, iteration: int, outputs: Sequence[Any]) -> Marks:
        """Note a run that has just ended; what counts leaves in its place.

        Args:
            run: lives as long as the graph that it has made.
            outputs: the nodes of its outputs, in the order of their numbers.
        """
        claimer = self._claimer
        if not self.is_untouched():
            self.touch()
        is_known = self._seen == claimer.late_changes
        if is_known and self._marks:
            # With the graph of the last run the accumulations may be gone.
            is_known = self._last is not None and self._last() is not None
        # Before marks are looked for, which may change the owners.
        self.iteration = iteration
        claimer.iterations.update(self._owners)
        if not is_known:
            self._marks = self._find_marks(outputs)
        self._seen = claimer.late_changes
        claimer.late_runs.add(run)
        self._last = weakref.ref(run)
        return self._marks

    def has(self, key: int) -> bool:
        """Whether a leaf is one of these."""
        return key in self._leaves

    def _find_marks(self, outputs: Sequence[Any]) -> Marks:
        nodes, marks = list(outputs), []
        for place, edge, key in self._way:
            node = nodes[place].next_functions[edge][0]
            nodes.append(node)
            if key is not None and mark_of(node) is not None:
                marks.append((key, self.claim(node, key)))
        return marks

    def claim(self, node: Any, key: int) -> Sequence[Accumulation]:
        """Hook the accumulation of a leaf; returns the listeners for a pass that comes to the
        graph."""
        leaf = self._leaves.get(key)
        if leaf is None or leaf.variable() is not node.variable:
            return ()
        return self._claimer.claim_late(node, leaf.known, leaf.number, self.iteration)

    def mark(self, node: Any) -> bool:
        """See :class:`~amanda_torch.autograd.leaves.LateClaims`."""
        key = id(node.variable)
        leaf = self._leaves.get(key)
        if leaf is None or is_marked(node, leaf.known.handle.scopes):
            return False
        # Without a run there is no graph of it with the accumulation, which would be marked.
        if not any(run.uses(key) for run in self._claimer.late_runs):
            return False
        self.touch()
        self.claim(node, key)
        return True

    def touch(self) -> None:
        """Accumulations may have got hooks."""
        self._claimer.late_changes += 1


class KnownRuns(Protocol):
    """What is known of all runs of a graph whose leaves may be left unhooked.

    Attributes:
        leaves: they; None for none.
        lost: the passes in a row that could not be counted at their ends for their leaves.
    """

    leaves: Leaves | None
    lost: int

    def may_add(self) -> bool:
        """Whether the executions of the running pass may be counted at its end."""


class LeavesRun:
    """One run of a graph, in which hooks of its own at leaves may be missing.

    Args:
        known: what is known of all runs.
    """

    __slots__ = ("__weakref__", "_changes", "_known", "_marks")

    def __init__(self, known: KnownRuns) -> None:
        self._known = known
        self._marks: Marks = ()
        self._changes = 0

    def note_marks(self, marks: Marks) -> None:
        """Note what counts the accumulations of leaves in its place."""
        assert self._known.leaves is not None
        self._marks = marks
        self._changes = self._known.leaves.changes

    def uses(self, key: int) -> bool:
        """Whether an operator of the graph uses a leaf."""
        return self._known.leaves is not None and self._known.leaves.has(key)

    def _may_add(self) -> bool:
        """Whether the pass that runs now may be counted at its end."""
        leaves = self._known.leaves
        if leaves is not None and not (leaves.changes == self._changes and leaves.is_untouched()):
            self._known.lost += 1
            return False
        return self._known.may_add()

    def _tell(self, found: Mapping[int, Sequence[Accumulation]], gradients: Sequence[Any]) -> None:
        """Tell the hooks of leaves of the pass: they count, where another run does not."""
        running = passes.running()
        for key, reached in found.items():
            if running is not None:
                if key in running.timed_leaves:
                    continue
                running.counted.add(key)
            note_reached(reached, gradients)
