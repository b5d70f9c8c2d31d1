"""Looking at the values of compiled PyTorch code while it runs.

What the compiler puts into its code has to be a function of tensors. An operator of our own is
one: it gives copies of its inputs, which the code goes on with, and the compiler can neither look
into it nor leave it out. When it runs, it shows the inputs to a routine.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import amanda
from amanda import OpContext

Look = Callable[..., Any]

_NUMBERS = itertools.count()
_LOOKS: weakref.WeakValueDictionary[int, Shown] = weakref.WeakValueDictionary()


class Shown:
    """Shows the tensors of an operator of compiled code to a routine that changes nothing."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self._number = next(_NUMBERS)
        _LOOKS[self._number] = self

    @amanda.traceable
    def run(self, *tensors: Any) -> list[Any]:
        """Instrumentation routine: what is compiled in."""
        given = [tensor for tensor in tensors if tensor is not None]
        copies = iter(_operator()(given, self._number))
        return [None if tensor is None else next(copies) for tensor in tensors]


def looking(context: OpContext, look: Look) -> Look:
    """The routine that an analysis inserts so that `look` sees the tensors, in every mode.

    Args:
        context: of the operator.
        look: an instrumentation routine that changes nothing.
    """
    if not context.namespace.matches("pytorch/*/graph"):
        return look
    return Shown(look).run


@functools.cache
def _operator() -> Any:
    torch = importlib.import_module("torch")

    def look(tensors: Sequence[Any], number: int) -> list[Any]:
        shown = _LOOKS.get(number)
        if shown is not None:
            shown.look(*tensors)
        return copies(tensors, number)

    def copies(tensors: Sequence[Any], number: int) -> list[Any]:
        return [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]

    operator = torch.library.custom_op(
        "amanda_tools::look",
        look,
        mutates_args=(),
        schema="(Tensor[] tensors, int number) -> Tensor[]",
    )
    operator.register_fake(copies)
    return operator


HeldT = TypeVar("HeldT")


def left_elsewhere(held: dict[int, HeldT]) -> HeldT | None:
    """What was left by another thread than the one that asks, the oldest; None if nothing was.

    Both routines run in the operator's thread where operators run at once. What executes a
    graph may run the two in different threads.

    Args:
        held: thread's number to what its routine left; the entry is removed.
    """
    return held.pop(next(iter(held))) if held else None
