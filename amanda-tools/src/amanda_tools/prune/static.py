"""Static pruning: one mask per weight, made by a schedule, for forward and backward pass."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.errors import AmandaError
from amanda.tools.description import OpDescription
from amanda_tools._operators.weights import Weight, is_another, weak_reference, weight_of
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.prune.given_masks import GivenMasks, check_shape, is_same_name, variable_name
from amanda_tools.prune.options import PruneOptions
from amanda_tools.prune.rules import mask_smallest, rule_of


@amanda.traceable
def apply_mask(weight: Any, mask: Any) -> Any:
    """Instrumentation routine: put a weight under its mask, which masks its gradient as well."""
    return weight * arithmetic_of(weight).cast_like(mask, weight)


@attrs.define(eq=False)
class PrunedWeight:
    """A weight and its mask, shared by all operators that read it.

    Attributes:
        weight: the weight as its first reader has it, without the value.
        shape: sizes of its axes.
        source: returns the value while it is alive, where it is an object of its own.
        readers: ids of the operators that read it under the mask.
        mask: True where the weight stays; None before there is one.
        steps: number of backward passes by operator id.
        due: training step at which the next mask is made; None if there is none.
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
        """Training steps so far: the most backward passes that one of the readers had."""
        return max(self.steps.values(), default=0)

    def count(self, gradient: Any, op_id: str) -> None:
        """Instrumentation routine: count one training step of a reader."""
        self.steps[op_id] += 1

    def set(self, mask: Array, due: int | None) -> None:
        """Set the mask, and the step at which the next one is made."""
        self.mask, self.due = mask, due
        # Constants of the old mask, one per element type and device.
        self._constants.clear()

    def constant(self, like: Any) -> Any:
        """Return the mask, or None, with the element type and device of a tensor."""
        if self.mask is None:
            return None
        key = (str(like.dtype), str(getattr(like, "device", "")))
        if key not in self._constants:
            self._constants[key] = arithmetic_of(like).constant(self.mask, like)
        return self._constants[key]

    def check_is(self, found: Weight) -> None:
        """Refuse a weight that a run has read instead of this one.

        Raises:
            AmandaError: the shape or the name differs.
        """
        shape, name = shape_of(found.value), variable_name(found.variable)
        own = variable_name(self.weight.variable)
        is_renamed = bool(name and own) and not is_same_name(name, own)
        if shape != self.shape or (found.identity != self.weight.identity and is_renamed):
            raise AmandaError(
                f"prune: the mask of op {self.readers[0]} is for a weight {own} of the shape "
                f"{self.shape}, and the run has read {name or 'one'} of the shape {shape}: it is "
                "of another model"
            )

    def write_zeros(self, found: Weight) -> None:
        """Write the zeros of the mask into the weight, as a run has read it.

        Raises:
            TypeError: the value is none that can be written.
            AmandaError: the variable cannot be written.
        """
        mask, value = self.mask, found.value
        assert mask is not None
        with amanda.disabled():
            if found.variable is not None:
                found.variable.change(lambda old: old * arithmetic_of(old).constant(mask, old))
            else:
                arithmetic = arithmetic_of(value)
                arithmetic.assign(value, arithmetic.wide_numpy(value) * mask)


@attrs.frozen
class Schedule:
    """When masks are made, and at which fraction of the final sparsity.

    The fraction grows as in Zhu and Gupta (2017), ``1 - (1 - t)**3`` from start to end.
    """

    start: int
    end: int
    every: int

    @property
    def is_constant(self) -> bool:
        """True if the first mask is made at once, and is the last."""
        return self.start == 0 and self.end == 0

    def share(self, step: int) -> float:
        """Return the fraction of the final sparsity at a step."""
        if step >= self.end:
            return 1.0
        return float(1 - (1 - (step - self.start) / (self.end - self.start)) ** 3)

    def next_due(self, step: int) -> int | None:
        """Return the step of the mask after one made at `step`; None if it is the last."""
        return min(step + self.every, self.end) if step < self.end else None


