"""Nodes that only look at tensors: what they read, so that Grappler optimizes as without them.

Grappler replaces chains of sums, products and roots by others that round otherwise, where nothing
else reads the tensors between them. A node that looks at such a tensor reads it from a copy of its
operator, if that computes or moves single elements::

    a * 3.0 * 2.0           Mul > Mul, of which Grappler makes a * 6.0
    looked at: a * 3.0      Mul > Mul, and Mul' > node

What computes does not wait for these nodes either (:meth:`Building.split_looks`). A product with a
bias and an activation is computed in the same steps whether Grappler fuses it or not: each bit is
the same (2.16 to 2.21 on CPUs), and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.gradient_order import is_sum
from amanda_tensorflow.operators.types import NOT_OPS, is_differentiable

_SUMS = frozenset({"Add", "AddN", "AddV2", "Neg", "Sub"})
_COMBINED = _SUMS | frozenset("Div Mul Pow RealDiv Reciprocal Rsqrt Sqrt Square".split())
"""Types that the arithmetic optimizer and constant folding combine with each other (2.16 to 2.21)
so that the result is rounded otherwise."""

_CHEAP = frozenset(
    """Abs BiasAdd Cast ConcatV2 Cos Elu EluGrad Erf Erfc Exp ExpandDims Expm1 GatherV2 LeakyRelu
    LeakyReluGrad Log Log1p Maximum Mean Minimum Pack Pad PadV2 Relu Relu6 Relu6Grad ReluGrad
    ReverseV2 RsqrtGrad Select SelectV2 Sigmoid SigmoidGrad Sin Slice Softmax Softplus SoftplusGrad
    SqrtGrad SquaredDifference StridedSlice StridedSliceGrad Tanh TanhGrad Tile Transpose""".split()
)
"""Further types of which a copy takes about as long as to read the tensor."""

_HELD = NOT_OPS | {"ReadVariableOp"}
"""Types whose outputs are held in every run, by a variable or the caller."""

_RESHAPING = frozenset({"Reshape", "Sum"})
"""Types that pass a tensor on where they change no shape, as in gradients of broadcasts."""

_PASSING = frozenset({"Identity", "IdentityN", "StopGradient"})
_OF_SHAPES = frozenset("BroadcastGradientArgs OnesLike Rank Shape ShapeN Size ZerosLike".split())
"""Types that read no data: Grappler takes what they compute from the shapes that it knows."""


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

    def read_copies(self) -> bool:
        """Let nodes that look at a tensor between combined operators read it from a copy.

        Returns:
            Whether TensorFlow may round otherwise all the same: what is combined waits for a node,
            or a node for it, or a node looks at a term of a sum that is too costly to be copied.
        """
        self._added.update(self.nodes)
        is_apart = self._keep_apart()
        for node in self.nodes.values():
            for index, read in enumerate(node.inputs):
                tensor = _source(read)
                if self._is_between(tensor.op):
                    self._copy(tensor.op)
                elif tensor.op.type not in _CHEAP | _HELD and is_differentiable(tensor):
                    is_apart |= self._is_term(tensor.op)
                if (seen := self._seen(tensor)) is not read:
                    _internals.update_input(node, index, seen)
        return is_apart

    def _keep_apart(self) -> bool:
        """True if an operator that may be combined waits for a node, or a node for it."""
        waited = [before for node in self.nodes.values() for before in node.control_inputs]
        for op in filter(_may_be_combined, self.graph.get_operations()):
            if any(_may_be_combined(tensor.op) for tensor in op.inputs):
                waited += [op for before in op.control_inputs if before.name in self.nodes]
        return any(map(_may_be_combined, waited))

    def _readers(self, op: Any) -> Iterator[tuple[str, Any]]:
        """The operators that read the outputs of one in the vanilla graph, each with its type."""
        waiting = [*op.outputs]
        while waiting:
            tensor = waiting.pop()
            if any(tensor is output for output in self.graph.outputs):
                yield "_Retval", None
            for reader in tensor.consumers():
                if reader.type in _OF_SHAPES or reader.name in self._added:
                    continue
                if reader.type in _RESHAPING:
                    waiting += reader.outputs
                elif _passes(reader):
                    at = zip(reader.inputs, reader.outputs, strict=True)
                    waiting += [new for old, new in at if old is tensor]
                else:
                    # What looks at a term of a sum of three holds it, as all others are held: the
                    # sum waits for it, and is not combined.
                    yield "" if is_sum(reader) else reader.type, reader

    def _above(self, op: Any) -> list[Any]:
        """The operators that Grappler may compute together with one that reads them."""
        return [t.op for t in map(_source, op.inputs) if self._is_between(t.op)]

    def _is_between(self, op: Any) -> bool:
        """True if Grappler may compute an operator together with all that read it, or add it to
        more than one other."""
        if op.name not in self._known:
            self._known[op.name] = self._find_between(op)
        return self._known[op.name]

    def _find_between(self, op: Any) -> bool:
        if op.type in _OF_SHAPES:
            return bool(self._above(op))
        kinds = {kind for kind, _ in self._readers(op)}
        if _may_be_combined(op) and kinds and kinds <= _COMBINED:
            return True
        is_cheap = op.type in _CHEAP | _COMBINED | _RESHAPING and is_differentiable(op.outputs[0])
        return is_cheap and self._is_term(op)

    def _is_term(self, op: Any) -> bool:
        """True if an operator may be one of more than two terms of a sum.

        Grappler makes one operator of them, and the runtime adds them in an order that depends on
        which of them nobody holds any more (2.16 to 2.21).
        """
        return any(kind in _SUMS and self._is_chained(end) for kind, end in self._readers(op))

    def _is_chained(self, op: Any) -> bool:
        """True if only another sum reads a sum, or if it alone reads another one."""
        ends = [op, *(t.op for t in map(_source, op.inputs) if t.op.type in _SUMS)]
        read = [[kind for kind, _ in self._readers(end)] for end in ends]
        return any(len(kinds) == 1 and kinds[0] in _SUMS for kinds in read)

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


def _may_be_combined(op: Any) -> bool:
    """True if Grappler may compute an operator together with others."""
    return op.type in _COMBINED | _RESHAPING and is_differentiable(op.outputs[0])


def _passes(op: Any) -> bool:
    """True if an operator passes its inputs on, and Grappler leaves it out."""
    return op.type in _PASSING and not op.control_inputs


def _source(tensor: Any) -> Any:
    """The tensor that identities pass on."""
    while _passes(tensor.op):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
