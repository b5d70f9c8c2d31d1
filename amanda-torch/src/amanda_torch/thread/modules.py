"""Where an operator is: module frames, and the counters that operator ids are made of.

Ids follow design section 6:
``<outermost module's class>.<module path>/<op name>:<k>``.
"""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amanda_torch import _internals

_TRANSPARENT = {
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "CheckpointWrapper",
    "OffloadWrapper",
}
"""Wrappers of PyTorch that leave no trace in ids."""

_CALL_NUMBER = re.compile(r"#\d+")

Cell = list[Any]
"""``[count, plan, plan, ...]`` of one op name within one frame; see :class:`Frame`."""


class Child:
    """One module called within a frame, and the frames of its calls.

    A transparent one has no frames: what it calls counts as its caller's, or as
    that of the module `inner` which it calls by a way of its own.
    """

    __slots__ = ("calls", "frames", "inner", "name", "ref", "transparent")

    def __init__(self, ref: weakref.ref[nn.Module], name: str, transparent: bool) -> None:
        self.ref = ref
        self.name = name
        self.transparent = transparent
        self.inner: weakref.ref[nn.Module] | None = None
        self.calls = 0
        self.frames: list[Frame] = []


class Frame:
    """One module call, at its place in the calling modules; reused in every iteration.

    Attributes:
        path: the id's part before the slash, "" outside of modules.
        cells: func to cell; the position in a cell is the count.
        names: op name to cell: funcs of one name share it.
        children: id of a module object to its :class:`Child`.
        generation: of the plans in the cells, see ``Tracker.generation``.
        caller: the frame that this one returns to, while it is active.
        module: weak reference to the module, None for the root.
    """

    __slots__ = (
        "__weakref__",
        "caller",
        "cells",
        "children",
        "generation",
        "module",
        "names",
        "path",
    )

    def __init__(self, path: str, module: weakref.ref[nn.Module] | None) -> None:
        self.path = path
        self.cells: dict[Any, Cell] = {}
        self.names: dict[str, Cell] = {}
        self.children: dict[int, Child] = {}
        self.generation = 0
        self.caller: Frame | None = None
        self.module = module

    def restart(self) -> None:
        """Begin a new iteration: all counters from zero."""
        for cell in self.names.values():
            cell[0] = 0
        for child in self.children.values():
            child.calls = 0

    def forget_plans(self, generation: int) -> None:
        """Drop the plans, which a change of scopes has made out of date."""
        for cell in self.names.values():
            del cell[1:]
        self.generation = generation

    def cell_for(self, func: Any, name: str) -> Cell:
        """The cell of an op name, known from now on by `func` too."""
        cell = self.names.get(name)
        if cell is None:
            cell = self.names[name] = [0]
        self.cells[func] = cell
        return cell

    def counters(self) -> tuple[dict[str, int], dict[int, int]]:
        """A snapshot of all counters."""
        return (
            {name: cell[0] for name, cell in self.names.items()},
            {key: child.calls for key, child in self.children.items()},
        )

    def set_counters(self, snapshot: tuple[dict[str, int], dict[int, int]]) -> None:
        """Go back to a snapshot."""
        for name, cell in self.names.items():
            cell[0] = snapshot[0].get(name, 0)
        for key, child in self.children.items():
            child.calls = snapshot[1].get(key, 0)

    def clear(self) -> None:
        """Let go of everything below this frame, at the end of the thread's scopes."""
        for child in self.children.values():
            for frame in child.frames:
                frame.clear()
        self.children.clear()
        self.cells.clear()
        self.names.clear()


