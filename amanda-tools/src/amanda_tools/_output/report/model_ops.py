"""The operators of a run, put together from the results of all of its tools.

::

    ops = merge_ops(report.tools)
    ops["ResNet.conv1/conv2d:0"].values["flops"]

An operator has one entry with the figures of all tools: ``trace`` gives its edges and source line,
``flops`` its cost, ``profile`` its time, ``sparsity`` its zeros. Rows of third-party tools are read
by the same keys.
"""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from amanda.python.text import printable
from amanda.results import ToolReport
from amanda_tools._operators.model_phases import MODEL
from amanda_tools._output.units import whole_text
from amanda_tools._values.shapes import HANDLES

_OF_TENSORS = frozenset({"zeros", "elements"})
"""Keys of the rows of single tensors that make figures of operators."""

_CALL = re.compile(r"#\d+")
"""The number of a repeated call, in the path of an id: ``Net.fc#1/linear:0``."""

_LONGEST = 300
"""Characters of an operator's attributes that a page holds."""

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_DTYPE = re.compile(r"(?:\w+\.)?(float|bfloat|uint|int|complex)(\d+)")


@attrs.frozen
class Figure:
    """A figure that operators have and modules sum up.

    Attributes:
        key: name in the values of an operator.
        name: heading.
        unit: unit, drawn with prefixes.
        over: key of the figure that it is a share of; "" for a sum.
        per_step: True if rows hold sums over the whole run, and their ``per_step`` the sum of one
            step.
        tool: name of the tool that it is from.
    """

    key: str
    name: str
    unit: str = ""
    over: str = ""
    per_step: bool = False
    tool: str = ""


FIGURES = (
    Figure("parts_before", "in later parts", "%", over="parts_but_one"),
    Figure("flops", "FLOPs", "FLOP", per_step=True),
    Figure("seconds", "time", "s", per_step=True),
    Figure("params", "parameters"),
    Figure("activation_bytes", "activations", "B"),
    Figure("saved_bytes", "saved for backward", "B"),
    Figure("zeros", "zeros", "%", over="elements"),
    Figure("not_finite", "NaN and infinities"),
)
"""What a page can show of operators and modules, in order."""

_OF_OPS = {figure.key for figure in FIGURES} - {"not_finite"} | {"parts_but_one"}
"""Keys of the rows of operators that are figures."""


@attrs.define
class ModelOp:
    """One operator of the run.

    Attributes:
        id, type: as in :class:`amanda.tools.description.OpDescription`.
        path: names of the modules around it, outermost first, and of the model.
        direction: ``"forward"`` or ``"backward"``.
        forward: id of the forward operator of a backward one.
        phase: phase of the run; "" if no tool gives it.
        outputs: shapes and element types of its outputs, for people.
        details: further lines of the details view, by heading.
        device: device of its first tensor; "" if no tool gives it.
        values: figures by key, of one step if the run has steps.
    """

    id: str
    type: str
    path: tuple[str, ...]
    direction: str
    forward: str
    phase: str = ""
    outputs: str = ""
    details: dict[str, str] = attrs.field(factory=dict)
    device: str = ""
    values: dict[str, float] = attrs.field(factory=dict)

    @property
    def is_model(self) -> bool:
        """True if the operator belongs to the model's forward or backward pass."""
        return not self.phase or self.phase in MODEL


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one: results of tools may hold anything."""
    return value if isinstance(value, Mapping) else {}


def list_of(value: Any) -> Sequence[Any]:
    """Return a value if it is a list, else an empty one."""
    return value if isinstance(value, (list, tuple)) else ()


def summary_of(tool: ToolReport) -> Mapping[str, Any]:
    """Return the summary in the result of a tool; empty without one."""
    return mapping_of(mapping_of(tool.result).get("summary"))


def merge_ops(tools: Sequence[ToolReport]) -> tuple[dict[str, ModelOp], dict[str, str]]:
    """Return all operators in the results, by id, in the order of the longest result; and by key
    of a figure the tool that it is from."""
    steps = steps_of(tools)
    found: dict[str, ModelOp] = {}
    givers: dict[str, str] = {}
    # Results with edges are in the order of the run; others may be sorted by their figures.
    for tool in sorted(tools, key=lambda tool: "edges" not in mapping_of(tool.result)):
        result = mapping_of(tool.result)
        seen: dict[str, set[str]] = {}
        for row in rows_of(result):
            op = found.setdefault(str(row["id"]), _create(row))
            _describe(op, row)
            of_step = _in_step(op, row, steps)
            _add_values(op, of_step, seen.setdefault(op.id, set()), str(result.get("tool")))
            for key in op.values:
                givers.setdefault(key, tool.name)
    return found, givers


def rows_of(result: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a result that describe operators in the common form."""
    for row in list_of(result.get("ops")):
        if isinstance(row, Mapping) and isinstance(row.get("id"), str) and "type" in row:
            yield row


def pairs_of(tools: Iterable[ToolReport]) -> list[tuple[str, str]]:
    """Return the edges of all results, producer and consumer, each once."""
    edges = [edge for tool in tools for edge in list_of(mapping_of(tool.result).get("edges"))]
    pairs = [
        (edge.get("producer", ""), edge.get("consumer", "")) for edge in map(mapping_of, edges)
    ]
    return list(dict.fromkeys((str(producer), str(consumer)) for producer, consumer in pairs))


