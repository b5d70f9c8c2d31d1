"""Tools with routines at every operator, which tell what they have seen."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

import amanda
from amanda.state import STATE


class Ids(amanda.Tool):
    """The ids of all operators in the order of their executions, by routines or by analyses."""

    def __init__(self, acts: bool) -> None:
        super().__init__()
        self.ids: list[str] = []
        self._acts = acts
        self.add_inst_for_op(self.forward)

    def found(self) -> Any:
        return self.ids

    def forward(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        if self._acts:
            context.insert_before_op(lambda: self.ids.append(op_id), inputs=[])
        else:
            self.ids.append(op_id)


class Around(amanda.Tool):
    """Routines around every operator, which note what they are given, and in what state."""

    def __init__(self, *, backward: bool = True) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.add_inst_for_op(self.forward)
        if backward:
            self.add_inst_for_op(self.backward, backward=True)

    def found(self) -> Any:
        return self.seen

    def forward(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        context.insert_before_op(self.note, where=op_id)
        context.insert_before_op(self.touch, inputs=[])
        if context.get_inputs():
            context.insert_before_op(self.note, inputs=[-1], where="last")
        context.insert_after_op(self.note, where="after")

    def backward(self, context: amanda.OpContext) -> None:
        pass

    def note(self, *tensors: Any, where: str) -> None:
        shapes = [None if tensor is None else (*tensor.shape,) for tensor in tensors]
        self.seen.append((where, shapes, torch.is_grad_enabled(), STATE.paused))

    def touch(self) -> None:
        # Operators of a tool are none of the program's.
        self.seen.append(float(torch.ones(2).sum()))


class Returning(amanda.Tool):
    """Two routines before and after each operator; what one of them does is to be said."""

    def __init__(self, act: Callable[..., Any], at: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.act, self.at = act, at
        self.add_inst_for_op(self.forward)

    def forward(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ != "mul":
            return
        for place, insert in (
            ("before", context.insert_before_op),
            ("after", context.insert_after_op),
        ):
            for number in range(2):
                acts = f"{place} {number}" == self.at
                insert(self.run, place=f"{place} {number}", acts=acts)

    def run(self, *tensors: Any, place: str, acts: bool) -> Any:
        self.seen.append(place)
        return self.act(*tensors) if acts else None


class Inlined(amanda.Tool):
    """A counter, a timer and a change of memory around every forward and backward operator."""

    def __init__(
        self, log: amanda.inline.Log | None = None, used: Callable[[], int] | None = None
    ) -> None:
        super().__init__()
        self.counter, self.timer = amanda.inline.Counter(), amanda.inline.Timer(log)
        self.change = amanda.inline.MemoryChange(amanda.inline.MemoryUse(used))
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def found(self) -> Any:
        log = self.timer.log
        rows = len(log.numbers) if log is not None else 0
        return self.counter.count, self.timer.executions, rows, self.change.bytes

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.change.before, inputs=[])
        context.insert_before_op(self.timer.start, inputs=[])
        context.insert_after_op(self.timer.stop, outputs=[])
        context.insert_after_op(self.change.after, outputs=[])
        context.insert_after_op(self.counter, outputs=[])

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.change.before, grad_outputs=[])
        context.insert_before_backward_op(self.timer.start, grad_outputs=[])
        context.insert_after_backward_op(self.timer.stop, grad_inputs=[])
        context.insert_after_backward_op(self.change.after, grad_inputs=[])
        context.insert_after_backward_op(self.counter, grad_inputs=[])


class Measured(amanda.Tool):
    """One routine of amanda.inline at every forward operator, and nothing else."""

    def __init__(self, times: bool) -> None:
        super().__init__()
        self._times = times
        self._routines: dict[str, Any] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        made = amanda.inline.Timer() if self._times else amanda.inline.Counter()
        routine = self._routines.setdefault(context.get_op_id(), made)
        if isinstance(routine, amanda.inline.Timer):
            context.insert_before_op(routine.start, inputs=[])
            context.insert_after_op(routine.stop, outputs=[])
        else:
            context.insert_after_op(routine, outputs=[])

    def found(self) -> dict[str, int]:
        kind = "executions" if self._times else "count"
        return {op_id: getattr(routine, kind) for op_id, routine in self._routines.items()}


class Checks(amanda.Tool):
    """A check around every forward and backward operator.

    Attributes:
        errors: ids of the operators with outputs that are not finite, the shapes of their inputs
            and outputs, and whether the inputs were finite, in the order of the executions.
        trail: ids of all operators, likewise.
        asked: kinds of tensors that Python was asked about.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Any] = []
        self.trail: collections.deque[str] = collections.deque()
        self.asked: list[str] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def found(self) -> Any:
        return self.errors, list(self.trail)

    def check(self, op_id: str) -> amanda.inline.Check:
        def found(inputs: Any, outputs: Any, was_finite: bool) -> None:
            shapes = [t if t is None else list(t.shape) for t in (*inputs, None, *outputs)]
            self.errors.append((op_id, shapes, was_finite))

        return amanda.inline.Check(
            self.is_finite, found, overwrites=None, trail=self.trail, name=op_id
        )

    def is_finite(self, tensor: torch.Tensor) -> bool:
        self.asked.append(f"{tensor.layout} {tensor.dtype} {tensor.device}")
        try:
            return bool(torch.isfinite(tensor).all())
        except (RuntimeError, TypeError):
            return True

    def forward(self, context: amanda.OpContext) -> None:
        check = self.check(context.get_op_id())
        context.insert_before_op(check.before)
        context.insert_after_op(check.after)

    def backward(self, context: amanda.OpContext) -> None:
        check = self.check(str(context.get_backward_op_id()))
        context.insert_before_backward_op(check.before)
        context.insert_after_backward_op(check.after)


class Sums(amanda.Tool):
    """A sum around every forward and backward operator.

    Attributes:
        sums: by id of the operator.
        asked: ids of the operators of which a number was asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, amanda.inline.ShapeSum] = {}
        self.total = amanda.inline.Counter()
        self.asked: list[str] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def sum(self, op_id: str, of: str | None = None) -> amanda.inline.ShapeSum:
        forward = self.sums.get(of) if of else None

        def weigh(shapes: Any) -> int | None:
            self.asked.append(op_id)
            last = forward.last if forward is not None else ()
            found = str((plain_shapes(shapes), plain_shapes(last)))
            return None if "9" in found else sum(map(ord, found))

        made = amanda.inline.ShapeSum(weigh, self.total, of=forward)
        return self.sums.setdefault(op_id, made)

    def forward(self, context: amanda.OpContext) -> None:
        one = self.sum(context.get_op_id())
        context.insert_before_op(one.before)
        context.insert_after_op(one.after)

    def backward(self, context: amanda.OpContext) -> None:
        one = self.sum(str(context.get_backward_op_id()), context.get_op_id())
        context.insert_before_backward_op(one.before)
        context.insert_after_backward_op(one.after)

    def found(self) -> Any:
        rows = {
            op_id: (one.executions, one.amount, one.unknown, plain_shapes(one.last))
            for op_id, one in self.sums.items()
        }
        return rows, self.total.count


def plain_shapes(value: Any) -> Any:
    """Shapes as plain numbers."""
    return [plain_shapes(one) for one in value] if isinstance(value, (tuple, list)) else value
