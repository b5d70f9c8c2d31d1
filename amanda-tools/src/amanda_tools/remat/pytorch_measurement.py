"""Measures what PyTorch's operators cost and keep; imported when the first of them comes.

An operator that may be recomputed is run a second time when it is first met. This gives its time,
and whether it is reproducible: its results have to be equal bit by bit.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from amanda import OpContext
from amanda.python.nested import leaves
from amanda.tools.description import describe, op_name
from amanda_tools._internals import no_overrides, version_of, writes_into_tensors
from amanda_tools._operators.parameters import parameters_of
from amanda_tools._operators.saved_tensors import saved_items
from amanda_tools._timelines.memory import synchronize
from amanda_tools.remat import recorded_runs as runs
from amanda_tools.remat.plan import MeasuredOp


@attrs.frozen
class StateBefore:
    """State before an operator ran.

    Attributes:
        versions: weak reference and version of each input.
        random: states of the generators.
        target: copy of the tensor that the operator is about to change in place, if a measured
            operator made it; else None.
    """

    versions: Sequence[tuple[weakref.ref[torch.Tensor], int]]
    random: Sequence[torch.Tensor]
    target: torch.Tensor | None


class TorchMeasurement:
    """Measures the operators of one iteration; each is run twice.

    Args:
        ops: gets the operators that are differentiated, in order.
        sizes: gets the bytes by piece of memory.
    """

    def __init__(self, ops: list[MeasuredOp], sizes: dict[int, int]) -> None:
        self.ops = ops
        self.sizes = sizes
        self._pieces: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._met: set[int] = set()
        self._is_sharded = False
        self._before: dict[str, StateBefore] = {}

    def before(self, context: OpContext) -> None:
        """Note the state before an operator, in an analysis before it."""
        # Tensors of a class of its own are read here, and never computed with.
        with no_overrides():
            self._note(context)

    def _note(self, context: OpContext) -> None:
        self._is_sharded |= op_name(context.get_op()).startswith("fsdp::")
        given = [t for t in context.get_inputs() if t is not None and not t.is_inference()]
        versions = [(weakref.ref(tensor), version_of(tensor)) for tensor in given]
        target, writes = None, op_name(context.get_op()).endswith("_")
        if writes and given and self._maker(given[0]) is not None and is_plain(given[0]):
            target = given[0].detach().clone()
        self._before[context.get_op_id()] = StateBefore(versions, runs.random_states(), target)

    def starts_with_gradients(self) -> bool:
        """True if gradients are recorded now, and were not in what was measured so far."""
        return torch.is_grad_enabled() and not self.ops

    def is_own(self, context: OpContext) -> bool:
        """True for operators of PyTorch itself, False for custom ones."""
        op = context.get_op()
        func = getattr(op, "func", op)
        if isinstance(func, functools.partial):
            return False
        is_registered = type(func).__name__ in ("OpOverload", "OpOverloadPacket")
        return not is_registered or str(func).startswith("aten.")

    def after(self, context: OpContext, reason: str) -> bool:
        """Measure an operator in an analysis that sees its outputs.

        Args:
            context: of the operator.
            reason: why it must not be run again, "" if it may.

        Returns:
            True if it is one of :attr:`ops`; operators that are not differentiated are not.
        """
        with no_overrides():
            return self._measure(context, reason)

    def _measure(self, context: OpContext, reason: str) -> bool:
        before = self._before.pop(context.get_op_id(), None)
        if before is None:
            # Its analyses began anew while it ran: it is measured in the next iteration.
            return False
        step = MeasuredOp(describe(context))
        outputs = [tensor for tensor in context.get_outputs() or () if tensor is not None]
        if changed := self._changed(before):
            step.obstacle = "it changes a tensor in place"
            self._mark_changes(context, before, step, changed)
        if not any(map(_is_recorded, outputs)):
            return False
        self.ops.append(step)
        inputs = [tensor for tensor in context.get_inputs() if tensor is not None]
        step.inputs = self._read(context)
        step.made = self._made(inputs, outputs)
        self._met.update(step.inputs, step.made)
        step.obstacle = step.obstacle or _obstacle(context, inputs, outputs, step) or reason
        if self._is_sharded and parameters_of(context):
            step.obstacle = step.obstacle or "FSDP2 drops its weight before the backward pass"
        if step.obstacle:
            step.saved = self._saved(context, step)
        else:
            self._run_again(context, step, self._drawn(before, step))
        return True

    def _made(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int]:
        """Return the pieces of outputs that are no views of inputs."""
        known = {id(runs.storage_of(tensor)) for tensor in inputs}
        new = [tensor for tensor in outputs if id(runs.storage_of(tensor)) not in known]
        return [piece for piece in map(self._piece, new) if piece is not None]

    def _piece(self, tensor: torch.Tensor) -> int | None:
        """Return the piece of a tensor's storage, a new one if needed; None without a storage."""
        storage = runs.storage_of(tensor)
        if storage is None:
            return None
        piece = self._pieces.setdefault(storage, len(self.sizes))
        self.sizes.setdefault(piece, storage.nbytes())
        return piece

    def _read(self, context: OpContext) -> list[int]:
        """Return the pieces that the operator reads, those of parameters and buffers aside."""
        pieces = [
            self._piece(tensor)
            for index, tensor in enumerate(context.get_inputs())
            if tensor is not None and context.get_value(index) is None
        ]
        return [piece for piece in pieces if piece is not None]

    def _maker(self, tensor: torch.Tensor) -> MeasuredOp | None:
        """Return the measured operator that made the memory of a tensor."""
        storage = runs.storage_of(tensor)
        piece = None if storage is None else self._pieces.get(storage)
        return next((step for step in self.ops if piece in step.made), None)

    def _changed(self, before: StateBefore) -> set[int | None]:
        """Return the pieces that an operator has changed in place."""
        return {
            self._piece(tensor)
            for ref, version in before.versions
            if (tensor := ref()) is not None and version_of(tensor) != version
        }

    def _mark_changes(
        self, context: OpContext, before: StateBefore, step: MeasuredOp, changed: set[int | None]
    ) -> None:
        """Mark operators that an in-place change makes unrepeatable.

        An operator whose inputs were changed cannot be run again. The operator that made the
        changed tensor can, if the change is repeated after it.
        """
        maker = self._maker(context.get_inputs()[0]) if before.target is not None else None
        if maker is not None and not self._can_repeat(context, before, maker, changed):
            maker = None
        for other in self.ops:
            is_hit = changed.intersection(other.inputs) or changed.intersection(other.made)
            if is_hit and other is not maker:
                other.obstacle = other.obstacle or f"{step.op.id} changes its tensors in place"
        if maker is not None:
            maker.changes.append(step.op.id)
            others = [piece for piece in self._read(context) if piece not in changed]
            maker.inputs = [*maker.inputs, *others]

    def _can_repeat(
        self, context: OpContext, before: StateBefore, maker: MeasuredOp, changed: set[int | None]
    ) -> bool:
        """Decide whether a change can be repeated right after its maker has run again."""
        if len(changed) != 1 or maker.obstacle or not self.is_own(context):
            return False
        if self._reads_later(context, maker, changed) or _draws(context, before):
            return False
        inputs, target = context.get_inputs(), before.target
        # The maker's output needs a gradient. A tensor in its memory that does not is cut off from
        # it, as `.data` is, whose changes no version counts: where the operator has another id in
        # a later iteration, nothing would tell of the change.
        if not inputs[0].requires_grad:
            return False
        rest = [None if tensor is None else tensor.detach() for tensor in inputs[1:]]
        if not changed.isdisjoint(self._piece(tensor) for tensor in rest if tensor is not None):
            return False
        assert target is not None
        start = time.perf_counter()
        context.get_function()(target, *rest)
        maker.cost += 1e6 * (time.perf_counter() - start)
        # A copy of a view may be laid out more densely than the view.
        return is_same(target.contiguous(), inputs[0].detach().contiguous())

    def _reads_later(self, context: OpContext, maker: MeasuredOp, changed: set[int | None]) -> bool:
        """Return True if an operator reads a piece made since `maker`, but for the changed one."""
        later = {piece for step in self.ops[self.ops.index(maker) :] for piece in step.made}
        return bool((set(self._read(context)) - changed) & later)

    def _saved(self, context: OpContext, step: MeasuredOp) -> frozenset[int]:
        """Return the pieces that autograd has kept, from the operator's nodes."""
        constants = {
            id(runs.storage_of(tensor))
            for index, tensor in enumerate(context.get_inputs())
            if tensor is not None and context.get_value(index) is not None
        }
        found = list(saved_items(context))
        if any(isinstance(item, list) for item in found):
            step.obstacle = "a hook of the program keeps what it saves"
            step.unknown = sum(tensor is None for tensor in leaves(found))
        kept = [t for t in leaves(found) if id(runs.storage_of(t)) not in constants]
        pieces = frozenset(p for p in map(self._piece, kept) if p is not None)
        # Memory that no operator has read or made before belongs to this operator alone.
        step.made = [*step.made, *sorted(pieces - self._met)]
        return pieces

    def _drawn(self, before: StateBefore, step: MeasuredOp) -> Sequence[torch.Tensor]:
        """Return the generators' states before an operator that drew from them, else ().

        The states are kept for the second run, and count as an input.
        """
        now = runs.random_states()
        if all(map(torch.equal, before.random, now)):
            return ()
        piece = len(self.sizes)
        self.sizes[piece] = sum(state.nbytes for state in now)
        step.inputs = [*step.inputs, piece]
        step.is_random = True
        return before.random

    def _run_again(
        self, context: OpContext, step: MeasuredOp, random: Sequence[torch.Tensor]
    ) -> None:
        tensors, outputs = context.get_inputs(), context.get_outputs() or ()
        if any(isinstance(item, list) for item in saved_items(context)):
            step.saved = self._saved(context, step)
            return
        names = context.get_input_names()
        inputs = [_again(*pair) for pair in zip(names, tensors, strict=True)]
        try:
            function = context.get_function()
            synchronize()
            start = time.perf_counter()
            with torch.enable_grad(), runs.with_random_states(random), runs.collect_saved([]):
                result = runs.tensors_in(function(*inputs))
            synchronize()
            step.cost = 1e6 * (time.perf_counter() - start)
        except Exception as error:  # any error of the operator is a reason
            step.obstacle = f"it cannot be run again: {error}"
            result = []
        first = [tensor for tensor in outputs if tensor is not None]
        if not step.obstacle and not _are_same(first, result):
            step.obstacle = "it gives other results when it is run again"
        step.saved = self._saved(context, step)


