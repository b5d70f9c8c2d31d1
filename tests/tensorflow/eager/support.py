"""Tools and comparisons that the tests of TensorFlow's eager driver share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import amanda

DRIVERS = ["tensorflow-eager"]


def apply(*tools: amanda.Tool) -> amanda.apply:
    """``amanda.apply`` with the eager driver and no other."""
    return amanda.apply(*tools, drivers=DRIVERS)


class Seen(amanda.Tool):
    """Notes the ids of the operators that it analyses, and what is asked for beside them."""

    def __init__(
        self, only: str = "", look: Callable[[amanda.OpContext], Any] | None = None
    ) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.backward_ids: list[str] = []
        self._only = only
        self._look = look
        self.add_inst_for_op(self.note)
        self.add_inst_for_op(self.note_backward, backward=True)

    def note(self, context: amanda.OpContext) -> None:
        if self._only in ("", context.get_op().type):
            self.ids.append(context.get_op_id())
            if self._look is not None:
                self._look(context)

    def note_backward(self, context: amanda.OpContext) -> None:
        if self._only in ("", context.get_op().type):
            self.backward_ids.append(context.get_backward_op_id() or "")


class Acting(amanda.Tool):
    """Calls functions for the forward operators of one type and for their backward operators."""

    def __init__(
        self,
        only: str,
        forward: Callable[[amanda.OpContext], Any] | None = None,
        backward: Callable[[amanda.OpContext], Any] | None = None,
        after: Callable[[amanda.OpContext], Any] | None = None,
    ) -> None:
        super().__init__()
        for analysis, where in ((forward, False), (backward, True)):
            if analysis is not None:
                self.add_inst_for_op(_only(only, analysis), backward=where)
        if after is not None:
            self.add_inst_for_op(_only(only, after), backward=True, require_outputs=True)


def _only(kind: str, analysis: Callable[[amanda.OpContext], Any]) -> Callable[..., Any]:
    def filtered(context: amanda.OpContext) -> None:
        if kind in ("", context.get_op().type):
            analysis(context)

    return filtered


class Identity(amanda.Tool):
    """Identity routines at all points of all operators, and on whole operators.

    Args:
        returned: what a routine returns for the tensors it gets.
    """

    def __init__(self, returned: Callable[..., Any]) -> None:
        super().__init__()
        self.calls = 0
        self._returned = returned
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)
        context.insert_before_backward_op(self.routine)
        context.insert_after_backward_op(self.routine)

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.routine)
        context.insert_after_backward_op(self.routine)

    def routine(self, *tensors: Any) -> Any:
        self.calls += 1
        return self._returned(*tensors)


def nothing(*tensors: Any) -> None:
    """A routine that returns None."""


def same(*tensors: Any) -> Sequence[Any]:
    """A routine that returns what it gets."""
    return tensors


def copies(*tensors: Any) -> list[Any]:
    """A routine that returns equal tensors in place of those that it may replace."""
    fixed = (tf.resource, tf.variant)
    return [None if t is None or t.dtype in fixed else tf.identity(t) for t in tensors]


def bits(values: Any) -> list[Any]:
    """All tensors of a structure in a form in which equal means equal in every bit."""
    found: list[Any] = []
    for value in tf.nest.flatten(values, expand_composites=True):
        if isinstance(value, tf.Tensor) and value.dtype in (tf.resource, tf.variant):
            continue
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        content = array.tolist() if array.dtype == object else array.tobytes()
        found.append((array.dtype, array.shape, content))
    return found


def gradients(
    build: Callable[..., Any], *sources: Any, persistent: bool = False
) -> tuple[Any, list[Any]]:
    """The result of `build`, and the gradients of its sum."""
    with tf.GradientTape(persistent=persistent) as tape:
        for source in sources:
            tape.watch(source)
        result = build(*sources)
    return result, tape.gradient(result, list(sources))
