"""Operator ids of the eager driver, and the module calls that they are made of.

An id is ``<outermost module's class>.<module path>/<op name>:<k>``, where `k` counts the
operators of that name within one call of the module. Outside of modules operators count by their
phase: ``/mul:0`` is the first one of the forward phase, ``/setup/mul:0`` one that makes weights. A
:class:`Tracker` knows the module call that its thread is in::

    caller = tracker.enter_module(module)
    ...                       # operators find their counters in tracker.cells
    tracker.go_to(caller)

The frames of module calls are kept and reused in every iteration, with what is known of
their operators, so that an operator costs a dictionary look-up and no string.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import nn

from amanda.interface.specs import Phase
from amanda.references import Reference, nothing
from amanda.state import Lock
from amanda_torch import _internals
from amanda_torch.eager.fused_modules import FUSED
from amanda_torch.eager.keras_layers import layer_name
from amanda_torch.operators.names import CONSTANTS

_graph_task = _internals.graph_task
_TRANSPARENT = {
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "CheckpointWrapper",
    "OffloadWrapper",
}
"""Wrappers of PyTorch that leave no trace in ids: a model has the same ids without them."""

_MAX_OUTERMOST = 1000
"""Outermost modules of one iteration; with more, each is a model that is built, run and dropped."""

_LEARNING = 2
"""Iterations in which all operators of a program without modules are asked for their phases: a
first step, and one that begins after weights were changed."""

_NOTED = 32
"""Tensors whose phase is remembered, for the operators that compute with them next."""

_CALL_NUMBER = re.compile(r"#\d+")


class Noted:
    """The last tensors that were noted, held weakly, and found by their identity."""

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: dict[int, Reference] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Note a tensor, and forget the one that was noted first if there are too many."""
        references, key = self._references, id(tensor)
        references.pop(key, None)
        references[key] = Reference(tensor, nothing)
        if len(references) > _NOTED:
            del references[next(iter(references))]

    def set(self, tensors: Sequence[Any]) -> None:
        """Note these instead of all others, however many they are."""
        # Small models are called as often as operators are.
        self._references = {id(tensor): Reference(tensor, nothing) for tensor in tensors}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of them."""
        reference = self._references.get(id(tensor))
        # Another one may have got the identity of one that is gone.
        return reference is not None and reference() is tensor

    def clear(self) -> None:
        """Forget all."""
        self._references = {}


Cell = list[Any]
"""``[count, known, known, ...]`` of one op name within one frame; see :class:`Frame`."""


class Model:
    """Stands for an outermost module: alive as long as that is, or a hook of one of its graphs."""

    __slots__ = ("__weakref__",)


class Child:
    """One module called within a frame, and the frames of its calls.

    A transparent one has no frames: the operators that it calls count as its caller's, or
    as those of the module `inner`, which a compiled module calls without ``__call__``.

    Attributes:
        is_fused: it may run as one operator, see :mod:`amanda_torch.eager.fused_modules`; tools are
            told of its calls; or it may run captured. The gate leaves them to Python.
    """

    __slots__ = ("calls", "frames", "inner", "is_fused", "model", "name", "ref", "transparent")

    def __init__(
        self,
        ref: _Called,
        name: str,
        transparent: bool,
        is_fused: bool,
        model: Model | None = None,
    ) -> None:
        self.model = model
        self.ref = ref
        self.name = name
        self.transparent = transparent
        self.is_fused = is_fused
        self.inner: weakref.ref[nn.Module] | None = None
        self.calls = 0
        self.frames: list[Frame] = []


class _Called(weakref.ref[nn.Module]):
    """A reference to a module that was called within a frame.

    One object: with a callback of its own it would be six for each module. It holds no tracker,
    which would be a cycle.

    Attributes:
        key: the id of the module.
    """

    __slots__ = ("_children", "_last", "key")

    key: int
    _children: dict[int, Child]
    _last: dict[int, _Called]

    @classmethod
    def of(cls, module: nn.Module, children: dict[int, Child], last: dict[int, _Called]) -> Self:
        """A new one. Not by ``__new__`` and ``__init__``, which are two functions.

        Args:
            children: those of the frame.
            last: the references to modules where each was last met.
        """
        called = cls(module, _forget)
        called.key, called._children, called._last = id(module), children, last
        return called

    def frame(self) -> Frame | None:
        """The frame of the module's last call there."""
        child = self._children.get(self.key)
        return child.frames[-1] if child is not None and child.frames else None

    def forget(self) -> None:
        """The module is gone."""
        child = self._children.pop(self.key, None)
        self._last.pop(self.key, None)
        if child is not None:
            # It may be one of those that have run in this iteration.
            child.frames.clear()
            child.model = None


