"""Frames of module calls, one for each call at its place in the calling modules; reused in every
iteration."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Literal, Self

from torch import nn

from amanda.interface.specs import Phase
from amanda_torch.eager import records

Cell = list[Any]
"""``[count, known, known, ...]`` of one op name within one frame; see :class:`Frame`."""


class Model:
    """Represents an outermost module: alive as long as the module or a hook of one of its
    graphs."""

    __slots__ = ("__weakref__",)


class Child(records.ChildFields):
    """One module called within a frame, and the frames of its calls.

    A transparent one has no frames: the operators that it calls count as its caller's, or
    as those of the module `inner`, which a compiled module calls without ``__call__``.

    Attributes:
        is_fused: True if it may run as one operator, see :mod:`amanda_torch.eager.fused_modules`,
            or if its calls are reported to tools. The gate leaves these calls to Python.
    """

    __slots__ = ("inner", "model", "name")

    def __init__(
        self, ref: Called, name: str, transparent: bool, is_fused: bool, model: Model | None = None
    ) -> None:
        self.model = model
        self.ref = ref
        self.name = name
        self.transparent = transparent
        self.is_fused = is_fused
        self.inner: weakref.ref[nn.Module] | None = None
        self.calls = 0
        self.frames: list[Frame] = []


class Called(weakref.ref[nn.Module]):
    """A reference to a module that was called within a frame.

    It is one object, without a callback of its own, and holds no tracker, which would be a cycle.

    Attributes:
        key: the id of the module.
    """

    __slots__ = ("_children", "_last", "key")

    key: int
    _children: dict[int, Child]
    _last: dict[int, Called]

    @classmethod
    def of(cls, module: nn.Module, children: dict[int, Child], last: dict[int, Called]) -> Self:
        """Create a reference. Not by ``__new__`` and ``__init__``, which are two functions.

        Args:
            children: children of the frame.
            last: by ``id()`` of a module, the reference of its last call.
        """
        called = cls(module, _forget)
        called.key, called._children, called._last = id(module), children, last
        return called

    def frame(self) -> Frame | None:
        """The frame of the module's last call there."""
        child = self._children.get(self.key)
        return child.frames[-1] if child is not None and child.frames else None

    def forget(self) -> None:
        """Drop the frames of a module that has been deleted."""
        child = self._children.pop(self.key, None)
        self._last.pop(self.key, None)
        if child is not None:
            # The child may be among those that have run in this iteration.
            child.frames.clear()
            child.model = None


def _forget(called: Any) -> None:
    called.forget()


class Frame(records.FrameFields):
    """One module call, at its place in the calling modules; reused in every iteration.

    Attributes:
        path: the id's part before the slash, "" outside of modules.
        cells: func to cell; an operator's position in its cell is its count. While operators are
            checked, a tuple of the cell if the last one was a forward operator by its inputs.
        names: op name to cell; several funcs of one name share a cell.
        children: id of a module object to its :class:`Child`.
        generation: generation of the plans in the cells, see
            :attr:`~amanda_torch.eager.op_ids.Tracker.generation`.
        caller: the frame that this one returns to, while it is active.
        module: weak reference to the module, None for the root.
        model: the outermost module, None for the root.
        captured: facts about compiled graphs that run in the module call.
        is_wrapped: True if the module was entered by a wrapper that runs it.
        phase: outside of modules, the phase of its operators, "" for the root; None within one.
        asides: of the root, the frames of the other phases by phase.
        is_checked: True if the phase of an operator is determined before it is counted, see
            :attr:`~amanda_torch.eager.op_ids.Tracker.root`; `cells` holds no operators then.
    """

    __slots__ = (
        "__weakref__",
        "asides",
        "captured",
        "is_checked",
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
        self.is_wrapped = False
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
        """Begin a new iteration: set all counters to zero."""
        for cell in self.names.values():
            cell[0] = 0
        for child in self.children.values():
            child.calls = 0

    def forget_plans(self, generation: int) -> None:
        """Drop the facts about operators, since scopes, switches or actions have changed."""
        for _, cell in self.named_cells():
            del cell[1:]
        self.generation = generation

    def cell_for(self, func: Any, name: str) -> Cell:
        """The cell of an op name; register it for `func`."""
        cell = self.names.get(name)
        if cell is None:
            cell = self.names[name] = [0]
        if not self.is_checked:
            self.cells[func] = cell
        return cell

    def named_cells(self) -> Iterator[tuple[str, Cell]]:
        """Yield all cells by name; names of other phases' cells begin with the phase."""
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
