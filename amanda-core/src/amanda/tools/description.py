"""Plain-data descriptions of operators, for the results of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from amanda.interface.context import OpContext

OUTSIDE = "(outside of modules)"
"""Where tables say that an operator runs which no module runs."""


@attrs.frozen
class OpDescription:
    """What the rows of all tools say of an operator.

    Attributes:
        id: the operator's id, of a backward operator its own.
        type: what it computes: canonical (``conv2d``) where a mapping rule knows
            it, else the framework's name for it.
        name: the framework's name for it.
        module: path of the module that runs it.
        namespace: where it runs.
        forward: of a backward operator the forward operator's id, else "".
    """

    id: str
    type: str
    name: str
    module: str
    namespace: str
    forward: str = ""

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.forward else "forward"

    @property
    def place(self) -> str:
        """Where tables say that it runs, see :func:`place`."""
        return place(self.id, self.module)

    def row(self) -> dict[str, Any]:
        """The keys that every row has, and those that a backward operator's has."""
        row = {
            "id": self.id,
            "type": self.type,
            "name": self.name,
            "direction": self.direction,
            "module": self.module,
            "namespace": self.namespace,
        }
        return {**row, "forward": self.forward} if self.forward else row

    def is_selected(self, types: Sequence[str]) -> bool:
        """Whether one of `types` is its type or name; no types at all select everything."""
        return not types or self.type in types or self.name in types


def describe(context: OpContext) -> OpDescription:
    """The operator of a context, in the terms that all tools share.

    The types are canonical if the tool depends on ``MappingTool.standard()``.
    """
    op_id, name = context.get_op_id(), op_name(context.get_op())
    kind = str(context["op_type"] or name)
    module, namespace = context.get_module(), str(context.namespace)
    if context.is_forward():
        return OpDescription(op_id, kind, name, module, namespace)
    backward_name = op_name(context.get_backward_op())
    backward_type = str(context["backward_op_type"] or backward_name)
    backward_id = str(context.get_backward_op_id())
    return OpDescription(backward_id, backward_type, backward_name, module, namespace, op_id)


def place(op_id: str, module: str) -> str:
    """The module's path; of an outermost module's own forward its name, from the id."""
    outermost = op_id.partition("/")[0].partition("#")[0]
    return module or outermost or OUTSIDE


def op_name(op: Any) -> str:
    """The framework's name for an operator: its ``__name__``, or its ``type``."""
    name = getattr(op, "__name__", None) or getattr(op, "type", None)
    return str(name or type(op).__name__)
