"""``remat``: recompute activations in the backward pass, to stay within a budget of memory."""

from amanda_tools.remat.options import RematOptions
from amanda_tools.remat.tool import RematTool

__all__ = ["RematOptions", "RematTool"]
