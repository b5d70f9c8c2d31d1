"""Static pruning: one mask per weight, made by schedule, in forward and backward."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.errors import AmandaError
from amanda.tools.description import OpDescription
from amanda_tools._operators.weights import Weight, weight_of
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.prune.options import PruneOptions
from amanda_tools.prune.rules import rule_of, without_smallest


@amanda.traceable
def masked(weight: Any, mask: Any) -> Any:
    """Instrumentation routine: the weight under its mask, and so its gradient."""
    return weight * arithmetic_of(weight).cast_like(mask, weight)


def weak_reference(value: Any) -> Callable[[], Any]:
    """Return a function that gives a value while it is alive, else None.

    It always gives None for objects that take no weak reference.
    """
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


@attrs.define(eq=False)
class PrunedWeight:
    """A weight and its mask, shared by all operators that read it.

    Attributes:
        weight: the weight as the first of them has it, without its value.
        shape: its shape.
        source: gives the value if it is an object of its own that is alive.
        readers: ids of the operators that read it under the mask.
        mask: True where the weight stays; None before there is one.
        steps: backward passes by operator.
        due: the step at which the mask is made anew; None if never.
    """

    weight: Weight
    shape: tuple[int, ...]
    source: Callable[[], Any]
    readers: list[str] = attrs.field(factory=list)
    mask: Array | None = None
    steps: collections.Counter[str] = attrs.field(factory=collections.Counter)
    due: int | None = 0
    _constants: dict[tuple[str, str], Any] = attrs.field(factory=dict)

    @property
    def step(self) -> int:
        """Training steps so far: backward passes of the reader that had most."""
        return max(self.steps.values(), default=0)

    def count(self, gradient: Any, op_id: str) -> None:
        """Instrumentation routine: one more training step of a reader."""
        self.steps[op_id] += 1

    def set(self, mask: Array, due: int | None) -> None:
        """Take another mask."""
        self.mask, self.due = mask, due
        self._constants.clear()

    def constant(self, like: Any) -> Any:
        """The mask, or None, in the type and on the device of a tensor."""
        if self.mask is None:
            return None
        key = (str(like.dtype), str(getattr(like, "device", "")))
        if key not in self._constants:
            self._constants[key] = arithmetic_of(like).constant(self.mask, like)
        return self._constants[key]


@attrs.frozen
class Schedule:
    """When masks are made, and for which share of the final sparsity.

    The share grows as in Zhu and Gupta (2017), ``1 - (1 - t)**3`` from start to end.
    """

    start: int
    end: int
    every: int

    @property
    def is_constant(self) -> bool:
        """Whether the first mask is there from the beginning and the last."""
        return self.start == 0 and self.end == 0

    def share(self, step: int) -> float:
        """Of the final sparsity, at one step."""
        if step >= self.end:
            return 1.0
        return float(1 - (1 - (step - self.start) / (self.end - self.start)) ** 3)

    def next_due(self, step: int) -> int | None:
        """The step of the mask that follows one made at `step`."""
        return min(step + self.every, self.end) if step < self.end else None


class GlobalThreshold:
    """The smallest weights of all operators together.

    The magnitudes are collected in one iteration, and the masks hold from the
    next one: when the first operator runs a second time, all have been met. One
    that is met later is compared with the threshold that was found.

    Attributes:
        step: of the iteration in which they were collected.
    """

    def __init__(self) -> None:
        self.step = 0
        self._met: set[str] = set()
        self._scores: dict[PrunedWeight, Array] = {}
        self._threshold: float | None = None

    def collect(self, op_id: str, weight: PrunedWeight, value: Any) -> bool:
        """Take in a weight; whether all had been collected before."""
        if op_id in self._met:
            return True
        if weight.mask is None and self._threshold is not None:
            scores = np.abs(arithmetic_of(value).wide_numpy(value))
            weight.set(scores > self._threshold, None)
            return False
        self._met.add(op_id)
        if weight not in self._scores:
            self._scores[weight] = np.abs(arithmetic_of(value).wide_numpy(value))
            self.step = weight.step
        return False

    def masks(self, sparsity: float) -> list[tuple[PrunedWeight, Array]]:
        """The masks of the weights that were collected, which are forgotten."""
        scores = list(self._scores.items())
        flat = np.concatenate([part.ravel() for _, part in scores])
        mask = without_smallest(flat, round(sparsity * flat.size))
        self._threshold = float(flat[~mask].max(initial=0.0))
        self._met.clear()
        self._scores.clear()
        parts = np.split(mask, np.cumsum([part.size for _, part in scores])[:-1])
        return [
            (weight, part.reshape(weight.shape))
            for (weight, _), part in zip(scores, parts, strict=True)
        ]


class StaticPruning:
    """Gives weights their masks.

    Attributes:
        weights: of each pruned operator.
    """

    def __init__(self, options: PruneOptions) -> None:
        self._options = options
        self._rule = rule_of(options)
        self._schedule = Schedule(options.start, options.end, options.every)
        self._global = GlobalThreshold() if options.scope == "global" else None
        self.weights: dict[str, PrunedWeight] = {}
        self._by_value: dict[Hashable, PrunedWeight] = {}
        self._given: Mapping[str, Array] | None = None
        self._given_by = ""

    def use(self, masks: Mapping[str, Array], source: str) -> None:
        """Take these masks, by op id, and make no others."""
        self._given, self._given_by = masks, source

    def treat(self, context: OpContext, op: OpDescription) -> None:
        """Let an operator read its weight under the mask.

        Raises:
            Untreatable: the method has no mask for it.
            AmandaError: the masks that were loaded are of another model.
        """
        found = weight_of(context)
        self._rule.check(found)
        weight = self._weight_of(op.id, found)
        if weight.due is None and weight.mask is not None:
            mask = weight.constant(found.value)
            context.insert_before_op(masked, inputs=[found.index], mask=mask)
            return
        context.insert_before_op(
            self._masked_by_schedule, inputs=[found.index], pruned=weight, op_id=op.id
        )
        if not self._schedule.is_constant:
            # Not before: a checkpoint's recomputation, which comes between, is of the same step.
            context.insert_after_backward_op(weight.count, grad_inputs=[found.index], op_id=op.id)

    # -- weights ----------------------------------------------------------

    def _weight_of(self, op_id: str, found: Weight) -> PrunedWeight:
        known = self.weights.get(op_id)
        if known is None:
            known = self._shared(found) or self._new_weight(op_id, found)
            known.readers.append(op_id)
            self.weights[op_id] = known
        self._check_shape(op_id, known.shape, found)
        return known

    def _shared(self, found: Weight) -> PrunedWeight | None:
        """What is known of this very weight from another operator."""
        known = self._by_value.get(found.identity)
        is_same = known is not None and (found.key is not None or known.source() is found.value)
        return known if is_same else None

    def _new_weight(self, op_id: str, found: Weight) -> PrunedWeight:
        # What is not the program's own object (a copy of a variable) may be gone at once.
        source = weak_reference(found.value)
        weight = PrunedWeight(attrs.evolve(found, value=None), shape_of(found.value), source)
        self._by_value[found.identity] = weight
        if self._given is not None:
            weight.set(self._given_mask(op_id, found), None)
        elif self._schedule.is_constant and self._global is None:
            self._make(weight, found.value)
        return weight

    def _given_mask(self, op_id: str, found: Weight) -> Array:
        assert self._given is not None
        if op_id not in self._given:
            raise AmandaError(
                f"prune: {self._given_by} has no mask for op {op_id}, the first one that is "
                f"missing: it is of another model, or of other ops or other options"
            )
        self._check_shape(op_id, self._given[op_id].shape, found)
        return self._given[op_id]

    def _check_shape(self, op_id: str, shape: tuple[int, ...], found: Weight) -> None:
        if shape != shape_of(found.value):
            raise AmandaError(
                f"prune: the mask of op {op_id} has the shape {shape}, its weight has "
                f"{shape_of(found.value)}: the mask is of another model; use a new tool for it"
            )

    # -- masks ------------------------------------------------------------

    def _make(self, weight: PrunedWeight, value: Any) -> None:
        """Make the mask that is due."""
        step = weight.step
        sparsity = self._options.sparsity * self._schedule.share(step)
        mask = self._rule.mask(arithmetic_of(value).wide_numpy(value), weight.weight, sparsity)
        weight.set(mask, self._schedule.next_due(step))

    def _masked_by_schedule(self, value: Any, pruned: PrunedWeight, op_id: str) -> Any:
        """Instrumentation routine: the weight under the mask of this step."""
        if pruned.due is not None and pruned.step >= max(pruned.due, self._schedule.start):
            if self._global is None:
                self._make(pruned, value)
            else:
                self._make_global(self._global, value, pruned, op_id)
        mask = pruned.constant(value)
        return None if mask is None else masked(value, mask)

    def _make_global(
        self, threshold: GlobalThreshold, value: Any, pruned: PrunedWeight, op_id: str
    ) -> None:
        """Collect a weight for the masks that are due, or make them."""
        if not threshold.collect(op_id, pruned, value):
            return
        step = threshold.step
        sparsity = self._options.sparsity * self._schedule.share(step)
        for weight, mask in threshold.masks(sparsity):
            weight.set(mask, self._schedule.next_due(step))
