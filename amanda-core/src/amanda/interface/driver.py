"""The interface between Amanda and a driver.

A driver of a framework that runs operators at once extends
:class:`amanda.engine.eager.EagerDriver`, which implements most of it.
"""

from __future__ import annotations

import abc
import enum
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import MappingProxyType
from typing import Any, ClassVar, Self

import attrs

from amanda.errors import described
from amanda.interface.action import Action
from amanda.interface.namespace import Namespace
from amanda.interface.proofs import Proof
from amanda.interface.settings import mistake
from amanda.python.patching import PatchSet

INTERFACE_VERSION = 2
"""Version of this interface; core refuses drivers written for another one."""


class Capability(enum.Enum):
    """A part of the contract that a driver may lack; the contract kit skips its tests."""

    BACKWARD = "backward operators are seen and can be instrumented"
    REPLACE_OP = "replace_op"
    REPLACE_BACKWARD_OP = "replace_backward_op"
    AD_IN_ROUTINES = "routines may take part in automatic differentiation"
    SECOND_ORDER = "gradients of gradients"
    USER_OPS = "operators defined by the user are seen"
    IN_PLACE = "operators change tensors in place"
    MODULES = "operator ids carry module paths"
    THREADS = "threads started inside a scope are covered"
    REPLAY = "a single operator can be run again (graph tracing's replay)"
    STATIC_GRAPH = "analyses see a whole graph before it runs"
    COMPILED = "traceable routines are compiled with the model"


@attrs.frozen
class ThreadSwitches:
    """Functions of a framework that change the current thread, for code of tools.

    Each is called at every point with a routine: functions in C, such as the examples here, are
    best. The defaults switch nothing.

    Attributes:
        is_recording: True if operators take part in automatic differentiation
            (``torch.is_grad_enabled``).
        set_recording: switches recording on or off.
        mode_depth: returns the number of modes that see the calls of operators.
        leave_modes: removes the modes, after appending their restoration to the list that it gets
            (:func:`amanda.state.unwind`); called if there are modes.
    """

    is_recording: Callable[[], bool] = bool
    set_recording: Callable[[bool], object] = bool
    mode_depth: Callable[[], int] = int
    leave_modes: Callable[[list[Any]], object] = bool


@attrs.frozen
class ExportedNode:
    """What an exporter has made of one operator: a node of its program, or several.

    Attributes:
        module: path of the module that it was made in; None if that is not known, as of what the
            exporter has computed beforehand.
        types: canonical types of the operators that it may stand for.
        shapes: shapes of its outputs, which others may follow; None if they are not known.
        parts: names of the nodes, in order.
        parameters: names of the parameters that it reads; an exporter that joins operators leaves
            the weight of one of them its name.
        is_repeated: it is in the body of a loop, whose steps are operators of their own.
    """

    module: str | None
    types: frozenset[str]
    shapes: Sequence[tuple[int | None, ...]] | None = None
    parts: tuple[str, ...] = ()
    parameters: frozenset[str] = frozenset()
    is_repeated: bool = False


