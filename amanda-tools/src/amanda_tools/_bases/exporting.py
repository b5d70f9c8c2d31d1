"""Base of the tools whose changes can be exported with the model: ``prune``, ``quantize``."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs

from amanda.results import Table, plural
from amanda_tools._bases.targeting import OptionsT, TargetingTool
from amanda_tools.export import Change, Exported, check_target, export_model
from amanda_tools.export.model_of_run import ModelOfRun


class ExportingTool(TargetingTool[OptionsT], abc.ABC):
    """States its changes as data, and exports the model with them.

    Attributes:
        file_option: name of the option with the file that the model is exported to at the end of a
            program.
        exported: what has been exported at the end of the program; None if nothing has.
    """

    file_option: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.exported: Exported | None = None
        self._models = ModelOfRun(self, getattr(self.options, self.file_option))
        # Read by `amanda run`.
        self.needs_end = self._models.target is not None
        if self._models.target is not None:
            check_target(self._models.target)

    @abc.abstractmethod
    def changes(self) -> Sequence[Change]:
        """Return what the tool changes, as data.

        Raises:
            AmandaError: it cannot be exported, or not yet.
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
        if self._models.target is not None:
            model, inputs = self._models.of(self.name, self.ops)
            options = {"op_filter": op_filter, "fallback": getattr(self.options, "fallback", False)}
            self.exported = self.export_model(model, inputs, self._models.target, **options)

    def summary(self) -> dict[str, Any]:
        """Return the options, operators left alone with reasons, types and patterns never met, and
        what has been exported."""
        found = super().summary()
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
