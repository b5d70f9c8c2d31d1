"""Observing tensors of an operator in every mode, code that ``torch.compile`` has made included.

In an analysis::

    context.insert_after_op(make_observer(context, look))

A routine in compiled code has to be a traceable function of tensors. So an operator of our own is
compiled in: it returns copies of its inputs, with which the code continues, and calls the
observing function each time it runs. The compiler can neither look into it nor remove it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import amanda
from amanda import OpContext

Observe = Callable[..., Any]

_NUMBERS = itertools.count()
_OBSERVERS: weakref.WeakValueDictionary[int, CompiledObserver] = weakref.WeakValueDictionary()
"""Observers by the number that stands in compiled code."""


def make_observer(context: OpContext, observe: Observe) -> Observe:
    """Return the routine to insert so that `observe` gets the tensors, in every mode.

    Args:
        context: of the operator.
        observe: an instrumentation routine that returns nothing.
    """
    if not context.namespace.matches("pytorch/*/graph"):
        return observe
    return CompiledObserver(observe).run


class CompiledObserver:
    """Shows the tensors of an operator of compiled code to a routine that returns nothing."""

    def __init__(self, observe: Observe) -> None:
        self.observe = observe
        self._number = next(_NUMBERS)
        _OBSERVERS[self._number] = self

    @amanda.traceable
    def run(self, *tensors: Any) -> Any:
        """Instrumentation routine, which is compiled in."""
        given = [tensor for tensor in tensors if tensor is not None]
        if all(type(tensor) in _plain_types() for tensor in given):
            # Values, in code that runs operator by operator: copies may have other strides, with
            # which PyTorch takes other kernels, and results differ in their last bits.
            return self.observe(*tensors)
        copies = iter(_operator()(given, self._number))
        return [None if tensor is None else next(copies) for tensor in tensors]


@functools.cache
def _plain_types() -> frozenset[type]:
    """The types of tensors with values; what a compiler traces with has others."""
    torch = importlib.import_module("torch")
    return frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@functools.cache
def _operator() -> Any:
    """Register ``amanda_tools::look``: copies of its inputs, shown to the numbered observer."""
    torch = importlib.import_module("torch")

    def look(tensors: Sequence[Any], number: int) -> list[Any]:
        found = _OBSERVERS.get(number)
        if found is not None:
            found.observe(*tensors)
        return copies(tensors, number)

    def copies(tensors: Sequence[Any], number: int) -> list[Any]:
        # A custom operator must not return its inputs.
        return [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]

    operator = torch.library.custom_op(
        "amanda_tools::look",
        look,
        mutates_args=(),
        schema="(Tensor[] tensors, int number) -> Tensor[]",
    )
    operator.register_fake(copies)
    return operator
