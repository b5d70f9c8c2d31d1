"""Tensors that a replacement captures in addition to its inputs, and their gradients.

A tool that puts one function in the place of several operators (``SubgraphRewritingTool``) replaces
each of them: all but the last by routines that keep their inputs, the last one by the function of
everything that was kept. That function captures the inputs of the other operators, and has to be
differentiated with respect to them. Where the gradient is in the same graph already, the gradient
call of the operator whose input a captured tensor is hands its gradient on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import tensorflow as tf

from amanda_tensorflow.gradient_map.recording import GradientCall
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.graphs.vjp import Tensors, after_routines, derived, is_zeros
from amanda_tensorflow.operators.types import is_differentiable


def captured_tensors(made: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The tensors that a replacement captures, each once, if they can have a gradient.

    Args:
        made: the operators that the replacement has added to the copy.
        given: its inputs.
    """
    new, inputs = {op.name for op in made}, {id(tensor) for tensor in given}
    found = {
        id(tensor): tensor
        for op in made
        for tensor in op.inputs
        if tensor.op.name not in new and id(tensor) not in inputs
    }
    return [tensor for tensor in found.values() if is_differentiable(tensor)]


@attrs.frozen(eq=False)
class ReplacementCapture:
    """A replaced operator whose replacement captures tensors.

    Attributes:
        site: where the operator is.
        name: its name in the vanilla graph.
        outputs: the outputs of the replacement.
        tensors: the captured tensors.
    """

    site: OpSite
    name: str
    outputs: Tensors
    tensors: Sequence[Any]

    def call_before(self, site: OpSite, call: GradientCall) -> GradientCall | None:
        """The last gradient call of the operator before another call; None if there is none."""
        graph, limit = self.site.graph, site.position(call)
        earlier = [
            other
            for other in site.log.calls[:limit]
            if other.forward.name == self.name and other.forward.graph() is graph
        ]
        return earlier[-1] if earlier else None


class ReplacementCaptures:
    """The captures in one copy.

    Args:
        of_outputs: gives the gradients of the outputs of a gradient call's forward operator.
    """

    def __init__(self, of_outputs: Callable[[OpSite, GradientCall], Tensors]) -> None:
        self._of_outputs = of_outputs
        self._noted: list[ReplacementCapture] = []

    def note(self, capture: ReplacementCapture) -> None:
        """Note a replacement, if it captures anything."""
        if capture.tensors:
            self._noted.append(capture)

    def added(self, site: OpSite, call: GradientCall, given: Tensors, found: Tensors) -> Tensors:
        """Add the gradients from replacements that capture an operator's inputs.

        Args:
            call: the operator's gradient call.
            given: the inputs that the operator's own replacement was given.
            found: their gradients so far; None where they are not wanted.
        """
        result = list(found)
        for capture in self._noted:
            ids = {id(tensor) for tensor in capture.tensors}
            wanted = [
                i
                for i, (tensor, gradient) in enumerate(zip(given, found, strict=False))
                if gradient is not None and id(tensor) in ids
            ]
            earlier = capture.call_before(site, call) if wanted else None
            if earlier is None:
                continue
            inputs = [given[i] for i in wanted]
            new = after_routines(
                capture.site.states[capture.name].routines,
                self._of_outputs(site, earlier),
                partial(derived, capture.outputs, inputs),
            )
            for i, gradient in zip(wanted, new, strict=True):
                result[i] = _sum([result[i], gradient])
        return result


def _sum(gradients: Iterable[Any]) -> Any:
    """The sum of the gradients that are there, without zeros that stand for missing ones."""
    known = [gradient for gradient in gradients if gradient is not None]
    present = [tf.convert_to_tensor(g) for g in known if not is_zeros(g)]
    return tf.add_n(present) if len(present) > 1 else (present or known)[0]
