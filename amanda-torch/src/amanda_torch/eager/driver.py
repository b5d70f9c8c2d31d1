"""The driver for PyTorch's eager mode: attaches the interceptor and what goes around it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import amanda
from amanda.errors import CapabilityError
from amanda.interface.action import Action
from amanda.namespace import Namespace
from amanda.patching import PatchSet
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.substitution import substitute
from amanda_torch.eager import interceptors
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.eager.routines import RoutineCall
from amanda_torch.eager.tracers import Tracers
from amanda_torch.plugin import TorchEagerDriver
from amanda_torch.thread.local import LOCAL, muted
from amanda_torch.thread.modules import Frame, Labels

if TYPE_CHECKING:
    from collections.abc import Iterator

_DESCENDED_PACKAGES = ("torch.utils.checkpoint", "torch.nn.parallel", "torch.distributed.")
"""``autograd.Function``s of PyTorch's own that only carry other operators."""


class EagerDriver(TorchEagerDriver):
    """Instruments PyTorch's operators as they are called from Python."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self._patches = PatchSet()
        self._labels = Labels()
        self._interceptors: weakref.WeakSet[Interceptor] = weakref.WeakSet()
        self._tracers = Tracers()

    @property
    def namespace(self) -> Namespace:
        """``pytorch/<major>.<minor>/eager``."""
        return Namespace(f"pytorch/{'.'.join(torch.__version__.split('.')[:2])}/eager")

    # -- life cycle -------------------------------------------------------

    def attach(self) -> None:
        """Patch the few places that a function mode does not reach.

        Raises:
            CapabilityError: this PyTorch lacks a private symbol; it is named.
        """
        gone = _internals.missing()
        if gone:
            raise CapabilityError(
                f"PyTorch {torch.__version__} has no {', '.join(gone)}, which amanda-torch "
                f"{amanda.__version__} needs; install a release of amanda-torch for it"
            )
        try:
            self._patch()
        except BaseException:
            self.detach()
            raise

    def _patch(self) -> None:
        patches = self._patches
        patches.wrap(nn.Module, "__call__", self._module_call)
        patches.wrap(_internals.SCRIPT_FUNCTION, "__call__", self._script_call)
        patches.wrap(_internals.AUTOGRAD, _internals.AUTOGRAD_ENGINE, self._engine)
        patches.wrap(_internals.FUNCTION_NODE, "apply", _function_backward)
        patches.set(_internals.FUNCTION_BASE, "apply", classmethod(_function_apply), create=True)
        patches.wrap(
            _internals.CHECKPOINT, _internals.CHECKPOINT_GENERATOR, self._checkpoint_generator
        )
        patches.wrap(_internals.CHECKPOINT.CheckpointFunction, "forward", self._checkpoint_forward)
        self._tracers.attach()

    def detach(self) -> None:
        """Undo every patch."""
        self._tracers.detach()
        self._patches.undo()
        self._labels.clear()

    def enter_thread(self) -> None:
        """Start to intercept in the current thread."""
        if LOCAL.interceptor is None:
            interceptor = interceptors.create(self.dispatcher, self._labels)
            interceptor.enter()
            self._interceptors.add(interceptor)
            LOCAL.interceptor = interceptor
        LOCAL.interceptor.enter_scopes()

    def exit_thread(self) -> None:
        """Stop to intercept in the current thread."""
        interceptor, LOCAL.interceptor = LOCAL.interceptor, None
        if interceptor is not None:
            interceptor.exit()
            interceptor.clear()

    def invalidate(self) -> None:
        """Make all threads ask for their plans again."""
        for interceptor in tuple(self._interceptors):
            interceptor.replan()

    def new_iteration(self) -> None:
        """Restart the counters of operators outside of modules."""
        if LOCAL.interceptor is not None:
            LOCAL.interceptor.new_iteration()

    # -- routines ---------------------------------------------------------

    def vanilla(self) -> AbstractContextManager[None]:
        """Mute the current thread's interceptor."""
        return muted()

    def ad_isolated(self) -> AbstractContextManager[Any]:
        """``torch.no_grad()``."""
        return torch.no_grad()

    def routine(
        self, action: Action, selected: Sequence[Any], isolated: bool
    ) -> AbstractContextManager[Any]:
        """Both of the above in one, and a look at what the routine did in place."""
        return RoutineCall(action, selected, isolated)

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a ``torch.Tensor``."""
        return isinstance(value, torch.Tensor)

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        """See :func:`amanda_torch.autograd.substitution.substitute`."""
        return substitute(old, new, action)

    # -- patches ----------------------------------------------------------

    def _module_call(self, vanilla: Any) -> Any:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            interceptor = LOCAL.interceptor
            # is_quiet(), here for its speed.
            if interceptor is None or interceptor.muted or interceptor.thread["paused"]:
                return vanilla(module, *args, **kwargs)
            parent = interceptor.enter_module(module)
            try:
                return vanilla(module, *args, **kwargs)
            finally:
                # The way back from Tracker.enter_module(), here for its speed.
                frame = interceptor.frame
                if frame is not parent:
                    frame.caller = None
                    interceptor.frame = parent
                    interceptor.cells = parent.cells

        return __call__

    def _script_call(self, vanilla: Any) -> Any:
        def __call__(function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            interceptor = LOCAL.interceptor
            if interceptor is not None and interceptor.is_listening():
                self.dispatcher.not_seen("TorchScript functions: their operators run in C++")
            return vanilla(function, *args, **kwargs)

        return __call__

    def _engine(self, vanilla: Any) -> Any:
        """All backward passes started from Python come through here."""

        def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            interceptor = LOCAL.interceptor
            if interceptor is None:
                return vanilla(roots, *args, **kwargs)
            if self.dispatcher.is_paused():
                with self.dispatcher.quiet_backward():
                    return vanilla(roots, *args, **kwargs)
            interceptor.begin_backward(roots)
            outermost = not _internals.in_backward()
            listening = interceptor.is_listening()
            if not listening:
                interceptor.enter()
            try:
                return vanilla(roots, *args, **kwargs)
            finally:
                if not listening:
                    interceptor.exit()
                if outermost:
                    interceptor.new_iteration()

        return run_backward

    def _checkpoint_generator(self, vanilla: Any) -> Any:
        def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
            return vanilla(self._recomputed(fn), *args, **kwargs)

        return generator

    def _checkpoint_forward(self, vanilla: Any) -> Any:
        forward = vanilla.__func__

        def forward_with(ctx: Any, run_function: Any, *args: Any) -> Any:
            again = self._recomputed(run_function)
            result = forward(ctx, run_function, *args)
            ctx.run_function = again
            return result

        return staticmethod(forward_with)

    def _recomputed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` for its second run, in the backward pass: under the ids of the first."""
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
        """Go back to where a checkpoint was, in the thread that runs the backward pass."""
        state = STATE
        borrowed = LOCAL.interceptor is None
        if borrowed:
            state.scopes = scopes
            self.enter_thread()
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
                self.exit_thread()