class Labels:
    """Names of outermost modules: the class, and a number from the second instance on.

    Shared by all threads, so that a model has one name wherever it runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, itertools.count[int]] = {}
        self._labels: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def label(self, module: nn.Module) -> str:
        """``ResNet`` for the first ResNet met, ``ResNet@1`` for the second."""
        with self._lock:
            known = self._labels.get(id(module))
            if known is not None and known[0]() is module:
                return known[1]
            name = class_name(module)
            number = next(self._counts.setdefault(name, itertools.count()))
            label = f"{name}@{number}" if number else name
            self._labels[id(module)] = (weakref.ref(module), label)
            return label

    def clear(self) -> None:
        """Forget all names, when the driver is detached."""
        self._counts.clear()
        self._labels.clear()


class Tracker:
    """The module frames of one thread.

    Attributes:
        frame: the frame of the module call that is running.
        cells: ``frame.cells``, kept here for the op path.
        root: the frame outside of all modules.
        generation: raised whenever plans become out of date.
        iteration: raised whenever the root counters restart.
    """

    def __init__(self, labels: Labels, unseen: Callable[[str], None]) -> None:
        self._unseen = unseen
        self.root = Frame("", None)
        self.frame = self.root
        self.cells = self.root.cells
        self.generation = 0
        self.iteration = 0
        self._labels = labels
        self._seen_outermost: set[int] = set()
        self._last: dict[int, weakref.ref[Frame]] = {}

    def go_to(self, frame: Frame) -> None:
        """Make `frame` the current one."""
        self.frame = frame
        self.cells = frame.cells

    def enter_module(self, module: nn.Module) -> Frame:
        """Enter the frame of a module call; returns the frame to come back to."""
        parent = self.frame
        child = parent.children.get(id(module))
        if child is None or child.ref() is not module:
            child = self._new_child(parent, module)
        if child.transparent:
            inner = child.inner() if child.inner is not None else None
            return parent if inner is None else self.enter_module(inner)
        if parent is self.root:
            if _internals.in_backward() and self._enter_again(module):
                return parent
            self._enter_outermost(module)
        call = child.calls
        child.calls = call + 1
        frames = child.frames
        frame = frames[call] if call < len(frames) else self._new_frame(parent, child, call)
        if frame.generation != self.generation:
            frame.forget_plans(self.generation)
        # Frame.restart(), here for its speed: every module call comes by.
        for cell in frame.names.values():
            cell[0] = 0
        if frame.children:
            for other in frame.children.values():
                other.calls = 0
        frame.caller = parent
        self.frame = frame
        self.cells = frame.cells
        return parent

    def new_iteration(self) -> None:
        """Restart the counters outside of modules."""
        self.root.restart()
        self._seen_outermost.clear()
        self.iteration += 1

    def forget_plans(self) -> None:
        """Make all plans out of date: those of active frames now, others on entry."""
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

    def last_frame(self, module: nn.Module) -> Frame | None:
        """The frame of the last call of `module` in this thread."""
        reference = self._last.get(id(module))
        frame = reference() if reference is not None else None
        same = frame is not None and frame.module is not None and frame.module() is module
        return frame if same else None

    def clear(self) -> None:
        """Let go of everything."""
        self.root.clear()
        self._last.clear()
        self._seen_outermost.clear()
        self.go_to(self.root)

    def _enter_again(self, module: nn.Module) -> bool:
        """Enter a module that the backward pass recomputes under its ids of before."""
        frame = self.last_frame(module)
        if frame is None:
            return False
        if frame.generation != self.generation:
            frame.forget_plans(self.generation)
        frame.restart()
        frame.caller = self.frame
        self.go_to(frame)
        return True

    def _enter_outermost(self, module: nn.Module) -> None:
        """An outermost module that runs again begins a new iteration.

        Design section 6 restarts the root counters at each outermost module;
        restarting only when one of them comes round again keeps the operators
        between two models of one iteration apart.
        """
        if id(module) in self._seen_outermost or len(self._seen_outermost) > 1000:
            self.new_iteration()
        self._seen_outermost.add(id(module))

    def _new_child(self, parent: Frame, module: nn.Module) -> Child:
        key = id(module)
        children, last = parent.children, self._last

        def died(_: weakref.ref[nn.Module]) -> None:
            children.pop(key, None)
            last.pop(key, None)

        transparent = is_transparent(module)
        if transparent:
            name = ""
        elif parent is self.root:
            name = self._labels.label(module)
        else:
            owner = parent.module() if parent.module is not None else None
            name = _name_within(owner, module) or self._stray_name(parent, module)
        if isinstance(module, torch.jit.ScriptModule):
            self._unseen("TorchScript modules: their operators run in C++")
        child = Child(weakref.ref(module, died), name, transparent)
        if transparent and hasattr(module, _internals.COMPILED_MODULE):
            child.inner = weakref.ref(getattr(module, _internals.COMPILED_MODULE))
        children[key] = child
        return child

    def _stray_name(self, parent: Frame, module: nn.Module) -> str:
        """A name for a module that its caller does not own, e.g. one kept in a list."""
        name = class_name(module)
        taken = {child.name for child in parent.children.values()}
        return next(n for n in (f"{name}@{i}" for i in itertools.count()) if n not in taken)

    def _new_frame(self, parent: Frame, child: Child, call: int) -> Frame:
        name = f"{child.name}#{call}" if call else child.name
        frame = Frame(f"{parent.path}.{name}" if parent.path else name, child.ref)
        frame.generation = self.generation
        child.frames.append(frame)
        module = child.ref()
        if module is not None:
            self._last[id(module)] = weakref.ref(frame)
        return frame


def class_name(module: nn.Module) -> str:
    """The class's name; FSDP2 makes a subclass of the user's, which is looked through."""
    cls = type(module)
    if cls.__bases__ and cls.__bases__[0].__name__ == "FSDPModule":
        cls = cls.__bases__[-1]
    return cls.__name__


def is_transparent(module: nn.Module) -> bool:
    """Whether `module` is a wrapper of PyTorch's that ids do not mention."""
    cls = type(module)
    return cls.__name__ in _TRANSPARENT and cls.__module__.startswith("torch.")


def _name_within(owner: nn.Module | None, module: nn.Module) -> str | None:
    """Path of `module` below `owner`, without transparent wrappers."""
    if owner is None:
        return None
    for path, candidate in owner.named_modules():
        if candidate is module and path:
            return _without_wrappers(owner, path)
    return None


def _without_wrappers(owner: nn.Module, path: str) -> str:
    parts = []
    for part in path.split("."):
        if not is_transparent(owner):
            parts.append(part)
        owner = getattr(owner, part)
    return ".".join(parts)
