"""FLOP formulas of operators: registering them, and finding the one of an operator.

A formula takes one :class:`~amanda_tools._operators.signature.CallShapes` and returns the FLOPs of
one execution, a multiplication and an addition counting two::

    register("my_op", lambda call: 2 * math.prod(call.inputs[0]))
    formula_of("my_op").flops(CallShapes(OpSignature("my_op"), [(3, 4)]))     # 24
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._operators.op_table import FlopFormula, is_free, is_free_backward, row_of, set_row
from amanda_tools._operators.signature import CallShapes
from amanda_tools._operators.torch_formulas import torch_formula

Formula = Callable[[CallShapes], "int | None"]


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
            its outputs the gradients that it computes; ``call.forward`` is the call of the forward
            operator, and ``call.forward_flops`` its FLOPs. In a graph whose shapes are not known
            before it runs, ``call.forward`` has None for inputs that its formula does not read.
        backward: True for backward operators.
        reads_outputs: False if the formula does not read ``call.outputs``. Such an operator counts
            as soon as it begins where a checkpoint runs it again.

    Raises:
        TypeError: `name` is no text, or `formula` cannot be called.
    """
    if not isinstance(name, str) or not callable(formula):
        raise TypeError(f"register() takes a name and a function, got {name!r} and {formula!r}")
    set_row(name, backward=backward, flops=FlopFormula(formula, reads_outputs))


def formula_of(kind: str, name: str = "", op: Any = None) -> FlopFormula | None:
    """Return the formula of a forward operator; None if there is none.

    Args:
        kind: canonical type.
        name: the framework's name for it.
        op: the operator as its framework has it, for a formula of PyTorch's counter.
    """
    # The name of an operator of a library may be that of another one of the framework.
    found = row_of(kind).flops or (None if "::" in kind else row_of(name).flops)
    if found is None and op is not None:
        formula = torch_formula(op)
        if formula is not None:
            return FlopFormula(formula, source="torch.utils.flop_counter")
    return found


def formula_in(context: OpContext, kind: str, name: str) -> FlopFormula | None:
    """Return :func:`formula_of` the operator of a context; None of one that reads a sparse tensor,
    since formulas are of all elements."""
    found = formula_of(kind, name, None if is_free(kind) else context.get_op())
    # In a graph, reading tensors would copy it.
    inputs = context.get_inputs() if found is not None and context.runs_at_once else ()
    layouts = [str(getattr(tensor, "layout", "")) for tensor in inputs]
    return None if any(layout.startswith("torch.sparse_") for layout in layouts) else found


def backward_formula_of(op: OpDescription, forward: OpDescription) -> FlopFormula | None:
    """Return the formula of a backward operator; None if there is none.

    Args:
        op: the backward operator.
        forward: its forward operator.
    """
    names = op.name, op.name.rstrip("0123456789")
    # PyTorch appends a number.
    found = next((f for name in names if (f := row_of(name, backward=True).flops)), None)
    if found is not None or is_free_backward(op.type, op.name):
        return found
    # One backward operator for each operator, without a canonical type of its own.
    is_only_one = op.type == op.name == f"{forward.name}_backward"
    return row_of(f"{forward.type}_backward" if is_only_one else op.type, backward=True).flops
