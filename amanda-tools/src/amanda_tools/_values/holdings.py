"""The memory of tensors from the first sight of it until it is freed.

``ledger.note(tensor, op, "activations")`` notes the memory of a tensor once, however many views it
has, and keeps none of it alive. What is held at the peak, or at another moment, can be asked
afterwards::

    ledger.held(ledger.peak_at)
"""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from amanda.python.references import Reference
from amanda.tools.description import OpDescription
from amanda_tools._internals import local_part
from amanda_tools._values.shapes import HANDLES, byte_size

_ROOM = 1000
"""Freed holdings that are kept before those that no moment needs are dropped."""


_RANKS = {"buffers": 1, "gradients": 2, "optimizer state": 2, "parameters": 3}
"""Of two kinds the one with the higher rank holds."""


@attrs.define(eq=False)
class Holding:
    """The memory of one tensor and of all of its views.

    Attributes:
        bytes: its size.
        op: the operator that has made it, or was given it first.
        kind: what it is used as.
        name: path of a parameter, or of the one whose gradient it is.
        born, died: moments of the ledger; infinite until it is freed.
        references: by id, those to the objects that live as long as the memory.
    """

    bytes: int
    op: OpDescription
    kind: str
    name: str
    born: int
    died: float = math.inf
    references: dict[int, Any] = attrs.field(factory=dict)

    def claim(self, op: OpDescription, kind: str, name: str = "") -> None:
        """Note what an operator uses it as, unless it is known to be more than that."""
        if _RANKS.get(kind, 0) > _RANKS.get(self.kind, 0):
            self.op, self.kind, self.name = op, kind, name


class Ledger:
    """The memory of tensors, and its peak.

    Attributes:
        bytes: held now.
        peak: the most that was held at once, and `step_peak`, the most since it was set to 0.
        peak_at, peak_step: moment and iteration of the peak.
        now: the current moment: how many holdings there have been, and how many were freed.
        step: number of the current iteration.
        holdings: those that may be asked for.
        unknown: tensors whose memory cannot be seen, counted at each look.
    """

    def __init__(self) -> None:
        self.bytes = self.peak = self.step_peak = self.peak_at = self.peak_step = 0
        self.now = self.step = self.unknown = 0
        self._live: dict[Hashable, Holding] = {}
        self.holdings: list[Holding] = []
        # By callbacks of references, which may run in any thread.
        self._freed: collections.deque[tuple[Hashable, int]] = collections.deque()

    def note(self, tensor: Any, op: OpDescription, kind: str, name: str = "") -> Holding | None:
        """Note the memory of a tensor, and return its holding; None if it is not known."""
        try:
            key, holder, size = _memory_of(local_part(tensor))
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
            self.unknown += 1
            return None
        # Now that the holder lives, nothing else has its id.
        self.settle()
        return self._hold(key, holder, size, op, kind, name) if size else None

    def note_variable(self, key: Hashable, size: int, op: OpDescription) -> Holding:
        """Note a variable, which is held to the end, and return its holding."""
        return self._hold(("variable", key), None, size, op, "buffers", "")

    def _hold(
        self, key: Hashable, holder: Any, size: int, op: OpDescription, kind: str, name: str
    ) -> Holding:
        found = self._live.get(key)
        if found is None:
            self.now += 1
            found = self._live[key] = Holding(0, op, kind, name, self.now)
            self.holdings.append(found)
        if holder is not None and id(holder) not in found.references:
            freed, place = self._freed, (key, id(holder))
            found.references[id(holder)] = Reference(holder, lambda _: freed.append(place))
        # Storages may be resized.
        self.bytes += size - found.bytes
        found.bytes = size
        if self.bytes > self.peak:
            self.peak, self.peak_at, self.peak_step = self.bytes, self.now, self.step
        self.step_peak = max(self.step_peak, self.bytes)
        return found

    def settle(self) -> None:
        """Note what has been freed until now."""
        while self._freed:
            key, holder = self._freed.popleft()
            found = self._live[key]
            del found.references[holder]
            if not found.references:
                del self._live[key]
                self.bytes -= found.bytes
                self.now += 1
                found.died = self.now

    def drop(self, moments: Sequence[int]) -> None:
        """Drop what has been freed and was held neither at the peak nor at one of the moments."""
        if len(self.holdings) > 2 * len(self._live) + _ROOM:
            wanted = (self.peak_at, *moments)
            self.holdings = [
                each
                for each in self.holdings
                if each.died == math.inf or any(each.born <= m <= each.died for m in wanted)
            ]

    def held(self, moment: int) -> Iterator[Holding]:
        """Yield what was held at a moment: the peak, a moment that :meth:`drop` was given, or
        now."""
        return (each for each in self.holdings if each.born <= moment < each.died)


def _memory_of(tensor: Any) -> tuple[Hashable, Any, int]:
    """The key of the memory of a tensor, the object that lives as long, and the bytes.

    Raises:
        Exception: the tensor has none that can be seen, such as a sparse one.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        storage = tensor.untyped_storage()
        # One object stands for a storage as long as the storage lives.
        return id(storage), storage, 0 if storage.device.type == "meta" else storage.nbytes()
    size = 0 if getattr(tensor.dtype, "name", "") in HANDLES else byte_size(tensor)
    if size is None:
        raise TypeError("unknown size")
    return _address(tensor) or id(tensor), tensor, size


def _address(tensor: Any) -> int:
    """The address of a tensor of TensorFlow in main memory, which others may share; 0 if there is
    none, as of element types that Python's buffers lack."""
    if "CPU" not in str(getattr(tensor, "device", "")):
        return 0
    try:
        return int(np.asarray(memoryview(tensor)).ctypes.data)
    except (BufferError, TypeError, ValueError):
        return 0
