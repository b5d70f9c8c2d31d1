"""``path``: effective paths: the critical neurons, synapses and weights of an input or a class.

:func:`rule` registers a rule for operators that have none, :func:`similarity` and
:func:`containment` compare paths, :func:`read` and :func:`write` are for files of paths.
"""

from amanda_tools.path.effective_paths import (
    Mask,
    OpPath,
    Path,
    containment,
    read,
    similarity,
    write,
)
from amanda_tools.path.rule_call import Call, NoRule, Wanted
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
