"""Runs of PyTorch operators that are run again in the backward pass.

A :class:`RecordedRun` holds what its operator needs to be run again, and autograd holds a
:class:`SavedHandle` in place of each tensor that the operator saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from amanda.errors import AmandaError
from amanda.interface.calls import OpFunction
from amanda.python.nested import leaves
from amanda.tool import vanilla
from amanda_tools._internals import old_batch_check, version_of

_is_old_batch = old_batch_check()

STATE = frozenset({"running_mean", "running_var"})
"""Inputs that a normalization updates; the second run must update copies."""


@attrs.define(eq=False, weakref_slot=True)
class Kept:
    """A tensor that is held, with its version at that time."""

    tensor: torch.Tensor
    version: int
    op_id: str

    @classmethod
    def of(cls, tensor: torch.Tensor, op_id: str) -> Kept:
        """Hold a tensor without its autograd graph."""
        return cls(tensor.detach(), version_of(tensor), op_id)

    def tensor_now(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            AmandaError: it was changed in place since.
        """
        if version_of(self.tensor) != self.version:
            raise AmandaError(
                f"remat: a tensor {tuple(self.tensor.shape)} that the backward pass of op "
                f"{self.op_id} needs has been modified by an inplace operation since"
            )
        return self.tensor


@attrs.define(eq=False, weakref_slot=True)
class Recomputed:
    """A tensor that the second run of an operator makes.

    Attributes:
        execution: the run.
        number: position among its outputs; -1 - number for a tensor that the operator packed.
        geometry: element type, offset, shape and strides within the output's memory; None for a
            packed tensor itself.
    """

    execution: RecordedRun
    number: int
    geometry: tuple[torch.dtype, int, torch.Size, tuple[int, ...]] | None = None

    @classmethod
    def in_memory_of(cls, execution: RecordedRun, number: int, tensor: torch.Tensor) -> Recomputed:
        """Describe a tensor that lies in the memory of an output."""
        geometry = (tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return cls(execution, number, geometry)

    def tensor_now(self) -> torch.Tensor:
        """Return the tensor; the run has been run again."""
        execution = self.execution
        if self.number < 0:
            return execution.packed[-1 - self.number]
        whole = execution.outputs[self.number]
        if self.geometry is None:
            return whole
        dtype, offset, shape, stride = self.geometry
        with torch.no_grad():
            empty = torch.empty(0, dtype=dtype, device=whole.device)
            return empty.set_(whole.untyped_storage(), offset, shape, stride)


@attrs.frozen
class OverwrittenTensor:
    """A tensor that an operator changed in place after it was saved."""

    op_id: str

    def tensor_now(self) -> torch.Tensor:
        """Always raise: the tensor does not exist any more.

        Raises:
            AmandaError: as PyTorch raises for such a program.
        """
        raise AmandaError(
            "remat: a tensor that the backward pass needs has been modified by an inplace "
            f"operation, {self.op_id}"
        )


@attrs.define(eq=False, weakref_slot=True)
class SavedHandle:
    """The object that autograd holds in place of a saved tensor."""

    content: Kept | Recomputed | OverwrittenTensor


@attrs.frozen
class Autocast:
    """The setting of ``torch.autocast`` for a kind of device."""

    kind: str
    dtype: torch.dtype
    is_enabled: bool

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> Autocast | None:
        """Read the current setting for the device of the inputs; None if autocast does not know
        it."""
        kind = next(tensor.device.type for tensor in inputs if tensor is not None)
        if not torch.amp.is_autocast_available(kind):
            return None
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(self) -> torch.autocast:
        """Make the setting once more, without the cache of casts, which other operators must not
        share."""
        return torch.autocast(self.kind, self.dtype, self.is_enabled, cache_enabled=False)


def random_states() -> list[torch.Tensor]:
    """Return the states of the generators that operators draw from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


@contextmanager
def with_random_states(states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Set generators to given states within the block; without any, do nothing."""
    if not states:
        yield
        return
    now = random_states()
    _set_random_states(states)
    try:
        yield
    finally:
        _set_random_states(now)


def _set_random_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


@attrs.define(eq=False)
class InPlaceChange:
    """An operator that changes the output of a recorded run in place.

    Attributes:
        function: runs it.
        number: position of the output that is changed.
        geometry: part of its memory; see :class:`Recomputed`.
        others: where its other inputs are found.
        autocast: as in :class:`RecordedRun`.
    """

    function: OpFunction
    number: int
    geometry: Any
    others: Sequence[Kept | Recomputed | None]
    autocast: Autocast | None

    def run_again(self, execution: RecordedRun) -> None:
        """Change the output of a run that was run again."""
        target = Recomputed(execution, self.number, self.geometry).tensor_now()
        others = [None if source is None else source.tensor_now() for source in self.others]
        with (
            vanilla(),
            torch.no_grad(),
            nullcontext() if self.autocast is None else self.autocast.again(),
        ):
            self.function(target, *others)


@attrs.define(eq=False, weakref_slot=True)
class RecordedRun:
    """One run of an operator, with everything to run it again in the backward pass.

    Attributes:
        op_id: id of the operator.
        function: runs it.
        names: names of its inputs.
        inputs: where they are found.
        gradients: for each of them, True if it requires a gradient.
        autocast: setting of ``torch.autocast``; None where there is none.
        random: states of the generators before an operator that draws from them, else empty.
        count: number of tensors it packed.
        changes: operators that changed its outputs in place since.
        outputs, packed: tensors of the second run, while they are wanted.
        has_run: there are tensors of a second run.
        handles: all living handles that lead here.
        unread: handles that the backward pass has not unpacked since the second run.
        waiting: runs that are still to be run again from this one's outputs.
    """

    op_id: str
    function: OpFunction
    names: Sequence[str]
    inputs: Sequence[Kept | Recomputed | None]
    gradients: Sequence[bool]
    autocast: Autocast | None
    random: Sequence[torch.Tensor] = ()
    count: int = 0
    changes: list[InPlaceChange] = attrs.field(factory=list)
    outputs: list[torch.Tensor] = attrs.field(factory=list)
    packed: list[torch.Tensor] = attrs.field(factory=list)
    has_run: bool = False
    handles: weakref.WeakSet[SavedHandle] = attrs.field(factory=weakref.WeakSet)
    unread: weakref.WeakSet[SavedHandle] = attrs.field(factory=weakref.WeakSet)
    waiting: weakref.WeakSet[RecordedRun] = attrs.field(factory=weakref.WeakSet)

    def sources(self) -> list[RecordedRun]:
        """Return the runs that the inputs come out of."""
        others = [source for change in self.changes for source in change.others]
        return [part.execution for part in (*self.inputs, *others) if isinstance(part, Recomputed)]

    def add_handle(self, handle: SavedHandle) -> None:
        """Note a handle that leads here."""
        self.handles.add(handle)
        self.unread.add(handle)

    def run_again(self) -> None:
        """Compute the outputs and the packed tensors once more.

        Raises:
            AmandaError: the operator packed another number of tensors.
        """
        inputs = self._inputs_again()
        packed: list[torch.Tensor] = []
        with (
            vanilla(),
            torch.enable_grad(),
            with_random_states(self.random),
            nullcontext() if self.autocast is None else self.autocast.again(),
            collect_saved(packed),
        ):
            result = self.function(*inputs)
        if len(packed) != self.count:
            raise AmandaError(
                f"remat: op {self.op_id} saved {self.count} tensors, and {len(packed)} when it "
                f"was run again; leave it out: exclude={self.op_id!r}"
            )
        self.outputs = [tensor.detach() for tensor in tensors_in(result)]
        self.packed = packed
        for change in self.changes:
            change.run_again(self)
        self.has_run = True

    def _inputs_again(self) -> list[Any]:
        inputs: list[Any] = []
        for name, source, gradient in zip(self.names, self.inputs, self.gradients, strict=True):
            tensor = None if source is None else source.tensor_now()
            if tensor is not None and name in STATE:
                tensor = tensor.clone()
            if tensor is not None and gradient:
                tensor = tensor.detach().requires_grad_()
            inputs.append(tensor)
        return inputs

    def release(self) -> None:
        """Drop the tensors of the second run if nothing wants them any more."""
        if self.has_run and not self.unread and not self.waiting:
            self.outputs, self.packed, self.has_run = [], [], False
            # A second backward pass (retain_graph) unpacks the handles again.
            self.unread = weakref.WeakSet(self.handles)


@contextmanager
def collect_saved(packed: list[torch.Tensor]) -> Iterator[None]:
    """Collect what autograd saves within the block in a list; other hooks do not see it."""

    def pack(tensor: torch.Tensor) -> None:
        packed.append(tensor.detach())

    def unpack(_: None) -> torch.Tensor:
        raise AmandaError("remat: the second run of an operator has no backward pass")

    with saved_tensors_hooks(pack, unpack):
        yield


def is_transformed(tensor: torch.Tensor | None) -> bool:
    """True for a tensor with a tangent, of forward-mode differentiation, and for a batch of the
    older ``vmap``, which computes vectorized Jacobians: neither can be detached (2.13)."""
    if tensor is None:
        return False
    if _is_old_batch(tensor):
        return True
    tangent: Any = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def storage_of(tensor: Any) -> Any:
    """Return the storage of a tensor, which takes weak references; None if it has none."""
    try:
        return tensor.untyped_storage()
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def tensors_in(result: Any) -> list[torch.Tensor]:
    """Return the tensors of an operator's result."""
    return [item for item in leaves(result) if isinstance(item, torch.Tensor)]
