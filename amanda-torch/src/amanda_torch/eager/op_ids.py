"""Operator ids of the eager driver, made from the module calls of a thread.

An id is ``<outermost module's class>.<module path>/<op name>:<k>``, where `k` counts the
operators of that name within one call of the module. Outside of modules operators count by their
phase: ``/mul:0`` is the first of the forward phase, ``/setup/mul:0`` the first that creates
weights. A :class:`Tracker` follows the module calls of its thread::

    caller = tracker.enter_module(module)
    ...                       # operators find their counters in tracker.cells
    tracker.go_to(caller)

Frames of module calls are reused in every iteration, with the facts about their operators, so that
an operator costs a dictionary look-up and no string.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from amanda.interface.specs import Phase
from amanda.python.references import Reference, nothing
from amanda_torch import _internals
from amanda_torch.eager import records
from amanda_torch.eager.fused_modules import FUSED
from amanda_torch.eager.keras_layers import layer_name
from amanda_torch.eager.module_frames import Called, Child, Frame, Model
from amanda_torch.eager.module_names import Labels, Places, class_name
from amanda_torch.operators.names import CONSTANTS, TRANSPARENT, is_transparent

_graph_task = _internals.graph_task
_MAX_OUTERMOST = 1000
"""Outermost modules of one iteration at most: a program with more builds, runs and drops models."""

_LEARNING = 2
"""Iterations in which the phases of all operators of a program without modules are determined: a
first step, and one that begins after weights were changed."""

_NOTED = 32
"""Tensors whose phase is remembered, for operators that read them."""

_CALL_NUMBER = re.compile(r"#\d+")


class Noted:
    """The last noted tensors, held weakly and found by identity."""

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
        """Note these tensors, however many, instead of all others."""
        # Small models are called as often as operators are.
        self._references = {id(tensor): Reference(tensor, nothing) for tensor in tensors}

    def has(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is among them."""
        reference = self._references.get(id(tensor))
        # Another tensor may have the identity of a deleted one.
        return reference is not None and reference() is tensor

    def clear(self) -> None:
        """Forget all."""
        self._references = {}


