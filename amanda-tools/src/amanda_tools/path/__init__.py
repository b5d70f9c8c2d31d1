"""``path``: effective paths, the critical neurons, synapses and weights of an input or a class."""

from amanda_tools.path.call import Call, NoRule, Wanted
from amanda_tools.path.paths import Mask, OpPath, Path, containment, read, similarity, write
from amanda_tools.path.rules import rule
from amanda_tools.path.tool import PathOptions, PathTool

__all__ = [
    "Call",
    "Mask",
    "NoRule",
    "OpPath",
    "Path",
    "PathOptions",
    "PathTool",
    "Wanted",
    "containment",
    "read",
    "rule",
    "similarity",
    "write",
]