def _forget(called: Any) -> None:
    called.forget()


class _ReadOfFrame:
    """The attributes that the gate reads at each call of a module: those of a base come first, and
    lie together in memory."""

    __slots__ = ("caller", "cells", "children", "generation", "names")


class Frame(_ReadOfFrame):
    """One module call, at its place in the calling modules; reused in every iteration.

    Attributes:
        path: the id's part before the slash, "" outside of modules.
        cells: func to cell; an operator's position in its cell is its count. A tuple of a cell
            where operators are checked and the last one was a forward one by its inputs.
        names: op name to cell; several funcs of one name share a cell.
        children: id of a module object to its :class:`Child`.
        generation: of the plans in the cells, see :attr:`Tracker.generation`.
        caller: the frame that this one returns to, while it is active.
        module: weak reference to the module, None for the root.
        model: the outermost module that it is a part of, None for the root.
        captured: what is known of compiled graphs that run in the module call.
        is_wrapped: whether the module was entered with a wrapper that runs it.
        is_open: whether the modules that are called in it may run captured, see
            :attr:`Tracker.captures`; that of the root is not looked at.
        is_left: whether the module, an outermost one, is to run as it is, whatever it is given.
        phase: outside of modules, the phase of its operators, "" for the root; None within one.
        asides: of the root, the frames of the other phases.
        is_checked: whether operators ask for their phase before they are counted, see
            :attr:`Tracker.root`: they are not to be found in `cells`.
    """

    __slots__ = (
        "__weakref__",
        "asides",
        "captured",
        "is_checked",
        "is_left",
        "is_open",
        "is_wrapped",
        "model",
        "module",
        "path",
        "phase",
    )

    def __init__(
        self,
        path: str,
        module: weakref.ref[nn.Module] | None,
        model: Model | None = None,
        phase: Phase | Literal[""] | None = None,
    ) -> None:
        self.path = path
        self.model = model
        self.cells: dict[Any, Any] = {}
        self.names: dict[str, Cell] = {}
        self.children: dict[int, Child] = {}
        self.generation = 0
        self.caller: Frame | None = None
        self.module = module
        self.captured: dict[Any, Any] = {}
        self.is_wrapped = self.is_open = self.is_left = False
        self.phase = phase
        self.asides: dict[str, Frame] = {}
        self.is_checked = False

    def check(self, is_checked: bool) -> None:
        """Set :attr:`is_checked`."""
        self.is_checked = is_checked
        # Functions that are not operators stay: their cell is a list without a count.
        for func in [func for func, cell in self.cells.items() if cell]:
            del self.cells[func]

    def restart(self) -> None:
        """Begin a new iteration: all counters from zero."""
        for cell in self.names.values():
            cell[0] = 0
        for child in self.children.values():
            child.calls = 0

    def forget_plans(self, generation: int) -> None:
        """Drop what is known of the operators: scopes, switches or actions have changed."""
        for _, cell in self.named_cells():
            del cell[1:]
        self.generation = generation

    def cell_for(self, func: Any, name: str) -> Cell:
        """The cell of an op name, to be found by `func` from now on."""
        cell = self.names.get(name)
        if cell is None:
            cell = self.names[name] = [0]
        if not self.is_checked:
            self.cells[func] = cell
        return cell

    def named_cells(self) -> Iterator[tuple[str, Cell]]:
        """All cells, those of other phases by a name that no operator has."""
        yield from self.names.items()
        for frame in self.asides.values():
            for name, cell in frame.names.items():
                yield f"{frame.path}/{name}", cell

    def counters(self) -> tuple[dict[str, int], dict[int, int]]:
        """A snapshot of all counters."""
        return (
            {name: cell[0] for name, cell in self.named_cells()},
            {key: child.calls for key, child in self.children.items()},
        )

    def set_counters(self, snapshot: tuple[dict[str, int], dict[int, int]]) -> None:
        """Set all counters to those of a snapshot."""
        for name, cell in self.named_cells():
            cell[0] = snapshot[0].get(name, 0)
        for key, child in self.children.items():
            child.calls = snapshot[1].get(key, 0)

    def clear(self) -> None:
        """Drop everything below this frame, at the end of the thread's scopes."""
        for child in self.children.values():
            for frame in child.frames:
                frame.clear()
        self.children.clear()
        self.captured.clear()
        self.cells.clear()
        self.names.clear()
        self.asides.clear()


