"""The base class of the exporters of frameworks."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from amanda.errors import AmandaError, UnsupportedProgramError
from amanda_tools._values.tensors import Array
from amanda_tools.export import checks
from amanda_tools.export.changes import Change


class BaseExporter:
    """Exports one model.

    Args:
        name: name of the tool, for messages.
        tool: the tool; None changes nothing.
        model: the model.
        inputs: example inputs.
        fallback: leave an operator whose change cannot be expressed as it is.
        op_filter: that of the tool's scope; None for none.

    Attributes:
        left: by ids of operators that are left as they are, the reasons.
    """

    def __init__(
        self, name: str, tool: Any, model: Any, inputs: Any, *, fallback: bool, op_filter: Any
    ) -> None:
        self._name, self._tool, self._fallback, self._filter = name, tool, fallback, op_filter
        self._model, self._inputs = model, inputs
        self.left: dict[str, str] = {}

    def _changes(self) -> list[Change]:
        """Return what the tool changes.

        Raises:
            AmandaError: that is nothing, or not known yet.
        """
        if self._tool is None:
            return []
        if not (changes := list(self._tool.changes())):
            raise UnsupportedProgramError(
                f"{self._name}: there is nothing to export; run the model under the tool first"
            )
        return changes

    def _leave(self, op_id: str, reason: str) -> None:
        """Leave an operator in floating point, or refuse to."""
        if not self._fallback:
            raise UnsupportedProgramError(
                f"{self._name}: op {op_id}: {reason}; fallback=True leaves it in floating point"
            )
        self.left[op_id] = reason

    @contextmanager
    def _refusing(self, exporter: str) -> Iterator[None]:
        """Raise the errors of a framework's exporter as UnsupportedProgramError."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except (AmandaError, OSError):
            raise
        except ImportError as error:
            raise UnsupportedProgramError(
                f"{self._name}: {error}: pip install 'amanda-tools[onnx]'"
            ) from error
        except Exception as error:
            while error.__cause__ is not None and isinstance(error.__cause__, Exception):
                error = error.__cause__
            reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
            raise UnsupportedProgramError(
                f"{self._name}: {exporter} refuses the model: {reason}"
            ) from error

    def _difference(
        self,
        found: Sequence[Array],
        model: Any,
        inputs: Any,
        kept: Sequence[Change],
        tolerance: float,
        values: Callable[[], Mapping[str, Array]],
    ) -> float:
        """Return the largest difference to a model under the tool.

        Args:
            found: the outputs of the exported model.
            model, inputs: run under the tool.
            kept: the changes that have been made.
            tolerance: as for :func:`checks.difference`.
            values: gives the outputs of operators in the exported model, by id.

        Raises:
            UnsupportedProgramError: it is too large.
        """
        tool = checks.Applied(kept) if self.left or not self._tool else self._tool
        given = model, inputs, tool
        expected = checks.outputs_under(*given, op_filter=self._filter)
        difference = checks.difference(found, expected, tolerance)
        if difference is not None:
            return difference
        more = {"tolerance": tolerance, "op_filter": self._filter}
        before = checks.Outputs()
        checks.outputs_under(*given, before, op_filter=self._filter)
        if where := checks.first_difference(*given, found=before.values, **more):
            raise UnsupportedProgramError(
                f"{self._name}: the model gives another result at each run, as random numbers do, "
                f"first at op {where}"
            )
        where = checks.first_difference(*given, found=values(), **more)
        if not where:
            where, difference = self._recheck(found, expected)
        if difference is None:
            raise UnsupportedProgramError(
                f"{self._name}: the exported model computes another result than the model under "
                f"the tool{where and f', first at op {where}'}"
            )
        return difference

    def _recheck(
        self, found: Sequence[Array], expected: Sequence[Array]
    ) -> tuple[str, float | None]:
        """Compare the operators of the exported model on equal inputs.

        Returns:
            The first one that differs, and the largest difference of the outputs where none does;
            "" and None where the format has no such comparison.
        """
        return "", None