class Tracker(records.TrackerFields):
    """The module frames of one thread.

    Attributes:
        active: the scopes that instrument operators now, unless `stale`.
        frame: the frame of the module call that is running.
        cells: ``frame.cells``, one look-up nearer to the operators.
        root: the frame outside of all modules, of the forward phase. The phases of its operators
            are determined (checked) in programs that call modules, and in the first iterations of
            any program. Later, in a program without modules, only operators whose names have had
            another phase are checked, since checks cost time.
        checked: the operators that were checked in a program without modules, and their names.
        codes: by the ``id()`` of code, the phase of the operators that it calls, see
            :func:`~amanda_torch.eager.phases.phase_outside`.
        known_codes: the code in `codes`, kept so that its ``id()`` stays unique.
        is_building: whether a module was built since an outermost one was called.
        has_recorded: whether an operator outside of modules was recorded for differentiation.
        has_trained: whether a backward pass has ended.
        has_continued: whether one has ended in this iteration without ending it.
        is_inferring: whether layers of Keras run to learn the shapes of their results.
        generation: counts up whenever plans become out of date.
        iteration: counts up whenever the root counters restart.
        results: tensors that an outermost module has returned at its last call.
        has_run: whether an outermost module was called.
        tells: whether a tool has routines at derived points.
        tells_modules: whether a tool has routines at the entry or exit of modules.

    Args:
        labels: the names of outermost modules.
    """

    def __init__(self, labels: Labels) -> None:
        self.active: tuple[Any, ...] = ()
        self.root = Frame("", None, phase="")
        self.root.is_checked = True
        self.checked: dict[Any, str] = {}
        self.codes: dict[int, Any] = {}
        self.known_codes: list[Any] = []
        self.is_building = self.has_recorded = self.has_trained = False
        self.is_inferring = self.has_continued = False
        self.frame = self.root
        self.cells = self.root.cells
        self.generation = 0
        self.iteration = 0
        self._labels = labels
        # Not ids of modules: a new module may get the id of a deleted one.
        self._seen_outermost: set[Child] = set()
        self._last: dict[int, Called] = {}
        # For the outermost module that runs; created when its first child is new.
        self._places: Places | None = None
        self.results, self._more_results, self._measured = Noted(), Noted(), Noted()
        self.has_run = False
        self.tells = False
        self.tells_modules = False

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
        """Within it, calls of modules are ignored, and all operators are of the setup."""
        outer, frame, inferring = self.frame, self.outside("setup"), self.is_inferring
        try:
            self.is_inferring = True
            self.go_to(frame)
            yield
        finally:
            self.is_inferring = inferring
            self.go_to(outer)

    def asks(self, name: str) -> bool:
        """True if the phase of an operator that is called now is determined before it is
        counted."""
        frame = self.frame
        if frame.is_checked or not frame.asides:
            return frame.is_checked
        # In training, creating tensors is not setup any more.
        left_out = "setup" if self.has_trained else ""
        return any(name in a.names for a in frame.asides.values() if a.phase != left_out)

    def _end_checks(self) -> None:
        """Count operators without a check, except operators whose names have had another phase."""
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
        """Enter the frame of a module call; return the frame of the caller."""
        # enter_module() of the extension (operators.cc) does the same for known calls.
        parent = self.frame
        if parent.phase:
            if self.is_inferring:
                return parent
            # A step of an optimizer has raised.
            self.go_to(self.root)
            parent = self.root
        child = parent.children.get(id(module))
        if child is None or child.ref() is not module:
            if parent.is_wrapped and self._is_within(module):
                return parent
            child = self._new_child(parent, module)
        if child.transparent:
            return self._enter_wrapped(child)
        if parent is self.root and not self._begins_outermost(child, module):
            return parent
        call = child.calls
        child.calls = call + 1
        frames = child.frames
        frame = frames[call] if call < len(frames) else self._new_frame(parent, child, call)
        if frame.generation != self.generation:
            frame.forget_plans(self.generation)
        frame.restart()
        frame.caller = parent
        self.frame = frame
        self.cells = frame.cells
        return parent

    def path_of(self, module: nn.Module) -> str | None:
        """The path of the next call of `module` from here; None for its first call."""
        child = self.frame.children.get(id(module))
        if child is None or child.ref() is not module:
            return self.frame.path if self._is_within(module) else None
        begins = self.frame is self.root and child in self._seen_outermost
        call = 0 if begins else child.calls
        return child.frames[call].path if call < len(child.frames) else None

    def forget_call(self, module: nn.Module) -> None:
        """Undo the last call of `module` from here: its next call has the same ids."""
        child = self.frame.children.get(id(module))
        if child is None:
            if self._is_within(module):
                self.frame.restart()
            return
        child.calls -= bool(child.calls)
        if self.frame is self.root:
            self._seen_outermost.discard(child)

    def was_called(self, child: Child) -> bool:
        """True if an outermost module has been called in the present iteration."""
        return child in self._seen_outermost

    def new_iteration(self) -> None:
        """Restart the counters outside of modules."""
        root = self.root
        if self.frame.phase:
            self.go_to(root)
        root.restart()
        for frame in root.asides.values():
            # Building models is no part of an iteration, unless the program declares one.
            if frame.phase != "setup" or not (self.has_run or self.has_trained):
                frame.restart()
        if root.is_checked and not self.has_run and self.iteration >= _LEARNING - 1:
            self._end_checks()
        self._seen_outermost.clear()
        self.has_continued = False
        self.iteration += 1

    def forget_plans(self) -> None:
        """Drop all plans: in active frames now, in other frames when they are entered."""
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
                child.is_fused = self._is_for_python(child.ref())
                frames += child.frames

    def _is_for_python(self, module: nn.Module | None) -> bool:
        """See :attr:`Child.is_fused`."""
        return self.tells_modules or isinstance(module, FUSED)

    def note_results(self, results: Sequence[Any]) -> None:
        """Note the tensors that an outermost module has returned."""
        self.results.set(results)

    def note_outside(self, result: Any, phase: Phase) -> None:
        """Note the result of an operator outside of modules that records no gradient."""
        if isinstance(result, torch.Tensor):
            noted = self._more_results if phase == "forward" else self._measured
            noted.add(result)

    def is_measured(self, tensors: Sequence[Any]) -> bool:
        """True if an operator of another phase than forward has computed one of these tensors."""
        return any(map(self._measured.has, tensors))

    def is_result(self, tensors: Sequence[Any]) -> bool:
        """True if an outermost module has returned one of these tensors at its last call, or the
        tensor was computed from such a result.

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
        """True if a module that was entered by its wrapper calls itself.

        In PyTorch 2.13 ``OptimizedModule`` calls the ``__call__`` of a layer of ``torch.nn`` that
        is not captured as one graph, and the ``forward`` of other modules.
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

    def _begins_outermost(self, child: Child, module: nn.Module) -> bool:
        """Begin a new iteration if this outermost module has run in the present one.

        Restarting the root counters at every outermost module would give the same ids to
        the operators before and after the second model of one iteration.

        Returns:
            False if the module was entered instead, with the ids of its forward pass: a module that
            a backward pass calls is recomputed, by another library's checkpoints.
        """
        if _graph_task() != -1 and self._enter_again(module):
            return False
        if child in self._seen_outermost or len(self._seen_outermost) > _MAX_OUTERMOST:
            self.new_iteration()
        self._seen_outermost.add(child)
        self._places = None
        self.is_building = False
        if not self.has_run:
            if not (self.has_recorded or self.iteration):
                # The operators before it have created weights.
                self.root.restart()
            self.has_run = True
            self.root.check(True)
        if CONSTANTS.is_filled:
            CONSTANTS.forget(module)
        return True

    def _new_child(self, parent: Frame, module: nn.Module) -> Child:
        key = id(module)
        children = parent.children
        transparent = type(module).__name__ in TRANSPARENT and is_transparent(module)
        model: Model | None = None
        if transparent:
            name = ""
        elif parent is self.root:
            name, model = self._labels.label(module)
        else:
            owner = parent.module() if parent.module is not None else None
            name = self._name_below(owner, module) or self._stray_name(parent, module)
        is_fused = self._is_for_python(module)
        reference = Called.of(module, children, self._last)
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
        # The second look-up finds modules that were registered later, or elsewhere at first.
        return self._places.path(owner, module) or Places(owner).path(owner, module)

    def _stray_name(self, parent: Frame, module: nn.Module) -> str:
        """A name for a module that its caller does not register, such as one in a list."""
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
