"""The driver: what of autograd is replaced, and how values are differentiated.

autograd wraps a value in a box while it is differentiated. Every operator is a closure of one
function, ``primitive``; users bind these closures by name. Therefore their code is replaced, and
not the names.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from amanda.driver import Namespace, PatchSet
from autograd import core, tracer
from autograd.builtins import SequenceBox
from autograd.builtins import tuple as tuple_
from autograd.extend import Box, VJPNode, defjvp, defvjp, defvjp_argnums, primitive, vspace
from autograd.numpy.numpy_boxes import ArrayBox

from amanda_autograd.plugin import AutogradDriver

Vjp = Callable[[list[Any]], list[Any]]


def _hook(f_raw: Any, f_wrapped: Any, is_ufunc: Any) -> Any:
    """A function with the free variables of a primitive; its code stands in for theirs."""

    def hooked(*args: Any, **kwargs: Any) -> Any:
        from amanda_autograd.driver import AutogradEagerDriver

        assert f_raw is not None or is_ufunc
        return AutogradEagerDriver.attached.intercepted(f_wrapped, args, kwargs)

    return hooked


HOOK: types.CodeType = _hook(None, None, None).__code__
PRIMITIVE: types.CodeType = np.sum and tracer.primitive(abs).__code__


def vanilla(operator: Any) -> Callable[..., Any]:
    """The operator as it is without the driver."""
    code, scope = PRIMITIVE, operator.__globals__
    function = types.FunctionType(code, scope, operator.__name__, None, operator.__closure__)
    function.__kwdefaults__ = operator.__kwdefaults__
    return function


@primitive
def straight(value: Any, old: Any) -> Any:
    """`value`, whose gradient goes to `old`."""
    return value


defvjp(straight, lambda ans, value, old: lambda g: g, argnums=[1])
defjvp(straight, lambda g, ans, value, old: g, argnums=[1])


@primitive
def through(vjp: Vjp, outputs: Sequence[Any], *inputs: Any) -> Any:
    """`outputs`, whose gradients go through `vjp` to `inputs`."""
    return tuple(outputs)


def _through_vjp(argnums: Sequence[int], ans: Any, args: Any, kwargs: Any) -> Any:
    def backward(gradients: Any) -> list[Any]:
        passed = dict(enumerate(args[0](list(gradients)), start=2))
        return [vspace(args[i]).zeros() if passed[i] is None else passed[i] for i in argnums]

    return backward


defvjp_argnums(through, _through_vjp)


class AutogradEagerDriver(AutogradDriver):
    """Instruments autograd while it is attached.

    Attributes:
        attached: the instance that is attached.
    """

    attached: AutogradEagerDriver

    @property
    def namespace(self) -> Namespace:
        """The name of the framework for mapping rules and results."""
        return Namespace("autograd/1/eager")

    def patch(self, patches: PatchSet) -> None:
        """Replace the code of all operators, of those that are defined later, and the pass."""
        AutogradEagerDriver.attached = self
        for operator in list(tracer.trace_primitives_map.values()):
            patches.set(operator, "__code__", HOOK)
        patches.wrap(tracer, "wraps", lambda wraps: functools.partial(self._wraps, patches, wraps))
        patches.wrap(core, "backward_pass", self._passing_backward)

    def _wraps(self, patches: PatchSet, wraps: Any, function: Any, **kwargs: Any) -> Any:
        """``tracer.wraps``, which decorates every primitive when it is defined."""

        def decorate(wrapped: Any) -> Any:
            if wrapped.__code__ is PRIMITIVE:
                patches.set(wrapped, "__code__", HOOK)
            return wraps(function, **kwargs)(wrapped)

        return decorate

    def _passing_backward(self, backward_pass: Any) -> Any:
        def run(*args: Any) -> Any:
            with self.backward_pass():
                return backward_pass(*args)

        return run

    def intercepted(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an operator."""
        if not self.is_active or operator in (straight, through):
            return vanilla(operator)(*args, **kwargs)
        dispatched = kwargs.pop("called_by_autograd_dispatcher", False)

        def function(*args: Any, **kwargs: Any) -> Any:
            result = vanilla(operator)(*args, called_by_autograd_dispatcher=dispatched, **kwargs)
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
        boxed = isinstance(tensor, Box) and isinstance(tensor._node, VJPNode)
        return boxed and not isinstance(tensor._value, Box)

    def with_vjp(self, outputs: list[Any], inputs: list[Any], vjp: Vjp) -> list[Any]:
        """Boxes of `outputs` behind an operator of our own."""
        with self.vanilla():
            return list(through(vjp, [self.unbox(output) for output in outputs], *inputs))

    def straight_through(self, value: Any, old: Any) -> Any:
        """`value` with the gradient of `old`, in every kind of differentiation."""
        with self.vanilla():
            return straight(value, old)

    def differentiate(
        self, function: Callable[[list[Any]], list[Any]], inputs: list[Any]
    ) -> tuple[list[Any], Vjp]:
        """Trace `function` by itself."""
        wanted = [i for i, x in enumerate(inputs) if x is not None and self.wants_gradient(x)]
        values = tuple(self.unbox(inputs[i]) for i in wanted)
        root, top, given = VJPNode.new_root(), tracer.trace_stack.top, list(inputs)
        try:
            with tracer.trace_stack.new_trace() as trace, self.vanilla():
                boxes = tracer.new_box(values, trace, root)
                for position, index in enumerate(wanted):
                    given[index] = boxes[position]
            outputs = function(given)
            with self.vanilla():
                result = tuple_(outputs)
        finally:
            tracer.trace_stack.top = top

        def vjp(gradients: list[Any]) -> list[Any]:
            passed: list[Any] = [None] * len(inputs)
            if isinstance(result, Box) and result._trace == trace:
                zeros = [vspace(value).zeros() for value in result._value]
                told = [z if g is None else g for g, z in zip(gradients, zeros, strict=True)]
                for i, gradient in zip(wanted, core.backward_pass(tuple(told), result._node)):
                    passed[i] = gradient
            return passed

        return [self.unbox(output) for output in outputs], vjp
