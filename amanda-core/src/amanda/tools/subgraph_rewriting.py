"""Subgraph rewriting: a connected pattern of operators, and what takes its place.

A pattern is a tree of :class:`Op`, its root the last operator; strings name the
tensors that come in from outside::

    pattern = Op("relu", Op("add", "x", "y", any_order=True))

    def fused(x, y):
        return add_relu(x, y)

    with amanda.apply(SubgraphRewritingTool(pattern, fused)):
        model(x)  # the first iteration is traced
        model(x)  # from the second on it is rewritten
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from amanda.errors import AmandaError, CapabilityError
from amanda.interface.context import OpContext
from amanda.interface.tool import Tool, traceable
from amanda.tools.graph import Graph, TracedOp, TracedTensor
from amanda.tools.graph_tracing import GraphTracingTool
from amanda.tools.mapping import MappingTool
from amanda.tools.subgraph_patterns import Binding, Op, Place, bindings, chain

__all__ = ["Match", "Op", "SubgraphRewritingTool"]


@attrs.define(eq=False)
class Match:
    """Operators that a pattern has been found to be.

    Attributes:
        ops: name in the pattern to operator; a name that two of them have is left out.
        root: the last operator, which gives the result.
        inputs: name of a tensor from outside to where it comes in.
        ids: of all operators, in the order in which they were traced.
        outside: numbers of the tensors from outside in the graph.
        pattern: parts of the pattern to operators.
        is_symbolic: whether it is in a graph, into which the replacement is traced.
        functions, values: of the iteration that is running.
    """

    ops: dict[str, TracedOp]
    root: TracedOp
    inputs: dict[str, Place]
    ids: list[str]
    outside: frozenset[int]
    pattern: Mapping[Op, TracedOp]
    is_symbolic: bool = False
    functions: dict[str, Callable[..., Any]] = attrs.field(factory=dict, repr=False)
    values: dict[Place, Any] = attrs.field(factory=dict, repr=False)

    @property
    def interior_ids(self) -> list[str]:
        """The ids without that of the root."""
        return [op_id for op_id in self.ids if op_id != self.root.id]

    def attributes(self, name: str) -> Mapping[str, Any]:
        """The non-tensor arguments of an operator, as they were when it was traced."""
        return self.ops[name].attributes

    def run(self, name: str, *inputs: Any) -> Any:
        """Run one of the operators, with the attributes that it has, on these inputs.

        Inputs that are left out at the end are None.
        """
        op = self.ops[name]
        missing = len(op.inputs) - len(inputs)
        return self.functions[op.id](*inputs, *[None] * missing)

    def keep(self, op_id: str, inputs: Sequence[Any]) -> None:
        """Keep the tensors from outside that an operator reads until the root runs."""
        for place in self.inputs.values():
            if place.op == op_id:
                self.values[place] = inputs[place.input]


class SubgraphRewritingTool(Tool):
    """Replaces what a pattern matches, or removes it.

    The first iteration is traced and runs as it is; from the second on, the
    operators before the root do not run, and `replacement` gives the root's
    output. Of matches that share an operator the first one holds. What the
    operators before the root produce must be read inside of the match only:
    another operator that reads it prevents the match; it holds NaN where the
    framework's tensors can be made so (``new_full``), and else they do run.

    In eager modes, a root that reads another tensor than the one that it was matched
    with runs as it is, that time. In the graphs of TensorFlow iterations are runs of the
    graph, and the replacement is traced into it: it has to be a function of tensors.

    Args:
        pattern: the root of the pattern, or a list of types: each reads the
            first output of the one before.
        replacement: called with the tensors from outside by their names, and with
            the keyword ``match`` if it has such an argument; returns the root's output, or
            a list of them (of several, the first one will do). It takes part in AD. None
            removes the operators: the result is the tensor of the first name in the pattern
            (of a list of types, the first input of the first operator).

    Attributes:
        matches: those that are rewritten.
        rejected: ids and reason of those that are not.

    Raises:
        TypeError: the pattern or the replacement is something else.
        CapabilityError: (when it is met) there is a match in a graph mode of PyTorch.
    """

    def __init__(
        self, pattern: Op | Sequence[str], replacement: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        if replacement is not None and not callable(replacement):
            raise TypeError(f"a replacement is a function or None, got {replacement!r}")
        self.pattern = chain(pattern)
        self._replacement = replacement or _first
        self._wants_match = replacement is not None and _has_argument(replacement, "match")
        self.matches: list[Match] = []
        self.rejected: list[tuple[list[str], str]] = []
        self._candidates: dict[str, Match] = {}
        self._active: dict[str, Match] = {}
        self._outputs: dict[str, tuple[Any, list[Any]]] = {}
        self._in_place: dict[str, frozenset[int]] = {}
        self.depends_on(MappingTool.standard(), GraphTracingTool())
        self.add_inst_for_op(self._rewrite)
        self.add_inst_for_op(self._find, require_outputs=True)

    # -- the first iteration -------------------------------------------------

    def _find(self, context: OpContext) -> None:
        """Analysis after an operator: is it the root of a match?"""
        op_id = context.get_op_id()
        graph: Graph = context["graph"]
        if op_id in self._outputs or op_id not in graph:
            return
        outputs = [_about(tensor) for tensor in context.get_outputs() or ()]
        self._outputs[op_id] = _shapes(context.get_inputs()), outputs
        self._in_place[op_id] = _written(context)
        found = next(bindings(self.pattern, graph.op(op_id), graph, Binding()), None)
        if found is None:
            return
        is_eager = context.namespace.tags[-1] == "eager"
        if not is_eager and not any(map(context.namespace.matches, _GRAPHS)):
            raise CapabilityError(
                f"SubgraphRewritingTool: op {op_id} is the root of a match in "
                f"{context.namespace}, where subgraphs are not rewritten: run the model eagerly"
            )
        match = self._match(found, graph)
        match.is_symbolic = not is_eager
        if taken := [name for name in match.ids if name in self._candidates]:
            self._reject(match, f"op {taken[0]} is part of another match")
            return
        self._candidates.update(dict.fromkeys(match.ids, match))
        context.insert_after_op(self._close, outputs=[], match=match, done=[])

    def _match(self, found: Binding, graph: Graph) -> Match:
        order = {op.id: place for place, op in enumerate(graph.ops)}
        ops = sorted(found.ops.values(), key=lambda op: order[op.id])
        outside = frozenset(t.index for t in found.tensors.values() if t is not None)
        names = collections.Counter(node.name for node in found.ops)
        named = {node.name: op for node, op in found.ops.items() if names[node.name] == 1}
        root = found.ops[self.pattern]
        ids = [op.id for op in ops]
        return Match(named, root, dict(found.places), ids, outside, found.ops)

    @traceable
    def _close(self, match: Match, done: list[bool]) -> None:
        """Routine after a root: what was traced is analysed again when it is next met.

        In a graph it is called while the graph is instrumented, and nothing is inserted.
        """
        if not done:
            done.append(True)
            for op_id in match.ids:
                self.reanalyse(op_id)

    # -- from the second on ------------------------------------------------------

    def _rewrite(self, context: OpContext) -> None:
        """Analysis before an operator: is it a part of a match?"""
        op_id = context.get_op_id()
        candidate = self._candidates.get(op_id)
        if candidate is not None and op_id not in self._active:
            self._decide(candidate, context["graph"])
        match = self._active.get(op_id)
        if match is None:
            self._check_inputs(context)
            return
        match.functions[op_id] = context.get_function()
        if match.is_symbolic and op_id == match.root.id:
            context.replace_op(self._replaced_in_graph, match=match)
        elif op_id == match.root.id:
            context.replace_op(self._replaced, match=match, graph=context["graph"])
        else:
            context.replace_op(self._skipped, match=match, op_id=op_id)

    def _decide(self, match: Match, graph: Graph) -> None:
        """Rewrite a candidate, now that all readers of its tensors are known, or do not."""
        reason = self._objection(match, graph)
        for op_id in match.ids:
            if reason:
                del self._candidates[op_id]
            else:
                self._active[op_id] = match
        if reason:
            self._reject(match, reason)
        else:
            self.matches.append(match)

    def _objection(self, match: Match, graph: Graph) -> str:
        """Why a candidate cannot be rewritten; "" if it can."""
        ids = set(match.ids)
        for node, op in match.pattern.items():
            if not node.accepts(op, graph):
                return f"the predicate of op {op.id} does not hold in the whole graph"
        for op in map(graph.op, match.interior_ids):
            for reader in graph.consumers(op.id):
                if reader.id not in ids and reader.name not in _STACKS:
                    return f"op {reader.id} reads the output of op {op.id}, too"
            if any(t is not None and t.index in match.outside for t in self._written_by(op)):
                return f"op {op.id} changes a tensor from outside in place"
        order = [op.id for op in graph.ops]
        between = order[order.index(match.ids[0]) : order.index(match.root.id)]
        for op_id in between:
            written = self._written_by(graph.op(op_id))
            if op_id not in ids and any(
                t is not None and t.index in match.outside for t in written
            ):
                return f"op {op_id} changes a tensor in place that the match reads"
        return ""

    def _written_by(self, op: TracedOp) -> list[TracedTensor | None]:
        return [op.inputs[position] for position in self._in_place.get(op.id, ())]

    def _reject(self, match: Match, reason: str) -> None:
        self.rejected.append((match.ids, reason))

    def _check_inputs(self, context: OpContext) -> None:
        """See that an operator that was not there before does not read what is gone.

        Raises:
            AmandaError: it does.
        """
        graph: Graph = context["graph"]
        for tensor in context.get_inputs():
            known = None if tensor is None else graph.tensor_of(tensor)
            match = self._active.get(known.producer) if known is not None else None
            if match is not None and match.is_symbolic:
                continue  # in a graph it runs for those that read it
            if match is not None and known is not None and known.producer != match.root.id:
                raise AmandaError(
                    f"SubgraphRewritingTool: op {context.get_op_id()} reads the output of op "
                    f"{known.producer}, which op {match.root.id} was rewritten without; exclude "
                    "it with a predicate (where=) in the pattern"
                )

    # -- instead of the operators --------------------------------------------------

    @traceable
    def _replaced_in_graph(self, *inputs: Any, match: Match) -> Any:
        """Routine in the place of the root, traced into the graph that is instrumented."""
        match.keep(match.root.id, inputs)
        values, match.values = match.values, {}
        return self._call(match, inputs, values)

    @traceable
    def _skipped(self, *inputs: Any, match: Match, op_id: str) -> Any:
        """Routine in the place of an operator before the root: its inputs are kept for it."""
        match.keep(op_id, inputs)
        traced, about = self._outputs[op_id]
        source = next((t for t in inputs if hasattr(t, "new_full")), None)
        if source is None or _shapes(inputs) != traced:
            return match.functions[op_id](*inputs)
        made = [None if one is None else _stand_in(source, *one) for one in about]
        return made[0] if len(made) == 1 else made

    def _replaced(self, *inputs: Any, match: Match, graph: Graph) -> Any:
        """Routine in the place of the root."""
        root = match.root
        match.keep(root.id, inputs)
        values, match.values = match.values, {}
        for tensor, given in zip(root.inputs, inputs, strict=True):
            producer = "" if tensor is None else tensor.producer
            known = graph.tensor_of(given)
            if producer in match.interior_ids and (known is None or known.producer != producer):
                # This time the program reads something else there.
                return match.functions[root.id](*inputs)
        return self._call(match, inputs, values)

    def _call(self, match: Match, inputs: Sequence[Any], values: Mapping[Place, Any]) -> Any:
        further = {"match": match} if self._wants_match else {}
        tensors = {name: values[place] for name, place in match.inputs.items()}
        result = self._replacement(**tensors, **further)
        if len(match.root.outputs) < 2 or isinstance(result, (list, tuple)):
            return result
        # Of an operator with several outputs the replacement has given the first one.
        return [result, *match.functions[match.root.id](*inputs)[1:]]


_GRAPHS = ("tensorflow/*/function", "tensorflow/*/graph")
"""The graph modes whose gradients reach all that a replacement uses."""

_STACKS = frozenset({"TensorListPushBack", "StackPushV2"})
"""What keeps values in a loop for its gradient, which is derived anew from the replacement."""

# -- tensors ---------------------------------------------------------------------


def _shapes(tensors: Sequence[Any]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(
        None if t is None or not hasattr(t, "new_full") else tuple(t.shape) for t in tensors
    )


def _about(tensor: Any) -> tuple[tuple[int, ...], Any] | None:
    """What a stand-in for a tensor needs; None where there is none."""
    return (tuple(tensor.shape), tensor.dtype) if hasattr(tensor, "new_full") else None


def _stand_in(source: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor that is seen if it is read: NaN where its type has that."""
    is_real = "float" in str(dtype) or "complex" in str(dtype)
    return source.new_full(shape, float("nan") if is_real else 0, dtype=dtype)


def _written(context: OpContext) -> frozenset[int]:
    """The inputs that an operator has given back as its outputs."""
    outputs = context.get_outputs() or ()
    inputs = context.get_inputs()
    return frozenset(
        position
        for position, tensor in enumerate(inputs)
        if tensor is not None and any(tensor is output for output in outputs)
    )


def _first(**tensors: Any) -> Any:
    """The replacement that removes: the first tensor from outside."""
    return next(iter(tensors.values()))


def _has_argument(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