class Driver(abc.ABC):
    """Adapts one execution mode of one framework to Amanda.

    Core creates one instance for the first scope that uses it, and drops it after the last. A
    driver changes its framework only between :meth:`attach` and :meth:`detach`, through
    :class:`amanda.python.patching.PatchSet` or the framework's own modes.

    Attributes:
        name: unique name, e.g. ``"torch-eager"``.
        framework: the module whose import enables the driver, e.g. ``"torch"``.
        packages: further top-level modules that belong to the framework, e.g. ``("keras",)``: tools
            that name a line of the program skip their stack frames, as those of `framework` and of
            the driver, and ``amanda doctor`` prints their versions.
        mode: the execution mode; of several drivers for one framework and
            mode, the one with the highest `priority` is used.
        priority: see `mode`.
        opt_in: True if it is used only on request, by name.
        interface_version: the :data:`INTERFACE_VERSION` it was written for.
        capabilities: the parts of the contract that it implements.
        target: ``"module:Class"`` of the driver itself, if the registered class only declares it,
            so that listing drivers imports no framework.
        interceptors: names of its mechanisms to intercept operators, if there are several.
        interceptor_variable: the environment variable that selects one of them.
        follows_pauses: True if it instruments nothing in a thread that core has paused for a tool's
            code (``Dispatcher.is_paused()``, ``STATE.paused``): then :meth:`vanilla` is not entered
            at routines of other frameworks.
        thread_switches: functions that switch the thread for a tool's code that takes no part in
            automatic differentiation, beside :meth:`routine`.
        dropped_types: types of operators that return the elements that they get, and that an
            exporter may leave out.
        mesh: the coordinate of this process in each named axis of the program's meshes of devices,
            as far as the driver has seen them: ``{"dp": 0, "tp": 1}``.
        dispatcher_class: a subclass of :class:`amanda.engine.dispatch.Dispatcher`, for drivers that
            insert routines into graphs, or run the routines of a point faster; None for the
            ordinary one.
        dispatcher: core's side of this driver.
        switched_off: mechanisms whose proofs have failed, with the consequences
            (:mod:`amanda.interface.proofs`); set before :meth:`attach`, which leaves them out.
        patches: the replaced attributes of the framework.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    mode: ClassVar[str] = "eager"
    priority: ClassVar[int] = 0
    opt_in: ClassVar[bool] = False
    interface_version: ClassVar[int]
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    target: ClassVar[str] = ""
    interceptors: ClassVar[tuple[str, ...]] = ()
    interceptor_variable: ClassVar[str] = ""
    follows_pauses: ClassVar[bool] = False
    dropped_types: ClassVar[frozenset[str]] = frozenset()
    thread_switches: ClassVar[ThreadSwitches] = ThreadSwitches()
    mesh: ClassVar[Mapping[str, int]] = MappingProxyType({})
    dispatcher_class: ClassVar[type | None] = None

    def __init__(self, dispatcher: Any) -> None:
        self.dispatcher = dispatcher
        self.patches = PatchSet()
        self.switched_off: Mapping[str, str] = {}

    @classmethod
    def loaded(cls) -> type[Self]:
        """The class of the driver itself, ``target`` or this one; imports the framework.

        Raises:
            TypeError: ``target`` names something that is no subclass of Driver.
        """
        if not vars(cls).get("target"):
            return cls
        module, _, name = cls.target.partition(":")
        found: type[Self] = getattr(importlib.import_module(module), name)
        if not (inspect.isclass(found) and issubclass(found, Driver)):
            raise TypeError(
                f"target {cls.target} of {cls.__name__} names {described(found)}, not a "
                "subclass of amanda.Driver"
            )
        return found

    @classmethod
    def reason_unusable(cls) -> str:
        """The reason why the driver cannot be used in this environment; "" if it can."""
        return ""

    @classmethod
    def reason_against_settings(cls) -> str:
        """The reason why the driver cannot follow its environment variables; "" if it can.

        Called before a program starts. An override calls this method first, and imports no
        framework.
        """
        return mistake(cls.interceptor_variable, cls.interceptors)

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """The private symbols that the driver needs and the installed framework lacks; for ``amanda
        doctor``. It may import the framework."""
        return ()

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """Tiny programs that test each mechanism of the driver."""
        return ()

    @classmethod
    def untested_version(cls) -> str:
        """The framework's version and build, such as ``PyTorch 2.16.0+cpu``, if the driver was not
        tested with it; then the proofs run before it is attached. "" for a tested version."""
        return ""

    @classmethod
    def self_test(cls) -> Sequence[str]:
        """The problems that a test of a few seconds finds, for ``amanda doctor``. By default those
        of the :meth:`proofs` whose modules are imported."""
        loaded = cls.loaded()
        if loaded is not cls:
            return loaded.self_test()
        for needed in {proof.needs for proof in cls.proofs()} - {""}:
            with suppress(ImportError):
                importlib.import_module(needed)
        made = [proof for proof in cls.proofs() if proof.can_run()]
        return [f"{proof.mechanism}: {found}" for proof in made for found in proof.problems()]

    @classmethod
    def remarks(cls) -> Sequence[str]:
        """Properties of the driver that depend on the machine, one sentence each, for ``amanda
        doctor``. Problems belong to :meth:`self_test`. It may import the framework."""
        return ()

    @property
    @abc.abstractmethod
    def namespace(self) -> Namespace:
        """Framework, version and mode: ``pytorch/2.13/eager``."""

    @property
    def runs_at_once(self) -> bool:
        """True if operators run when the program calls them, False if in a graph built ahead."""
        return Capability.STATIC_GRAPH not in self.capabilities

    def patch(self, patches: PatchSet) -> None:
        """Replace functions of the framework, all of them through `patches`.

        A driver that uses the framework's own modes instead overrides :meth:`attach` and
        :meth:`detach`.
        """

    def attach(self) -> None:
        """Start to intercept: apply :meth:`patch`. On an exception nothing is left behind."""
        try:
            self.patch(self.patches)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Restore the framework exactly: undo every patch; idempotent."""
        self.patches.undo()

    @abc.abstractmethod
    def vanilla(self) -> AbstractContextManager[Any]:
        """Within it, the current thread's framework calls are not instrumented."""

    def resumed(self) -> AbstractContextManager[Any]:
        """Within it, operators are intercepted although another one is running: for handlers of
        signals."""
        return nullcontext()

    @abc.abstractmethod
    def ad_isolated(self) -> AbstractContextManager[Any]:
        """Within it, framework calls take no part in automatic differentiation."""

    def enter_thread(self) -> None:
        """Note that the current thread enters a scope of this driver."""

    def exit_thread(self) -> None:
        """Note that the current thread has left its last scope of this driver."""

    def exit_other_thread(self, thread: int) -> None:
        """Note that the current thread has ended the last scope of another thread.

        For drivers with changes that only that thread itself can undo.
        """

    def tool_raised(self, error: BaseException) -> None:
        """Note that code of a tool has raised in this thread, at an operator of any framework.

        For frameworks that lose exceptions of called code: the driver can raise it again.
        """

    def invalidate(self) -> None:
        """Drop plans, which may be out of date; called from any thread."""

    def new_iteration(self) -> None:
        """Restart the operator ids' counters of the current thread."""

    def will_step(self, module: Any) -> bool:
        """True if an optimizer has weights of an outermost module.

        Then passes before its first step belong to one iteration, as after a step. Called once in a
        scope, if such passes could be iterations of their own. The default is False.
        """
        return False

    @contextmanager
    def _routine(self, isolated: bool) -> Iterator[None]:
        with self.vanilla(), self.ad_isolated() if isolated else nullcontext():
            yield

    def routine(
        self, action: Action, selected: Sequence[Any], isolated: bool
    ) -> AbstractContextManager[Any]:
        """The context of a routine: vanilla, and isolated from AD if it asks for that.

        A driver overrides it to be faster, or to check `selected` afterwards.
        """
        return self._routine(isolated)

    def unbox(self, value: Any) -> Any:
        """The form in which analyses and isolated routines see a tensor.

        For frameworks without ``no_grad``, in which differentiation wraps values: code outside of
        AD gets the value itself. The default is the tensor.
        """
        return value

    def exported_nodes(
        self, target: Any, modules: Collection[str]
    ) -> Sequence[ExportedNode] | None:
        """The nodes of a program that the framework has exported, in order, for ``amanda.align``.

        None for another object, or a file of another kind.

        Args:
            target: the program, or a path.
            modules: the paths of the modules that have run, for programs that number them.
        """
        return None

    def with_routines(self, function: Any) -> Any:
        """A function that the framework has traced, with the routines that it has got in the scopes
        of this thread, as a callable that needs no Amanda; None for another object.

        Raises:
            CapabilityError: a routine calls Python.
        """
        return None

    def is_tensor(self, value: Any) -> bool:
        """True if `value` is a tensor of the framework."""
        return value is not None and not isinstance(
            value, (bool, int, float, complex, str, bytes, list, tuple, dict, set)
        )

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        """The tensor to use where a routine returned `new` in place of `old`.

        A driver with AD passes the gradient straight through to `old` unless
        the action is differentiable (contract rule 7).
        """
        return new
