"""The driver: what of autograd is replaced, and how values are differentiated.

autograd wraps a value in a box while it is differentiated. Every operator is a closure of one
function, ``primitive``; users bind these closures by name. Therefore their code is replaced, and
not the names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from autograd import core, tracer
from autograd.builtins import SequenceBox
from autograd.builtins import tuple as tuple_
from autograd.extend import Box, VJPNode, defjvp, defvjp, defvjp_argnums, primitive, vspace
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.util import toposort

from amanda.driver import Namespace, PatchSet
from amanda_autograd._internals import PRIMITIVE, code_calling, is_outermost, node_in, vanilla_of
from amanda_autograd.plugin import AutogradDriver

Vjp = Callable[[list[Any]], list[Any]]


class Known(functools.partial):  # type: ignore[type-arg]
    """The vector-Jacobian product of a node that is not a backward operator of the user's."""


def is_operator(operator: Any) -> bool:
    """Whether a primitive is an operator of tensors, and not one of containers or of ours."""
    return operator.fun.__module__ not in ("autograd.builtins", "autograd.core", __name__)


def joined(outputs: Sequence[Any]) -> Any:
    """A single output by itself, for autograd keeps the items of its containers alive."""
    return outputs[0] if len(outputs) == 1 else tuple_(outputs)


@primitive
def straight(value: Any, old: Any) -> Any:
    """`value`, whose gradient goes to `old`."""
    return value


defvjp(straight, lambda ans, value, old: lambda g: g, argnums=[1])
defjvp(straight, lambda g, ans, value, old: g, argnums=[1])


@primitive
def through(vjp: Vjp, outputs: Sequence[Any], *inputs: Any) -> Any:
    """`outputs`, a single one by itself, whose gradients go through `vjp` to `inputs`."""
    return joined(outputs)


def _through_vjp(argnums: Sequence[int], ans: Any, args: Any, kwargs: Any) -> Any:
    # The closure stays with the graph and must hold none of the arguments.
    vjp, spaces, single = args[0], [vspace(args[i]) for i in argnums], len(args[1]) == 1

    def backward(gradients: Any) -> list[Any]:
        passed = vjp([gradients] if single else list(gradients))
        return [
            space.zeros() if passed[i - 2] is None else passed[i - 2]
            for i, space in zip(argnums, spaces, strict=True)
        ]

    return backward


defvjp_argnums(through, _through_vjp)


class AutogradEagerDriver(AutogradDriver):
    """Instruments autograd while it is attached."""

    @property
    def namespace(self) -> Namespace:
        """The name of the framework for mapping rules and results."""
        return Namespace("autograd/1/eager")

    def patch(self, patches: PatchSet) -> None:
        """Replace the code of all operators, of those that are defined later, and the pass."""
        for operator in list(tracer.trace_primitives_map.values()):
            self._wrap(patches, operator)
        patches.wrap(tracer, "wraps", lambda wraps: functools.partial(self._wraps, patches, wraps))
        patches.wrap(VJPNode, "__init__", self._recording)
        patches.wrap(core, "backward_pass", self._passing_backward)

    def _wrap(self, patches: PatchSet, operator: Any) -> None:
        run = functools.partial(self._intercepted, operator, vanilla_of(operator))
        patches.set(operator, "__code__", code_calling(run))

    def _wraps(self, patches: PatchSet, wraps: Any, function: Any, **kwargs: Any) -> Any:
        """``tracer.wraps``, which decorates every primitive when it is defined."""

        def decorate(wrapped: Any) -> Any:
            if wrapped.__code__ is PRIMITIVE:
                self._wrap(patches, wrapped)
            return wraps(function, **kwargs)(wrapped)

        return decorate

    def _recording(self, init: Any) -> Any:
        def recorded(node: VJPNode, value: Any, operator: Any, *rest: Any) -> None:
            init(node, value, operator, *rest)
            if not is_operator(operator) or operator is through:
                node.vjp = Known(node.vjp)

        return recorded

    def _passing_backward(self, backward_pass: Any) -> Any:
        def run(gradient: Any, end: Any) -> Any:
            for node in toposort(end):
                if node.parents and not isinstance(node.vjp, Known):
                    self.count_unclaimed()
            # Within the function of an outer differentiation the program goes on.
            with self.backward_pass(continues=_is_traced()):
                return backward_pass(gradient, end)

        return run

    def _intercepted(
        self, operator: Any, vanilla: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A call of an operator."""
        if not self.is_active or not is_operator(operator):
            return vanilla(*args, **kwargs)
        dispatched = kwargs.pop("called_by_autograd_dispatcher", False)

        def function(*args: Any, **kwargs: Any) -> Any:
            result = vanilla(*args, called_by_autograd_dispatcher=dispatched, **kwargs)
            # A box of a list of outputs: its items are boxes.
            return list(result) if isinstance(result, SequenceBox) else result

        signature = self.signature(operator, known=operator.fun)
        return self.run_operator(operator, operator.__name__, signature, args, kwargs, function)

    # -- tensors and differentiation --------------------------------------

    def is_tensor(self, value: Any) -> bool:
        """Arrays, NumPy's scalars, and boxes of them."""
        return isinstance(value, (np.ndarray, np.generic, ArrayBox))

    def unbox(self, value: Any) -> Any:
        """The array in a box."""
        return tracer.getval(value)

    def ad_isolated(self) -> AbstractContextManager[None]:
        """Nothing to do: nothing is recorded of arrays without a box."""
        return nullcontext()

    def wants_gradient(self, tensor: Any) -> bool:
        """Whether it is in the box of a backward pass to come, and of no outer one."""
        return isinstance(tensor, Box) and is_outermost(tensor)

    def with_vjp(self, outputs: list[Any], inputs: list[Any], vjp: Vjp) -> list[Any]:
        """Boxes of `outputs` behind an operator of our own."""
        with self.vanilla():
            result = through(vjp, [self.unbox(output) for output in outputs], *inputs)
            return [result] if len(outputs) == 1 else list(result)

    def straight_through(self, value: Any, old: Any) -> Any:
        """`value` with the gradient of `old`, in every kind of differentiation."""
        with self.vanilla():
            return straight(value, old)

    def differentiate(
        self, function: Callable[[list[Any]], list[Any]], inputs: list[Any]
    ) -> tuple[list[Any], Vjp]:
        """Trace `function` by itself."""
        found: dict[int, Any] = {}
        top, given, count = tracer.trace_stack.top, list(inputs), len(inputs)
        try:
            with tracer.trace_stack.new_trace() as trace:
                for i, tensor in enumerate(inputs):
                    if tensor is not None and self.wants_gradient(tensor):
                        leaf = VJPNode.new_root()
                        leaf.vjp = Known(_collect, found, i)
                        given[i] = tracer.new_box(self.unbox(tensor), trace, leaf)
                outputs = function(given)
                with self.vanilla():
                    result = joined(outputs)
        finally:
            tracer.trace_stack.top = top
        end = node_in(result, trace) if isinstance(result, Box) else None
        spaces = [vspace(self.unbox(output)) for output in outputs]

        def vjp(gradients: list[Any]) -> list[Any]:
            if end is None:
                return [None] * count
            told = zip(gradients, spaces, strict=True)
            core.backward_pass(joined([s.zeros() if g is None else g for g, s in told]), end)
            return [found.pop(i, None) for i in range(count)]

        return [self.unbox(output) for output in outputs], vjp


def _is_traced() -> bool:
    """Whether a function that is to be differentiated runs; an exception in one spoils the count
    that autograd keeps of them."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not tracer.trace.__code__:
        frame = frame.f_back
    return frame is not None


def _collect(found: dict[int, Any], position: int, gradient: Any) -> tuple[()]:
    """Ends a trace: the gradient of the input at `position`."""
    found[position] = gradient
    return ()
