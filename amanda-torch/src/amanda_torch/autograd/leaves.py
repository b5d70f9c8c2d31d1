"""Leaves: which operator owns the accumulation of a leaf's gradient, and when it is hooked."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from amanda.python.references import Reference
from amanda.state import Lock
from amanda_torch.autograd.executions import Execution, Past
from amanda_torch.autograd.gradient_graphs import KnownGradients
from amanda_torch.autograd.hooks import Accumulation, NodeHooks, add_reached
from amanda_torch.routines import RoutineDispatcher

_MARK = "amanda"
"""Key in the metadata of a leaf's accumulation: by scope in which some operator owns it, its
:class:`~amanda_torch.autograd.hooks.Accumulation`; None where nothing is to be done at it. The only
one stands there without a dictionary: Python's, or that of the gate."""


class _Owner(Reference):
    """A reference to a leaf, and the operator whose its accumulation is.

    One object: with a callback of its own it would be six.

    Attributes:
        op_id: of the operator.
        known: a reference to what is known of its gradients: the leaf may outlive its model.
        number: of the leaf among those that it owns.
        past: its tensors, as long as an analysis of the accumulation is pending.
        is_idle: True if it is known that nothing is to be done there. The extension reads it.
    """

    __slots__ = ("is_idle", "key", "known", "number", "op_id", "owners", "past")

    key: int
    owners: dict[int, _Owner]
    op_id: str
    known: weakref.ref[KnownGradients]
    number: int
    past: Past | None
    is_idle: bool


def _forget_owner(owner: Any) -> None:
    """The leaf is gone."""
    if owner.owners.get(owner.key) is owner:
        del owner.owners[owner.key]


