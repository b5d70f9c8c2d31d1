"""Checkpointed functions: a backward pass runs them again under the ids of their first run.

``torch.utils.checkpoint`` keeps no intermediate results, and runs the function a second time when
the backward pass needs them, possibly in a thread of autograd, which no scope covers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from amanda.python.patching import PatchSet, named_as
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.eager.interceptors import LOCAL
from amanda_torch.eager.module_frames import Frame


class Checkpoints:
    """The patches on ``torch.utils.checkpoint``.

    Args:
        enter_thread, exit_thread: the driver's methods of these names.
    """

    def __init__(self, enter_thread: Callable[[], None], exit_thread: Callable[[], None]) -> None:
        self._enter_thread = enter_thread
        self._exit_thread = exit_thread

    def patch(self, patches: PatchSet) -> None:
        """Wrap the implementation with ``use_reentrant=False``."""
        patches.wrap(_internals.CHECKPOINT, _internals.CHECKPOINT_GENERATOR, self._generator)

    def patch_reentrant(self, patches: PatchSet) -> None:
        """Wrap the implementation with ``use_reentrant=True``."""
        patches.wrap(_internals.CHECKPOINT.CheckpointFunction, "forward", self._forward)

    def _generator(self, vanilla: Any) -> Any:
        @functools.partial(named_as, vanilla)
        def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
            return vanilla(self._recomputed(fn), *args, **kwargs)

        return generator

    def _forward(self, vanilla: Any) -> Any:
        forward = vanilla.__func__

        @functools.partial(named_as, forward)
        def forward_with(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
            again = self._recomputed(run_function)
            result = forward(ctx, run_function, preserve_rng_state, *args)
            ctx.run_function = again
            return result

        return staticmethod(forward_with)

    def _recomputed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` for its second run, in the backward pass, with the ids of the first run."""
        interceptor = LOCAL.interceptor
        if interceptor is None or interceptor.is_quiet():
            return fn
        frame, counters = interceptor.frame, interceptor.frame.counters()
        scopes = tuple(weakref.ref(scope) for scope in STATE.scopes)

        def again(*args: Any, **kwargs: Any) -> Any:
            live = tuple(s for s in (ref() for ref in scopes) if s is not None and s.alive)
            if not live:
                return fn(*args, **kwargs)
            with self._resumed(live, frame, counters):
                return fn(*args, **kwargs)

        return again

    @contextmanager
    def _resumed(self, scopes: tuple[Any, ...], frame: Frame, counters: Any) -> Iterator[None]:
        """Continue at the frame and counters of a checkpoint, in the thread that runs the backward
        pass."""
        state = STATE
        # Autograd's device threads are covered by no scope.
        borrowed = LOCAL.interceptor is None
        if borrowed:
            state.scopes = scopes
            self._enter_thread()
        interceptor = LOCAL.interceptor
        assert interceptor is not None
        before, now = interceptor.frame, frame.counters()
        frame.set_counters(counters)
        if not interceptor.is_quiet():
            interceptor.go_to(frame)
        try:
            yield
        finally:
            interceptor.go_to(before)
            frame.set_counters(now)
            if borrowed:
                state.scopes = ()
                interceptor.go_to(interceptor.root)
                self._exit_thread()
