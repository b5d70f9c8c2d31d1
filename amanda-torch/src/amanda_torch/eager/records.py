"""Base classes of records that the extension reads at each operator.

If the extension is installed, they are types of its own; otherwise they are the classes here, with
the same names and fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amanda_torch import accel

if TYPE_CHECKING or accel.refusal():

    class TrackerFields:
        """Fields of a tracker, see :class:`amanda_torch.eager.op_ids.Tracker`.

        Attributes:
            cells: ``frame.cells``.
            frame: the frame of the module call that is running.
            root: the frame outside of all modules.
            generation: counts up whenever plans become out of date.
            iteration: counts up whenever the root counters restart.
            stale: True if the plans have to be asked for before the next operator.
            thread: ``vars()`` of the thread's :class:`amanda.state.ThreadState`.
        """

        __slots__ = ("cells", "frame", "generation", "iteration", "root", "stale", "thread")

        stale: bool
        thread: dict[str, Any]

    class FrameFields:
        """Fields of the frame of a module call, see
        :class:`amanda_torch.eager.module_frames.Frame`.

        Attributes:
            cells: func to cell.
            names: op name to cell.
            children: id of a module to its child.
            generation: generation of the plans in the cells.
            caller: the frame that this one returns to, while it is active.
        """

        __slots__ = ("caller", "cells", "children", "generation", "names")

    class ChildFields:
        """Fields of a module called within a frame, see
        :class:`amanda_torch.eager.module_frames.Child`.

        Attributes:
            ref: a weak reference to the module.
            transparent: True if it has no frames.
            is_fused: True if Python runs all of its calls.
            calls: the number of calls in this iteration.
            frames: frames of these calls.
        """

        __slots__ = ("calls", "frames", "is_fused", "ref", "transparent")

        frames: list[Any]

    class KnownFields:
        """Fields of the facts about an operator, see :class:`amanda_torch.eager.execution.KnownOp`.

        Attributes:
            executor: runs the operator, or the rest of its routines, if the extension cannot.
            claims: True if some tool looks at its backward operators.
            steps_before, steps_after: the steps of its plan that the extension may run; None if
                Python runs them.
            gradients: facts about its backward operators.
            form: form of its layout, see :attr:`amanda_torch.operators.layouts.Layout.form`; None
                without one.
            iterations: by operator id, the iteration in which it last ran with gradients.
            op_id: its id.
            name: its name.
        """

        __slots__ = (
            *("claims", "executor", "form", "gradients", "iterations"),
            *("name", "op_id", "steps_after", "steps_before"),
        )

        gradients: Any
        form: Any
        steps_before: Any
        steps_after: Any

else:
    TrackerFields = accel.load().TrackerFields
    FrameFields = accel.load().FrameFields
    ChildFields = accel.load().ChildFields
    KnownFields = accel.load().KnownFields