class Labels:
    """Names of outermost modules: the class, and a number from the second instance on.

    Shared by all threads, so that a model has one name wherever it runs.

    Args:
        forget: called with the name of a module that is gone, and so are all hooks on its graphs.
    """

    def __init__(self, forget: Callable[[str], None] = lambda label: None) -> None:
        self._forget = forget
        self._lock = Lock()
        self._counts: dict[str, itertools.count[int]] = {}
        self._labels: dict[int, tuple[weakref.ref[nn.Module], str, Model]] = {}
        self._models: dict[str, weakref.ref[Model]] = {}

    def label(self, module: nn.Module) -> tuple[str, Model]:
        """``ResNet`` for the first ResNet that runs, ``ResNet@1`` for the second; and the
        model."""
        return self._lock.hold(self._label, module)

    def _label(self, module: nn.Module) -> tuple[str, Model]:
        known = self._labels.get(id(module))
        if known is not None and known[0]() is module:
            return known[1:]
        name = class_name(module)
        number = next(self._counts.setdefault(name, itertools.count()))
        label = f"{name}@{number}" if number else name
        model = self._model(label)
        self._labels[id(module)] = self._reference(module), label, model
        return label, model

    def _reference(self, module: nn.Module) -> weakref.ref[nn.Module]:
        # The callbacks hold no Labels, which would be a cycle.
        key, labels = id(module), self._labels

        def died(reference: weakref.ref[nn.Module]) -> None:
            known = labels.get(key)
            if known is not None and known[0] is reference:
                del labels[key]

        return weakref.ref(module, died)

    def _model(self, label: str) -> Model:
        forget, models = self._forget, self._models

        def died(reference: weakref.ref[Model]) -> None:
            # After clear() nothing is reported.
            if models.get(label) is reference:
                del models[label]
                forget(label)

        model = Model()
        models[label] = weakref.ref(model, died)
        return model

    def clear(self) -> None:
        """Forget all names, when the driver is detached."""
        self._models.clear()
        self._counts.clear()
        self._labels.clear()


class _ReadOfTracker:
    """The attributes that the gate reads at each operator, as of :class:`Frame`."""

    __slots__ = ("cells", "frame", "generation", "iteration", "root", "stale")


class Tracker(_ReadOfTracker):
    """The module frames of one thread.

    Attributes:
        active: the scopes that instrument operators now, unless `stale`.
        frame: the frame of the module call that is running.
        cells: ``frame.cells``, one look-up nearer to the operators.
        root: the frame outside of all modules, of the forward phase. Its operators are checked for
            their phase wherever a program calls modules, and in the first iterations of any
            program. In one without modules, only those are checked later whose names have had
            another phase by then, so that the others cost no check.
        checked: the operators that were checked in a program without modules, and their names.
        codes: by the ``id`` of code, what it tells of the phase of what it calls, see
            :func:`~amanda_torch.eager.phases.phase_outside`.
        known_codes: this code, so that no other gets its ``id``.
        is_building: whether a module was built since an outermost one was called.
        has_recorded: whether an operator outside of modules was recorded for differentiation.
        has_trained: whether a backward pass has ended.
        is_inferring: whether layers of Keras run to learn the shapes of their results.
        generation: counts up whenever plans become out of date.
        iteration: counts up whenever the root counters restart.
        results: what an outermost module has returned at its last call.
        has_run: whether an outermost module was called.
        tells: whether a tool has routines at derived points.
        tells_modules: whether a tool has routines at the entry or exit of modules.
        captures: whether modules may run captured: outermost ones, and those in one that cannot.

    Args:
        labels: the names of outermost modules.
        not_seen: called with a reason where operators run that cannot be seen.
    """

    # The gate reads some of them (amanda_torch.eager.gate).
    __slots__ = (
        "_labels",
        "_last",
        "_measured",
        "_more_results",
        "_not_seen",
        "_places",
        "_seen_outermost",
        "active",
        "captures",
        "checked",
        "codes",
        "has_recorded",
        "has_run",
        "has_trained",
        "is_building",
        "is_inferring",
        "known_codes",
        "results",
        "tells",
        "tells_modules",
        "thread",
    )

    stale: bool
    thread: dict[str, Any]

    def __init__(self, labels: Labels, not_seen: Callable[[str], None]) -> None:
        self._not_seen = not_seen
        self.active: tuple[Any, ...] = ()
        self.root = Frame("", None, phase="")
        self.root.is_checked = True
        self.checked: dict[Any, str] = {}
        self.codes: dict[int, Any] = {}
        self.known_codes: list[Any] = []
        self.is_building = self.has_recorded = self.has_trained = False
        self.is_inferring = False
        self.frame = self.root
        self.cells = self.root.cells
        self.generation = 0
        self.iteration = 0
        self._labels = labels
        # Not ids of modules: a new module may get the id of one that is gone.
        self._seen_outermost: set[Child] = set()
        self._last: dict[int, _Called] = {}
        # Of the outermost module that runs; made when its first child is new.
        self._places: Places | None = None
        self.results, self._more_results, self._measured = Noted(), Noted(), Noted()
        self.has_run = False
        self.tells = False
        self.tells_modules = False
        self.captures = False

    def go_to(self, frame: Frame) -> None:
        """Make `frame` the current one."""
        self.frame = frame
        self.cells = frame.cells

    def outside(self, phase: Phase) -> Frame:
        """The frame of the operators of a phase outside of modules."""
        if phase in ("forward", "backward"):
            return self.root
        frame = self.root.asides.get(phase)
        if frame is None:
            frame = self.root.asides[phase] = Frame(f"/{phase}", None, phase=phase)
            frame.generation = self.generation
        return frame

    @contextmanager
    def inferring_shapes(self) -> Iterator[None]:
        """Within it, modules leave no trace, and all operators are of the setup."""
        outer, frame, inferring = self.frame, self.outside("setup"), self.is_inferring
        try:
            self.is_inferring = True
            self.go_to(frame)
            yield
        finally:
            self.is_inferring = inferring
            self.go_to(outer)

    def asks(self, name: str) -> bool:
        """Whether an operator that is called now is asked for its phase before it is counted."""
        frame = self.frame
        if frame.is_checked or not frame.asides:
            return frame.is_checked
        # In training, creating tensors is not setup any more.
        left_out = "setup" if self.has_trained else ""
        return any(name in a.names for a in frame.asides.values() if a.phase != left_out)

    def _end_checks(self) -> None:
        """Count operators without a check, but those whose names have had another phase."""
        root = self.root
        root.check(False)
        for func, name in self.checked.items():
            if not self.asks(name):
                root.cell_for(func, name)
        self.checked.clear()

    def note_recorded(self) -> None:
        """Note that an operator outside of modules was recorded for differentiation."""
        if not self.has_recorded:
            self.has_recorded = True
            self.root.restart()

    def enter_module(self, module: nn.Module) -> Frame:
        """Enter the frame of a module call; returns the frame to come back to."""
        parent = self.frame
        if parent.phase:
            if self.is_inferring:
                return parent
            # An optimizer's step has raised.
            self.go_to(self.root)
            parent = self.root
        child = parent.children.get(id(module))
        if child is None or child.ref() is not module:
            if parent.is_wrapped and self._is_within(module):
                return parent
            child = self._new_child(parent, module)
        if child.transparent:
            return self._enter_wrapped(child)
        if parent is self.root:
            # A module that a backward pass calls is recomputed, by another library's checkpoints:
            # it keeps its ids, and begins no iteration.
            if _graph_task() != -1 and self._enter_again(module):
                return parent
            self._enter_outermost(child)
            if CONSTANTS.is_filled:
                CONSTANTS.forget(module)
        call = child.calls
        child.calls = call + 1
        frames = child.frames
        frame = frames[call] if call < len(frames) else self._new_frame(parent, child, call)
        if frame.generation != self.generation:
            frame.forget_plans(self.generation)
        # Frame.restart(), inlined: this runs at every module call.
        for cell in frame.names.values():
            cell[0] = 0
        if frame.children:
            for other in frame.children.values():
                other.calls = 0
        frame.caller = parent
        self.frame = frame
        self.cells = frame.cells
        return parent

    def path_of(self, module: nn.Module) -> str | None:
        """The path that the next call of `module` from here has, None for its first one."""
        child = self.frame.children.get(id(module))
        if child is None or child.ref() is not module:
            return self.frame.path if self._is_within(module) else None
        begins = self.frame is self.root and child in self._seen_outermost
        call = 0 if begins else child.calls
        return child.frames[call].path if call < len(child.frames) else None

    def forget_call(self, module: nn.Module) -> None:
        """Take back that `module` was called from here: its next call has the same ids."""
        child = self.frame.children.get(id(module))
        if child is None:
            if self._is_within(module):
                self.frame.restart()
            return
        child.calls -= bool(child.calls)
        if self.frame is self.root:
            self._seen_outermost.discard(child)

    def was_called(self, child: Child) -> bool:
        """Whether an outermost module has been called in the present iteration."""
        return child in self._seen_outermost

    def new_iteration(self) -> None:
        """Restart the counters outside of modules."""
        root = self.root
        if self.frame.phase:
            self.go_to(root)
        # Frame.restart(), inlined: a small model may be all of an iteration.
        for cell in root.names.values():
            cell[0] = 0
        for child in root.children.values():
            child.calls = 0
        for frame in root.asides.values():
            # Building models is not part of an iteration, unless the program declares one.
            if frame.phase != "setup" or not (self.has_run or self.has_trained):
                for cell in frame.names.values():
                    cell[0] = 0
                for child in frame.children.values():
                    child.calls = 0
        if root.is_checked and not self.has_run and self.iteration >= _LEARNING - 1:
            self._end_checks()
        self._seen_outermost.clear()
        self.iteration += 1

    def forget_plans(self) -> None:
        """Drop all plans: those of active frames now, the others when their frame is entered."""
        self.generation += 1
        frame: Frame | None = self.frame
        while frame is not None:
            frame.forget_plans(self.generation)
            frame = frame.caller
        self.root.forget_plans(self.generation)

    def module_path(self) -> str:
        """Path of the running module within the outermost one, "" outside of modules."""
        return _CALL_NUMBER.sub("", self.frame.path.partition(".")[2])

    def modules(self) -> list[nn.Module]:
        """The running modules, innermost first."""
        found = []
        frame: Frame | None = self.frame
        while frame is not None:
            module = frame.module() if frame.module is not None else None
            if module is not None:
                found.append(module)
            frame = frame.caller
        return found

    def references(self) -> list[weakref.ref[nn.Module]]:
        """References to the running modules, innermost first."""
        found = []
        frame: Frame | None = self.frame
        while frame is not None:
            if frame.module is not None:
                found.append(frame.module)
            frame = frame.caller
        return found

    def last_frame(self, module: nn.Module) -> Frame | None:
        """The frame of the last call of `module` in this thread."""
        reference = self._last.get(id(module))
        return reference.frame() if reference is not None and reference() is module else None

    def tell_modules(self, tells: bool) -> None:
        """Set :attr:`tells_modules`, and let the gate leave all calls of modules to Python."""
        self.tells_modules = tells
        frames = [self.root]
        while frames:
            frame = frames.pop()
            for child in frame.children.values():
                child.is_fused = self._is_for_python(frame, child.ref())
                frames += child.frames

    def open(self, frame: Frame) -> None:
        """Let the modules that are called in a frame run captured, each on its own."""
        if not frame.is_open:
            frame.is_open = True
            for child in frame.children.values():
                child.is_fused = True

    def leave_to_gate(self, module: nn.Module, parent: Frame) -> None:
        """Let the gate enter a module that is called in an open frame: it does not run captured."""
        child = parent.children.get(id(module))
        if child is not None:
            child.is_fused = self.tells_modules or isinstance(module, FUSED)

    def _is_for_python(self, parent: Frame, module: nn.Module | None) -> bool:
        """See :attr:`Child.is_fused`."""
        is_captured = self.captures and (parent is self.root or parent.is_open)
        return self.tells_modules or is_captured or isinstance(module, FUSED)

    def note_results(self, results: Sequence[Any]) -> None:
        """Note what an outermost module has returned."""
        self.results.set(results)

    def note_outside(self, result: Any, phase: Phase) -> None:
        """Note what an operator outside of modules has computed without gradients."""
        if isinstance(result, torch.Tensor):
            noted = self._more_results if phase == "forward" else self._measured
            noted.add(result)

    def is_measured(self, tensors: Sequence[Any]) -> bool:
        """Whether one of these tensors was computed by an operator of another phase."""
        return any(map(self._measured.has, tensors))

    def is_result(self, tensors: Sequence[Any]) -> bool:
        """Whether an outermost module has returned one of these tensors at its last call.

        Or it was computed from one that it has.
        """
        return any(map(self.results.has, tensors)) or any(map(self._more_results.has, tensors))

    def clear(self) -> None:
        """Drop all frames."""
        self.has_run = self.tells = self.tells_modules = False
        self.results.clear()
        self._more_results.clear()
        self._measured.clear()
        self.is_building = self.has_recorded = self.has_trained = self.is_inferring = False
        self.codes.clear()
        self.known_codes.clear()
        self.checked.clear()
        self.root.clear()
        self.root.is_checked = True
        self._last.clear()
        self._places = None
        CONSTANTS.clear()
        self._seen_outermost.clear()
        self.go_to(self.root)

    def _enter_wrapped(self, child: Child) -> Frame:
        """Enter the module in a wrapper, if the wrapper runs it without ``__call__``."""
        inner = child.inner() if child.inner is not None else None
        if inner is None:
            return self.frame
        parent = self.enter_module(inner)
        self.frame.is_wrapped = True
        return parent

    def _is_within(self, module: nn.Module) -> bool:
        """Whether a module calls itself that was entered with its wrapper.

        In PyTorch 2.13 ``OptimizedModule`` calls the ``__call__`` of a layer of ``torch.nn`` where
        that is not captured as one graph, and the ``forward`` of other modules.
        """
        frame = self.frame
        return frame.is_wrapped and frame.module is not None and frame.module() is module

    def _enter_again(self, module: nn.Module) -> bool:
        """Enter a module that a backward pass runs again under the ids of its forward pass."""
        frame = self.last_frame(module)
        if frame is None:
            return False
        if frame.generation != self.generation:
            frame.forget_plans(self.generation)
        frame.restart()
        frame.caller = self.frame
        self._places = None
        self.go_to(frame)
        return True

    def _enter_outermost(self, child: Child) -> None:
        """Begin a new iteration if this outermost module has run in the present one.

        Restarting the root counters at every outermost module would give the same ids to
        the operators before and after the second model of one iteration.
        """
        if child in self._seen_outermost or len(self._seen_outermost) > _MAX_OUTERMOST:
            self.new_iteration()
        self._seen_outermost.add(child)
        self._places = None
        self.is_building = False
        if not self.has_run:
            if not (self.has_recorded or self.iteration):
                # What was computed before has made weights.
                self.root.restart()
            self.has_run = True
            self.root.check(True)

    def _new_child(self, parent: Frame, module: nn.Module) -> Child:
        key = id(module)
        children = parent.children
        transparent = type(module).__name__ in _TRANSPARENT and is_transparent(module)
        model: Model | None = None
        if transparent:
            name = ""
        elif parent is self.root:
            name, model = self._labels.label(module)
        else:
            owner = parent.module() if parent.module is not None else None
            name = self._name_below(owner, module) or self._stray_name(parent, module)
        if isinstance(module, torch.jit.ScriptModule):
            self._not_seen("TorchScript modules: their operators run in C++")
        is_fused = self._is_for_python(parent, module)
        reference = _Called.of(module, children, self._last)
        child = Child(reference, name, transparent, is_fused, model)
        if transparent and hasattr(module, _internals.COMPILED_MODULE):
            child.inner = weakref.ref(getattr(module, _internals.COMPILED_MODULE))
        children[key] = child
        return child

    def _name_below(self, owner: nn.Module | None, module: nn.Module) -> str | None:
        """Path of `module` below `owner`, which calls it, without transparent wrappers."""
        if owner is None:
            return None
        if self._places is None:
            self._places = Places(self.modules()[-1])
        # The second for a module that is registered later, or first at a place elsewhere.
        return self._places.path(owner, module) or Places(owner).path(owner, module)

    def _stray_name(self, parent: Frame, module: nn.Module) -> str:
        """A name for a module that its caller does not register, e.g. one kept in a list."""
        taken = {child.name for child in parent.children.values()}
        given = layer_name(module)
        if given and given not in taken:
            return given
        name = given or class_name(module)
        return next(n for n in (f"{name}@{i}" for i in itertools.count()) if n not in taken)

    def _new_frame(self, parent: Frame, child: Child, call: int) -> Frame:
        name = f"{child.name}#{call}" if call else child.name
        frame = Frame(f"{parent.path}.{name}" if parent.path else name, child.ref, child.model)
        frame.model = frame.model or parent.model
        frame.generation = self.generation
        child.frames.append(frame)
        # Not a reference to the frame, which would be an object for each module.
        self._last[child.ref.key] = child.ref
        return frame


