"""Base of the tools that change operators of some types: ``inject``, ``prune``, ``quantize``."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import attrs

from amanda import OpContext
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.targets import Targets
from amanda_tools._operators.weights import Untreatable

OptionsT = TypeVar("OptionsT")


class TargetingTool(PrintingTool[OptionsT], abc.ABC):
    """Changes operators of the types that the option ``ops`` names.

    The options have ``ops`` and ``exclude``.

    Attributes:
        finds_products: True if a matrix product with a weight counts as ``linear`` among the types
            that ``ops`` has by default.
        targets: selects the operators.
        ops: the operators that are changed, by id.
    """

    finds_products: ClassVar[bool] = True
    group = "change"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        given: Any = self.options
        is_default = given.ops == attrs.fields_dict(type(given))["ops"].default
        self.targets = Targets(self.types(), given.exclude, is_default=is_default)
        self.ops: dict[str, OpDescription] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.analyse)

    def types(self) -> Sequence[str]:
        """Return the types of the operators."""
        given: Any = self.options
        types: Sequence[str] = given.ops
        return types

    def analyse(self, context: OpContext) -> None:
        """Change an operator if the options select it; an analysis."""
        op = describe(context)
        finds = self.finds_products and self.targets.is_default
        if self.targets.takes(op, has_weight=finds and context["weight_index"] is not None):
            try:
                self.treat(context, op)
            except Untreatable as reason:
                self.targets.skip(op, str(reason))
            else:
                self.ops[op.id] = op

    @abc.abstractmethod
    def treat(self, context: OpContext, op: OpDescription) -> None:
        """Insert the tool's routines, in an analysis.

        Raises:
            Untreatable: the tool cannot act on the operator.
        """

    def summary(self) -> dict[str, Any]:
        """Return the options, operators left alone with reasons, types and patterns never met."""
        given: Any = self.options
        return {"options": attrs.asdict(given), **self.targets.summary()}
