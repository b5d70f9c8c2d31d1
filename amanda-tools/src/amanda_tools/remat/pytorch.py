"""Recomputation on PyTorch; imported when a tensor of it is there.

What autograd keeps is packed into tickets (``torch.autograd.graph.saved_tensors_hooks``). A
ticket of an operator that is recomputed holds no tensor, but leads to the operator, which holds
its inputs in the same way. When the backward pass unpacks a ticket, the operators it leads to
run again, with everything as it was, and autograd's own packing of that second run gives the
tensors that the first one had packed, in the same order.
"""

from __future__ import annotations

import functools
import operator as operators
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch.autograd.graph import saved_tensors_hooks

from amanda.calls import OpFunction
from amanda.errors import AmandaError
from amanda.tool import vanilla

_STATE = frozenset({"running_mean", "running_var"})
"""Inputs that a normalization updates, and that must not be updated once more."""

version_of = functools.partial(operators.attrgetter("_version"))
"""How often a tensor was changed in place: what autograd itself looks at."""


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
class Part:
    """A tensor that comes out of an operator's second run.

    Attributes:
        execution: of the operator.
        number: which output; of what the operator has packed, -1 - the number.
        geometry: how the tensor lies in the output's memory; None for the packed one itself.
    """

    execution: Execution
    number: int
    geometry: tuple[torch.dtype, int, torch.Size, tuple[int, ...]] | None = None

    @classmethod
    def in_memory_of(cls, execution: Execution, number: int, tensor: torch.Tensor) -> Part:
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


@attrs.define(eq=False, weakref_slot=True)
class Ticket:
    """What autograd holds in place of a tensor that an operator saves."""

    content: Kept | Part


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


@attrs.define(eq=False, weakref_slot=True)
class Execution:
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
        outputs, packed: the tensors of its second run, while they are wanted.
        unspent: tickets that the backward pass has not unpacked since the second run.
        waiting: executions that are still to be run again from this one's outputs.
    """

    op_id: str
    function: OpFunction
    names: Sequence[str]
    inputs: Sequence[Kept | Part | None]
    gradients: Sequence[bool]
    autocast: Autocast | None
    random: Sequence[torch.Tensor] = ()
    count: int = 0
    outputs: list[torch.Tensor] = attrs.field(factory=list)
    packed: list[torch.Tensor] = attrs.field(factory=list)
    has_run: bool = False
    tickets: weakref.WeakSet[Ticket] = attrs.field(factory=weakref.WeakSet)
    unspent: weakref.WeakSet[Ticket] = attrs.field(factory=weakref.WeakSet)
    waiting: weakref.WeakSet[Execution] = attrs.field(factory=weakref.WeakSet)

    def sources(self) -> list[Execution]:
        """The executions that this one's inputs come out of."""
        return [part.execution for part in self.inputs if isinstance(part, Part)]

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
        self.has_run = True

    def _inputs_again(self) -> list[Any]:
        inputs: list[Any] = []
        for name, source, gradient in zip(self.names, self.inputs, self.gradients, strict=True):
            tensor = None if source is None else source.tensor_now()
            if tensor is not None and name in _STATE:
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


class Recomputer:
    """Runs the operators of the forward pass, and again in the backward pass.

    Args:
        recomputed: ids of the operators that are run again.
        drawing: ids of those that draw random numbers.
    """

    def __init__(self, recomputed: frozenset[str], drawing: frozenset[str]) -> None:
        self._recomputed = recomputed
        self._drawing = drawing
        self._lock = threading.RLock()
        # The executions that the memory of living tensors came out of. They live as long as
        # such a tensor, a ticket, or an execution that reads it does, and no longer than until
        # the backward pass begins.
        self._origins: weakref.WeakKeyDictionary[Any, tuple[Execution, int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._met: set[str] = set()

    def run(self, *inputs: Any, function: OpFunction, op_id: str, names: Sequence[str]) -> Any:
        """Replacement routine: the operator, with tickets for what it saves."""
        if not torch.is_grad_enabled():
            return function(*inputs)
        execution = None
        if op_id in self._recomputed:
            if op_id in self._met:
                self._begin_iteration()
            self._met.add(op_id)
            execution = self._execution(inputs, function.now(), op_id, names)
        tickets: list[Ticket] = []
        storages = {storage for storage in map(storage_of, inputs) if storage is not None}

        def pack(tensor: torch.Tensor) -> Ticket:
            ticket = self._ticket(tensor, op_id, execution, storages, len(tickets))
            tickets.append(ticket)
            return ticket

        with saved_tensors_hooks(pack, self._unpack):
            result = function(*inputs)
        if execution is not None:
            execution.count = len(tickets)
            for number, output in enumerate(tensors_in(result)):
                storage = storage_of(output)
                if storage is not None and storage not in storages:
                    self._origins[storage] = execution, number, version_of(output)
        # Autograd holds pack, and by it both, as long as what it has packed.
        storages.clear()
        tickets.clear()
        return result

    def _begin_iteration(self) -> None:
        self._met.clear()
        self._origins.clear()

    def _execution(
        self, inputs: Sequence[Any], function: OpFunction, op_id: str, names: Sequence[str]
    ) -> Execution:
        found = Execution(
            op_id,
            function,
            names,
            [None if tensor is None else self._found(tensor, op_id) for tensor in inputs],
            [tensor is not None and tensor.requires_grad for tensor in inputs],
            Autocast.of(inputs),
            random_states() if op_id in self._drawing else (),
        )
        for source in found.sources():
            source.waiting.add(found)
        return found

    def _found(self, tensor: torch.Tensor, op_id: str) -> Kept | Part:
        """Where a tensor will be found in the backward pass."""
        storage = storage_of(tensor)
        origin = None if storage is None else self._origins.get(storage)
        if origin is None or tensor.is_conj() or tensor.is_neg():
            return Kept.of(tensor, op_id)
        execution, number, version = origin
        # What was changed in place since does not come out of a second run.
        if version_of(tensor) != version:
            return Kept.of(tensor, op_id)
        return Part.in_memory_of(execution, number, tensor)

    def _ticket(
        self,
        tensor: torch.Tensor,
        op_id: str,
        execution: Execution | None,
        storages: set[Any],
        number: int,
    ) -> Ticket:
        content = self._found(tensor, op_id)
        if isinstance(content, Kept) and execution is not None:
            storage = storage_of(tensor)
            if storage is not None and storage not in storages:
                content = Part(execution, -1 - number)
        ticket = Ticket(content)
        if isinstance(content, Part):
            content.execution.lead(ticket)
        return ticket

    def _unpack(self, ticket: Ticket) -> torch.Tensor:
        content = ticket.content
        if isinstance(content, Kept):
            return content.tensor_now()
        with self._lock:
            self._origins.clear()
            self._compute(content.execution)
            tensor = content.tensor_now()
            content.execution.unspent.discard(ticket)
            content.execution.release()
        return tensor

    def _compute(self, target: Execution) -> None:
        """Run an execution again, and before it those that its inputs come out of."""
        stack = [target]
        while stack:
            execution = stack[-1]
            if execution.has_run:
                stack.pop()
                continue
            sources = execution.sources()
            for source in sources:
                source.waiting.add(execution)
            missing = [source for source in sources if not source.has_run]
            if missing:
                stack += missing
                continue
            execution.run_again()
            for source in sources:
                source.waiting.discard(execution)
                source.release()


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