class LeafClaimer:
    """Finds the owners of leaves' accumulations and hooks them, for one thread.

    Attributes:
        dispatcher: runs the routines.
        iterations: by operator the iteration in which it last ran with gradients.
        leaf_owners: by the identity of a leaf a weak reference to it, and the operator that used it
            first in an iteration.
    """

    # Threads may share a leaf, and one that finds it claimed has to find its hooks there, too.
    _locked = staticmethod(Lock().hold)

    def __init__(self, dispatcher: RoutineDispatcher) -> None:
        self.dispatcher = dispatcher
        self.iterations: dict[str, int] = {}
        self.leaf_owners: dict[int, _Owner] = {}

    @staticmethod
    def is_alone() -> bool:
        """Whether operators of at most one thread own leaves."""
        return len(_CLAIMERS) <= 1

    def clear(self) -> None:
        """Forget everything, at the end of the thread's scopes."""
        self.iterations.clear()
        self.leaf_owners.clear()
        _CLAIMERS.discard(self)

    def forget(self, model: str) -> None:
        """Drop the facts about the operators of a model that is gone, in any thread.

        Args:
            model: what their ids begin with.
        """
        ends = tuple(f"{model}{end}" for end in "./#")
        for op_id in list(self.iterations):
            if op_id.startswith(ends):
                self.iterations.pop(op_id, None)

    def note_run(self, op_id: str, iteration: int) -> None:
        """Remember the iteration in which an operator with gradients last ran."""
        self.iterations[op_id] = iteration

    def _claim_leaves(
        self,
        leaves: Sequence[Any],
        known: KnownGradients,
        described: tuple[Execution, Sequence[Any]] | Past | None,
        iteration: int,
        reached: list[Accumulation],
        first: int = 0,
    ) -> bool:
        """Hook the accumulations of leaves that belong to an operator, under the lock.

        Args:
            known: what is known of the operator's gradients.
            described: the execution and its outputs, or its tensors; None if no analysis is
                pending.
            reached: is added what is to be told when a pass comes to the operator.
            first: the number of the first one that belongs to it.

        Returns:
            Whether nothing is to be done at any of them.
        """
        handle, count, is_idle = known.handle, first, True
        native = self.dispatcher.native
        for node in leaves:
            mark = node.metadata.get(_MARK)
            if mark is None and native is not None and (mark := native.mark(node)) is not None:
                node.metadata[_MARK] = mark
            if mark is not None and type(mark) is not dict and mark.scopes == handle.scopes:
                # Of an operator that ran before, as of all but the first calls in a loop.
                if not mark.is_idle and mark not in reached:
                    reached.append(mark)
                continue
            marks, fresh = self._owned(node, known, iteration, count)
            if not fresh:
                add_reached(reached, marks, handle.scopes)
                continue
            backward_id = f"{handle.op_id}/grad/AccumulateGrad:{count}"
            count += 1
            hooks = known.hooks.get(backward_id)
            if hooks is None and known.asked != self.dispatcher.analysed:
                hooks = known.shared_hooks(self.dispatcher, "AccumulateGrad", backward_id)
            if hooks is None or not hooks.is_idle:
                is_idle, past = False, None
                if hooks is None and type(described) is Past:
                    past = described
                elif hooks is None and described is not None:
                    layout = None if known.graph is None else known.graph.layout
                    past = described[0].past(described[1], layout)
                only = self.hook_leaf(node, marks, fresh, known, backward_id, hooks, past)
                if only is None:
                    add_reached(reached, marks, handle.scopes)
                else:
                    reached.append(only)
        known.asked = self.dispatcher.analysed
        return is_idle

    def hook_leaf(
        self,
        node: Any,
        marks: dict[Any, Any],
        fresh: Sequence[Any],
        known: KnownGradients,
        backward_id: str,
        hooks: NodeHooks | None,
        past: Past | None,
    ) -> Accumulation | None:
        """Hook the accumulation of a leaf that begins to belong to an operator.

        Args:
            marks, fresh: see :meth:`_owned`; the former is added to.
            known: what is known of the operator's gradients.
            backward_id: the accumulation's id.
            hooks: what acts there; None as long as an analysis is pending.
            past: the tensors of the execution that the analysis is told.

        Returns:
            What acts there, if it is the same in all scopes that have marked it.
        """
        # It may outlive the model, as the leaf may.
        self.leaf_owners[id(node.variable)].past = None if past is None else past.bare()
        native = self.dispatcher.native
        # One for each: a pass of another thread may come through some of them only.
        for scopes in (fresh,) if len(fresh) == 1 else [(scope,) for scope in fresh]:
            # The extension's is hooked without objects of gradients.
            make = Accumulation if native is None else native.Accumulation
            one = make(self, known, backward_id, scopes, past)
            if len(marks) > 1:
                marks[scopes[0]] = one
            else:
                node.metadata[_MARK] = one
            before, after = hooks is None or hooks.has_before, hooks is None or hooks.has_after
            if native is not None:
                native.register_leaf(one, node, before, after)
                continue
            if before:
                node.register_prehook(one)
            if after:
                node.register_hook(one)
        return None if len(marks) > 1 else one

    def claim_leaves(
        self,
        leaves: Sequence[Any],
        known: KnownGradients,
        iteration: int,
        reached: list[Accumulation],
        past: Past | None = None,
    ) -> None:
        """Hook the accumulations of leaves that belong to an operator in compiled code.

        Args:
            known: what is known of the operator's gradients.
            reached: is added what is to be told when a pass comes to the code.
            past: the tensors of an execution; None where no analysis is pending.
        """
        self.iterations[known.handle.op_id] = iteration
        self._locked(self._claim_leaves, leaves, known, past, iteration, reached)

    def leaf_hooks(
        self, known: KnownGradients, backward_id: str, scopes: Sequence[Any], past: Past | None
    ) -> NodeHooks:
        """The hooks of a leaf's accumulation, in the scopes in which it is the operator's."""
        hooks = known.made_hooks(self.dispatcher, "AccumulateGrad", backward_id, past)
        whole = len(scopes) == len(known.handle.scopes)
        return hooks if whole else hooks.of_scopes(set(scopes))

    def _owned(
        self, node: Any, known: KnownGradients, iteration: int, number: int
    ) -> tuple[dict[Any, Any], Sequence[Any]]:
        """The marks on a leaf's accumulation, and the scopes in which it begins to belong to an
        operator: it does to the first operator of the iteration that used the leaf.

        Args:
            known: what is known of the operator's gradients.
            number: of the leaf among those that it owns.
        """
        # A leaf has one accumulation node as long as some graph uses it: the marks on it keep
        # a second operator, or a second graph, from hooking it again.
        metadata, handle = node.metadata, known.handle
        none: dict[Any, Any] = {}
        # At once: the gate, which holds no lock, may be about to mark it in another thread.
        marks: Any = metadata.setdefault(_MARK, none)
        fresh: Sequence[Any] = handle.scopes
        if marks is not none:
            if type(marks) is not dict:
                # The only one, of one operator for all its scopes.
                marks = metadata[_MARK] = marks.marks()
            fresh = [scope for scope in fresh if scope not in marks]
            if not fresh:
                return marks, fresh
        op_id, leaf = handle.op_id, node.variable
        # Not a WeakIdKeyDictionary, which makes an object of Python for each question.
        found = self.leaf_owners.get(id(leaf))
        owner = found.op_id if found is not None and found() is leaf else None
        if owner != op_id:
            ran = None if owner is None else self.iterations.get(owner)
            if found is not None and owner is not None and ran == iteration:
                return self._claim_for_owner(found, node, iteration), ()
            self._set_owner(leaf, known, number)
        elif found is not None and found.known() is not known:
            found.known, found.number, found.is_idle = weakref.ref(known), number, False
        for scope in fresh:
            marks[scope] = None
        return marks, fresh

    def _claim_for_owner(self, owner: _Owner, node: Any, iteration: int) -> dict[Any, Any]:
        """The marks on an accumulation whose owner ran in this iteration, and left none.

        Its backward operators need no hooks; or the graph that it has made is gone, as that of a
        norm that is printed, and the accumulation with it: this is another one.
        """
        known = owner.known()
        if known is not None and not owner.is_idle:
            hooks = known.hooks.get(f"{owner.op_id}/grad/AccumulateGrad:{owner.number}")
            if hooks is None or not hooks.is_idle:
                past = owner.past
                self._claim_leaves([node], known, past, iteration, [], owner.number)
            else:
                owner.is_idle = True
        marks: Any = node.metadata[_MARK]
        found: dict[Any, Any] = marks if type(marks) is dict else marks.marks()
        return found

    def _set_owner(self, leaf: torch.Tensor, known: KnownGradients, number: int) -> None:
        _CLAIMERS.add(self)
        owner = _Owner(leaf, _forget_owner)
        owner.key, owner.owners, owner.op_id = id(leaf), self.leaf_owners, known.handle.op_id
        owner.known, owner.number = weakref.ref(known), number
        owner.past, owner.is_idle = None, False
        self.leaf_owners[id(leaf)] = owner


_CLAIMERS: weakref.WeakSet[LeafClaimer] = weakref.WeakSet()
"""The claimers of all threads whose operators own leaves."""
