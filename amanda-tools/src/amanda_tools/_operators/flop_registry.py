"""The registry of FLOP formulas: floating-point operations by shapes and attributes.

A formula takes one :class:`~amanda_tools._operators.signature.CallShapes` and returns the FLOPs of
one execution, a multiplication and an addition counting two::

    register("my_op", lambda call: 2 * math.prod(call.inputs[0]))
    formula_of("my_op").flops(CallShapes(Signature("my_op"), [(3, 4)]))     # 24
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from amanda.tools.description import OpDescription
from amanda_tools._operators import cost, gradient_cost
from amanda_tools._operators.decompositions import COUNTS
from amanda_tools._operators.op_types import is_free_backward
from amanda_tools._operators.signature import CallShapes
from amanda_tools._operators.torch_formulas import torch_formula

Formula = Callable[[CallShapes], "int | None"]


@attrs.frozen
class FlopFormula:
    """A registered formula.

    Attributes:
        formula: the function.
        reads_outputs: False if it does not read ``call.outputs``.
        source: where it comes from, as results show it.
    """

    formula: Formula
    reads_outputs: bool = True
    source: str = "formula"

    def flops(self, call: CallShapes) -> int | None:
        """Return the FLOPs of a call; None for a form that the formula does not know."""
        try:
            return self.formula(call)
        except (LookupError, TypeError, ValueError, StopIteration):
            return None


_FORWARD: dict[str, FlopFormula] = {}
_BACKWARD: dict[str, FlopFormula] = {}


def register(
    name: str, formula: Formula, *, backward: bool = False, reads_outputs: bool = True
) -> None:
    """Register the FLOP formula of a type of operator, in place of one that it may have.

    ``flops``, ``summary`` and ``remat`` use it, for scopes that begin later.

    Args:
        name: the canonical type (``conv2d``); the framework's own name for an operator without one.
            With `backward` the name of the backward operator in its framework, or the canonical
            type of it (``conv2d_backward``), which holds where a framework has one backward
            operator for each operator.
        formula: ``formula(call)`` returns the FLOPs of one execution as an int, or None where it
            does not know them. A ``LookupError``, ``TypeError`` or ``ValueError`` means None, too.
            ``call.inputs`` and ``call.outputs`` are the shapes of the tensors, tuples of int, with
            None for an absent tensor; ``call.attributes`` are the canonical attributes by name, and
            the framework's own. A backward operator's inputs are the gradients that it takes,
            its outputs those that it computes; ``call.forward`` is the call of the forward
            operator, and ``call.forward_flops`` its FLOPs.
        backward: True for backward operators.
        reads_outputs: False if the formula does not read ``call.outputs``. Such an operator counts
            as soon as it begins where a checkpoint runs it again.

    Raises:
        TypeError: `name` is no text, or `formula` cannot be called.
    """
    if not isinstance(name, str) or not callable(formula):
        raise TypeError(f"register() takes a name and a function, got {name!r} and {formula!r}")
    table = _BACKWARD if backward else _FORWARD
    table[name] = FlopFormula(formula, reads_outputs)


def formula_of(kind: str, name: str = "", op: Any = None) -> FlopFormula | None:
    """Return the formula of a forward operator; None if there is none.

    Args:
        kind: canonical type.
        name: the framework's name for it.
        op: the operator as its framework has it, for a formula of PyTorch's counter.
    """
    found = _FORWARD.get(kind) or _FORWARD.get(name)
    if found is None and op is not None:
        formula = torch_formula(op)
        if formula is not None:
            return FlopFormula(formula, source="torch.utils.flop_counter")
    return found


def backward_formula_of(op: OpDescription, forward: OpDescription) -> FlopFormula | None:
    """Return the formula of a backward operator; None if there is none.

    Args:
        op: the backward operator.
        forward: its forward operator.
    """
    # PyTorch appends a number.
    found = _BACKWARD.get(op.name) or _BACKWARD.get(op.name.rstrip("0123456789"))
    if found is not None or is_free_backward(op.type, op.name):
        return found
    # One backward operator for each operator, without a canonical type of its own.
    is_only_one = op.type == op.name == f"{forward.name}_backward"
    return _BACKWARD.get(f"{forward.type}_backward" if is_only_one else op.type)


def register_ours() -> None:
    """Register the formulas of this package."""
    for kind, formula in {**cost.FORMULAS, **COUNTS}.items():
        register(kind, formula, reads_outputs=formula in cost.READING_OUTPUTS)
    for name, formula in gradient_cost.FORMULAS.items():
        register(name, formula, backward=True)


register_ours()
