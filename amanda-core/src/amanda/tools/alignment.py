"""The nodes of an exported program that the operators of a model have become.

::

    program = torch.export.export(model, (x,))
    found = amanda.align(model, (x,), program)
    found["Net.fc/linear:0"].nodes  # ('linear',)

A driver reads the program (:meth:`amanda.Driver.exported_nodes`). Within a module both keep their
order: the longest common sequence of operators and nodes of one type and the same shapes is paired.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from amanda.errors import UnsupportedProgramError, described
from amanda.interface.context import OpContext
from amanda.interface.driver import Driver, ExportedNode
from amanda.interface.tool import Tool
from amanda.scope.apply import apply
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool


@attrs.frozen
class AlignedOp:
    """An operator, and what an exporter has made of it.

    Attributes:
        op: the operator.
        weight: name of the parameter that a mapping rule calls its weight; "" without one.
        nodes: names of its nodes in the program; the last one computes its outputs.
        reason: why there are none; "" if there are.
        is_dropped: there are none, as it returns the elements that it gets, or the exporter has
            computed it beforehand.
    """

    op: OpDescription
    weight: str = ""
    nodes: tuple[str, ...] = ()
    reason: str = ""
    is_dropped: bool = False


class _Recorder(Tool):
    """Lists the operators of a run, and the drivers of its scope."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, AlignedOp] = {}
        self.drivers: Sequence[Driver] = ()
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._note, require_outputs=True)

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        self.drivers = drivers

    def _note(self, context: OpContext) -> None:
        op, weight = describe(context), context["weight_index"]
        name = None if weight is None else context.get_parameter_name(weight)
        self.ops[op.id] = AlignedOp(op, name or "")


