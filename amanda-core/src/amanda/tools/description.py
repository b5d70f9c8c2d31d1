"""Descriptions of operators as plain data, for the results of tools.

``describe(context).row()`` gives the keys that the rows of all tools share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from amanda.errors import MappingError
from amanda.interface.context import DESCRIPTION, OpContext
from amanda.interface.specs import OpTensors, Phase, TensorSpec
from amanda.tools import canonical
from amanda.tools.canonical import op_name

__all__ = ["OUTSIDE", "OpDescription", "describe", "op_name", "place", "plain_attributes"]

OUTSIDE = "(outside of modules)"
"""Shown in tables in place of a module path for an operator that runs outside of modules."""

SOURCE_LINES = "__source_lines__"
"""A global of code that a driver has generated from the program's: by its line, the files and lines
of the program, innermost first."""


@attrs.frozen
class OpDescription:
    """The description of an operator that the results of all tools share.

    Attributes:
        id: its id; for a backward operator the backward id.
        type: the canonical type (``conv2d``) if a mapping rule sets it, else `name`.
        name: the framework's name for it.
        module: path of the module that runs it, "" outside of modules.
        namespace: framework, version and mode.
        forward: for a backward operator the id of its forward operator, else "".
        phase: the phase of the program in which it first ran.
        attributes: the forward operator's canonical attributes, or the framework's own where no
            rule gives them; those of plain types.
        tensors: shapes, element types and devices of its tensors, filled in as it first runs;
            of a backward operator, of its gradients.
    """

    id: str
    type: str
    name: str
    module: str
    namespace: str
    forward: str = ""
    phase: Phase = attrs.field(default="forward", eq=False)
    attributes: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)
    tensors: OpTensors = attrs.field(factory=OpTensors, eq=False, repr=False)

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.forward else "forward"

    @property
    def place(self) -> str:
        """The module as shown in tables, see :func:`place`."""
        return place(self.id, self.module)

    def row(self) -> dict[str, Any]:
        """The keys of a row: the keys of :meth:`identity` and of :meth:`facts`."""
        return {**self.identity(), **self.facts()}

    def identity(self) -> dict[str, Any]:
        """The keys that identify the operator; a backward operator also has ``forward``."""
        row = {
            "id": self.id,
            "type": self.type,
            "name": self.name,
            "direction": self.direction,
            "module": self.module,
            "namespace": self.namespace,
        }
        return {**row, "forward": self.forward} if self.forward else row

    def facts(self) -> dict[str, Any]:
        """``phase``; ``inputs`` and ``outputs``, lists of ``shape``, ``dtype`` and ``device``, with
        None for a tensor that is absent; ``attributes``."""
        return {
            "phase": self.phase,
            "inputs": _rows(self.tensors.inputs),
            "outputs": _rows(self.tensors.outputs),
            "attributes": dict(self.attributes),
        }

    def is_selected(self, types: Sequence[str]) -> bool:
        """True if `types` contains its type or name, or is empty."""
        return not types or self.type in types or self.name in types


def describe(context: OpContext) -> OpDescription:
    """Describe the operator of a context.

    Its type is canonical if the tool depends on ``MappingTool.standard()``.
    """
    # Not by the context's own reading, which is a function for a key that is missing.
    basis = context.get("op_type"), context.get(canonical.RULE)
    known: OpDescription | None = None
    if (kept := context.get(DESCRIPTION)) is not None and kept[0] == basis:
        known = kept[1]
    if context.is_forward():
        if known is None:
            return _describe_forward(context, basis)
        context.get_tensor_specs()  # its tensors are those, seen as far as they exist now
        return known
    op_id, module, namespace = context.get_op_id(), context.get_module(), str(context.namespace)
    backward_name = op_name(context.get_backward_op())
    backward_type = str(context["backward_op_type"] or backward_name)
    about = str(context.get_backward_op_id()), backward_type, backward_name
    # Its attributes are those of the forward operator, which a tool has mostly read before.
    attributes = plain_attributes(context) if known is None else known.attributes
    facts = context.get_phase(), attributes, context.get_tensor_specs()
    return OpDescription(*about, module, namespace, op_id, *facts)


def _describe_forward(context: OpContext, basis: tuple[Any, ...]) -> OpDescription:
    """Describe a forward operator, and keep the description if its attributes are complete."""
    name = op_name(context.get_op())
    attributes = plain_attributes(context)
    found = OpDescription(
        context.get_op_id(),
        str(basis[0] or name),
        name,
        context.get_module(),
        str(context.namespace),
        phase=context.get_phase(),
        attributes=attributes,
        tensors=context.get_tensor_specs(),
    )
    if context.get(canonical.LACKS_OUTPUTS) is None:
        context[DESCRIPTION] = basis, found
    return found


def plain_attributes(context: OpContext) -> dict[str, Any]:
    """The canonical attributes of the forward operator, in types that JSON has.

    Where no rule knows the operator, or this form of it, they are the framework's own attributes.
    Values of other types are left out.
    """
    try:
        given = canonical.attributes(context) if context.get(canonical.RULE) else None
    except MappingError:
        given = None
    found = context.get_attrs() if given is None else given
    for name, value in tuple(found.items()):
        # For each operator that is new: most values need no function.
        if value is None or type(value) in _PLAIN:
            continue
        plain = _plain(value)
        if plain is _OTHER:
            del found[name]
        else:
            found[name] = plain
    return found


_PLAIN = frozenset({bool, int, float, str})

_OTHER: Any = object()
"""Stands for a value that has no plain form."""

_MAX_ITEMS = 64
"""Items of an attribute that is a list; a longer one is data."""

_NAMED = frozenset({"dtype", "device", "layout", "memory_format", "DType"})
"""Classes of frameworks whose values are names."""


def _plain(value: Any, around: tuple[Any, ...] = ()) -> Any:
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        if len(value) <= _MAX_ITEMS and _PLAIN.issuperset(map(type, value)):
            return list(value)
        if any(one is value for one in around):  # it holds itself
            return _OTHER
        around = (*around, value)
        items = [_plain(item, around) for item in value[: _MAX_ITEMS + 1]]
        is_data = len(items) > _MAX_ITEMS or any(item is _OTHER for item in items)
        return _OTHER if is_data else items
    if kind.__name__ in _NAMED:
        return str(getattr(value, "name", None) or value).rpartition(".")[2]
    return _OTHER


def _rows(specs: Sequence[TensorSpec | None] | None) -> list[dict[str, Any] | None]:
    return [None if spec is None else spec.row() for spec in specs or ()]


def place(op_id: str, module: str) -> str:
    """The module path to show in tables.

    The path of an outermost module is ""; for it the name of its class is taken from the id.
    """
    # Ids have the form `<class of the outermost module>.<module path>#<call>/<operator>:<number>`.
    outermost = op_id.partition("/")[0].partition("#")[0]
    return module or outermost or OUTSIDE
