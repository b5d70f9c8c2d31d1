"""Counts over the compiled backward pass of a graph, without a hook at each leaf.

A compiler's code has one autograd node for the backward pass of the whole graph, and its edges lead
to the accumulations of leaves. As soon as all is known that tools do at these, and nothing but
counters and sums is left, a run hooks that node alone (:class:`JointRun`): what a backward pass
executes there is counted when it has ended, as in
:mod:`~amanda_torch.compiled.derived`, which also says which passes have the leaves hooked instead::

    joint = learn(claimer, sites, inputs, node, flowing, added, count)
    if joint is not None and joint.can_run(inputs):
        node = joint.node_of(result, start)
        joint.claim(node, iteration)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from amanda.inline import ShapeSum
from amanda.references import Reference, nothing
from amanda.state import STATE, TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.autograd import passes
from amanda_torch.autograd.claims import Claimer
from amanda_torch.autograd.gradient_graphs import KnownGradients
from amanda_torch.autograd.hooks import Accumulation, NodeHooks, nothing_flows
from amanda_torch.autograd.nodes import is_accumulation
from amanda_torch.compiled.deferred import Added, Additions, StaticSum
from amanda_torch.compiled.derived import MOST_LOST
from amanda_torch.compiled.derived_leaves import Leaf, Leaves, LeavesRun

_sequence = _internals.node_sequence

Count = Callable[..., None]
"""A posthook of the node: counts the backward operators of the graph."""

_HIDDEN = "backward passes of compiled code, in passes of compiled autograd"


class UsesLeaves(Protocol):
    """An operator of a graph that uses leaves.

    Attributes:
        gradients: what is known of its backward operators.
        leaves: the numbers of the leaves among the inputs of the graph.
    """

    @property
    def gradients(self) -> KnownGradients: ...
    @property
    def leaves(self) -> Sequence[int]: ...


class JointBackward:
    """The facts about the node of the backward pass, in all runs of a graph.

    Args:
        claimer: that of the thread that runs the graph.
        kind: the class of the node.
        count: counts the backward operators in a pass that is not counted at its end.
        added: what the backward operators add to.
        leaves: the leaves whose accumulations operators of the graph own; None for none.
        of_leaf: by the identity of a leaf, what its accumulation adds to in a pass.
    """

    def __init__(
        self,
        claimer: Claimer,
        kind: type,
        count: Count,
        added: Sequence[Added],
        leaves: Leaves | None,
        of_leaf: Mapping[int, Sequence[Added]],
    ) -> None:
        self._dispatcher = claimer.dispatcher
        self._settled = self._dispatcher.settled
        self._kind = kind
        self._added = added
        self._of_leaf = of_leaf
        self._every = Additions([*added, *(one for found in of_leaf.values() for one in found)])
        self.count = count
        self.leaves = leaves
        self.lost = 0

    def can_run(self, inputs: Sequence[Any]) -> bool:
        """Whether a run with these inputs may leave its leaves unhooked."""
        if self._settled is not self._dispatcher.settled or self.lost > MOST_LOST:
            return False
        return self.leaves is None or self.leaves.can_run(inputs)

    def node_of(self, result: Any, start: int) -> Any:
        """The node that a run has made; None if there is another one, or none.

        Args:
            result: the outputs of the run.
            start: the number of the next node before it.
        """
        found = None
        for output in result:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                node = output.grad_fn
                if node is None or node is found or _sequence(node) < start:
                    continue
                if found is not None or type(node) is not self._kind:
                    return None
                found = node
        return found

    def claim(self, node: Any, iteration: int) -> None:
        """Note a run that has just ended, and hook its node, if there is anything to count.

        Args:
            iteration: that of its thread.
        """
        run = JointRun(self)
        passes.tell(run)
        if self.leaves is not None:
            run.note_marks(self.leaves.note_run(run, iteration, (node,)))
        # It lives as long as the hook, and with that as long as the graph.
        node.register_prehook(run.enter)

    def may_add(self) -> bool:
        """Whether the executions of the running pass may be counted at its end."""
        return (
            self._settled is self._dispatcher.settled
            and not torch.is_grad_enabled()
            and self._dispatcher.is_plain_thread(vars(STATE))
        )

    def add(self, counted: set[int]) -> None:
        """Count one pass.

        Args:
            counted: see :attr:`~amanda_torch.autograd.passes.BackwardPass.counted`; to be added to.
        """
        every = self._every
        if not counted.isdisjoint(self._of_leaf):
            left = [found for key, found in self._of_leaf.items() if key not in counted]
            every = Additions([*self._added, *(one for found in left for one in found)])
        counted.update(self._of_leaf)
        TOOL_LOCK.hold(every.add)

    def claim_leaves(self, node: Any) -> dict[int, Sequence[Accumulation]]:
        """Hook the leaves that the node leads to; returns the listeners for passes, by identity."""
        leaves = self.leaves
        if leaves is None:
            return {}
        leaves.touch()
        targets = [target for target, _ in node.next_functions if is_accumulation(target)]
        return {
            id(target.variable): leaves.claim(target, id(target.variable)) for target in targets
        }

    def hidden(self) -> None:
        """A pass of compiled autograd comes to the node, in which nothing can be hooked."""
        self._dispatcher.not_seen(_HIDDEN)


class JointRun(LeavesRun):
    """One run of a graph, which the hook on its node holds.

    Args:
        joint: what is known of all runs.
    """

    __slots__ = ("_has_run", "_is_hooked", "_joint")

    def __init__(self, joint: JointBackward) -> None:
        super().__init__(joint)
        self._joint = joint
        self._has_run = self._is_hooked = False

    def look_behind(self, nodes: Sequence[Any]) -> None:
        """See :class:`~amanda_torch.autograd.passes.AddedUp`: :meth:`enter` meets each pass."""

    def enter(self, gradients: tuple[Any, ...]) -> None:
        """Prehook of the node."""
        if nothing_flows(gradients):
            return
        running = passes.running()
        may_add = not (self._has_run or self._is_hooked or running is None)
        if may_add and running is not None and running.is_whole() and self._may_add():
            self._joint.lost = 0
            # Not at its end: one that raises leaves a node that cannot run again.
            self._has_run = True
            running.entered[self._add] = {0}
            self._tell(dict(self._marks), gradients)
            return
        node = _internals.current_node()
        if node is None:
            self._joint.hidden()
            return
        if not self._is_hooked:
            self._is_hooked = True
            node.register_hook(self._joint.count)
        self._tell(self._joint.claim_leaves(node), gradients)

    def _add(self, _: set[int], counted: set[int]) -> None:
        self._joint.add(counted)


def learn(
    claimer: Claimer,
    sites: Sequence[UsesLeaves],
    inputs: Sequence[Any],
    node: Any,
    flowing: set[int],
    added: Sequence[Added],
    count: Count,
) -> JointBackward | None:
    """Collect the facts about the node; None as long as leaves have to be hooked.

    Args:
        sites: the operators of the graph that use leaves.
        inputs: of a run.
        node: of its backward pass.
        flowing: the edges of the node by which a pass has passed gradients on.
        added, count: as of :class:`JointBackward`.
    """
    leaves: dict[int, Leaf] = {}
    of_leaf: dict[int, Sequence[Added]] = {}
    behind = [None if leaf is None else id(leaf) for leaf in leaves_behind(node)]
    edges = {key: edge for edge, key in enumerate(behind) if key is not None}
    for site in sites:
        number = 0
        for index in site.leaves:
            leaf, key = inputs[index], id(inputs[index])
            if claimer.owner_of(leaf) == site.gradients.handle.op_id and key not in leaves:
                one = Leaf(Reference(leaf, nothing), index, site.gradients, number)
                number += 1
                found = _added(one.hooks(claimer))
                if found is None:
                    return None
                leaves[key] = one
                if found and edges.get(key) in flowing:
                    of_leaf[key] = found
    if any(id(inputs[index]) not in leaves for site in sites for index in site.leaves):
        # An operator outside of the graph owns one.
        return None
    if not leaves:
        return JointBackward(claimer, type(node), count, added, None, {})
    if not leaves.keys() <= edges.keys():
        return None
    shared = Leaves(claimer, leaves, {}, [(0, edges[key], key) for key in leaves])
    return JointBackward(claimer, type(node), count, added, shared, of_leaf)


def leaves_behind(node: Any) -> list[Any]:
    """For each edge of a node, the leaf that it leads to; None where it leads elsewhere."""
    targets = [target for target, _ in node.next_functions]
    return [target.variable if is_accumulation(target) else None for target in targets]


def _added(hooks: NodeHooks | None) -> Sequence[Added] | None:
    """The additions of an accumulation in each pass; None if they are not known."""
    found = None if hooks is None else hooks.added()
    if found is None:
        return None
    every: list[Added] = []
    for one in found:
        if isinstance(one, ShapeSum):
            if not one.executions:
                return None
            # The shapes of a leaf are the same in each pass.
            every.append(StaticSum(one, (one.weigh(one.last), one.last)))
        else:
            every.append(one)
    return every