def run_example(model: Any, example_inputs: Any) -> Any:
    """Call a model with example inputs: a tuple or list of arguments, a dictionary of keyword
    arguments, or the only argument."""
    if isinstance(example_inputs, Mapping):
        return model(**example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return model(*example_inputs)
    return model(example_inputs)


def align(model: Any, example_inputs: Any, target: Any) -> dict[str, AlignedOp]:
    """Find the nodes of an exported program for every operator of a model.

    Args:
        model: the model that was exported, in the same mode, with gradients or without; it runs
            once. In ``torch.no_grad()`` PyTorch's fast path joins operators of attention:
            ``torch.backends.mha.set_fastpath_enabled(False)`` for those of a tool that changes
            values.
        example_inputs: a tuple of its arguments, a dictionary of keyword arguments, or a tensor.
        target: the program, or a path: in PyTorch of ``torch.export`` (``.pt2``) or of
            ``torch.onnx`` (``.onnx``, ``dynamo=True``); for a model of Keras another one
            (``.keras``), a SavedModel (a folder), or LiteRT (``.tflite``).

    Returns:
        The operators by id, in the order in which they ran.

    Raises:
        UnsupportedProgramError: no driver can read `target`, or no operator has run.
    """
    recorder = _Recorder()
    with apply(recorder):
        run_example(model, example_inputs)
    if not recorder.ops:
        raise UnsupportedProgramError("align: no operator of the model has been seen")
    modules = {found.op.module for found in recorder.ops.values()}
    for driver in recorder.drivers:
        nodes = driver.exported_nodes(target, modules)
        if nodes is not None:
            return _aligned(recorder.ops, nodes, driver.dropped_types)
    raise UnsupportedProgramError(
        f"align: {described(target)} is no exported program that a driver can read"
    )


def _aligned(
    ops: Mapping[str, AlignedOp], nodes: Sequence[ExportedNode], dropped: frozenset[str]
) -> dict[str, AlignedOp]:
    ours = defaultdict[str, list[AlignedOp]](list)
    theirs = defaultdict[str | None, list[ExportedNode]](list)
    readers = defaultdict[str, list[ExportedNode]](list)
    for found in ops.values():
        ours[_module_of(found)].append(found)
    for node in nodes:
        theirs[node.module].append(node)
        for name in node.parameters:
            readers[name].append(node)
    pairs: dict[str, ExportedNode] = {}
    for module, own in ours.items():
        pairs |= _paired(own, _unrolled(theirs[module], own))
    rewritten = frozenset[str]().union(*(node.types for node in theirs[None]))
    result = {}
    for op_id, found in ops.items():
        kind, module = found.op.type, _module_of(found)
        reading = readers[found.weight] if found.weight else []
        if op_id in pairs or len(reading) == 1:
            node = pairs.get(op_id) or reading[0]
            result[op_id] = attrs.evolve(found, nodes=node.parts)
            continue
        is_dropped, reason = True, "the exporter has left it out: it returns the elements it gets"
        if kind in rewritten:
            reason = "the exporter has computed it beforehand, or as a node that names no operator"
        elif kind not in dropped or not _keeps_size(found):
            is_known = any(kind in node.types for node in theirs[module])
            what = f"{kind} of these shapes" if is_known else kind
            is_dropped, reason = False, f"the program has no other {what} in {found.op.place}"
        result[op_id] = attrs.evolve(found, reason=reason, is_dropped=is_dropped)
    return result


def _keeps_size(found: AlignedOp) -> bool:
    """True if the first output has as many elements as the first input, unknown sizes as 1."""
    tensors = found.op.tensors
    first = (next(iter(specs or ()), None) for specs in (tensors.inputs, tensors.outputs))
    shapes = (getattr(spec, "shape", None) or () for spec in first)
    return len({math.prod(size or 1 for size in shape) for shape in shapes}) == 1


def _unrolled(nodes: Sequence[ExportedNode], ops: Sequence[AlignedOp]) -> Sequence[ExportedNode]:
    """Repeat the nodes of a loop, until there are as many of each type as operators."""
    looped = [node for node in nodes if node.is_repeated]
    if not looped:
        return nodes
    given, held = Counter(one.op.type for one in ops), Counter(t for n in looped for t in n.types)
    times = max((-(-count // held[kind]) for kind, count in given.items() if held[kind]), default=1)
    first = nodes.index(looped[0])
    after = [node for node in nodes[first:] if not node.is_repeated]
    return [*nodes[:first], *looped * times, *after]


def _module_of(found: AlignedOp) -> str:
    """Return the path of the module of the model that runs an operator: a module that is no part
    of it, as one that is made in each call, has a path with "@"."""
    known, at, _ = found.op.module.partition("@")
    return known.rpartition(".")[0] if at else known


def _is_pair(found: AlignedOp, node: ExportedNode) -> bool:
    shapes = [spec.shape or () for spec in found.op.tensors.outputs or () if spec is not None]
    given = node.shapes
    return found.op.type in node.types and (
        given is None or (len(given) >= len(shapes) and all(map(_is_alike, given, shapes)))
    )


def _is_alike(shape: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """True if a shape, in which sizes may be unknown, can be the other one."""
    known = zip(shape, other, strict=False)
    return len(shape) == len(other) and all(size in (None, own) for size, own in known)


def _paired(ops: Sequence[AlignedOp], nodes: Sequence[ExportedNode]) -> dict[str, ExportedNode]:
    """Return a longest common sequence, by op id; of equal ones that with the first nodes."""
    pairs: dict[str, ExportedNode] = {}
    # What both begin with is a part of a longest sequence.
    for found, node in zip(ops, nodes, strict=False):
        if not _is_pair(found, node):
            break
        pairs[found.op.id] = node
    ops, nodes = ops[len(pairs) :], nodes[len(pairs) :]
    # Entry (i, j) is the length for the operators and nodes from there on.
    lengths = [[0] * (len(nodes) + 1) for _ in range(len(ops) + 1)]
    for i in reversed(range(len(ops))):
        for j in reversed(range(len(nodes))):
            skipped = max(lengths[i + 1][j], lengths[i][j + 1])
            is_pair = _is_pair(ops[i], nodes[j])
            lengths[i][j] = max(skipped, lengths[i + 1][j + 1] + 1) if is_pair else skipped
    i = j = 0
    while i < len(ops) and j < len(nodes):
        if _is_pair(ops[i], nodes[j]) and lengths[i][j] == lengths[i + 1][j + 1] + 1:
            pairs[ops[i].op.id] = nodes[j]
            i, j = i + 1, j + 1
        elif lengths[i][j] == lengths[i][j + 1]:
            j += 1
        else:
            i += 1
    return pairs
