"""``remat``: recomputes activations in the backward pass, to keep saved memory within a limit."""

from amanda_tools.remat.options import RematOptions
from amanda_tools.remat.tool import RematTool

__all__ = ["RematOptions", "RematTool"]