def _obstacle(
    context: OpContext,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    step: MeasuredOp,
) -> str:
    """Return why an operator cannot be run again, as far as it shows without trying; else ""."""
    if not inputs:
        return "it has no inputs"
    if not step.made:
        return "it makes a view"
    if not all(is_plain(tensor) for tensor in (*inputs, *outputs)):
        return "its tensors are of a special kind"
    if _has_generator(context):
        return "it draws from a random generator of its own"
    if writes_into_tensors(op_name(context.get_op()).partition(".")[0]):
        return "it changes a tensor in place"
    return ""


def _draws(context: OpContext, before: StateBefore) -> bool:
    """Return True if the operator has drawn random numbers, or may have."""
    return _has_generator(context) or not all(map(torch.equal, before.random, runs.random_states()))


def _has_generator(context: OpContext) -> bool:
    """True if the program has passed a generator, whose state would change."""
    return any(isinstance(value, torch.Generator) for value in context.get_attrs().values())


def _again(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Detach an input for a second run; copy it if the operator updates it."""
    if tensor is None:
        return None
    detached = tensor.detach().clone() if name in runs.STATE else tensor.detach()
    return detached.requires_grad_() if tensor.requires_grad else detached


def _are_same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(is_same, first, second))


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have equal layouts and are equal bit by bit."""
    if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
        return False
    return torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bytes, in a row."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:
        # view() takes bytes of neighbours only; a single element is contiguous with any stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """True if a tensor is differentiated: not for a parameter that is initialized or updated."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        # A view, made without gradients, of a parameter that was changed in place.
        return False


def is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor is dense and real, with elements in memory of its own."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and not runs.is_transformed(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )
