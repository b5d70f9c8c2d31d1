"""Base of the tools that change operators of some types: ``inject``, ``prune``, ``quantize``."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import attrs

from amanda import OpContext
from amanda.errors import AmandaError
from amanda.results import Table, plural
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.targets import Targets
from amanda_tools._operators.weights import Untreatable
from amanda_tools.export import Change, Exported, check_target, export_model
from amanda_tools.export.model_of_run import ModelOfRun

OptionsT = TypeVar("OptionsT")


class TargetingTool(PrintingTool[OptionsT], abc.ABC):
    """Changes operators of the types that the option ``ops`` names.

    The options have ``ops`` and ``exclude``.

    Attributes:
        finds_products: True if a matrix product with a weight counts as ``linear`` among the types
            that ``ops`` has by default.
        file_option: name of the option with the file that the model is exported to at the end of a
            program; "" without one.
        targets: selects the operators.
        ops: the operators that are changed, by id.
        exported: what has been exported at the end of the program; None if nothing has.
    """

    finds_products: ClassVar[bool] = True
    file_option: ClassVar[str] = ""
    group = "change"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        given: Any = self.options
        is_default = given.ops == attrs.fields_dict(type(given))["ops"].default
        self.targets = Targets(self.types(), given.exclude, is_default=is_default)
        self.ops: dict[str, OpDescription] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.analyse)
        self.exported: Exported | None = None
        self._models = ModelOfRun()
        # Absolute: the program may change the current folder.
        file = self.file_option and getattr(given, self.file_option)
        self._file = Path(file).absolute() if file else None
        # Read by `amanda run`.
        self.needs_end = self._file is not None
        if self._file is not None:
            check_target(self._file)
            self.add_inst_for_pass(self._models.note)
            self.add_inst_for_pass(self._models.note, end=True)

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

    def export_model(
        self, model: Any, example_inputs: Any, path: str | os.PathLike[str], **options: Any
    ) -> Exported:
        """Write a model with this tool's changes into a file; arguments as of
        :func:`amanda_tools.export.export_model`."""
        return export_model(self, model, example_inputs, path, **options)

    def finish_run(self, op_filter: Any) -> None:
        """Export the model that the program has run, if an option asks for it.

        Raises:
            UnsupportedProgramError, OSError: as of :meth:`export_model`.
        """
        if self._file is not None:
            model, inputs = self._models.of(self.name, self.ops)
            options = {"op_filter": op_filter, "fallback": getattr(self.options, "fallback", False)}
            self.exported = self.export_model(model, inputs, self._file, **options)

    def changes(self) -> Sequence[Change]:
        """Return what the tool changes, as data.

        Raises:
            AmandaError: the tool has no changes that can be exported, or not yet.
        """
        raise AmandaError(f"{self.name}: its changes cannot be exported")

    def summary(self) -> dict[str, Any]:
        """Return the options, operators left alone with reasons, types and patterns never met."""
        given: Any = self.options
        found = {"options": attrs.asdict(given), **self.targets.summary()}
        return (
            found if self.exported is None else {**found, "exported": attrs.asdict(self.exported)}
        )

    def export_tables(self) -> Iterator[Table]:
        """What has been exported at the end of the program, and what is not in it."""
        if (found := self.exported) is not None:
            ops, gap = plural(len(found.ops), "op"), f"{found.difference:.2g}"
            title = f"{self.name}: exported {ops} to {found.path}, largest difference {gap}"
            yield Table(
                title, ("op in floating point", "reason"), [*found.in_floating_point.items()]
            )