class GlobalThreshold:
    """Prunes the smallest weights of all operators together.

    Magnitudes are collected during one iteration; when the first operator runs a second time, all
    operators have been met, and masks hold from then on. An operator that is met later is compared
    with the threshold found, and keeps that mask: the schedule does not change it.

    Attributes:
        step: training step at which the magnitudes were collected.
    """

    def __init__(self) -> None:
        self.step = 0
        self._met: set[str] = set()
        self._scores: dict[PrunedWeight, Array] = {}
        self._threshold: float | None = None

    def collect(self, op_id: str, weight: PrunedWeight, value: Any) -> bool:
        """Collect a weight; return whether all weights had been collected before."""
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
        """Return the masks of the collected weights, and forget their magnitudes."""
        scores = list(self._scores.items())
        flat = np.concatenate([part.ravel() for _, part in scores])
        mask = mask_smallest(flat, round(sparsity * flat.size))
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
        weights: pruned weights by operator id.
    """

    def __init__(self, options: PruneOptions) -> None:
        self._options = options
        self._rule = rule_of(options)
        self._schedule = Schedule(options.start, options.end, options.every)
        self._global = GlobalThreshold() if options.scope == "global" else None
        self.weights: dict[str, PrunedWeight] = {}
        self._by_value: dict[Hashable, PrunedWeight] = {}
        self._in_scope: dict[str, Hashable] = {}
        self._given: GivenMasks | None = None

    def use(self, masks: Mapping[str, Array], source: str, names: Mapping[str, str]) -> None:
        """Use these masks, by op id, and make no others.

        Args:
            masks: the masks.
            source: origin of the masks, for error messages.
            names: the names of their weights by op id, as far as they are known.
        """
        self._given = GivenMasks(masks, source, names)

    def enter_scope(self) -> None:
        """A scope begins: its operators may read weights of another model under known ids."""
        self._in_scope.clear()

    def unused(self) -> list[str]:
        """Return the op ids of given masks that no weight has."""
        return [] if self._given is None else self._given.unused()

    def treat(self, context: OpContext, op: OpDescription) -> None:
        """Make an operator read its weight under the mask.

        Raises:
            Untreatable: the method has no mask for it.
            AmandaError: the masks that were loaded belong to another model.
        """
        found = weight_of(context)
        self._rule.check(found)
        weight = self._weight_of(op.id, found)
        if weight.due is None and weight.mask is not None:
            mask = weight.constant(found.value)
            context.insert_before_op(apply_mask, inputs=[found.index], mask=mask)
            return
        context.insert_before_op(
            self._masked_by_schedule, inputs=[found.index], pruned=weight, op_id=op.id
        )
        if not self._schedule.is_constant:
            # After the backward operator: a checkpoint's recomputation runs before it, and belongs
            # to the same step.
            context.insert_after_backward_op(weight.count, grad_inputs=[found.index], op_id=op.id)

    # -- weights ----------------------------------------------------------

    def _weight_of(self, op_id: str, found: Weight) -> PrunedWeight:
        known = self._of_variable(found)
        if known is None and self._in_scope.get(op_id, found.identity) != found.identity:
            # Another operator of this scope has the same id, as the branches of tf.cond can have.
            op_id = next(i for n in itertools.count(2) if (i := f"{op_id}~{n}") not in self.weights)
            known = self._new_weight(op_id, found)
        if known is None:
            known = self.weights.get(op_id)
        if known is None:
            known = self._shared(found) or self._new_weight(op_id, found)
        if found.key is not None:
            self._in_scope.setdefault(op_id, found.identity)
        if op_id not in self.weights:
            known.readers.append(op_id)
            self.weights[op_id] = known
        check_shape(op_id, known.shape, found)
        return known

    def _of_variable(self, found: Weight) -> PrunedWeight | None:
        """Return the weight that was registered for a variable, whichever operator reads it."""
        return None if found.key is None else self._by_value.get(found.identity)

    def _shared(self, found: Weight) -> PrunedWeight | None:
        """Return the weight that another operator has registered for the same value."""
        known = self._by_value.get(found.identity)
        is_same = known is not None and (found.key is not None or known.source() is found.value)
        return known if is_same else None

    def _new_weight(self, op_id: str, found: Weight) -> PrunedWeight:
        # A value that is not an object of the program's (a copy of a variable) may be gone at once.
        source = weak_reference(found.value)
        weight = PrunedWeight(attrs.evolve(found, value=None), shape_of(found.value), source)
        self._by_value[found.identity] = weight
        if self._given is not None:
            weight.set(self._given.mask(op_id, found), None)
        elif self._schedule.is_constant and self._global is None:
            self._make(weight, found.value)
        return weight

    # -- masks ------------------------------------------------------------

    def _make(self, weight: PrunedWeight, value: Any) -> None:
        """Make the mask that is due."""
        step = weight.step
        sparsity = self._options.sparsity * self._schedule.share(step)
        mask = self._rule.mask(arithmetic_of(value).wide_numpy(value), weight.weight, sparsity)
        weight.set(mask, self._schedule.next_due(step))

    def _masked_by_schedule(self, value: Any, pruned: PrunedWeight, op_id: str) -> Any:
        """Instrumentation routine: put the weight under the mask of this step."""
        if is_another(value):
            return None
        if pruned.due is not None and pruned.step >= max(pruned.due, self._schedule.start):
            if self._global is None:
                self._make(pruned, value)
            else:
                self._make_global(self._global, value, pruned, op_id)
        mask = pruned.constant(value)
        return None if mask is None else apply_mask(value, mask)

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
