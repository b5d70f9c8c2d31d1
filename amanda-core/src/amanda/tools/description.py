"""Descriptions of operators as plain data, for the results of tools.

``describe(context).row()`` gives the keys that the rows of all tools share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from amanda.interface.context import OpContext

OUTSIDE = "(outside of modules)"
"""Shown in tables in the place of a module path for an operator that runs outside of modules."""


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
        """The module as shown in tables, see :func:`place`."""
        return place(self.id, self.module)

    def row(self) -> dict[str, Any]:
        """The keys of a row; that of a backward operator also has ``forward``."""
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
        """Whether `types` contains its type or name, or is empty."""
        return not types or self.type in types or self.name in types


def describe(context: OpContext) -> OpDescription:
    """Describe the operator of a context.

    Its type is canonical if the tool depends on ``MappingTool.standard()``.
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
    """The module path to show in tables.

    The path of an outermost module is ""; for it the name of its class is taken from the id.
    """
    # Ids have the form `<class of the outermost module>.<module path>#<call>/<operator>:<number>`.
    outermost = op_id.partition("/")[0].partition("#")[0]
    return module or outermost or OUTSIDE


def op_name(op: Any) -> str:
    """The framework's name for an operator: its ``__name__``, or its ``type``."""
    name = getattr(op, "__name__", None) or getattr(op, "type", None)
    return str(name or type(op).__name__)
