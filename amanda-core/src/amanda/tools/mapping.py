"""Context mapping: rules that translate contexts into framework-neutral keys (paper, section 5.2).

A tool that depends on ``MappingTool.standard()`` reads ``context["op_type"]`` and other keys on any
framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from amanda.interface.context import OpContext
from amanda.interface.namespace import Namespace
from amanda.interface.tool import Tool
from amanda.registry import plugins

Rule = Callable[[OpContext], Any]


class MappingTool(Tool):
    """Runs rules on the context of each operator before other tools analyse it.

    Args:
        rules: pairs of a namespace prefix and a rule. A rule is a function of the context, or a
            pair of functions (before, after): the first one runs before the analyses of the tools
            that depend on this one, the second one after all analyses of an instrumentation point.
            Either may be None.

    Raises:
        TypeError: a rule does not have this form.
    """

    def __init__(self, rules: Iterable[Sequence[Any]]) -> None:
        super().__init__()
        self._rules = [_parse(rule) for rule in rules]
        self._matching: dict[str, tuple[list[Rule], list[Rule]]] = {}

    @classmethod
    def standard(cls) -> MappingTool:
        """Create a tool with the rules of all installed packages.

        They set ``op_type`` (canonical: ``conv2d``, ``linear``, ...), ``backward_op_type``,
        ``weight_index`` and ``bias_index`` (positions among the inputs), ``weight_layout`` and
        ``data_layout``; and the rule that :func:`amanda.tools.canonical.attributes` runs. A key
        that does not apply to an operator is None.
        """
        found = cls(plugins.mapping_rules())
        found.only_watches = True
        return found

    def before_analyses(self, context: OpContext) -> None:
        found = self._matching.get(context.namespace) or self._matched(context.namespace)
        for rule in found[0]:
            rule(context)

    def after_analyses(self, context: OpContext) -> None:
        found = self._matching.get(context.namespace) or self._matched(context.namespace)
        for rule in found[1]:
            rule(context)

    def _matched(self, namespace: Namespace) -> tuple[list[Rule], list[Rule]]:
        """The rules of a namespace, looked up once: there are few, and many operators in each."""
        rules = [rule for rule in self._rules if namespace.matches(rule[0])]
        found = [r for _, r, _ in rules if r is not None], [r for _, _, r in rules if r is not None]
        self._matching[namespace] = found
        return found


def _parse(rule: Sequence[Any]) -> tuple[str, Rule | None, Rule | None]:
    prefix, *functions = rule
    if len(functions) == 1 and isinstance(functions[0], (list, tuple)):
        functions = list(functions[0])
    if (
        not isinstance(prefix, str)
        or not 1 <= len(functions) <= 2
        or not all(f is None or callable(f) for f in functions)
    ):
        raise TypeError(
            f"a mapping rule is [namespace, function] or [namespace, (before, after)], got {rule!r}"
        )
    before, after = (*functions, None)[:2]
    return prefix, before, after
