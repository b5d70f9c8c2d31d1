"""The programs of both frameworks: ``@program(packages)`` marks one, :func:`collect` finds all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.programs.comparison import Program

Function = Callable[[], Any]


def program(
    *packages: str, ranks: int = 1, environment: Mapping[str, str] | None = None
) -> Callable[[Function], Program]:
    """Mark a function as a program.

    Args:
        packages: distributions whose versions stand in the table; the first is the one that the
            program is about.
        ranks: how many processes run it together.
        environment: variables that its process needs before anything is imported.
    """

    def mark(function: Function) -> Program:
        return Program(
            name=function.__name__,
            packages=packages,
            framework=function.__module__.rpartition(".")[2].partition("_")[0],
            ranks=ranks,
            environment=environment or {},
            function=function,
        )

    return mark


def collect(framework: str) -> dict[str, Program]:
    """All programs of a framework, by name; importing them imports no package but itself."""
    found: dict[str, Program] = {}
    for path in sorted(Path(__file__).parent.glob(f"{framework}_*.py")):
        module = importlib.import_module(f"tests.programs.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, Program) and value.framework == framework:
                assert found.setdefault(value.name, value) is value, value.name
    return found
