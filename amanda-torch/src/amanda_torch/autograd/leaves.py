"""The accumulation of a leaf's gradient: the operator that owns it, and its hooks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda.python.references import Reference
from amanda_torch import _internals
from amanda_torch.autograd.executions import Past
from amanda_torch.autograd.gradient_graphs import KnownGradients
from amanda_torch.autograd.hooks import NodeHooks, all_none
from amanda_torch.routines import RoutineDispatcher

_ACCUMULATION = "AccumulateGrad"

_MARK = "amanda"
"""Key in the metadata of a leaf's accumulation. The value maps each scope in which an operator owns
the accumulation to its :class:`Accumulation`, or to None without routines and analyses. The
extension reads and extends it."""

_PASSES = 64
"""Backward passes of different threads over one leaf at the same time, at most."""

_graph_task = _internals.graph_task


class Accumulation:
    """The hooks of one scope on a leaf's accumulation, for passes that reach its operators.

    All graphs that use a leaf share its accumulation. The routines of a scope do not act in
    backward passes of graphs that were made before the scope, under ``disabled()``, or by threads
    that the scope does not cover.

    Args:
        find: returns the hooks; called once, when a pass reaches the accumulation.
    """

    __slots__ = ("_always", "_find", "_hooks", "_passes")

    def __init__(self, find: Callable[[], NodeHooks]) -> None:
        self._find: Callable[[], NodeHooks] | None = find
        self._hooks: NodeHooks | None = None
        # By the numbers of _internals.graph_task.
        self._passes: list[int] = []
        self._always = False

    def register(self, node: Any, before: bool, after: bool) -> None:
        """Hook an accumulation at one or both of its ends."""
        if before:
            node.register_prehook(self)
        if after:
            node.register_hook(self)

    def note_pass(self, task: int, makes_graph: bool) -> None:
        """Note that a backward pass has reached an operator of the scope that uses the leaf."""
        passes = self._passes
        if task not in passes:
            passes.append(task)
            if len(passes) > _PASSES:
                del passes[0]
        # The graph that this pass makes may lead to the leaf by nodes that no operator owns.
        self._always = self._always or makes_graph

    def __call__(self, gradients: tuple[Any, ...], consumed: tuple[Any, ...] | None = None) -> Any:
        """Run as prehook or posthook, as :class:`NodeHooks`."""
        if not (self._always or _graph_task() in self._passes):
            return None
        # Read before `_hooks`: another thread sets `_hooks` first and then drops `_find`.
        find, hooks = self._find, self._hooks
        if hooks is None and find is not None:
            hooks = self._hooks = find()
            # The leaf may outlive the model.
            self._find = None
        assert hooks is not None
        return hooks(gradients, consumed)


def is_owned(node: Any) -> bool:
    """True if an operator of some scope owns an accumulation."""
    return _MARK in node.metadata


def note_reached(reached: Sequence[Accumulation], gradients: Sequence[Any]) -> None:
    """Notify accumulations of a pass; a prehook of the nodes of an operator's outputs."""
    if all_none(gradients):
        return
    task, makes_graph = _graph_task(), torch.is_grad_enabled()
    for one in reached:
        one.note_pass(task, makes_graph)


class _Owner(Reference):
    """A weak reference to a leaf, with the operator that owns its accumulation.

    Attributes:
        key, owners: its key, and the dictionary that holds it.
        op_id: id of the operator.
        known: weak reference to the facts about the operator's gradients: the leaf may outlive the
            model.
        backward_id: id of the accumulation.
        past: the operator's tensors while an analysis of the accumulation is pending; else None.
        is_idle: True if the accumulation is known to have no routines and analyses. The extension
            reads it.
    """

    __slots__ = ("backward_id", "is_idle", "key", "known", "op_id", "owners", "past")

    key: int
    owners: dict[int, _Owner]
    op_id: str
    known: weakref.ref[KnownGradients]
    backward_id: str
    past: Past | None
    is_idle: bool


def _forget_owner(owner: Any) -> None:
    """Forget the owner of a leaf that has been deleted."""
    if owner.owners.get(owner.key) is owner:
        del owner.owners[owner.key]


