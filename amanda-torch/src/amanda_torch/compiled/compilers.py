"""Which compiler gets captured graphs: the program's, one that was asked for, or none."""

from __future__ import annotations

import os
from typing import Any

from amanda_torch.plugin import COMPILER_VARIABLE

AUTO = "auto"
"""The compiler without it: the program's own one, where no routine has to run between operators."""

EAGER_COMPILERS = frozenset({"eager", "eager_noexcept", "eager_debug"})
"""The compilers that run a graph operator by operator."""


def asked_compiler() -> str:
    """The compiler that the environment names; `AUTO` without one."""
    return os.environ.get(COMPILER_VARIABLE, AUTO)


OWN_COMPILER = "own"
"""The name by which it asks for the compiler that the program has chosen for a function."""


def name_of_compiler(compiler: Any) -> str:
    """How messages call a compiler of ``torch.compile``."""
    name = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None)
    return str(name or type(compiler).__name__)