def _create(row: Mapping[str, Any]) -> ModelOp:
    op_id, module = str(row["id"]), str(row.get("module") or "")
    forward = str(row.get("forward") or "")
    is_backward = row.get("direction") == "backward" or bool(forward)
    return ModelOp(
        id=op_id,
        type=str(row["type"]),
        path=names_of(op_id, module),
        direction="backward" if is_backward else "forward",
        forward=forward,
    )


def names_of(op_id: str, module: str) -> tuple[str, ...]:
    """Return the names of the modules around an operator, with that of the model if its id has it.

    PyTorch's ids begin with the class of the model, Keras' paths hold its name.
    """
    text = _CALL.sub("", op_id)
    if not module:
        head = text.partition("/")[0]
        return (head,) if head else ()
    owner, found, _ = text.partition(f".{module}/")
    # Names of modules may hold anything, the separator of the other framework included.
    separator = "/" if "/" in module and not found else "."
    parts = tuple(part for part in module.split(separator) if part)
    return (owner, *parts) if found and owner else parts


def _describe(op: ModelOp, row: Mapping[str, Any]) -> None:
    op.phase = op.phase or str(row.get("phase") or "")
    op.outputs = op.outputs or shapes_text(row.get("outputs"))
    op.device = op.device or _device(row)
    if given := shapes_text(row.get("inputs")):
        op.details.setdefault("inputs", given)
    if source := row.get("source"):
        op.details.setdefault("source", str(source))
    attributes = row.get("attributes")
    if attributes and isinstance(attributes, Mapping) and "attributes" not in op.details:
        text = ", ".join(f"{key}={value}" for key, value in attributes.items())
        op.details["attributes"] = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _in_step(op: ModelOp, row: Mapping[str, Any], steps: int) -> Mapping[str, Any]:
    """Return a row with the figures of one step: of the last one, or the mean of all."""
    per_step = row.get("per_step")
    if isinstance(per_step, Mapping):
        # Setup, and the loading of data, are in no step.
        return {**row, **per_step} if op.is_model or any(per_step.values()) else row
    if not (steps and op.is_model):
        return row
    means = {f.key: number_of(row.get(f.key)) for f in FIGURES if f.per_step}
    return {**row, **{key: value / steps for key, value in means.items() if value is not None}}


def _add_values(op: ModelOp, row: Mapping[str, Any], seen: set[str], tool: str) -> None:
    # Rows of stats and sparsity are about one tensor each; weights are not of this execution.
    if row.get("kind") == "weights":
        return
    keys = _OF_TENSORS if tool in ("sparsity", "stats") else _OF_OPS
    values = {key: value for key in keys if (value := number_of(row.get(key))) is not None}
    for key, value in values.items():
        if key in seen or key not in op.values:
            op.values[key] = op.values.get(key, 0.0) + value
            seen.add(key)
    counts = [row.get("times", 1)] if tool == "nan" else [row.get("nan"), row.get("inf")]
    parts = [part for part in map(number_of, counts) if part is not None]
    if parts:
        op.values["not_finite"] = op.values.get("not_finite", 0.0) + sum(parts)


def number_of(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # JSON has integers that no float can hold.
    return float(value) if is_real and abs(value) <= sys.float_info.max else None


def shapes_text(tensors: Any) -> str:
    """Format the shapes of tensors, given as mappings with ``shape`` and ``dtype``, else "".

    Handles of variables and iterators are left out: ``2×64×56×56 f32, 10 i64``
    """
    texts = [
        tensor_text(tensor)
        for tensor in list_of(tensors)
        if isinstance(tensor, Mapping) and tensor.get("dtype") not in HANDLES
    ]
    return ", ".join(text for text in texts if text)


def tensor_text(tensor: Mapping[str, Any]) -> str:
    """Format the shape and the element type of a tensor: ``2×64×56×56 f32``; "" without a shape."""
    shape = tensor.get("shape")
    if not isinstance(shape, (list, tuple)):
        return ""
    size = whole_text(_size(shape), tensor, _size)
    dtype = str(tensor.get("dtype") or "")
    found = _DTYPE.fullmatch(dtype)
    short = f"{_DTYPES[found[1]]}{found[2]}" if found else dtype
    return printable(f"{size} {short}".rstrip())


def _size(shape: Iterable[int | None]) -> str:
    return "×".join("?" if n is None else str(n) for n in shape) or "scalar"


def _device(row: Mapping[str, Any]) -> str:
    tensors = [*list_of(row.get("outputs")), *list_of(row.get("inputs"))]
    devices = (mapping_of(tensor).get("device") for tensor in tensors)
    return str(next(filter(None, devices), ""))


def has_last_step(tools: Iterable[ToolReport]) -> bool:
    """True if a tool has the figures of the last step."""
    return any("per_step" in row for tool in tools for row in rows_of(mapping_of(tool.result)))


def steps_of(tools: Sequence[ToolReport]) -> int:
    """Return the number of steps of the run; 0 if no tool has it."""
    for tool in tools:
        steps = summary_of(tool).get("steps")
        if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
            return steps
    return 0
