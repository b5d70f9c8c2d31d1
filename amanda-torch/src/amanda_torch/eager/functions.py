"""Intercepts the calls of ``autograd.Function``s, and their backward.

Until PyTorch 2.13 ``Function.apply`` is written in Python and ends up in
``_SingleLevelFunction.apply``, where a patch meets also a method that was bound to a name before
the scope (``cube = Cube.apply``). Since 2.14 it is a function of C, which cannot be replaced where
it was bound before the scope. It calls Python in three cases: it reads ``setup_context``, which
tells the two forms of a function apart; it asks for the arguments with their defaults, in the form
with a ``setup_context``; and under a functorch transform it hands over the whole call. The driver
answers the first two calls so that C makes the third one, which reaches the driver.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from amanda.python.patching import PatchSet, named_as
from amanda_torch import _internals
from amanda_torch.autograd.user_functions import note_created, run_backward
from amanda_torch.eager.interceptors import LOCAL, Interceptor, muted

_ENTERING = _internals.ENTERING

_DESCENDED_PACKAGES = ("torch.utils.checkpoint", "torch.nn.parallel", "torch.distributed.")
"""Packages whose ``autograd.Function``s only wrap other operators."""


def patch(patches: PatchSet) -> None:
    """Intercept each call of an ``autograd.Function``, and each backward of one."""
    patches.wrap(_internals.FUNCTION_NODE, "apply", _backward)
    if hasattr(_internals.FUNCTION_NODE, _internals.FUNCTION_NODE_BOXED):
        patches.wrap(_internals.FUNCTION_NODE, _internals.FUNCTION_NODE_BOXED, _compiled_backward)
    patches.set(_internals.FUNCTION_NODE, "__init__", note_created, create=True)
    if not _internals.FUNCTIONS_ENTER_IN_C:
        patches.set(_internals.FUNCTION_BASE, "apply", classmethod(_apply), create=True)
        return
    patches.set(torch.autograd.Function, "setup_context", _SetupContext(), create=True)
    patches.wrap(_internals.FUNCTIONS, _internals.FUNCTION_DEFAULTS, _bind)
    patches.wrap(_internals.FUNCTIONS, _internals.FUNCTION_TRANSFORM, _transform)


def _asking() -> Interceptor | None:
    """The interceptor of the current thread; None if its calls run vanilla."""
    interceptor = LOCAL.interceptor
    if interceptor is None or interceptor.is_quiet() or not interceptor.is_listening():
        return None
    return interceptor


def _is_descended(cls: Any) -> bool:
    return cls.__module__.startswith(_DESCENDED_PACKAGES) or cls is _internals.HOOK_FUNCTION


def _run(cls: Any, args: Any, kwargs: Any) -> Any:
    """Run an ``autograd.Function`` as an operator, or vanilla."""
    interceptor = _asking()
    if (
        interceptor is None
        or _is_descended(cls)
        or not any(isinstance(arg, torch.Tensor) for arg in (*args, *kwargs.values()))
    ):
        return _internals.apply_function(cls, *args, **kwargs)
    return interceptor.run_function(cls, args, kwargs)


def _backward(vanilla: Any) -> Any:
    """Hide the operators inside the backward of an ``autograd.Function``, which is one operator."""

    @_internals.not_counted_by_warnings
    @functools.partial(named_as, vanilla)
    def apply(self: Any, *args: Any) -> Any:
        interceptor = LOCAL.interceptor
        if not isinstance(self, _internals.FUNCTION_NODE):
            return vanilla(self, *args)
        if interceptor is None or _is_descended(_internals.forward_class(self)):
            return run_backward(self, vanilla, args)
        with muted():
            return run_backward(self, vanilla, args)

    return apply


def _compiled_backward(vanilla: Any) -> Any:
    """Hide the operators inside the backward of a function that a compiler has made."""

    @_internals.not_counted_by_warnings
    @functools.partial(named_as, vanilla)
    def apply(self: Any, *args: Any) -> Any:
        if LOCAL.interceptor is None:
            return vanilla(self, *args)
        with muted():
            return vanilla(self, *args)

    return apply


# -- until 2.13 ---------------------------------------------------------------


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The patch that ``Function.apply`` reaches outside of functorch transforms."""
    return _run(cls, args, kwargs)


# -- since 2.14 ---------------------------------------------------------------


class _SetupContext:
    """The ``setup_context`` that functions inherit: a different one in calls to be intercepted.

    C compares it with PyTorch's own, and asks for the arguments' defaults if it is different.
    """

    def __get__(self, _: Any, cls: Any = None) -> Any:
        if not _ENTERING.take_vanilla() and _is_diverted() and not _is_descended(cls):
            return _another_setup_context
        return _internals.FUNCTION_BASE.setup_context


def _another_setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
    return _internals.FUNCTION_BASE.setup_context(ctx, inputs, output)


def _is_diverted() -> bool:
    # Under a transform the mode reaches the driver.
    return _asking() is not None and not _internals.in_functorch()


def _bind(vanilla: Any) -> Any:
    """The patch of the function by which C fills in default arguments."""

    def bind_default_args(forward: Any, args: Any, kwargs: Any) -> Any:
        if _ENTERING.take_vanilla() or not _is_diverted():
            return vanilla(forward, args, kwargs)
        _ENTERING.divert()
        return args, kwargs

    return bind_default_args


def _transform(vanilla: Any) -> Any:
    """The patch of the function that C calls under functorch, and for intercepted calls."""
    inherited = _internals.FUNCTION_BASE.setup_context

    def call_custom_function_call(cls: Any, args: Any, kwargs: Any) -> Any:
        if not _ENTERING.take_diverted():
            return vanilla(cls, args, kwargs)
        if cls.setup_context not in (_another_setup_context, inherited):
            args, kwargs = _internals.bind_defaults(cls.forward, args, kwargs)
        return _run(cls, args, kwargs or {})

    return call_custom_function_call
