"""One run of an operator of PyTorch, and how it is run again; see :mod:`.pytorch`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch.autograd.graph import saved_tensors_hooks

from amanda.errors import AmandaError
from amanda.interface.calls import OpFunction
from amanda.tool import vanilla
from amanda_tools._internals import version_of

STATE = frozenset({"running_mean", "running_var"})
"""Inputs that a normalization updates, and that must not be updated once more."""


@attrs.define(eq=False, weakref_slot=True)
class Kept:
    """A tensor that is held, and the version of it that counts."""

    tensor: torch.Tensor
    version: int
    op_id: str

    @classmethod
    def of(cls, tensor: torch.Tensor, op_id: str) -> Kept:
        """Hold a tensor, not its graph."""
        return cls(tensor.detach(), version_of(tensor), op_id)

    def tensor_now(self) -> torch.Tensor:
        """The tensor.

        Raises:
            AmandaError: somebody has changed it in place.
        """
        if version_of(self.tensor) != self.version:
            raise AmandaError(
                f"remat: a tensor {tuple(self.tensor.shape)} that the backward pass of op "
                f"{self.op_id} needs has been modified by an inplace operation since"
            )
        return self.tensor


@attrs.define(eq=False, weakref_slot=True)
class Recomputed:
    """A tensor that comes out of an operator's second run.

    Attributes:
        execution: of the operator.
        number: which output; of what the operator has packed, -1 - the number.
        geometry: how the tensor lies in the output's memory; None for the packed one itself.
    """

    execution: RecordedRun
    number: int
    geometry: tuple[torch.dtype, int, torch.Size, tuple[int, ...]] | None = None

    @classmethod
    def in_memory_of(cls, execution: RecordedRun, number: int, tensor: torch.Tensor) -> Recomputed:
        """A tensor in the memory of an output."""
        geometry = (tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return cls(execution, number, geometry)

    def tensor_now(self) -> torch.Tensor:
        """The tensor, of an execution that has run again."""
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
class Gone:
    """A tensor that an operator has changed in place after it was saved."""

    op_id: str

    def tensor_now(self) -> torch.Tensor:
        """None is left.

        Raises:
            AmandaError: always, as PyTorch does.
        """
        raise AmandaError(
            "remat: a tensor that the backward pass needs has been modified by an inplace "
            f"operation, {self.op_id}"
        )


@attrs.define(eq=False, weakref_slot=True)
class Ticket:
    """What autograd holds in place of a tensor that an operator saves."""

    content: Kept | Recomputed | Gone


@attrs.frozen
class Autocast:
    """The setting of ``torch.autocast`` for a kind of device."""

    kind: str
    dtype: torch.dtype
    is_enabled: bool

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> Autocast | None:
        """The current one, for the device of the inputs."""
        kind = next(tensor.device.type for tensor in inputs if tensor is not None)
        if not torch.amp.is_autocast_available(kind):
            return None
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(self) -> torch.autocast:
        """Set it once more. Casts of weights are not shared with other operators."""
        return torch.autocast(self.kind, self.dtype, self.is_enabled, cache_enabled=False)


def random_states() -> list[torch.Tensor]:
    """The states of the generators that operators draw from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


@contextmanager
def with_random_states(states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it, the generators are in some states; without any, nothing is done."""
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
class Follower:
    """A change in place of what an operator has made.

    Attributes:
        function: makes it.
        number: which output is changed.
        geometry: which part of its memory; see :class:`Recomputed`.
        others: where the other inputs are to be found.
        autocast: as of :class:`RecordedRun`.
    """

    function: OpFunction
    number: int
    geometry: Any
    others: Sequence[Kept | Recomputed | None]
    autocast: Autocast | None

    def run_again(self, execution: RecordedRun) -> None:
        """Make the change once more, in what an execution has made again."""
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
    """One run of an operator that is run again in the backward pass.

    Attributes:
        op_id: of the operator.
        function: runs it.
        names: of its inputs.
        inputs: where they are to be found.
        gradients: whether each of them requires a gradient.
        autocast: what ``torch.autocast`` was set to; None where there is none.
        random: the states of the generators before an operator that draws from them, else none.
        count: how many tensors it packed.
        followers: what has changed its outputs in place since.
        outputs, packed: the tensors of its second run, while they are wanted.
        unspent: tickets that the backward pass has not unpacked since the second run.
        waiting: executions that are still to be run again from this one's outputs.
    """

    op_id: str
    function: OpFunction
    names: Sequence[str]
    inputs: Sequence[Kept | Recomputed | None]
    gradients: Sequence[bool]
    autocast: Autocast | None
    random: Sequence[torch.Tensor] = ()
    count: int = 0
    followers: list[Follower] = attrs.field(factory=list)
    outputs: list[torch.Tensor] = attrs.field(factory=list)
    packed: list[torch.Tensor] = attrs.field(factory=list)
    has_run: bool = False
    tickets: weakref.WeakSet[Ticket] = attrs.field(factory=weakref.WeakSet)
    unspent: weakref.WeakSet[Ticket] = attrs.field(factory=weakref.WeakSet)
    waiting: weakref.WeakSet[RecordedRun] = attrs.field(factory=weakref.WeakSet)

    def sources(self) -> list[RecordedRun]:
        """The executions that this one's inputs come out of."""
        others = [source for follower in self.followers for source in follower.others]
        return [part.execution for part in (*self.inputs, *others) if isinstance(part, Recomputed)]

    def lead(self, ticket: Ticket) -> None:
        """A ticket leads here."""
        self.tickets.add(ticket)
        self.unspent.add(ticket)

    def run_again(self) -> None:
        """Make the outputs and what was packed once more.

        Raises:
            AmandaError: the operator does not do what it did.
        """
        inputs = self._inputs_again()
        packed: list[torch.Tensor] = []
        with (
            vanilla(),
            torch.enable_grad(),
            with_random_states(self.random),
            nullcontext() if self.autocast is None else self.autocast.again(),
            collected(packed),
        ):
            result = self.function(*inputs)
        if len(packed) != self.count:
            raise AmandaError(
                f"remat: op {self.op_id} saved {self.count} tensors, and {len(packed)} when it "
                f"was run again; leave it out: exclude={self.op_id!r}"
            )
        self.outputs = [tensor.detach() for tensor in tensors_in(result)]
        self.packed = packed
        for follower in self.followers:
            follower.run_again(self)
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
        """Let go of the second run's tensors, if nobody wants them any more."""
        if self.has_run and not self.unspent and not self.waiting:
            self.outputs, self.packed, self.has_run = [], [], False
            # For a second backward pass, if there is one.
            self.unspent = weakref.WeakSet(self.tickets)


@contextmanager
def collected(packed: list[torch.Tensor]) -> Iterator[None]:
    """Within it, what autograd saves goes into a list, and into no other hook's hands."""

    def pack(tensor: torch.Tensor) -> None:
        packed.append(tensor.detach())

    def unpack(_: None) -> torch.Tensor:
        raise AmandaError("remat: the second run of an operator has no backward pass")

    with saved_tensors_hooks(pack, unpack):
        yield


def storage_of(tensor: Any) -> Any:
    """The memory of a tensor, which has weak references; None if it has none of its own."""
    try:
        return tensor.untyped_storage()
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors of an operator's result."""
    if isinstance(result, torch.Tensor):
        return [result]
    items = result if isinstance(result, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