def _is_descended(cls: type) -> bool:
    return cls.__module__.startswith(_DESCENDED_PACKAGES) or cls is _internals.HOOK_FUNCTION


def _function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Where every ``autograd.Function.apply`` ends up, early-bound ones included."""
    interceptor = LOCAL.interceptor
    if (
        interceptor is None
        or interceptor.is_quiet()
        or not interceptor.is_listening()
        or _is_descended(cls)
        or not any(isinstance(arg, torch.Tensor) for arg in args)
    ):
        return _internals.apply_function(cls, *args, **kwargs)
    return interceptor.run_function(cls, args, kwargs)


def _function_backward(vanilla: Any) -> Any:
    """The backward of an ``autograd.Function`` is one operator: its inner ones are hidden."""

    def apply(node: Any, *args: Any) -> Any:
        interceptor = LOCAL.interceptor
        if interceptor is None or _is_descended(_internals.forward_class(node)):
            return vanilla(node, *args)
        with muted():
            return vanilla(node, *args)

    return apply


def self_test() -> list[str]:
    """Run a tiny model under a watching tool; what went wrong, if anything."""
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op_id()))
    tool.add_inst_for_op(
        lambda context: seen.append(context.get_backward_op_id() or ""), backward=True
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = vars(nn.Module)["__call__"]
    with amanda.apply(tool, drivers=[TorchEagerDriver]):
        model(torch.ones(1, 2)).sum().backward()
    wanted = {"Sequential.0/linear:0", "Sequential.1/relu:0", "/sum:0"}
    problems = [f"operator {op_id} was not seen" for op_id in sorted(wanted - set(seen))]
    if not any("/grad/" in op_id for op_id in seen):
        problems.append("no backward operator was seen")
    if vars(nn.Module)["__call__"] is not before:
        problems.append("patches were left behind")
    return problems
