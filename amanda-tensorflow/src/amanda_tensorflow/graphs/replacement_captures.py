"""Tensors that a replacement uses besides those that it is given.

A tool that puts one function in the place of several operators replaces each of them: the first
ones by routines that keep what they are given, the last one by the function of all that was kept.
That function is differentiated with respect to what it has borrowed, too. Where the gradient is in
the same graph already, that of a borrowed tensor is handed on by the operator that was given it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda_tensorflow.gradient_map.recording import GradientCall
from amanda_tensorflow.graphs.sites import Site
from amanda_tensorflow.graphs.vjp import Tensors, derived, is_zeros


def captured_tensors(made: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The tensors that new operators read and that are neither given nor theirs, each once.

    Args:
        made: the operators that a replacement has added to the copy.
        given: its inputs.
    """
    new, known = {op.name for op in made}, {id(tensor) for tensor in given}
    found = {
        id(tensor): tensor
        for op in made
        for tensor in op.inputs
        if tensor.op.name not in new and id(tensor) not in known
    }
    return [t for t in found.values() if t.dtype.is_floating or t.dtype.is_complex]


@attrs.frozen(eq=False)
class ReplacementCapture:
    """A replaced operator that uses tensors which others were given.

    Attributes:
        site: where it is.
        name: of the vanilla operator.
        outputs: what the replacement gave.
        tensors: what it has borrowed.
    """

    site: Site
    name: str
    outputs: Tensors
    tensors: Sequence[Any]

    def call_before(self, site: Site, call: GradientCall) -> GradientCall | None:
        """Its gradient call in the same gradient as another call; None if there is none."""
        graph, limit = self.site.graph, site.position(call)
        earlier = [
            other
            for other in site.log.calls[:limit]
            if other.forward.name == self.name and other.forward.graph() is graph
        ]
        return earlier[-1] if earlier else None


class ReplacementCaptures:
    """The captures of one copy.

    Args:
        of_outputs: the gradients of the outputs of a gradient call's operator.
    """

    def __init__(self, of_outputs: Callable[[Site, GradientCall], Tensors]) -> None:
        self._of_outputs = of_outputs
        self._known: list[ReplacementCapture] = []

    def note(self, borrower: ReplacementCapture) -> None:
        """Note a replacement that has borrowed something."""
        if borrower.tensors:
            self._known.append(borrower)

    def added(self, site: Site, call: GradientCall, given: Tensors, found: Tensors) -> Tensors:
        """The gradients of what an operator was given, with those that captures have for it.

        Args:
            call: the operator's gradient call.
            given: its tensors, each of which stands for itself alone.
            found: their gradients without captures; None where they are not wanted.
        """
        result = list(found)
        for borrower in self._known:
            ids = {id(tensor) for tensor in borrower.tensors}
            wanted = [
                i
                for i, (tensor, gradient) in enumerate(zip(given, found, strict=False))
                if gradient is not None and id(tensor) in ids
            ]
            earlier = borrower.call_before(site, call) if wanted else None
            if earlier is None:
                continue
            of_outputs = self._of_outputs(site, earlier)
            new = derived(borrower.outputs, [given[i] for i in wanted], of_outputs)
            for i, gradient in zip(wanted, new, strict=True):
                result[i] = _sum([result[i], gradient])
        return result


def _sum(gradients: Iterable[Any]) -> Any:
    known = [gradient for gradient in gradients if gradient is not None]
    present = [tf.convert_to_tensor(g) for g in known if not is_zeros(g)]
    return tf.add_n(present) if len(present) > 1 else (present or known)[0]
