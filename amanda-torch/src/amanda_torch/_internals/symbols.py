"""Declaring private symbols, and looking for them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from amanda.python.signatures import annotations_of

EAGER_SYMBOLS: list[str] = []
COMPILER_SYMBOLS: list[str] = []
ABSENT: Any = object()


def missing(*, compiler: bool = False) -> list[str]:
    """The dotted names of the private symbols that this PyTorch does not have.

    Args:
        compiler: look for those of the compiler instead, which imports ``torch._dynamo``
            (about two seconds).
    """
    return [
        path
        for path in (COMPILER_SYMBOLS if compiler else EAGER_SYMBOLS)
        if find_symbol(path) is ABSENT
    ]


def find_symbol(path: str) -> Any:
    """The object of a dotted name; ``ABSENT`` if any part of the name is missing."""
    first, *names = path.split(".")
    found: Any = sys.modules[first]
    for name in names:
        owner, found = found, getattr(found, name, ABSENT)
        if found is ABSENT and isinstance(owner, type):
            # Attributes of instances are found in the annotations of the class.
            found = annotations_of(owner).get(name, ABSENT)
        if found is ABSENT:
            break
    return found


def require(*paths: str) -> None:
    """Declare symbols that other code looks up itself."""
    EAGER_SYMBOLS.extend(paths)


def symbol(path: str) -> Any:
    """Declare a symbol and look it up; if it is missing, a function that says so when called."""
    require(path)
    found = find_symbol(path)
    if found is not ABSENT:
        return found

    def gone(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"PyTorch {torch.__version__} has no {path}")

    return gone
