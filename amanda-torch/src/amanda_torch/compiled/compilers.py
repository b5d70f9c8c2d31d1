"""Determines the compiler of captured graphs: the program's, one chosen by the environment, or
none."""

from __future__ import annotations

import os
from typing import Any

from amanda_torch.plugin import COMPILER_VARIABLE

AUTO = "auto"
"""The default: the program's own compiler, if no routine has to run between operators."""

EAGER_COMPILERS = frozenset({"eager", "eager_noexcept", "eager_debug"})
"""The compilers that run a graph operator by operator."""


def asked_compiler() -> str:
    """The compiler that the environment names; `AUTO` by default."""
    return os.environ.get(COMPILER_VARIABLE, AUTO)


OWN_COMPILER = "own"
"""The name for the program's own compiler of a function."""


def name_of_compiler(compiler: Any) -> str:
    """The name of a compiler of ``torch.compile`` in messages."""
    name = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None)
    return str(name or type(compiler).__name__)
