"""Subgraph rewriting: replaces a connected pattern of operators, or removes it.

A pattern is a tree of :class:`Op` whose root is the last operator; strings name its input tensors::

    pattern = Op("relu", Op("add", "x", "y", any_order=True))

    def fused(x, y):
        return add_relu(x, y)

    with amanda.apply(SubgraphRewritingTool(pattern, fused)):
        model(x)  # the first iteration is traced
        model(x)  # the second one, and all others, are rewritten
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from amanda.errors import AmandaError
from amanda.interface.context import OpContext
from amanda.interface.tool import Tool, traceable
from amanda.python.signatures import signature_of
from amanda.tools.graph import Graph, TracedOp
from amanda.tools.graph_tracing import GraphTracingTool
from amanda.tools.mapping import MappingTool
from amanda.tools.subgraph_patterns import InputSlot, Op, PartialMatch, bindings, chain

__all__ = ["Match", "Op", "SubgraphRewritingTool"]

_STACKS = frozenset({"TensorListPushBack", "StackPushV2"})
"""Operators that save values in a loop for its gradient. They do not count as readers, because the
gradient is derived again from the replacement."""

_BACKWARD = re.compile(r"_backward$|Backward\d*$|Backprop|Grad(V\d+)?$|^accumulate_grad$")
"""Canonical types of backward operators, and their names in PyTorch and TensorFlow."""


@attrs.define(eq=False)
class Match:
    """A match of a pattern in the traced graph.

    Attributes:
        ops: operators by their name in the pattern; a name that two of them have is left out.
        root: the last operator, whose output is that of the match.
        inputs: for each name of an input tensor the place where the match reads it.
        ids: ids of all operators, in the order in which they were traced.
        outside: numbers of the input tensors in the graph.
        pattern: operators of the pattern to operators of the graph.
        is_symbolic: True if it is in a graph mode, where the replacement is traced into the graph.
        functions: functions that run the operators, by id; of the current iteration.
        values: input tensors that have been read, by place; of the current iteration.
    """

    ops: dict[str, TracedOp]
    root: TracedOp
    inputs: dict[str, InputSlot]
    ids: list[str]
    outside: frozenset[int]
    pattern: Mapping[Op, TracedOp]
    is_symbolic: bool = False
    functions: dict[str, Callable[..., Any]] = attrs.field(factory=dict, repr=False)
    values: dict[InputSlot, Any] = attrs.field(factory=dict, repr=False)

    @property
    def interior_ids(self) -> list[str]:
        """The ids of all operators but the root."""
        return [op_id for op_id in self.ids if op_id != self.root.id]

    def attributes(self, name: str) -> Mapping[str, Any]:
        """The non-tensor arguments of an operator when it was traced.

        Args:
            name: its name in the pattern.
        """
        return self.ops[name].attributes

    def run(self, name: str, *inputs: Any) -> Any:
        """Run one of the operators on other inputs, with its current attributes.

        Args:
            name: its name in the pattern.
            inputs: its input tensors; tensors that are left out at the end are None.
        """
        op = self.ops[name]
        missing = len(op.inputs) - len(inputs)
        return self.functions[op.id](*inputs, *[None] * missing)

    def keep(self, op_id: str, inputs: Sequence[Any]) -> None:
        """Keep the input tensors of the match that an operator reads, until the root runs."""
        for place in self.inputs.values():
            if place.op == op_id:
                self.values[place] = inputs[place.input]


class SubgraphRewritingTool(Tool):
    """Replaces or removes the operators that match a pattern.

    The first iteration is traced and not changed. From the second one on, the operators before the
    root of a match do not run, and the output of `replacement` is that of the root. If two matches
    share an operator, the first one is rewritten. The outputs of the operators before the root may
    be read inside of the match only: another operator that reads one prevents the rewriting. They
    are tensors of NaN if the framework's tensors have ``new_full``; otherwise these operators run.

    Where operators run at once, a root that reads another tensor than in the traced iteration runs
    as it is. In graphs that are built ahead an iteration is a run of the graph, and the replacement
    is traced into it: it has to be a function of tensors.

    Args:
        pattern: the root of the pattern; or a list of types, each of which reads the first output
            of the one before.
        replacement: called with the input tensors by their names, and with the keyword ``match`` if
            it has an argument of that name; returns the root's output, or a list of its outputs
            (for a root with several outputs the first one is enough). It takes part in AD. None
            removes the operators: the output is the tensor of the first name in the pattern, and
            for a list of types the first input of the first operator.

    Attributes:
        matches: the matches that are rewritten.
        rejected: the ids of each match that is not rewritten, and the reason.

    Raises:
        TypeError: the pattern or the replacement is something else.
        ValueError: the pattern names a backward operator: it would never match.
    """

    def __init__(
        self, pattern: Op | Sequence[str], replacement: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        if replacement is not None and not callable(replacement):
            raise TypeError(f"a replacement is a function or None, got {replacement!r}")
        self.pattern = chain(pattern)
        if backward := [kind for kind in self.pattern.all_types() if _BACKWARD.search(kind)]:
            raise ValueError(
                f"a pattern is of forward operators, and {', '.join(backward)} is a backward one: "
                "replace a gradient by context.replace_backward_op()"
            )
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
        """Analysis after an operator, in the first iteration: finds a match whose root it is."""
        op_id = context.get_op_id()
        graph: Graph = context["graph"]
        if op_id in self._outputs or op_id not in graph:
            return
        outputs = [_shape_and_dtype(tensor) for tensor in context.get_outputs() or ()]
        self._outputs[op_id] = _shapes(context.get_inputs()), outputs
        self._in_place[op_id] = _written(context)
        found = next(bindings(self.pattern, graph.op(op_id), graph, PartialMatch()), None)
        if found is None:
            return
        match = self._match(found, graph)
        match.is_symbolic = not context.runs_at_once
        # The first match in the order of execution has the operator.
        if taken := [name for name in match.ids if name in self._candidates]:
            self._reject(match, f"op {taken[0]} is part of another match")
            return
        self._candidates.update(dict.fromkeys(match.ids, match))
        context.insert_after_op(self._close, outputs=[], match=match, done=[])

    def _match(self, found: PartialMatch, graph: Graph) -> Match:
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
        """Routine after a root: lets the match be analysed again in the next iteration.

        It is traceable: graph drivers call it while they instrument a graph, and insert nothing.
        """
        # `done` belongs to the match: at each later execution there is nothing to analyse again.
        if not done:
            done.append(True)
            for op_id in match.ids:
                self.reanalyse(op_id)

    # -- from the second on ------------------------------------------------------

    def _rewrite(self, context: OpContext) -> None:
        """Analysis before an operator, from the second iteration on: replaces the operators of a
        match."""
        op_id = context.get_op_id()
        candidate = self._candidates.get(op_id)
        if candidate is not None and op_id not in self._active:
            self._decide(candidate, context["graph"])
        match = self._active.get(op_id)
        if match is None:
            self._check_inputs(context)
            return
        match.functions[op_id] = context.get_function()
        # A model may be traced in one mode and run in another one, with the same operators.
        is_symbolic = match.is_symbolic or not context.runs_at_once
        if is_symbolic and op_id == match.root.id:
            context.replace_op(self._replaced_in_graph, match=match)
        elif op_id == match.root.id:
            context.replace_op(self._replaced, match=match, graph=context["graph"])
        else:
            context.replace_op(self._skipped, match=match, op_id=op_id)

    def _decide(self, match: Match, graph: Graph) -> None:
        """Accept or reject a candidate, now that all operators that read its tensors are known."""
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
        """The reason why a candidate cannot be rewritten; "" if it can."""
        ids = set(match.ids)
        for node, op in match.pattern.items():
            if not node.accepts(op, graph):
                return f"the predicate of op {op.id} does not hold in the whole graph"
        for op in map(graph.op, match.interior_ids):
            for reader in graph.consumers(op.id):
                if reader.id not in ids and reader.name not in _STACKS:
                    return f"op {reader.id} reads the output of op {op.id}, too"
            if self._writes_from_outside(op, match):
                return f"op {op.id} changes a tensor from outside in place"
        order = [op.id for op in graph.ops]
        for op_id in order[order.index(match.ids[0]) : order.index(match.root.id)]:
            if op_id not in ids and self._writes_from_outside(graph.op(op_id), match):
                return f"op {op_id} changes a tensor in place that the match reads"
        return ""

    def _writes_from_outside(self, op: TracedOp, match: Match) -> bool:
        """True if an operator changes in place what a match reads from outside."""
        written = [op.inputs[position] for position in self._in_place.get(op.id, ())]
        return any(tensor is not None and tensor.index in match.outside for tensor in written)

    def _reject(self, match: Match, reason: str) -> None:
        self.rejected.append((match.ids, reason))

    def _check_inputs(self, context: OpContext) -> None:
        """Check that an operator that is new in this iteration reads no output inside of a match.

        Raises:
            AmandaError: it reads the output of an operator that does not run any more.
        """
        graph: Graph = context["graph"]
        for tensor in context.get_inputs():
            known = None if tensor is None else graph.tensor_of(tensor)
            match = self._active.get(known.producer) if known is not None else None
            if match is not None and (match.is_symbolic or not context.runs_at_once):
                continue  # In a graph the operator still runs for the operators that read it.
            if match is not None and known is not None and known.producer != match.root.id:
                raise AmandaError(
                    f"SubgraphRewritingTool: op {context.get_op_id()} reads the output of op "
                    f"{known.producer}, which op {match.root.id} was rewritten without; exclude "
                    "it with a predicate (where=) in the pattern"
                )

    # -- replacements of the operators --------------------------------------------------

    @traceable
    def _replaced_in_graph(self, *inputs: Any, match: Match) -> Any:
        """Replacement of the root in a graph mode; it is traced into the graph."""
        match.keep(match.root.id, inputs)
        values, match.values = match.values, {}
        return self._call(match, inputs, values)

    @traceable
    def _skipped(self, *inputs: Any, match: Match, op_id: str) -> Any:
        """Replacement of an operator before the root: keeps its inputs, and returns NaN."""
        match.keep(op_id, inputs)
        traced, about = self._outputs[op_id]
        source = next((t for t in inputs if hasattr(t, "new_full")), None)
        if source is None or _shapes(inputs) != traced:
            return match.functions[op_id](*inputs)
        made = [None if one is None else _stand_in(source, *one) for one in about]
        return made[0] if len(made) == 1 else made

    def _replaced(self, *inputs: Any, match: Match, graph: Graph) -> Any:
        """Replacement of the root in eager modes."""
        root = match.root
        match.keep(root.id, inputs)
        values, match.values = match.values, {}
        for tensor, given in zip(root.inputs, inputs, strict=True):
            producer = "" if tensor is None else tensor.producer
            known = graph.tensor_of(given)
            if producer in match.interior_ids and (known is None or known.producer != producer):
                # In this iteration the program reads another tensor there.
                return match.functions[root.id](*inputs)
        return self._call(match, inputs, values)

    def _call(self, match: Match, inputs: Sequence[Any], values: Mapping[InputSlot, Any]) -> Any:
        further = {"match": match} if self._wants_match else {}
        tensors = {name: values[place] for name, place in match.inputs.items()}
        result = self._replacement(**tensors, **further)
        if len(match.root.outputs) < 2 or isinstance(result, (list, tuple)):
            return result
        # The replacement has returned the first output of several.
        return [result, *match.functions[match.root.id](*inputs)[1:]]


# -- tensors ---------------------------------------------------------------------


def _shapes(tensors: Sequence[Any]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(
        None if t is None or not hasattr(t, "new_full") else tuple(t.shape) for t in tensors
    )


def _shape_and_dtype(tensor: Any) -> tuple[tuple[int, ...], Any] | None:
    """Shape and dtype for a stand-in of a tensor; None if the framework has no ``new_full``."""
    return (tuple(tensor.shape), tensor.dtype) if hasattr(tensor, "new_full") else None


def _stand_in(source: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor whose use is noticed: NaN, or 0 if its dtype has no NaN."""
    is_real = "float" in str(dtype) or "complex" in str(dtype)
    return source.new_full(shape, float("nan") if is_real else 0, dtype=dtype)


def _written(context: OpContext) -> frozenset[int]:
    """Positions of the inputs that an operator has returned as outputs: it works in place."""
    outputs = context.get_outputs() or ()
    inputs = context.get_inputs()
    return frozenset(
        position
        for position, tensor in enumerate(inputs)
        if tensor is not None and any(tensor is output for output in outputs)
    )


def _first(**tensors: Any) -> Any:
    """The replacement that removes a match: returns its first input tensor."""
    return next(iter(tensors.values()))


def _has_argument(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in signature_of(function).parameters
    except (TypeError, ValueError):
        return False
