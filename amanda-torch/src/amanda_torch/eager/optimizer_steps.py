"""Reports steps of optimizers, which are a phase of the program and end an iteration."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amanda.engine.dispatch import Dispatcher
from amanda.python.patching import PatchSet
from amanda_torch import _internals
from amanda_torch.eager.interceptors import LOCAL


class OptimizerSteps:
    """Reports the steps of optimizers by PyTorch's hooks for all optimizers.

    The operators of a step are of the optimizer phase, except for a loss that a closure computes.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._hooks: list[Any] = []

    def attach(self) -> None:
        """Register the hooks."""
        # Not patches of a class: optimizers have step methods of their own.
        self._hooks.append(register_optimizer_step_pre_hook(self._begins))
        self._hooks.append(register_optimizer_step_post_hook(self._has_ended))

    def detach(self) -> None:
        """Remove the hooks; harmless when called twice."""
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    def patch(self, patches: PatchSet) -> None:
        """Report the steps that a gradient scaler skips without a call of the optimizer.

        It skips steps whose gradients overflow, as the first ones with float16. Otherwise these
        gradients would count as accumulated.
        """
        patches.wrap(torch.amp.GradScaler, "step", self._scaled)

    def _scaled(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        points = self._dispatcher.points

        @functools.wraps(vanilla)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(vanilla, self, optimizer, *args, **kwargs)
            return points.call_optimizer(run)

        return step

    # In a compiled step Dynamo would trace the hooks, and warn of the clock.
    @_internals.not_traced
    def _begins(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        interceptor = LOCAL.interceptor
        is_alone = not any(callable(value) for value in (*args[1:], *kwargs.values()))
        if interceptor is not None and is_alone and interceptor.frame is interceptor.root:
            interceptor.go_to(interceptor.outside("optimizer"))
        self._dispatcher.points.optimizer_begins()

    @_internals.not_traced
    def _has_ended(self, *_: Any) -> None:
        interceptor = LOCAL.interceptor
        if interceptor is not None and interceptor.frame.phase == "optimizer":
            interceptor.go_to(interceptor.root)
            if interceptor.has_continued:
                # No backward pass of this step has ended its iteration.
                interceptor.new_iteration()
        self._dispatcher.points.optimizer_ends(self._dispatcher.scopes())


def has_optimizer(module: nn.Module) -> bool:
    """True if there is an optimizer that has a parameter of `module`."""
    kinds, found = [torch.optim.Optimizer], []
    for kind in kinds:
        kinds += kind.__subclasses__()
        # PyTorch marks the step method of a class when its first optimizer is created.
        if hasattr(kind.step, "hooked"):
            found.append(kind)
    weights = {id(parameter) for parameter in module.parameters()}
    # PyTorch has no list of optimizers, and most are created before the scope.
    for one in gc.get_referrers(*found) if found else ():
        if isinstance(one, torch.optim.Optimizer):
            for group in vars(one).get("param_groups", ()):
                if not weights.isdisjoint(map(id, group["params"])):
                    return True
    return False
