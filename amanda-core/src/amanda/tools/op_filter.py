"""A filter for all tools of a scope: which operators they see, at which executions they act.

The options ``--ops``, ``--modules``, ``--every`` and ``--skip`` of ``amanda run`` use it::

    with amanda.apply(tool, op_filter=OpFilter(modules=["layer1.*"], skip=10)):
        train(model)
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from amanda.interface.action import Action, ActionKind
from amanda.interface.context import OpContext
from amanda.interface.tool import Tool
from amanda.tools.description import describe, op_name
from amanda.tools.mapping import MappingTool

_REPLACING = (ActionKind.REPLACE_OP, ActionKind.REPLACE_BACKWARD_OP)
"""Actions that are never left out of an execution: a model is not to change its operators."""


def _names(names: Any) -> tuple[str, ...]:
    """Convert an argument to a tuple of names; a single name may be given as a string.

    Raises:
        TypeError: it is neither.
    """
    found = (names,) if isinstance(names, str) else names
    try:
        found = tuple(found)
    except TypeError:
        found = (None,)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"OpFilter takes names of operators and modules as texts, got {names!r}")
    return found


def _check_number(_: Any, field: Any, value: Any) -> None:
    if not isinstance(value, int):
        raise TypeError(f"OpFilter takes a whole number for {field.name}, got {value!r}")


@attrs.frozen
class OpFilter:
    """Restricts the tools of a scope to some operators and to some of their executions.

    Analysis routines do not see the other operators. Routines do not run at the other
    executions, which each operator counts by itself; a replacement acts at all of them. Mapping
    rules, and other tools that prepare the context, see everything.

    Args:
        ops: types or names of operators, ``["conv2d", "linear"]``; a backward operator is also
            selected by those of its forward operator. Empty for all.
        modules: patterns of module paths, ``["layer1.*"]``. Empty for all.
        every: routines run at each N-th execution of an operator.
        skip: routines do not run at the first N executions of an operator.

    Raises:
        TypeError: `ops` or `modules` are not names, or `every` or `skip` no whole number.
        ValueError: `every` is less than 1, or `skip` less than 0.
    """

    ops: Sequence[str] = attrs.field(default=(), converter=_names)
    modules: Sequence[str] = attrs.field(default=(), converter=_names)
    every: int = attrs.field(default=1, validator=[_check_number, attrs.validators.ge(1)])
    skip: int = attrs.field(default=0, validator=[_check_number, attrs.validators.ge(0)])
    _matched: set[str] = attrs.field(factory=set, init=False, eq=False, repr=False)
    # Whether an operator of a forward pass occurred there; in the order of occurrence.
    _met_ops: dict[str, bool] = attrs.field(factory=dict, init=False, eq=False, repr=False)
    _met_modules: dict[str, bool] = attrs.field(factory=dict, init=False, eq=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.ops or self.modules or self.every > 1 or self.skip)

    @property
    def dependencies(self) -> tuple[Tool, ...]:
        """The tools that a scope with this filter needs: the mapping rules, which name types."""
        return (MappingTool.standard(),) if self.ops else ()

    def selects(self, context: OpContext) -> bool:
        """True if the tools see an operator."""
        op = describe(context)
        forward = (str(context["op_type"] or ""), op_name(context.get_op()))
        modules = [p for p in self.modules if fnmatch.fnmatchcase(op.module, p)]
        ops = [name for name in self.ops if name in forward or op.is_selected((name,))]
        self._matched.update(modules, ops)
        is_forward = context.get_phase() == "forward"
        for met, name in ((self._met_ops, forward[0]), (self._met_modules, op.module)):
            met[name] = is_forward or met.get(name, False)
        return bool(modules or not self.modules) and bool(ops or not self.ops)

    def restrict(self, action: Action) -> Action:
        """The action with a routine that runs at the selected executions only."""
        if self.every == 1 and not self.skip:
            return action
        if action.kind in _REPLACING or getattr(action.func, "amanda_restricted", False):
            return action
        return attrs.evolve(action, func=self._restricted(action.func))

    def _restricted(self, routine: Callable[..., Any]) -> Callable[..., Any]:
        # A counter for each action: all actions of an operator are called at each of its
        # executions, so that their counters agree, unless one was recorded later (reanalyse()).
        execution = -1

        @functools.wraps(routine)
        def restricted(*arguments: Any, **named: Any) -> Any:
            nonlocal execution
            execution += 1
            if execution < self.skip or (execution - self.skip) % self.every:
                return None
            return routine(*arguments, **named)

        restricted.amanda_restricted = True  # type: ignore[attr-defined]
        return restricted

    def unmatched(self) -> list[str]:
        """A line for each name or pattern that has selected no operator, with existing ones."""
        given = {"--ops": (self.ops, self._met_ops), "--modules": (self.modules, self._met_modules)}
        return [
            f"{option} {name} matches no operator that the tools have seen{_met(name, met)}"
            for option, (names, met) in given.items()
            for name in names
            if name not in self._matched
        ]


def _met(name: str, met: Mapping[str, bool]) -> str:
    """The names among which none was selected: similar names, or the first ones.

    Where there are any, only those of forward passes: in a graph the operators of optimizers and
    initializers have their name scope as a module.
    """
    every = [one for one in met if one]
    known = [one for one in every if met[one]] or every
    if not known:
        return ""
    alike = [difflib.get_close_matches(name, names, n=3, cutoff=0.5) for names in (known, every)]
    shown = known if len(known) <= 3 else alike[0] or alike[1] or known[:3]
    more = ", ..." if len(known) > len(shown) else ""
    return f"; there {'is' if len(known) == 1 else 'are'} {', '.join(shown)}{more}"
