"""Reports the backward passes that the program starts, and the iterations that they end.

The operators of a pass are handled by :mod:`amanda_torch.autograd`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amanda.engine.signals import handlers_wait
from amanda.python.patching import PatchSet, named_as
from amanda_torch import _internals
from amanda_torch.autograd.gradients_of_gradients import MadeGraph
from amanda_torch.autograd.whole_operator import notes_dropped
from amanda_torch.eager.interceptors import LOCAL, Interceptor
from amanda_torch.routines import RoutineDispatcher


class BackwardPasses:
    """Reports backward passes by a patch of the function that starts them."""

    def __init__(self, dispatcher: RoutineDispatcher) -> None:
        self._dispatcher = dispatcher

    def patch(self, patches: PatchSet) -> None:
        """Report passes from now on."""
        patches.wrap(_internals.AUTOGRAD, _internals.AUTOGRAD_ENGINE, self._engine)

    def _engine(self, vanilla: Any) -> Any:
        """The patch of the function through which Python starts every backward pass."""

        @_internals.not_counted_by_warnings
        @functools.partial(named_as, vanilla)
        def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            interceptor, roots = LOCAL.interceptor, t_outputs
            if interceptor is None or not isinstance(roots, tuple):
                return vanilla(roots, *args, **kwargs)
            if self._dispatcher.is_paused():
                # A tool's own pass. Hooks in autograd's device threads learn that from the
                # dispatcher.
                with self._dispatcher.quiet_backward():
                    return vanilla(roots, *args, **kwargs)
            # The third of the further arguments.
            makes_graph = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
            continues, transformed = makes_graph, _internals.in_functorch()
            if transformed:
                # A transform always makes a graph; only an outer differentiation uses it.
                continues = _internals.is_within_differentiation(next(iter(roots), None))
                if continues and self._looks_at_gradients():
                    self._dispatcher.not_seen("derivatives of gradients under a transform")
            with handlers_wait(), self._pass(interceptor, roots, continues):
                if transformed or not (makes_graph and self._claims(interceptor)):
                    return vanilla(roots, *args, **kwargs)
                with MadeGraph(interceptor.executor.claimer, roots) as made:
                    result = vanilla(roots, *args, **kwargs)
                    made.claim_results(args[3] if len(args) > 3 else (), result or ())
                return result

        return run_backward

    def _looks_at_gradients(self) -> bool:
        return any(scope.analyses_backward() for scope in self._dispatcher.scopes())

    def _claims(self, interceptor: Interceptor) -> bool:
        """True if tools analyse backward operators of gradients; nodes are marked with their owners
        from now on."""
        claimer, claims = interceptor.executor.claimer, self._looks_at_gradients()
        if claims and not claimer.marks:
            # Drops the extension's records, which are without marks.
            interceptor.replan()
        return claims

    @contextmanager
    def _pass(
        self, interceptor: Interceptor, roots: tuple[Any, ...], continues: bool
    ) -> Iterator[None]:
        """The context of a backward pass of the program; the outermost one ends an iteration.

        Args:
            continues: True if the program computes with the gradients. Such a pass ends no
                iteration; neither does a pass inside a module.
        """
        interceptor.begin_backward(roots)
        outermost = not _internals.in_backward()
        # PyTorch has popped the mode within an operator: it is pushed for a backward pass that the
        # operator runs.
        listening = interceptor.is_listening()
        points = self._dispatcher.points
        is_covered = not interceptor.stale or interceptor.refresh()
        continues = continues or interceptor.frame.phase is None
        begun = points.backward_begins(continues) if outermost and interceptor.tells else ()
        if not listening:
            interceptor.enter()
        failed = True
        try:
            with notes_dropped():
                yield
            failed = False
        finally:
            if not listening:
                interceptor.exit()
            if outermost and is_covered and not interceptor.has_trained:
                interceptor.has_trained = True
                # Captured code outside of modules may belong to another phase from now on.
                interceptor.root.captured.clear()
            if outermost and not continues:
                interceptor.new_iteration()
            elif outermost:
                interceptor.has_continued = True
            points.backward_ends(begun, continues, failed)
