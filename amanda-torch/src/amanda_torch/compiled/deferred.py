"""Calls after a run of compiled code, in place of the routines of its operators.

Compiled code of a graph runs unchanged. The first run of the graph notes functions for the
additions of its operators to counters and sums and for their deferrable routines; they are called
after each later run::

    later = [counter, deferred_sum(flops, inputs, outputs)]
    result = code(*inputs)
    TOOL_LOCK.hold(call_all, later)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from amanda.inline import ShapeSum
from amanda.interface.action import Action
from amanda.interface.points import Point
from amanda.state import TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.routines import RoutineDispatcher

Deferred = Callable[[], Any]
"""A counter, or a function that adds to a sum or calls a routine as one execution does."""


def call_all(later: Iterable[Deferred]) -> None:
    """Call each, in the order of the operators, while the lock of tools is held."""
    for function in later:
        function()


def deferred_sum(to: ShapeSum, inputs: Sequence[Any], outputs: Sequence[Any]) -> Deferred:
    """Return a function that adds to a sum as an operator with these tensors does."""
    shapes = TOOL_LOCK.hold(lambda: (to.shapes_of(inputs), to.shapes_of(outputs)))
    return functools.partial(to.add, TOOL_LOCK.hold(to.weigh, shapes), shapes)


def deferred_routine(
    dispatcher: RoutineDispatcher, action: Action, tensors: Sequence[Any]
) -> Deferred:
    """Return a function that calls a routine, see :func:`amanda.deferrable`.

    Args:
        dispatcher: the driver's dispatcher.
        action: the routine's action.
        tensors: all tensors of its point, which are kept without their values.
    """
    kept = [None if tensor is None else stand_in(tensor) for tensor in tensors]
    return functools.partial(dispatcher.run_all, (action,), kept)


def deferred_point(
    dispatcher: RoutineDispatcher,
    point: Point,
    called: CalledModule,
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None,
) -> Deferred:
    """Return a function that calls the routines at the entry or the exit of a module.

    Args:
        dispatcher: the driver's dispatcher.
        point: entry or exit.
        called: the call of the module.
        inputs, outputs: the tensors there, which are kept without their values.
    """
    kept = None if outputs is None else [*map(_internals.valueless, outputs)]
    given = [*map(_internals.valueless, inputs)]
    return functools.partial(called.tell, dispatcher, point, given, kept)


@attrs.frozen
class CalledModule:
    """A call of a module in a graph.

    Attributes:
        path: path of the module within the outermost one.
        id: beginning of the ids of its operators.
        module: the module.
    """

    path: str
    id: str
    module: weakref.ref[nn.Module]

    def tell(
        self,
        dispatcher: RoutineDispatcher,
        point: Point,
        inputs: Sequence[Any],
        outputs: Sequence[Any] | None,
    ) -> None:
        """Run the routines at its entry or exit."""
        dispatcher.points.module(
            dispatcher.scopes(),
            point,
            module=self.path,
            id=self.id,
            target=self.module(),
            inputs=inputs,
            outputs=outputs,
        )


def is_deferrable_routine(action: Action) -> bool:
    """True if a routine may be called after the run."""
    return is_marked_deferrable(action.func) and not action.differentiable


def is_marked_deferrable(routine: Any) -> bool:
    """True if a tool has marked a routine as deferrable."""
    func = getattr(routine, "__func__", routine)
    return bool(getattr(func, "amanda_deferrable", False))


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype without values."""
    return tensor.detach().to("meta")
