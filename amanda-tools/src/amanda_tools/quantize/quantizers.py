"""Fake-quantizes one input of one operator: calibration, rounding, learned steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from amanda_tools._operators.weights import Untreatable, Weight
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Arithmetic, Array, arithmetic_of
from amanda_tools.export import Change, Function, Rounding
from amanda_tools.quantize.numbers import QuantGrid, dynamic_fit, fake_float, fake_quantize
from amanda_tools.quantize.observers import RangeObserver, range_of
from amanda_tools.quantize.options import QuantizeOptions

_SMALLEST = 1e-9
"""Lower bound of a learned step."""


@attrs.define(eq=False)
class Quantizer:
    """Fake-quantizes one input of an operator.

    Attributes:
        options: options of the tool.
        index: position of the input.
        role: weight or activation.
        bits: bits of a number.
        grid: the numbers.
        axes: axes of channels, of weights with a scale per channel; else none.
        group_axis: the axis with a scale for each group of positions; None without groups.
        scale, zero: float32, of one element or one per channel; with groups of the weight's shape,
            but for the axis of groups; None before they are known, and for dynamic activations.
        token_axis: the axis along which each range is, from the end; None for one range of all.
        integers: of a weight that a calibration has rounded; else None.
        factors: by which the channels of smoothed data are divided; else None.
        first_step: the initial value of a learned step; None if nothing is learned.
        step: the framework's variable of it; there when it has run once.
        remaining: executions that are still to be observed.
        parameter: path of the parameter that the input is; None for others.
        shape: of a weight.
    """

    options: QuantizeOptions
    index: int
    role: str
    bits: int
    grid: QuantGrid
    axes: tuple[int, ...] = ()
    group_axis: int | None = None
    scale: Array | None = None
    zero: Array | None = None
    token_axis: int | None = None
    integers: Array | None = None
    factors: Array | None = None
    first_step: Array | None = None
    step: Any = None
    remaining: int = 0
    parameter: str | None = None
    shape: tuple[int, ...] = ()
    _observer: RangeObserver | None = None
    _has_range: bool = False
    """True if anything but zeros has been observed."""
    _constants: dict[tuple[Any, ...], Any] = attrs.field(factory=dict)

    @classmethod
    def of_weight(cls, options: QuantizeOptions, weight: Weight) -> Quantizer:
        """Make the quantizer of a weight; its range, or what it begins to learn with, is known.

        Raises:
            Untreatable: it has no groups of this size.
        """
        bits = options.weight_bits
        grid = QuantGrid.of(options.number, bits, symmetric=True)
        # TensorFlow's depthwise convolutions have C and M in place of O; embeddings have no O
        # either.
        axes = weight.axes("OB") or weight.axes("C")
        self = cls(options, weight.index, "weight", bits, grid, axes if options.per_channel else ())
        self.shape = shape_of(weight.value)
        if options.group:
            self.group_axis = weight.axis("I")
            if (size := weight.width("I")) % options.group:
                raise Untreatable(f"group={options.group} does not divide its {size} inputs")
        rows = self._fit(arithmetic_of(weight.value).wide_numpy(weight.value))
        if options.method != "dynamic" and options.activation_bits:
            # Activations are calibrated with exact weights.
            self.remaining = options.calibration
        if options.method == "qat":
            assert self.scale is not None
            self.first_step = _first_step(rows, grid, self.scale).reshape(self.scale.shape)
        return self

    @classmethod
    def of_activation(
        cls, options: QuantizeOptions, index: int, token_axis: int | None = None
    ) -> Quantizer:
        """Make the quantizer of an activation, which observes executions first, or ranges each
        tensor."""
        bits = options.activation_bits
        symmetric = options.symmetric or options.method == "qat"
        grid = QuantGrid.of(options.number, bits, symmetric=symmetric)
        self = cls(options, index, "activation", bits, grid, token_axis=token_axis)
        if options.method != "dynamic":
            self.remaining = options.calibration
            self._observer = RangeObserver(options)
        if options.method == "qat":
            # The calibration sets the value; an optimizer can have the variable before.
            self.first_step = np.ones(1)
        return self

    @property
    def axis(self) -> int | list[int] | None:
        """The axis of channels; a list if a channel has an index on each of several axes."""
        return self.axes[0] if len(self.axes) == 1 else list(self.axes) or None

    @property
    def is_constant(self) -> bool:
        """True if the rounding never changes."""
        is_given = self.integers is not None or self.factors is not None
        is_fixed = self.scale is not None and self.first_step is None and not is_given
        return is_fixed and self.is_ready and not self._is_open

    @property
    def has_run(self) -> bool:
        """True if the operator has run; operators of a graph whose result is unused do not run."""
        return self.remaining < self.options.calibration

    @property
    def is_ready(self) -> bool:
        """True if it is calibrated, and rounds."""
        return self.remaining == 0

    # -- routines ---------------------------------------------------------

    def __call__(self, tensor: Any) -> Any:
        """Return the rounded tensor; None while it is only observed, or if it cannot be."""
        arithmetic = arithmetic_of(tensor)
        if not arithmetic.is_floating(tensor) or arithmetic.refusal(tensor):
            return None
        self.prepare(tensor)
        if self.remaining or (self._is_open and arithmetic.wide_numpy(tensor).any()):
            self._observe(arithmetic, tensor)
            return None
        if self.step is not None:
            return self.rounded_with(tensor, self.step)
        return self.rounded(tensor)

    def prepare(self, like: Any) -> None:
        """Make the variable of a learned step, where there is none yet."""
        if self.first_step is not None and self.step is None:
            arithmetic = arithmetic_of(like)
            self.step = arithmetic.variable(self.first_step, arithmetic.widen(like))

    def constants(self, like: Any) -> tuple[Any, Any]:
        """Return scale and zero point with the device and shape for a tensor."""
        return self._constant("scale", like), self._constant("zero", like)

    def _constant(self, name: str, like: Any) -> Any:
        """Return an attribute with the device and shape for a tensor; of integers their numbers."""
        shape = shape_of(like) if self.axes else ()
        key = (name, str(like.dtype), str(getattr(like, "device", "")), shape)
        if key not in self._constants:
            arithmetic, array = arithmetic_of(like), getattr(self, name)
            if name in ("scale", "zero"):
                array = self.spread(array, shape)
            elif self.scale is not None and name == "integers":
                array = array.astype(np.float32) * self.spread(self.scale, shape)
            self._constants[key] = arithmetic.constant(array, arithmetic.widen(like))
        return self._constants[key]

    def rounded(self, tensor: Any) -> Any:
        """Return the rounded tensor, by what does not change or is of the tensor itself."""
        arithmetic = arithmetic_of(tensor)
        if self.integers is not None:
            # A tensor, which TensorFlow's constants are not yet.
            whole = arithmetic.reshape(self._constant("integers", tensor), shape_of(tensor))
            return arithmetic.cast_like(whole, tensor)
        wide = self.divided(tensor)
        if self.scale is not None:
            found = self._rounded(wide, *self.constants(tensor))
        else:
            axis = self.token_axis and (max(self.token_axis, -len(tensor.shape)) or None)
            found = self._rounded(wide, *dynamic_fit(arithmetic, wide, self.grid, axis))
        return arithmetic.cast_like(found, tensor)

    def divided(self, tensor: Any) -> Any:
        """Return the tensor in float32, its channels divided by the factors of smoothing."""
        arithmetic = arithmetic_of(tensor)
        wide = arithmetic.widen(tensor)
        if self.factors is None:
            return wide
        return arithmetic.divide(wide, self._constant("factors", tensor))

    def _rounded(self, tensor: Any, scale: Any, zero: Any) -> Any:
        if self.grid.number != "int":
            return fake_float(tensor, scale, self.grid.number)
        return fake_quantize(tensor, scale, zero, self.grid.low, self.grid.high)

    def _beside(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in which values per channel broadcast to a tensor of `shape`."""
        return tuple(size if axis in self.axes else 1 for axis, size in enumerate(shape))

    def spread(self, part: Array, shape: Sequence[int]) -> Array:
        """Return scale or zero point so that it broadcasts to a tensor of `shape`."""
        if self.group_axis is None:
            return part.reshape(self._beside(shape))
        return np.repeat(part, self.options.group, self.group_axis)

    # -- calibration ------------------------------------------------------

    @property
    def _is_open(self) -> bool:
        """True if the calibration of an activation saw only zeros, which have no range.

        So begins the state of a recurrent layer, whose steps are executions of one operator in a
        loop of a graph: its range is that of the next tensor that is not zero. What is learned
        finds its range by itself.
        """
        is_static = self._observer is not None and self.options.method == "static"
        return is_static and self.is_ready and not self._has_range

    def _observe(self, arithmetic: Arithmetic, tensor: Any) -> None:
        self.remaining = max(self.remaining - 1, 0)
        if self._observer is None:
            return
        array = arithmetic.wide_numpy(tensor)
        self._has_range |= bool(array.any())
        self._observer.observe(array)
        if self.remaining:
            return
        low, high = self._observer.range(self.grid, 1 if self.factors is None else self.factors)
        # Never negative, as after a ReLU: all numbers of the grid can be used.
        if self.options.method == "qat" and low >= 0:
            self.grid = QuantGrid.unsigned(self.bits)
        self._set_range(low, high)
        if self.step is not None:
            assert self.scale is not None
            arithmetic.assign(self.step, _first_step(array.reshape(1, -1), self.grid, self.scale))

    def _fit(self, array: Array) -> Array:
        """Set the scale, or scales, of a weight; return the values of each as a row."""
        rows, shape = array.reshape(1, -1), (1,)
        if self.group_axis is not None:
            axis, size = self.group_axis, self.options.group
            split = (*array.shape[:axis], -1, size, *array.shape[axis + 1 :])
            blocks = np.moveaxis(array.reshape(split), axis + 1, -1)
            rows, shape = blocks.reshape(-1, size), blocks.shape[:-1]
        elif self.axes:
            shape = (math.prod(array.shape[axis] for axis in self.axes),)
            rows = np.moveaxis(array, self.axes, range(len(self.axes))).reshape(*shape, -1)
        low, high = range_of(rows, self.options, self.grid)
        self._set_range(low.reshape(shape), high.reshape(shape))
        return rows

    def fix(self, integers: Array, scale: Array) -> None:
        """Set the integers of a weight, in its layout, and their scale, or scales."""
        kind = np.int8 if self.bits <= 8 else np.int16
        self.integers = np.ascontiguousarray(integers, kind)
        self.scale, self.zero = scale, np.zeros_like(scale)
        self._constants.clear()

    def _set_range(self, low: Array, high: Array) -> None:
        self.scale, self.zero = self.grid.fitted(np.asarray(low), np.asarray(high))
        self._constants.clear()

    # -- learning ---------------------------------------------------------

    def rounded_with(self, tensor: Any, step: Any) -> Any:
        """Return the rounded tensor, differentiable in the tensor and in this step."""
        arithmetic = arithmetic_of(tensor)
        wide = arithmetic.widen(tensor)
        step = arithmetic.cast_like(step, wide)
        if self.group_axis is not None:
            size = shape_of(tensor)[self.group_axis]
            places = [place // self.options.group for place in range(size)]
            step = arithmetic.take(step, places, self.group_axis)
        else:
            shape = self._beside(shape_of(tensor)) if self.axes else (1,)
            step = arithmetic.reshape(step, shape)
        return arithmetic.cast_like(self._with_step(arithmetic, wide, step), tensor)

    def _with_step(self, arithmetic: Arithmetic, tensor: Any, step: Any) -> Any:
        """Round with a learned step size (Esser et al., ICLR 2020)."""
        shape = shape_of(tensor)
        # Number of values that share a step: weights of a channel, or features of a sample.
        parts = 1 if self.scale is None else self.scale.size
        count = math.prod(shape) // parts if self.role == "weight" else math.prod(shape[1:])
        share = 1 / math.sqrt(count * self.grid.high)
        step = arithmetic.clip(step, _SMALLEST, math.inf)
        # The value of the step, with its gradient scaled by `share`, as in the paper.
        step = arithmetic.stop_gradient(step) + _nothing(arithmetic, step * share)
        bounded = arithmetic.clip(tensor / step, self.grid.low, self.grid.high)
        rounded = arithmetic.stop_gradient(arithmetic.round(bounded))
        return (rounded + _nothing(arithmetic, bounded)) * step

    # -- figures ----------------------------------------------------------

    def changes(self, op_id: str) -> Iterator[Change]:
        """Yield what happens to an operator's input, as data."""
        final = self.final()
        if self.grid.number == "int" and final is not None:
            if self.factors is not None:
                yield Function(op_id, self.index, self._alone().divided)
            axis, group = self.axes[0] if len(self.axes) == 1 else None, 0
            rest = [place for place in range(len(self.shape)) if place not in self.axes]
            if self.group_axis is not None:
                axis, group = self.group_axis, self.options.group
            elif len(self.axes) > 1 and len(rest) == 1:
                # The same as a group of all positions on the only other axis.
                axis, group = rest[0], self.shape[rest[0]]
                beside = self._beside(self.shape)
                final = final[0].reshape(beside), final[1].reshape(beside)
            given = (*final, int(self.grid.low), int(self.grid.high), axis, group, self.integers)
            yield Rounding(op_id, self.index, *given, divides=self.step is not None)
            return
        yield Function(op_id, self.index, lambda tensor: self._alone().rounded(tensor))

    def _alone(self) -> Quantizer:
        """Return a copy for an exporter's trace: constants made there are of no use elsewhere."""
        return attrs.evolve(self, constants={})

    def final(self) -> tuple[Array, Array] | None:
        """Return scale and zero point, learned ones included; None if there are none, or not
        yet."""
        if self.remaining or self.scale is None or self.zero is None:
            return None
        if self.first_step is None:
            return self.scale, self.zero
        if self.step is None:
            return None
        found = arithmetic_of(self.step).wide_numpy(self.step).astype(np.float32)
        step = np.maximum(found, np.float32(_SMALLEST))
        return step.reshape(self.scale.shape), np.zeros_like(self.scale)

    def row(self) -> dict[str, Any]:
        """Return everything that another program needs to round alike, as plain data."""
        final = self.final()
        scale, zero = final if final is not None else (None, None)
        return {
            "input": self.index,
            "role": self.role,
            "parameter": self.parameter,
            "number": self.grid.number,
            "bits": self.bits if self.grid.number == "int" else 8,
            "low": self.grid.low,
            "high": self.grid.high,
            "axis": self.axis,
            "group": self.options.group if self.group_axis is not None else 0,
            "group_axis": self.group_axis,
            "token_axis": self.token_axis,
            "factors": None if self.factors is None else self.factors.tolist(),
            "scale": None if scale is None else scale.tolist(),
            "zero_point": None if zero is None else zero.astype(int).tolist(),
            "is_ready": self.is_ready,
        }


def _nothing(arithmetic: Arithmetic, tensor: Any) -> Any:
    """Return zeros with the gradient of a tensor."""
    return tensor - arithmetic.stop_gradient(tensor)


def _first_step(rows: Array, grid: QuantGrid, fallback: Array) -> Array:
    """Return the initial step: ``2 * mean(abs(x)) / sqrt(high)``."""
    step = 2 * np.abs(rows).mean(1, dtype=np.float64) / math.sqrt(grid.high)
    return np.where(step > _SMALLEST, step, np.asarray(fallback).reshape(-1))
