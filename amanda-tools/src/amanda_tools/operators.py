"""The table of operators, to which packages and programs add rows for operators of their own.

What the tools know of a canonical type is in its row: whether it counts FLOPs, whether it can make
a NaN, how ``path`` goes through it, which tools act on it by default::

    from amanda_tools import operators

    operators.register("my_gate", like="relu")
    operators.register("my_scan", group="moving", traits=("passes_values",))
    operators.register("my_product", flops=lambda call: 2 * math.prod(call.inputs[0]))
"""

from amanda_tools._operators.op_table import GROUPS, TRAITS, OperatorRow
from amanda_tools._operators.op_table import row_of as find
from amanda_tools._operators.op_table import set_row as register

__all__ = ["GROUPS", "TRAITS", "OperatorRow", "find", "register"]