def class_name(module: nn.Module) -> str:
    """The name of the module's class as the user wrote it."""
    cls = type(module)
    # FSDP2's fully_shard() makes a subclass ``(FSDPModule, <the user's class>)``.
    if cls.__bases__ and cls.__bases__[0].__name__ == "FSDPModule":
        cls = cls.__bases__[-1]
    return cls.__name__


def is_transparent(module: nn.Module) -> bool:
    """Whether `module` is a wrapper of PyTorch that ids do not mention."""
    cls = type(module)
    return cls.__name__ in _TRANSPARENT and cls.__module__.startswith("torch.")


class Places:
    """Where the modules below one are registered: the first place in the order of its children.

    Made in one walk, and then asked for one module after the other.
    """

    def __init__(self, top: nn.Module) -> None:
        # By module its name and the one above; not pairs of them, which would be objects.
        self._names: dict[int, str] = {}
        self._above: dict[int, weakref.ref[nn.Module]] = {}
        # Not named_modules(): its generators are nested, so that a step costs the depth.
        walk = [iter([("", top)])]
        owners: list[weakref.ref[nn.Module]] = []
        while walk:
            name, module = next(walk[-1], ("", None))
            if module is None:
                walk.pop()
                if owners:
                    owners.pop()
            elif id(module) not in self._names:
                own = weakref.ref(module)
                self._names[id(module)] = name
                self._above[id(module)] = owners[-1] if owners else own
                owners.append(own)
                walk.append(module.named_children())

    def path(self, owner: nn.Module, module: nn.Module) -> str | None:
        """The path of `module` below `owner`, without transparent wrappers.

        None if the place of `module` is not below `owner`, or is another one by now.
        """
        names: list[str] = []
        while module is not owner:
            reference, name = self._above.get(id(module)), self._names.get(id(module), "")
            above = reference() if reference is not None else None
            if above is None or above is module or getattr(above, name, None) is not module:
                return None
            # For each new module: most names need no function call.
            if type(above).__name__ not in _TRANSPARENT or not is_transparent(above):
                names.append(name)
            module = above
        return ".".join(reversed(names))
