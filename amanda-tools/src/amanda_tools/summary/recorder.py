"""Figures of modules in one forward pass: calls, outputs, and the sums over operators.

Routines at modules report entries and exits, with a :class:`ModuleSource` per kind of module;
routines at operators add figures to the module that runs in their thread::

    recorder.enter(TorchModules(), model)
    recorder.add(flops=2000, size=64)
    recorder.leave(model, outputs, inputs)
    recorder.models[0].last.figures[""].flops

A pass is one complete call of an outermost module; figures are those of the last pass.
"""

from __future__ import annotations

import abc
import collections
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import attrs

from amanda.interface.specs import specs_of
from amanda.python.references import Reference, nothing
from amanda_tools._internals import shown_part
from amanda_tools._values.shapes import batch_of


@attrs.frozen
class ParameterFact:
    """One parameter: `key` identifies it within a model."""

    key: int
    size: int
    bytes: int
    is_trainable: bool


@attrs.frozen
class ModuleFact:
    """The description of a module, without any call.

    Attributes:
        path: path within the model, as ``module`` in the rows of tools.
        kind: name of its class.
        depth: 0 for the model.
        parameters: parameters of the module and of its parts.
        output: declared shape of a module that is not called, such as an input; else None.
        is_seen: False if its operators run where no driver sees them.
        kernel: its attribute ``kernel_size``; None without one.
    """

    path: str
    kind: str
    depth: int
    parameters: Sequence[ParameterFact]
    output: Sequence[int | None] | None = None
    is_seen: bool = True
    kernel: Any = None


class ModuleSource(abc.ABC):
    """Names and descriptions of modules of one kind; unless overridden, of modules with a name.

    Attributes:
        separator: separator of the names in a path.
    """

    separator = "/"

    def name(self, root: Any) -> str:
        """Return the name of a model."""
        return str(root.name)

    def root_path(self, root: Any) -> str:
        """Return the path of a model itself."""
        return str(root.name)

    @abc.abstractmethod
    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        """Yield path and module of a model's tree, in order; a shared module has several paths."""

    def local_name(self, module: Any) -> str:
        """Return the name of a module that is called within another module and is not in its
        tree; "" if its figures belong to the caller."""
        return str(getattr(module, "name", ""))

    def weights(self, module: Any) -> dict[str, Any]:
        """Return the shapes of a module's parameters by name, without those of its parts."""
        return {}

    @abc.abstractmethod
    def describe(self, path: str, depth: int, module: Any) -> ModuleFact:
        """Return the description of a module."""


@attrs.define
class Figures:
    """The figures of one module in one pass, without those of its parts.

    Attributes:
        calls: number of its calls.
        outputs: shape, dtype and device of the outputs of its first call that has any; None before.
        inputs: those of the tensors that this call was given.
        flops, bytes: floating-point operations, and bytes of the outputs of its operators.
        is_partial: True if the operations of some operators are not known.
    """

    calls: int = 0
    outputs: list[dict[str, Any]] | None = None
    inputs: Sequence[dict[str, Any]] = ()
    flops: int = 0
    bytes: int = 0
    is_partial: bool = False


class ForwardPass:
    """One call of an outermost module."""

    def __init__(self, model: ModelRecord) -> None:
        self.model = model
        self.figures = collections.defaultdict[str, Figures](Figures)

    def count_call(self, path: str) -> int:
        """Count a call of the module at a path; return the number of its earlier calls."""
        figures = self.figures[path]
        figures.calls += 1
        return figures.calls - 1

    def add(self, path: str, flops: int | None, size: int) -> None:
        """Add the figures of an operator to the module at a path."""
        figures = self.figures[path]
        figures.flops += flops or 0
        figures.is_partial |= flops is None
        figures.bytes += size


