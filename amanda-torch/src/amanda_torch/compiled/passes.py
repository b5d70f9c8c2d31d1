"""The forward passes within a captured graph: calls of outermost modules in a compiled function.

A graph contains the operators of modules, not their calls. If tools have routines at passes or
iterations, forward passes are reported around the operators::

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
        begun: the running pass, and the notified scopes; None without one.
        entered: the running modules, with their inputs.
        outputs: numbers of the graph's outputs that belong to forward passes.
    """

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self.begun: tuple[Sequence[Any], str] | None = None
        self._computed: list[weakref.ref[torch.Tensor]] = []
        self.outputs: Sequence[int] = ()
        self.entered: list[tuple[CalledModule, Sequence[Any]]] = []

    def begin(self, module: nn.Module) -> None:
        """Begin the pass of an outermost module that has been entered, if a tool has routines for
        it.

        A running pass ends first.
        """
        self.end()
        interceptor = self._interceptor
        if not interceptor.tells:
            return
        dispatcher, model = interceptor.executor.claimer.dispatcher, interceptor.frame.path
        scopes = dispatcher.scopes()
        trains = torch.is_grad_enabled() and module.training
        facts: functools.partial[Any] = functools.partial(dict, target=module)
        told = dispatcher.points.forward_begins(scopes, model, trains, facts=facts)
        self.begun = told, model

    def end(self, failed: bool = False) -> None:
        """Report the end of the forward pass, if one runs."""
        begun, self.begun = self.begun, None
        if begun is None:
            return
        if self._computed:
            computed = [tensor for ref in self._computed if (tensor := ref()) is not None]
            self._computed = []
            self._interceptor.note_results(computed)
        self._dispatcher.points.forward_ends(*begun, failed)

    def give_up(self) -> None:
        """End the running pass, and the calls in it, after the run has raised; else do nothing."""
        while self.entered:
            self.leave(None)
        self.end(failed=True)

    # -- calls of modules, where tools have routines at them ---------------

    def mark(self, called: CalledModule, is_exit: bool, tensors: Sequence[Any]) -> None:
        """Report that a module is called, or has returned.

        Args:
            tensors: its inputs or outputs.
        """
        if is_exit:
            self.leave(tensors)
            return
        self.entered.append((called, tensors))
        called.tell(self._dispatcher, Point.MODULE_ENTRY, tensors, None)

    def leave(self, outputs: Sequence[Any] | None) -> None:
        """Report that the innermost module has returned; None for `outputs` means that it has
        raised."""
        called, inputs = self.entered.pop()
        called.tell(self._dispatcher, Point.MODULE_EXIT, inputs, outputs)

    @property
    def _dispatcher(self) -> RoutineDispatcher:
        return self._interceptor.executor.claimer.dispatcher

    # -- phases of what follows -------------------------------------------

    def note_computed(self, result: Any) -> None:
        """Note the outputs of an operator within a pass, in the first run.

        The graph does not tell which outputs a model returns.
        """
        if isinstance(result, torch.Tensor):
            self._computed.append(Reference(result, nothing))

    def learn_outputs(self, outputs: Sequence[Any]) -> None:
        """Find out in the first run which outputs of the graph belong to forward passes."""
        if self._interceptor.tells:
            is_result = self._interceptor.is_result
            self.outputs = [i for i, output in enumerate(outputs) if is_result([output])]

    def note_outputs(self, outputs: Sequence[Any]) -> None:
        """Note the results of forward passes in a later run: the phases of later operators depend
        on them."""
        if self.outputs:
            self._interceptor.note_results([outputs[i] for i in self.outputs])
