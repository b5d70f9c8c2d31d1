"""Every private symbol of PyTorch that this package uses, under a name that says what it does.

The other modules call these functions and touch nothing private themselves (ruff's SLF001 checks
that)::

    if _internals.in_backward():
        ...

A symbol is declared where it is used, with :func:`~amanda_torch._internals.symbols.symbol` or
:func:`~amanda_torch._internals.symbols.require`. The drivers ask :func:`missing` when they attach,
so that a PyTorch without one of them gives an error that names it. Observations in comments were
made with PyTorch 2.13.
"""

from amanda_torch._internals.autograd import *
from amanda_torch._internals.collectives import *
from amanda_torch._internals.compiler import *
from amanda_torch._internals.function_modes import *
from amanda_torch._internals.graphs import *
from amanda_torch._internals.keras import *
from amanda_torch._internals.modules import *
from amanda_torch._internals.notes import *
from amanda_torch._internals.operators import *
from amanda_torch._internals.python_frames import *
from amanda_torch._internals.symbols import *
from amanda_torch._internals.tensors import *
from amanda_torch._internals.threads import *