class ModelRecord:
    """One outermost module.

    Attributes:
        name: its label, ``Net``; ``Net@1`` for a second model of this name.
        source: names and descriptions of its modules.
        last: its last complete pass; None before.
        last_in_step: its last complete pass at the end of a step, without evaluations after it.
        passes: number of complete passes.
    """

    def __init__(self, name: str, source: ModuleSource, root: Any) -> None:
        self.name = name
        self.source = source
        self.last: ForwardPass | None = None
        self.last_in_step: ForwardPass | None = None
        self.passes = 0
        self._root = weakref.ref(root)
        # By identity: a module may have no hash, and another one may get its ``id()``.
        self._paths: dict[int, tuple[Reference, list[str]]] = {}
        self._called: dict[str, weakref.ref[Any]] = {}
        self._facts: list[ModuleFact] = []
        self.find_modules(root)

    def is_of(self, module: Any) -> bool:
        """True if this is the record of `module`."""
        return self._root() is module

    def has(self, path: str) -> bool:
        """True if a path is that of the model or of a module in it."""
        root = self._root()
        base = "" if root is None else self.source.root_path(root)
        return bool(base) and f"{path}{self.source.separator}".startswith(
            f"{base}{self.source.separator}"
        )

    def find_modules(self, root: Any) -> None:
        """Find the paths of the model's modules."""
        self._paths = {}
        for path, module in self.source.modules(root):
            self._paths_of(module).append(path)

    def _paths_of(self, module: Any) -> list[str]:
        """Return the known paths of a module, as a list to add to."""
        known = self._paths.get(id(module))
        if known is None or known[0]() is not module:
            known = self._paths[id(module)] = Reference(module, nothing), []
        return known[1]

    def path_of(self, source: ModuleSource, module: Any, parent: str) -> str:
        """Return the path of a module that runs within the module at `parent`."""
        places = self._paths_of(module)
        if not places:
            name = source.local_name(module)
            if not name:
                return parent
            path = f"{parent}{source.separator}{name}" if parent else name
            self._called[path] = weakref.ref(module)
            places.append(path)
            return path
        prefix = f"{parent}{self.source.separator}" if parent else ""
        return next((place for place in places if place.startswith(prefix)), places[0])

    def place(self, path: str, module: Any) -> str:
        """Register a module at a path within the outermost module; return the whole path."""
        base = self.source.root_path(self._root())
        whole = f"{base}{self.source.separator}{path}" if base else path
        if self._called.get(whole) is None and module is not None:
            self._called[whole] = weakref.ref(module)
        return whole

    def complete(self, done: ForwardPass) -> None:
        """Register a pass that has ended."""
        self.last = done
        self.passes += 1
        if not self._facts:
            self._facts = self._described()

    def facts(self) -> list[ModuleFact]:
        """Return the modules in the order of the tree; of a deleted model as they were."""
        self._facts = self._described() or self._facts
        return self._facts

    def _described(self) -> list[ModuleFact]:
        root = self._root()
        if root is None:
            return []
        base, separator = self.source.root_path(root), self.source.separator
        found: dict[str, ModuleFact] = {}
        for path, module in self._places(root):
            inside = path.removeprefix(base).strip(separator)
            depth = inside.count(separator) + 1 if inside else 0
            fact = self.source.describe(path, depth, module)
            found[path] = attrs.evolve(fact, kernel=vars(module).get("kernel_size"))
        return list(found.values())

    def _places(self, root: Any) -> list[tuple[str, Any]]:
        """Return the tree; modules known from calls only come after the module around them."""
        places, separator = list(self.source.modules(root)), self.source.separator
        known = {path for path, _ in places}
        for path, reference in self._called.items():
            module = reference()
            if path in known or module is None:
                continue
            parent = path.rpartition(separator)[0]
            around = [
                index
                for index, (other, _) in enumerate(places)
                if other == parent or other.startswith(f"{parent}{separator}")
            ]
            places.insert(around[-1] + 1 if around else len(places), (path, module))
        return places


@attrs.define
class _Frame:
    """A running call.

    Attributes:
        within: its pass; None for a call that is not recorded.
        handled: the exception that the program handles during the call.
        number: number of earlier calls of the module in the pass; -1 for a module whose figures
            belong to the caller.
        is_joined: True if the pass began elsewhere, and does not end with this call.
    """

    module: int
    path: str
    within: ForwardPass | None
    handled: BaseException | None
    number: int = -1
    is_joined: bool = False

    def is_part_of(self, outer: _Frame | None) -> bool:
        """True if the figures of the module belong to the call around this one."""
        return outer is not None and outer.path == self.path and outer.module != self.module


