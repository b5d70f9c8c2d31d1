"""Points that are derived from operators: of modules, of passes and of iterations.

Their routines get a :class:`PointContext`, such as ``tool.add_inst_for_module(routine)`` registers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import attrs


class Point(enum.Enum):
    """The points other than those of operators at which a tool's routine may run."""

    __hash__ = object.__hash__

    MODULE_ENTRY = "module_entry"
    MODULE_EXIT = "module_exit"
    FORWARD_BEGIN = "forward_begin"
    FORWARD_END = "forward_end"
    BACKWARD_BEGIN = "backward_begin"
    BACKWARD_END = "backward_end"
    ITERATION_BEGIN = "iteration_begin"
    ITERATION_END = "iteration_end"


# Without slots it is made in half the time, at each iteration.
@attrs.frozen(kw_only=True, eq=False, slots=False)
class PointContext:
    """The argument of a routine at a derived point.

    Attributes:
        point: where it is.
        namespace: framework, version and mode.
        runs_at_once: as :attr:`OpContext.runs_at_once <amanda.OpContext.runs_at_once>`.
        iteration: the number of the iteration, from 0.
        module: path of the module within the outermost one, "" for that and for other points.
        id: what the ids of the module's operators begin with (``Net.layer1.conv``), of a forward
            pass that of its outermost module; "" for other points.
        target: the module itself, as its framework has it, where a forward pass begins its
            outermost module, of a pass in a graph where it ends; None for other points.
        inputs: the tensors that the module is given, in order, where a forward pass begins those
            of its outermost module. Of a pass in a graph they are there where it ends, if it calls
            one outermost module; where the graph tells their shapes, tensors of the graph. Empty
            for other points.
        outputs: at its exit the tensors that it gives, and where a forward pass ends those of its
            outermost module, if they are known; None before, and where it has raised.
        begin, end: when the iteration began and ended, in seconds of ``time.perf_counter``; None
            for what is not known yet.
        follows: True if the iteration includes all that has run since the end of the last one; the
            first iteration, since the begin of the scope.
    """

    point: Point
    namespace: str
    iteration: int
    module: str = ""
    id: str = ""
    target: Any = None
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] | None = None
    begin: float | None = None
    end: float | None = None
    follows: bool = False
    runs_at_once: bool = True
