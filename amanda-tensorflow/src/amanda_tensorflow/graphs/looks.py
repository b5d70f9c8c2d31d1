"""Nodes that only look at tensors: what they read, so that Grappler optimizes as without them.

Grappler computes several operators as one, or in another order, where nothing else reads the
tensors between them. A node that looks at such a tensor reads it from a copy of its operator::

    relu(x @ w + b)         MatMul > BiasAdd > Relu
    looked at: BiasAdd      MatMul > BiasAdd > Relu, and MatMul' > BiasAdd' > node

What computes does not wait for these nodes either (:meth:`Building.split_looks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.gradient_order import is_sum
from amanda_tensorflow.operators.types import NOT_OPS, is_differentiable

_CONTRACTIONS = frozenset(
    "BatchMatMul BatchMatMulV2 Conv2D Conv3D DepthwiseConv2dNative MatMul".split()
)
_BEHIND = frozenset(
    "Add AddV2 BiasAdd FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Mul Squeeze".split()
)
"""Types that are computed with the contraction that they read."""

_COMBINED = _BEHIND | frozenset(
    """Abs Acos Acosh AddN Asin Asinh Atan Atanh Ceil Cos Cosh Div Elu Erf Erfc Exp Expm1 Floor Inv
    LeakyRelu Log Log1p Neg Pow RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sin
    Sinh Softplus Sqrt Square Sub Tan Tanh""".split()
)
"""Types that the arithmetic optimizer and the remapper combine with each other (2.16 to 2.21)."""

_SUMS = frozenset({"Add", "AddN", "AddV2", "Neg", "Sub"})
_PASSING = frozenset({"Identity", "IdentityN", "StopGradient"})
_RESHAPING = frozenset({"Reshape", "Sum"})
"""Types that pass a tensor on where they change no shape, as in gradients of broadcasts."""

_OF_SHAPES = frozenset("BroadcastGradientArgs OnesLike Rank Shape ShapeN Size ZerosLike".split())
"""Types that read no data: Grappler takes what they compute from the shapes that it knows."""


def may_be_combined(op: Any) -> bool:
    """True if Grappler may compute an operator together with others."""
    is_known = op.type in _COMBINED or op.type in _CONTRACTIONS or op.type in _RESHAPING
    return is_known and is_differentiable(op.outputs[0])


@attrs.frozen
class Looks:
    """The nodes of a copy, which is complete, that only look at tensors.

    Args:
        graph: of the copy.
        nodes: by name.
    """

    graph: Any
    nodes: Mapping[str, Any]
    _copies: dict[str, Any] = attrs.field(init=False, factory=dict)
    _added: set[str] = attrs.field(init=False, factory=set)
    _known: dict[str, bool] = attrs.field(init=False, factory=dict)

    def read_copies(self) -> None:
        """Let nodes that look at a tensor between combined operators read it from a copy."""
        self._added.update(self.nodes)
        for node in self.nodes.values():
            for index, read in enumerate(node.inputs):
                tensor = _source(read)
                if self._is_between(tensor.op) or (tensor.value_index and self._above(tensor.op)):
                    self._copy(tensor.op)
                if (seen := self._seen(tensor)) is not read:
                    _internals.update_input(node, index, seen)

    def keep_apart(self) -> bool:
        """True if an operator that may be combined waits for a node, or a node for it."""
        waited = [before for node in self.nodes.values() for before in node.control_inputs]
        for op in filter(may_be_combined, self.graph.get_operations()):
            if any(may_be_combined(tensor.op) for tensor in op.inputs):
                waited += [op for before in op.control_inputs if before.name in self.nodes]
        return any(map(may_be_combined, waited))

    def _readers(self, op: Any, count: int | None = None) -> Iterator[tuple[str, Any]]:
        """The operators that read the outputs of one in the vanilla graph, each with its type.

        Args:
            count: how many outputs; None for all.
        """
        waiting = [*op.outputs[:count]]
        while waiting:
            tensor = waiting.pop()
            if any(tensor is output for output in self.graph.outputs):
                yield "_Retval", None
            for reader in tensor.consumers():
                if reader.type in _OF_SHAPES or reader.name in self._added:
                    continue
                if reader.type in _RESHAPING and not _is_costly(op):
                    waiting += reader.outputs
                elif _passes(reader):
                    at = zip(reader.inputs, reader.outputs, strict=True)
                    waiting += [new for old, new in at if old is tensor]
                else:
                    yield reader.type, reader

    def _above(self, op: Any) -> list[Any]:
        """The operators that Grappler may compute together with one that reads them."""
        return [t.op for t in map(_source, op.inputs) if self._is_between(t.op)]

    def _is_between(self, op: Any) -> bool:
        """True if Grappler may compute an operator together with all that read it."""
        if op.name not in self._known:
            self._known[op.name] = self._find_between(op)
        return self._known[op.name]

    def _find_between(self, op: Any) -> bool:
        if op.type in _OF_SHAPES:
            return bool(self._above(op))
        if op.type in NOT_OPS or _internals.is_stateful(op) or not is_differentiable(op.outputs[0]):
            return False
        kinds = {kind for kind, _ in self._readers(op, 1)}
        others = _BEHIND if op.type in _CONTRACTIONS else _COMBINED
        if kinds and kinds <= others and may_be_combined(op):
            return True
        return any(kind in _SUMS and self._is_term(op, end) for kind, end in self._readers(op))

    def _is_term(self, op: Any, end: Any) -> bool:
        """True if an operator may be one of more than two terms of a sum.

        Grappler makes one operator of them, and the runtime adds them in an order that depends on
        which of them nobody holds any more (2.16 to 2.21). A sum that the program has waits for
        nodes that look at its terms: products are not copied for it.
        """
        around = {kind for kind, _ in self._readers(end)} | {t.op.type for t in end.inputs}
        return not _is_costly(op) if is_sum(end) else not _SUMS.isdisjoint(around)

    def _seen(self, tensor: Any) -> Any:
        """What stands for a tensor where nodes look at it."""
        copy = self._copies.get(tensor.op.name)
        return tensor if copy is None else copy.outputs[tensor.value_index]

    def _copy(self, op: Any) -> None:
        """Add a copy of an operator, and of those it may be computed with, without recursion."""
        waiting = [op]
        while waiting:
            above = [o for o in self._above(waiting[-1]) if o.name not in self._copies]
            waiting += above
            if not above and (last := waiting.pop()).name not in self._copies:
                copy = self._copies[last.name] = self._like(last)
                self._added.add(copy.name)

    def _like(self, op: Any) -> Any:
        """Return a new operator, like another one, on what nodes look at."""
        inputs = [self._seen(_source(tensor)) for tensor in op.inputs]
        types = [tensor.dtype for tensor in op.outputs]
        # Grappler joins operators that are alike.
        attributes = {**_internals.attributes_proto(op), "_amanda": _internals.AttrValue(b=True)}
        options = {"name": f"{op.name}/amanda/seen/", "attrs": attributes, "op_def": op.op_def}
        new = _internals.create_op_in(
            self.graph, op.type, inputs, types, compute_device=False, **options
        )
        _internals.set_device(new, op.device)
        return new


def _is_costly(op: Any) -> bool:
    """True if an operator is a product, whose copies take time."""
    return op.type in _CONTRACTIONS or "Backprop" in op.type


def _passes(op: Any) -> bool:
    """True if an operator passes its inputs on, and Grappler leaves it out."""
    return op.type in _PASSING and not op.control_inputs


def _source(tensor: Any) -> Any:
    """The tensor that identities pass on."""
    while _passes(tensor.op):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