class _CallsInThread(threading.local):
    """The running calls of modules in a thread."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


class Recorder:
    """Follows the calls of modules in each thread.

    Attributes:
        models: the outermost modules that were called.
    """

    def __init__(self) -> None:
        self.models: list[ModelRecord] = []
        self._known: dict[int, ModelRecord] = {}
        self._running: list[ForwardPass] = []
        self._local: Any = _CallsInThread()

    def of_graphs(self) -> Recorder:
        """Return a recorder of the same models for calls that any thread may report, in order."""
        other = Recorder()
        other.models, other._known, other._running = self.models, self._known, self._running
        other._local = SimpleNamespace(frames=[])
        return other

    def enter(
        self, source: ModuleSource, module: Any, *, is_hidden: bool = False, place: str = ""
    ) -> None:
        """Register that a module is called.

        Args:
            is_hidden: True to record neither this call nor the calls in it.
            place: its path within the outermost module, if known.
        """
        frames = self._local.frames
        outer = frames[-1] if frames else None
        # A graph may be called by a module that runs eagerly.
        joined = self._running[-1] if outer is None and place and self._running else None
        path, within = ("", joined) if outer is None else (outer.path, outer.within)
        if is_hidden:
            within = joined = None
        elif within is not None:
            model = within.model
            path = model.place(place, module) if place else model.path_of(source, module, path)
        elif outer is None:
            within, path = self._begin_pass(source, module)
        frame = _Frame(id(module), path, within, sys.exception(), is_joined=joined is not None)
        if within is not None and not frame.is_part_of(outer):
            frame.number = within.count_call(path)
        frames.append(frame)

    def _begin_pass(self, source: ModuleSource, module: Any) -> tuple[ForwardPass | None, str]:
        """Return a pass of an outermost module, or None, and the path of the module."""
        model = self._model(source, module)
        if model is None:
            return None, ""
        within = ForwardPass(model)
        self._running.append(within)
        return within, source.root_path(module)

    def leave(self, module: Any, outputs: Any, inputs: Any) -> None:
        """Register that a module has returned, or raised if another exception is handled than at
        its call."""
        frames = self._local.frames
        frame = self._pop(frames, module)
        if frame is None or frame.within is None:
            return
        has_returned = sys.exception() is frame.handled
        figures = frame.within.figures[frame.path]
        if has_returned and frame.number >= 0 and not figures.outputs:
            # TensorFlow does not compute unread tensors, as in a call that is only used for a
            # shape.
            figures.outputs, figures.inputs = outputs, tensor_rows(inputs)
        if not frames and has_returned and not frame.is_joined:
            frame.within.model.complete(frame.within)

    def _pop(self, frames: list[_Frame], module: Any) -> _Frame | None:
        """Remove the innermost call of a module, and calls in it; None without a call of it."""
        frame = None
        # The end of a call is not reported if a hook of the user fails.
        while frames and (frame is None or frame.module != id(module)):
            frame = frames.pop()
        if frame is not None and not frames and not frame.is_joined:
            self._running[:] = [one for one in self._running if one is not frame.within]
        return frame if frame is not None and frame.module == id(module) else None

    def add(self, flops: int | None, size: int) -> None:
        """Add the figures of an operator that has run in this thread."""
        frames = self._local.frames
        if frames and (within := frames[-1].within) is not None:
            within.add(frames[-1].path, flops, size)

    def add_at(self, path: str, flops: int | None, size: int) -> bool:
        """Add an operator of a graph to the module at a path; False if its model does not run."""
        frames = self._local.frames
        # A graph that an eager model has called.
        running = (one for one in reversed(self._running) if one.model.has(path))
        within = frames[0].within if frames else next(running, None)
        if within is not None:
            within.add(path, flops, size)
        return within is not None

    def describe(self, source: ModuleSource, module: Any) -> None:
        """Register a model that has not run."""
        if model := self._model(source, module):
            model.last = ForwardPass(model)

    def _model(self, source: ModuleSource, module: Any) -> ModelRecord | None:
        """Return the record of an outermost module; None if its framework cannot list its tree."""
        known = self._known.get(id(module))
        try:
            if known is None or not known.is_of(module):
                name = source.name(module)
                count = sum(model.name.partition("@")[0] == name for model in self.models)
                known = ModelRecord(f"{name}@{count}" if count else name, source, module)
                self._known[id(module)] = known
                self.models.append(known)
            else:
                known.find_modules(module)
        except TypeError:
            return None
        return known


def tensor_rows(tensors: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Return shape, dtype and device of tensors, in order; nested ones, and those of unknown rank,
    are left out."""
    given = [t for t in tensors or () if t is not None and not getattr(t, "is_nested", False)]
    rows = []
    for tensor, spec in zip(given, specs_of(map(shown_part, given)), strict=True):
        if spec is not None and spec.shape is not None:
            rows.append(spec.row())
            with suppress(LookupError):
                rows[-1]["shape"][:0] = batch_of([tensor]).values()
    return rows


def unique(parameters: Iterable[ParameterFact]) -> Sequence[ParameterFact]:
    """Return the parameters without duplicates."""
    return list({parameter.key: parameter for parameter in parameters}.values())
