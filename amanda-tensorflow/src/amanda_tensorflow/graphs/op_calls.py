"""What instrumenting one operator of a graph consists of: its call, its tensors, its limits."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import Any

import attrs

from amanda.engine.plan import ActionPlan
from amanda.errors import CapabilityError
from amanda.interface.calls import OpCall
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.python_nodes import is_routable
from amanda_tensorflow.graphs.sites import (
    ReadVariable,
    Site,
    value_of,
    variable_key,
    variable_view,
)
from amanda_tensorflow.operators.types import runner


@attrs.define(eq=False)
class GraphOpCall(OpCall):
    """What core is told of an operator of a graph; its inputs are tensors of the copy."""

    site: Site | None = None
    source: Any = None
    read: ReadVariable | None = None

    def value(self, index: int) -> Any:
        assert self.site is not None
        assert self.read is not None
        return value_of(self.site, self.source.inputs[index], self.read)

    def value_key(self, index: int) -> Hashable | None:
        assert self.site is not None
        return variable_key(self.site, self.source.inputs[index])

    def value_view(self, index: int) -> tuple[Any, ...]:
        assert self.site is not None
        return variable_view(self.site, self.source.inputs[index])

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        return runner(self.source)


def separate(tensors: Sequence[Any], only: Container[int] | None = None) -> list[Any]:
    """Copies of tensors (`only` of those at some positions), so that one that is given twice
    has two gradients."""
    return [
        _internals.identity(t) if is_routable(t) and (only is None or i in only) else t
        for i, t in enumerate(tensors)
    ]


def refuse_unknown_gradients(site: Site, op: Any, plan: ActionPlan) -> None:
    """Refuse what needs to know the gradients of an operator that were built too early.

    Raises:
        CapabilityError: a tool acts on them.
    """
    whole = [*plan.before_backward, *plan.after_backward]
    whole += [action for action in (plan.replace_backward, plan.replace) if action is not None]
    whole += [action for action in (*plan.before, *plan.after) if action.differentiable]
    if whole and any(call.forward.name == op.name for call in site.log.calls):
        raise CapabilityError(
            f"{whole[0].routine} acts on the gradient of op {whole[0].op_id}, which was built "
            "before `import amanda`, so that it is not known exactly; import amanda before the "
            "function is traced or the gradient is added to the graph"
        )


def refuse_captures(graph: Any) -> None:
    """A body has the inputs that its operator gives it, and no others.

    Raises:
        CapabilityError: a traced routine uses a tensor from outside of the body.
    """
    if graph.external_captures:
        names = ", ".join(str(t.name if hasattr(t, "name") else t) for t in graph.external_captures)
        raise CapabilityError(
            f"a traceable routine in the loop or branch {graph.name} uses tensors from "
            f"outside of it ({names:.120}); let it use constants (numpy arrays), or leave out "
            "@amanda.traceable"
        )


def is_ambiguous(site: Site, op: Any, inputs: Sequence[Any]) -> bool:
    """Whether the operator's gradient cannot be told which of its inputs it reads: one
    tensor was given twice, and is not the same twice any more. It is derived anew then."""
    seen: dict[int, Any] = {}
    if not any(seen.setdefault(id(t), n) is not n for t, n in zip(op.inputs, inputs, strict=True)):
        return False
    return any(call.forward.name == op.name for call in site.log.calls)


def readers_of(op: Any) -> Iterator[Any]:
    """The operators that read the outputs of a vanilla operator."""
    return (reader for tensor in op.outputs for reader in tensor.consumers())


def has_value(tensor: Any) -> bool:
    """Whether a tensor is there, and is no reference to a variable."""
    return tensor is not None and not tensor.dtype._is_ref_dtype
