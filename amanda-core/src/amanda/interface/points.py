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
        point: the point.
        namespace: framework, version and mode.
        runs_at_once: as :attr:`OpContext.runs_at_once <amanda.OpContext.runs_at_once>`.
        iteration: the number of the iteration, from 0.
        module: path of the module within the outermost one, "" for that and for other points.
        id: beginning of the ids of the module's operators (``Net.layer1.conv``), for a forward pass
            of its outermost module; "" for other points.
        target: the framework's module object; at the begin of a forward pass, in a graph at its
            end, the outermost module; None for other points.
        inputs: the module's input tensors in order; at the begin of a forward pass those of the
            outermost module. For a pass in a graph they are known at its end, if it calls one
            outermost module; tensors of the graph if it has their shapes. Empty for other points.
        outputs: at the exit of a module its output tensors, and at the end of a forward pass those
            of the outermost module, if known; None before, and after an exception.
        begin, end: times of the iteration's begin and end, in seconds of ``time.perf_counter``;
            None if unknown yet.
        follows: True if the iteration includes all operators since the end of the last one, or for
            the first iteration since the begin of the scope.
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