class LeafClaimer:
    """Finds the owners of leaves' accumulations and hooks the accumulations, for one thread.

    Attributes:
        dispatcher: the driver's dispatcher.
        iterations: by operator id, the iteration in which it last ran with gradients.
        leaf_owners: by ``id()`` of a leaf, the operator that used it first in an iteration. Not a
            WeakIdKeyDictionary, which makes an object for each look-up.
    """

    def __init__(self, dispatcher: RoutineDispatcher) -> None:
        self.dispatcher = dispatcher
        self.iterations: dict[str, int] = {}
        self.leaf_owners: dict[int, _Owner] = {}

    def clear(self) -> None:
        """Forget everything, at the end of the thread's scopes."""
        self.iterations.clear()
        self.leaf_owners.clear()

    def forget(self, model: str) -> None:
        """Drop the facts about the operators of a model that is gone, in any thread.

        Args:
            model: the beginning of their ids.
        """
        ends = tuple(f"{model}{end}" for end in "./#")
        for op_id in list(self.iterations):
            if op_id.startswith(ends):
                self.iterations.pop(op_id, None)

    def note_run(self, op_id: str, iteration: int) -> None:
        """Remember the iteration in which an operator with gradients last ran."""
        self.iterations[op_id] = iteration

    def claim_leaves(
        self,
        leaves: Sequence[Any],
        known: KnownGradients,
        iteration: int,
        past: Callable[[], Past | None],
    ) -> list[Accumulation]:
        """Hook the accumulations of leaves that belong to an operator, if they are not yet hooked.

        A leaf has one accumulation node as long as some graph uses it: the marks on it keep a
        second operator, or a second graph, from hooking it again.

        Args:
            leaves: the accumulations that the operator's gradients lead to.
            known: the facts about the operator's gradients.
            past: returns the tensors of the execution, for pending analyses.

        Returns:
            The accumulations to notify when a pass reaches the operator.
        """
        reached: dict[Accumulation, None] = {}
        scopes, number = known.handle.scopes, 0
        for node in leaves:
            marks = node.metadata.setdefault(_MARK, {})
            if not marks.keys() >= {*scopes}:
                owner = self._owner_of(node.variable, known, iteration, number)
                if owner.op_id == known.handle.op_id:
                    self.hook_leaf(node, marks, owner, known, past)
                    number += 1
                else:
                    self._hook_for_owner(node, marks, owner)
            for scope in scopes:
                one = marks.get(scope)
                if one is not None:
                    reached[one] = None
        return list(reached)

    def _owner_of(
        self, leaf: torch.Tensor, known: KnownGradients, iteration: int, number: int
    ) -> _Owner:
        """The operator that used a leaf first in an iteration: `known`'s if no other did.

        Args:
            number: number of the leaf among the operator's.
        """
        op_id, owner = known.handle.op_id, self.leaf_owners.get(id(leaf))
        if owner is not None and owner() is leaf and owner.op_id != op_id:
            if self.iterations.get(owner.op_id) == iteration:
                return owner
            owner = None
        if owner is None or owner() is not leaf:
            owner = _Owner(leaf, _forget_owner)
            owner.key, owner.owners, owner.op_id = id(leaf), self.leaf_owners, op_id
            self.leaf_owners[id(leaf)] = owner
        owner.known, owner.is_idle, owner.past = weakref.ref(known), False, None
        owner.backward_id = f"{op_id}/grad/{_ACCUMULATION}:{number}"
        return owner

    def owner_of(self, leaf: torch.Tensor) -> tuple[KnownGradients, str, Past | None] | None:
        """The backward operator that accumulates the gradient of a leaf: the facts about its
        operator, its id, and None for tensors; None if no operator has used the leaf."""
        owner = self.leaf_owners.get(id(leaf))
        known = owner.known() if owner is not None and owner() is leaf else None
        return None if owner is None or known is None else (known, owner.backward_id, None)

    def _hook_for_owner(self, node: Any, marks: dict[Any, Any], owner: _Owner) -> None:
        """Hook an unmarked accumulation whose owner has run in this iteration.

        The owner's graph is gone, as that of a norm that was printed, and its accumulation with it:
        this is a new one.
        """
        known = owner.known()
        if known is not None and not owner.is_idle:
            past = owner.past
            self.hook_leaf(node, marks, owner, known, lambda: past)

    def hook_leaf(
        self,
        node: Any,
        marks: dict[Any, Any],
        owner: _Owner,
        known: KnownGradients,
        past: Callable[[], Past | None],
    ) -> None:
        """Hook and mark an accumulation for its owner, in each scope that has not marked it."""
        dispatcher, backward_id = self.dispatcher, owner.backward_id
        hooks = known.hooks_for(dispatcher, _ACCUMULATION, backward_id)
        is_pending = hooks is None
        tensors = past() if is_pending else None
        owner.is_idle = hooks is not None and hooks.is_idle
        # The owner may outlive the model, as the leaf may.
        owner.past = None if tensors is None else tensors.bare()
        make = Accumulation if dispatcher.native is None else dispatcher.native.Accumulation
        for scope in known.handle.scopes:
            if scope in marks:
                continue
            one = None
            if hooks is None or not hooks.is_idle:
                find = functools.partial(self.leaf_hooks, hooks, known, backward_id, scope, tensors)
                one = make(find)
                one.register(
                    node, hooks is None or hooks.has_before, hooks is None or hooks.has_after
                )
            # After the hooks: an operator of another thread relies on the hooks of a mark. If that
            # thread was faster, these hooks are not notified, and act in no pass.
            marks.setdefault(scope, one)

    def leaf_hooks(
        self,
        hooks: NodeHooks | None,
        known: KnownGradients,
        backward_id: str,
        scope: Any,
        past: Past | None = None,
    ) -> NodeHooks:
        """The hooks of a leaf's accumulation in one of an operator's scopes.

        Args:
            hooks: the hooks for all scopes; None if an analysis is pending.
        """
        if hooks is None:
            hooks = known.made_hooks(self.dispatcher, _ACCUMULATION, backward_id, past)
        return hooks if len(known.handle.scopes) == 1 else hooks.of_scope(scope)

    def known_leaf_hooks(
        self, known: KnownGradients, backward_id: str
    ) -> Sequence[NodeHooks] | None:
        """The hooks of a leaf's accumulation in each of an operator's scopes; empty without
        routines; None if an analysis is pending."""
        hooks = known.hooks_for(self.dispatcher, _ACCUMULATION, backward_id)
        if hooks is None:
            return None
        if hooks.is_idle:
            return []
        scopes = known.handle.scopes
        return [self.leaf_hooks(hooks, known, backward_id, scope) for scope in scopes]
