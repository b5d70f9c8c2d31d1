"""The driver for PyTorch's eager mode: its life cycle, and its patches.

The :class:`~amanda_torch.eager.interceptors.Interceptor` of each covered thread, a
``TorchFunctionMode``, intercepts operators. The patches report calls that reach no such mode: of
modules, ``autograd.Function``s, backward passes, checkpoints, tracers.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import types
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from amanda.interface.action import Action
from amanda.interface.proofs import Proof
from amanda.python.patching import PatchSet, named_as
from amanda.python.references import is_own
from amanda.registry.proofs import is_proving
from amanda.state import LIVE_SCOPES, WeakMembers
from amanda_torch import _internals, accel
from amanda_torch.autograd.leaves import is_owned
from amanda_torch.autograd.nodes import new_nodes
from amanda_torch.autograd.substitution import reason_to_keep, substitute
from amanda_torch.driver import LoadedDriver
from amanda_torch.eager import functions, gate, proofs
from amanda_torch.eager.backward_passes import BackwardPasses
from amanda_torch.eager.checkpoints import Checkpoints
from amanda_torch.eager.interceptors import LOCAL, Interceptor, muted, remove_leftovers
from amanda_torch.eager.keras_calls import KerasCalls
from amanda_torch.eager.module_calls import called_modules
from amanda_torch.eager.module_names import Labels
from amanda_torch.eager.optimizer_steps import OptimizerSteps, has_optimizer
from amanda_torch.eager.tracers import Tracers
from amanda_torch.operators.calls import tensors_of
from amanda_torch.plugin import TorchEagerDriver
from amanda_torch.routines import RoutineCall, RoutineDispatcher

_COUNTED = "amanda_script"
"""Key in the metadata of nodes that differentiate TorchScript: their executions are counted."""


class InterceptingDriver(LoadedDriver, TorchEagerDriver):
    """Instruments PyTorch's operators as they are called from Python."""

    dispatcher_class = RoutineDispatcher
    dispatcher: RoutineDispatcher
    takes_gate: ClassVar[bool] = True
    """True if the gate may intercept operators."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self._labels = Labels(functools.partial(_forget, weakref.ref(self)))
        self._interceptors: WeakMembers[Interceptor] = WeakMembers()
        self._tracers = Tracers(self.capture_compiled)
        self._checkpoints = Checkpoints(self.enter_thread, self.exit_thread)
        self._has_gate = False
        self._optimizer_steps = OptimizerSteps(dispatcher)
        self._keras_calls = KerasCalls(dispatcher)

    # -- life cycle -------------------------------------------------------

    def patch(self, patches: PatchSet) -> None:
        """Patch the functions whose calls reach no function mode."""
        works = self._works
        # Mechanisms can be switched off and proven only with the mode, not with the gate.
        may_have_gate = self.takes_gate and not (self.switched_off or is_proving())
        self._has_gate = may_have_gate and gate.choose()
        if works(proofs.SCRIPTS):
            for kind, cls in _internals.SCRIPTED.items():
                patches.wrap(cls, "__call__", functools.partial(self._script_call, kind))
        patches.wrap(torch.cuda.CUDAGraph, "replay", self._replaying)
        if (collectives := _internals.COLLECTIVES) is not None:
            self.mesh.update(_internals.mesh_places())
            patches.wrap(torch.distributed.device_mesh.DeviceMesh, "__init__", self._noting_mesh)
            for owner in (collectives, torch.distributed):
                patches.wrap(owner, "barrier", _reported)
        if works(proofs.BACKWARD_PASSES):
            BackwardPasses(self.dispatcher).patch(patches)
        if works(proofs.FUNCTIONS):
            functions.patch(patches)
        if works(proofs.CHECKPOINTS):
            self._checkpoints.patch(patches)
        if works(proofs.REENTRANT_CHECKPOINTS):
            self._checkpoints.patch_reentrant(patches)
        # Only the program's own weak references are to keep PyTorch from swapping the tensors of
        # parameters.
        patches.wrap(_internals.SWAPPING, _internals.SWAPPING_REFERENCES, _without_own_references)
        asks = works(proofs.FAST_PATHS)
        called = self._called_modules if works(proofs.MODULE_CALLS) else None
        self._tracers.attach(called, asks, works(proofs.COMPILED), has_mode=not self._has_gate)
        self._optimizer_steps.patch(patches)
        self._optimizer_steps.attach()
        self._keras_calls.attach()
        if self._has_gate:
            gate.switch_on(patches, self.dispatcher)

    def _works(self, mechanism: str) -> bool:
        return mechanism not in self.switched_off

    def detach(self) -> None:
        """Undo every patch."""
        self._optimizer_steps.detach()
        self._keras_calls.detach()
        self._tracers.detach()
        super().detach()
        self.dispatcher.invalidate()
        self._labels.clear()
        for interceptor in self._interceptors:
            # Threads notice the end at their next operator.
            interceptor.replan()

    def enter_thread(self) -> None:
        """Intercept operators of the current thread, or note that a scope is new there."""
        interceptor = LOCAL.interceptor
        if interceptor is None or interceptor.ended or interceptor not in self._interceptors:
            # If another thread has ended the last scope, the interceptor of that scope's driver is
            # still here.
            remove_leftovers()
            interceptor_class = gate.gated_class() if self._has_gate else Interceptor
            interceptor = interceptor_class(
                self.dispatcher,
                self._labels,
                sees_transforms=self._works(proofs.TRANSFORMS),
                sees_composites=self._works(proofs.COMPOSITES),
            )
            self._interceptors.add(interceptor)
            LOCAL.interceptor = interceptor
            # The rest of a compiled function that opens the scope runs unchanged.
            interceptor.uncompiled.begin()
            interceptor.enter()
        interceptor.enter_scopes()

    def exit_thread(self) -> None:
        """Stop intercepting operators of the current thread."""
        interceptor = LOCAL.interceptor
        if interceptor is not None:
            interceptor.end()
            interceptor.uncompiled.end()
        LOCAL.interceptor = None

    def exit_other_thread(self, thread: int) -> None:
        """Have a thread remove its interceptor at its next operator."""
        for interceptor in self._interceptors:
            if interceptor.ident == thread:
                interceptor.end_elsewhere()

    def invalidate(self) -> None:
        """Make all threads ask for their plans again."""
        self.dispatcher.invalidate()
        for interceptor in self._interceptors:
            interceptor.replan()

    def new_iteration(self) -> None:
        """Restart the counters of operators outside of modules."""
        if LOCAL.interceptor is not None:
            LOCAL.interceptor.new_iteration()

    def will_step(self, module: Any) -> bool:
        """True if there is an optimizer with a parameter of a module."""
        # In tools' code: attributes of the program's classes may run operators.
        with self.vanilla():
            return has_optimizer(module)

    @classmethod
    def remarks(cls) -> Sequence[str]:
        """Name the interceptor in use, and the reason if it is not the faster one."""
        reason = gate.reason_unusable()
        if gate.name_asked() in gate.WITH_GATE and not reason:
            return ["operators are noticed by the gate, in C++"]
        return [f"operators are noticed by a TorchFunctionMode ({reason or 'as chosen'})"]

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """See :mod:`amanda_torch.eager.proofs`."""
        return proofs.proofs()

    @abc.abstractmethod
    def capture_compiled(self, callback: Any, interceptor: Interceptor) -> Any:
        """Return the callback by which Dynamo runs a compiled function, or, as a string, the reason
        why the function runs eagerly.

        Args:
            callback: Dynamo's own.
            interceptor: the interceptor of the current thread.
        """

    def forget(self, model: str) -> None:
        """Drop the facts about the operators of a deleted model, in all threads."""
        for interceptor in self._interceptors:
            interceptor.executor.claimer.forget(model)

    # -- routines ---------------------------------------------------------

    def vanilla(self) -> AbstractContextManager[None]:
        """Mute the current thread's interceptor."""
        # Analyses run in it, whose routines read tensors and compute with them.
        return muted(only_reads=True)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Push the interceptor, which PyTorch pops while it handles an operator."""
        interceptor = LOCAL.interceptor
        if interceptor is None or interceptor.is_quiet() or interceptor.is_listening():
            yield
            return
        _internals.push_mode(interceptor)
        try:
            yield
        finally:
            _internals.pop_mode()

    def routine(
        self, action: Action, selected: Sequence[Any], isolated: bool
    ) -> AbstractContextManager[Any]:
        """The context of a routine: isolated from AD if asked for; in-place changes are
        detected."""
        return RoutineCall(action, selected, isolated)

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        """See :func:`amanda_torch.autograd.substitution.substitute`."""
        if reason := reason_to_keep(old, action):
            self.dispatcher.not_seen(reason)
            return old
        return substitute(old, new, action)

    # -- patches ----------------------------------------------------------

    def _called_modules(self, vanilla: Any) -> Any:
        wrapped = called_modules(self.dispatcher, vanilla)
        # Enters the frame of a module in C++ if the module has been called there before.
        return accel.load().module_call(vanilla, wrapped) if self._has_gate else wrapped

    def _script_call(self, kind: str, vanilla: Any) -> Any:
        dispatcher = self.dispatcher

        def count(*_: Any) -> None:
            if not (dispatcher.is_paused() or is_owned(_internals.current_node())):
                dispatcher.not_seen("backward operators of TorchScript")

        def __call__(*args: Any, **kwargs: Any) -> Any:  # noqa: N807
            interceptor, start = LOCAL.interceptor, _internals.sequence_number()
            if interceptor is None or not interceptor.is_listening():
                return vanilla(*args, **kwargs)
            dispatcher.not_seen(f"TorchScript {kind}: their operators run in C++")
            result = vanilla(*args, **kwargs)
            if any(scope.analyses_backward() for scope in dispatcher.scopes()):
                for node in new_nodes(tensors_of(result), start):
                    # Several calls may lead to the accumulation of one leaf.
                    if _COUNTED not in node.metadata:
                        node.metadata[_COUNTED] = True
                        node.register_hook(count)
            return result

        return __call__

    def _noting_mesh(self, vanilla: Any) -> Any:
        """Note the place of this process in each mesh that has names for its axes."""

        @functools.partial(named_as, vanilla)
        def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807
            vanilla(*args, **kwargs)
            mesh = args[0]
            # Without a rank of its own (``device_type="xla"``) it raises.
            with contextlib.suppress(AttributeError):
                place = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False)
                self.mesh.update(place)

        return __init__

    def _replaying(self, vanilla: Any) -> Any:
        """Count what the program has captured on the device: no operator is called."""
        dispatcher = self.dispatcher

        @functools.partial(named_as, vanilla)
        def replay(self: Any) -> Any:
            interceptor = LOCAL.interceptor
            if interceptor is not None and interceptor.is_listening():
                dispatcher.not_seen("replays of CUDA graphs")
            return vanilla(self)

        return replay


def _reported(vanilla: Any) -> Any:
    """Wrap a collective without tensors, which does not report itself to modes."""

    @functools.wraps(vanilla)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        interceptor = LOCAL.interceptor
        if interceptor is None or interceptor.is_quiet() or not interceptor.is_listening():
            return vanilla(*args, **kwargs)
        return interceptor.run_unreported(vanilla, "barrier", args, kwargs)

    return barrier


def _without_own_references(vanilla: Any) -> Any:
    """The module ``weakref`` with a ``getweakrefs`` that leaves out Amanda's."""
    found = types.ModuleType(vanilla.__name__)
    vars(found).update(vars(vanilla))

    def getweakrefs(value: Any) -> list[Any]:
        return [one for one in vanilla.getweakrefs(value) if not is_own(one)]

    vars(found)["getweakrefs"] = getweakrefs
    return found


def _forget(reference: weakref.ref[InterceptingDriver], label: str) -> None:
    """Drop the facts about a module that is deleted, with all hooks on its graphs."""
    driver = reference()
    if driver is not None:
        for scope in tuple(LIVE_SCOPES):
            if driver in scope.drivers:
                scope.cache.forget(label)
        driver.forget(label)
        driver.dispatcher.invalidate()
