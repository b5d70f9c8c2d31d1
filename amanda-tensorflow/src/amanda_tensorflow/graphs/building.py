"""The graph copy under construction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import attrs
import tensorflow as tf

from amanda.state import LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.operators.types import ROUTING, takes_reference


class Releasable(Protocol):
    """Something in the copy that holds a tool until it is released."""

    def release(self) -> None:
        """Let go of the tool: the scope is over."""


@attrs.define(eq=False)
class Building:
    """The copy that is being built, as routines see it.

    Attributes:
        graph: the copy's graph.
        scopes: the scopes whose tools act on it.
        needs_gradient: whether the copy may be differentiated.
        anchors: operators that a node without inputs waits for.
        controls: nodes without outputs that what comes next has to wait for.
        late: a tensor's id to nodes that whoever reads the tensor has to wait for.
        template: what the replacement of an operator has to give: per output a
            tensor of its type, or None for what is not wanted.
        likes: of each such output a tensor of its shape, where it is known.
        takes_reference: whether the operator being built writes to one of its inputs.
        is_routing: whether the operator being built routes values in a version 1 loop
            or branch, where some of them may never come.
        is_changed: whether anything was inserted.
        may_change: whether a routine may have changed what a forward operator
            computes with or gives.
        has_python: whether any of it runs Python.
        routines: what calls Python at run time.
    """

    graph: Any
    scopes: tuple[LiveScope, ...]
    needs_gradient: bool
    anchors: Sequence[Any] = ()
    controls: list[Any] = attrs.field(factory=list)
    late: dict[int, list[Any]] = attrs.field(factory=dict)
    template: Sequence[Any] = ()
    likes: Sequence[Any] = ()
    takes_reference: bool = False
    is_routing: bool = False
    is_changed: bool = False
    may_change: bool = False
    has_python: bool = False
    routines: list[Releasable] = attrs.field(factory=list)

    def begin(self, kind: str) -> None:
        """Note of which type the operator is that is built next."""
        self.takes_reference = takes_reference(kind)
        self.is_routing = kind in ROUTING

    def absorb(self, inner: Building) -> None:
        """Note what was done to a body or branch of the copy."""
        self.is_changed |= inner.is_changed
        self.may_change |= inner.may_change
        self.has_python |= inner.has_python
        self.routines += inner.routines

    def late_nodes(self, tensors: Iterable[Any]) -> list[Any]:
        """The nodes that whoever reads these tensors has to wait for."""
        if not self.late:
            return []
        return [node for tensor in tensors for node in self.late.get(id(tensor), ())]

    def earlier(self) -> list[Any]:
        """The nodes without outputs that were put at this point before (design rule 9)."""
        return [] if self.is_routing else list(self.controls)

    def awaited(self, tensors: list[Any], readers: Iterable[Any] = ()) -> list[Any]:
        """The tensors, whose readers wait for the nodes without a value.

        Args:
            readers: the vanilla operators that read them.
        """
        valued = [t for t in tensors if has_value(t)]
        if not self.controls or not valued:
            return tensors
        controls = self.take_controls()
        if not any(op.type in ROUTING for op in readers):
            for tensor in valued:
                self.late.setdefault(id(tensor), []).extend(controls)
            return tensors
        # What routes values in a version 1 loop or branch does not wait for other things.
        with tf.control_dependencies(controls):
            return [_internals.identity(t) if has_value(t) else t for t in tensors]

    def take_controls(self) -> list[Any]:
        """The nodes to wait for, which are forgotten."""
        controls, self.controls = self.controls, []
        return controls


def has_value(tensor: Any) -> bool:
    """Whether a tensor is there, and is no reference to a variable."""
    return tensor is not None and not _internals.is_reference(tensor.dtype)
