"""The forward passes within a captured graph: calls of outermost modules in a compiled function.

A graph has the operators of modules, not their calls. If tools have routines at passes or
iterations, these are reported around the operators::

    passes = Passes(interceptor)
    passes.begin(module)        # its call has been entered
    passes.end()

If they have routines at modules, marks in the graph represent the calls::

    passes.mark(called, False, inputs)
    passes.mark(called, True, outputs)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from amanda.interface.points import Point
from amanda.python.references import Reference, nothing
from amanda_torch.compiled.deferred import CalledModule
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.routines import RoutineDispatcher


class Passes:
    """Reports the forward passes in the runs of one graph by one thread to tools.

    Args:
        interceptor: that of the thread.

    Attributes:
        begun: the pass that has begun, and the scopes that have been told; None without one.
        entered: the modules that have been called, with what they were given.
        outputs: which outputs of the graph belong to forward passes.
    """

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self.begun: tuple[Sequence[Any], str] | None = None
        self._computed: list[weakref.ref[torch.Tensor]] = []
        self.outputs: Sequence[int] = ()
        self.entered: list[tuple[CalledModule, Sequence[Any]]] = []

    def begin(self, module: nn.Module) -> None:
        """The call of an outermost module has been entered: the pass begins, if it is reported to a
        tool.

        The pass before it ends, if it has not.
        """
        self.end()
        interceptor = self._interceptor
        if not interceptor.tells:
            return
        dispatcher, model = interceptor.executor.claimer.dispatcher, interceptor.frame.path
        scopes = dispatcher.scopes()
        self.begun = scopes, model
        trains = torch.is_grad_enabled() and module.training
        facts: functools.partial[Any] = functools.partial(dict, target=module)
        dispatcher.points.forward_begins(scopes, model, trains, facts=facts)

    def end(self, failed: bool = False) -> None:
        """Tell of the end of the forward pass, if one has begun."""
        begun, self.begun = self.begun, None
        if begun is None:
            return
        if self._computed:
            computed = [tensor for ref in self._computed if (tensor := ref()) is not None]
            self._computed = []
            self._interceptor.note_results(computed)
        self._dispatcher.points.forward_ends(*begun, failed)

    def give_up(self) -> None:
        """End it, and the calls in it, where the run has raised; harmless where it has not."""
        while self.entered:
            self.leave(None)
        self.end(failed=True)

    # -- calls of modules, where tools have routines at them ---------------

    def mark(self, called: CalledModule, is_exit: bool, tensors: Sequence[Any]) -> None:
        """A module is called, or has returned.

        Args:
            tensors: what it is given, or has returned.
        """
        if is_exit:
            self.leave(tensors)
            return
        self.entered.append((called, tensors))
        called.tell(self._dispatcher, Point.MODULE_ENTRY, tensors, None)

    def leave(self, outputs: Sequence[Any] | None) -> None:
        """The innermost module has returned; or raised, for None."""
        called, inputs = self.entered.pop()
        called.tell(self._dispatcher, Point.MODULE_EXIT, inputs, outputs)

    @property
    def _dispatcher(self) -> RoutineDispatcher:
        return self._interceptor.executor.claimer.dispatcher

    # -- phases of what follows -------------------------------------------

    def note_computed(self, result: Any) -> None:
        """Note the outputs of an operator within a pass, in the first run.

        Of what the model returns, the graph does not tell it.
        """
        if isinstance(result, torch.Tensor):
            self._computed.append(Reference(result, nothing))

    def learn_outputs(self, outputs: Sequence[Any]) -> None:
        """Learn in the first run which outputs of the graph belong to forward passes."""
        if self._interceptor.tells:
            is_result = self._interceptor.is_result
            self.outputs = [i for i, output in enumerate(outputs) if is_result([output])]

    def note_outputs(self, outputs: Sequence[Any]) -> None:
        """Note them, in a later run: operators that follow are told by them from others."""
        if self.outputs:
            self._interceptor.note_results([outputs[i] for i in self.outputs])
