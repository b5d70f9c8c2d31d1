"""The selection common to all tools: ``--ops``, ``--modules``, ``--every`` and ``--skip``."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from amanda.interface.action import ActionKind
from amanda.interface.context import OpContext
from amanda.interface.tool import Tool
from amanda.tools.description import describe, op_name

Analysis = Callable[[OpContext], Any]

_GATED = (
    ActionKind.BEFORE_OP,
    ActionKind.AFTER_OP,
    ActionKind.BEFORE_BACKWARD_OP,
    ActionKind.AFTER_BACKWARD_OP,
)
"""Routines that may be left out of an execution; a replacement may not."""


@attrs.frozen
class Selection:
    """Which operators the tools of a run see, and at which of their executions.

    Attributes:
        ops: types or names of operators; a backward operator counts with its forward
            operator's too. None for all.
        modules: patterns of module paths. None for all.
        every: routines run at each N-th execution of an operator.
        skip: routines do not run at the first N executions of an operator.
    """

    ops: Sequence[str] = ()
    modules: Sequence[str] = ()
    every: int = 1
    skip: int = 0
    _met: set[str] = attrs.field(factory=set, init=False, eq=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.ops or self.modules or self.every > 1 or self.skip)

    def restrict(self, *tools: Tool) -> None:
        """Make tools, and those that they depend on, see no more than what is selected.

        Mapping rules and what else prepares the context for others still sees everything.
        """
        for tool in tools if self else ():
            self.restrict(*tool.dependencies)
            analyses = vars(tool).get("_analyses", {})
            for point in tuple(analyses):
                found = tool.analyses(point)
                # A tool on which two others depend is restricted once.
                if not any(isinstance(analysis, _Selected) for analysis in found):
                    analyses[point] = tuple((False, _Selected(self, a)) for a in found)

    def matches(self, context: OpContext) -> bool:
        """Whether an operator is selected."""
        op = describe(context)
        forward = (str(context["op_type"] or ""), op_name(context.get_op()))
        modules = [p for p in self.modules if fnmatch.fnmatchcase(op.module, p)]
        ops = [name for name in self.ops if name in forward or op.is_selected((name,))]
        self._met.update(modules, ops)
        return bool(modules or not self.modules) and bool(ops or not self.ops)

    def unmet(self) -> list[str]:
        """The options that fit no operator, each with what it says, as ``--ops con2d``."""
        given = {"--ops": self.ops, "--modules": self.modules}
        return [
            f"{option} {name}"
            for option, names in given.items()
            for name in names
            if name not in self._met
        ]

    def gated(self, routine: Callable[..., Any]) -> Callable[..., Any]:
        """A routine that runs at the selected executions only."""
        execution = -1

        @functools.wraps(routine)
        def gate(*arguments: Any, **named: Any) -> Any:
            nonlocal execution
            execution += 1
            if execution < self.skip or (execution - self.skip) % self.every:
                return None
            return routine(*arguments, **named)

        return gate


class _Selected:
    """An analysis of the selected operators, whose routines run at the selected executions."""

    def __init__(self, selection: Selection, analysis: Analysis) -> None:
        self._selection = selection
        self._analysis = analysis
        self.__name__ = getattr(analysis, "__name__", repr(analysis))

    def __call__(self, context: OpContext) -> None:
        selection = self._selection
        if not selection.matches(context):
            return
        recorded = context._state.actions  # noqa: SLF001
        known = {kind: len(recorded.get(kind, ())) for kind in _GATED}
        self._analysis(context)
        if selection.every == 1 and not selection.skip:
            return
        for kind in _GATED:
            actions = recorded.get(kind, [])
            for i in range(known[kind], len(actions)):
                actions[i] = attrs.evolve(actions[i], func=selection.gated(actions[i].func))
