"""Operators of the toy framework, and how a user defines further ones.

Every call of an operator goes through :func:`execute`. Gradient formulas are
written with ``op.compute``, which does not: they are the framework's inside.
"""

from __future__ import annotations

import builtins
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from amanda.python.signatures import signature_of
from amanda.testing.loopback.tape import Tensor, record

GENERATOR = random.Random(0)
"""Where ``dropout`` draws its random numbers."""


class LoopbackOp:
    """An operator: a function of tensors and attributes with a declared signature.

    A parameter annotated with ``Tensor`` takes a tensor, with ``Sequence[Tensor]``
    a list of tensors; all others are attributes.

    Attributes:
        compute: the function that computes it.
        signature: its parameters.
        inplace: True if it changes its first argument and returns it.
    """

    def __init__(self, compute: Callable[..., Any], inplace: bool = False) -> None:
        self.__name__ = compute.__name__
        self.__doc__ = compute.__doc__
        self.compute = compute
        self.inplace = inplace
        self.signature = signature_of(compute)

    def __repr__(self) -> str:
        return f"<operator {self.__name__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return execute(self, args, kwargs)

    def takes_tensor(self, parameter: str) -> bool:
        """True if a parameter is declared as a tensor or a list of tensors."""
        return "Tensor" in str(self.signature.parameters[parameter].annotation)


def op(compute: Callable[..., Any]) -> LoopbackOp:
    """Define an operator; its body is a part of it, and not seen as operators."""
    return LoopbackOp(compute)


def execute(op: LoopbackOp, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator for the user."""
    return op.compute(*args, **kwargs)


def _elementwise(function: Callable[..., float], *tensors: Tensor) -> Tensor:
    shapes = {t.shape for t in tensors}
    if len(shapes) > 1:
        raise ValueError(f"shapes differ: {sorted(shapes)}")
    numbers = [function(*row) for row in zip(*(t.data for t in tensors), strict=True)]
    return Tensor(numbers, tensors[0].shape)


def _zeros(shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return Tensor([0.0] * count, shape)


@op
def add(input: Tensor, other: Tensor | float) -> Tensor:
    """The sum of two tensors, or of a tensor and a number."""
    if not isinstance(other, Tensor):
        out = _elementwise(lambda x: x + other, input)
        record("AddBackward", [input], [out], lambda grads: [grads[0]])
        return out
    out = _elementwise(lambda x, y: x + y, input, other)
    record("AddBackward", [input, other], [out], lambda grads: [grads[0], grads[0]])
    return out


@op
def mul(input: Tensor, other: Tensor | float) -> Tensor:
    """The product of two tensors, or of a tensor and a number."""
    if not isinstance(other, Tensor):
        out = _elementwise(lambda x: x * other, input)
        record("MulBackward", [input], [out], lambda grads: [mul.compute(grads[0], other)])
        return out

    def gradients(grads: list[Tensor], left: Tensor, right: Tensor) -> list[Tensor]:
        return [mul.compute(grads[0], right), mul.compute(grads[0], left)]

    out = _elementwise(lambda x, y: x * y, input, other)
    record("MulBackward", [input, other], [out], gradients, [input, other])
    return out


@op
def relu(input: Tensor) -> Tensor:
    """The positive part."""

    def gradients(grads: list[Tensor], source: Tensor) -> list[Tensor]:
        return [mul.compute(grads[0], _elementwise(lambda x: float(x > 0), source))]

    out = _elementwise(lambda x: max(x, 0.0), input)
    record("ReluBackward", [input], [out], gradients, [input])
    return out


@op
def dropout(input: Tensor, p: float = 0.5) -> Tensor:
    """Set a random share `p` of the numbers to zero and scale the others up."""
    scale = 1.0 / (1.0 - p)
    mask = _elementwise(lambda _: scale * (GENERATOR.random() >= p), input)
    out = _elementwise(lambda x, m: x * m, input, mask)
    record("DropoutBackward", [input], [out], lambda grads, m: [mul.compute(grads[0], m)], [mask])
    return out


@op
def transpose(input: Tensor) -> Tensor:
    """Rows become columns."""
    rows, columns = input.shape
    numbers = [input.data[r * columns + c] for c in range(columns) for r in range(rows)]
    out = Tensor(numbers, (columns, rows))
    record("TransposeBackward", [input], [out], lambda grads: [transpose.compute(grads[0])])
    return out


@op
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """The matrix product."""

    def gradients(grads: list[Tensor], left: Tensor, right: Tensor) -> list[Tensor]:
        return [
            matmul.compute(grads[0], transpose.compute(right)),
            matmul.compute(transpose.compute(left), grads[0]),
        ]

    (rows, inner), (height, columns) = input.shape, other.shape
    if inner != height:
        raise ValueError(f"matrices of shapes {input.shape} and {other.shape} do not fit")
    numbers = [
        builtins.sum(input.data[r * inner + k] * other.data[k * columns + c] for k in range(inner))
        for r in range(rows)
        for c in range(columns)
    ]
    out = Tensor([float(number) for number in numbers], (rows, columns))
    record("MatmulBackward", [input, other], [out], gradients, [input, other])
    return out


@op
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ transposed(weight) + bias``: one operator with several backward operators."""
    product: Tensor = matmul.compute(input, transpose.compute(weight))
    if bias is None:
        return product
    rows, columns = product.shape
    out = Tensor([x + bias.data[i % columns] for i, x in enumerate(product.data)], (rows, columns))

    def gradients(grads: list[Tensor]) -> list[Tensor]:
        return [grads[0], _column_sums(grads[0])]

    record("AddBiasBackward", [product, bias], [out], gradients)
    return out


def _column_sums(input: Tensor) -> Tensor:
    rows, columns = input.shape
    out = Tensor([float(builtins.sum(input.data[c::columns])) for c in range(columns)], (columns,))

    def gradients(grads: list[Tensor]) -> list[Tensor]:
        wide = Tensor(grads[0].data * rows, (rows, columns))
        record("RepeatBackward", [grads[0]], [wide], lambda again: [_column_sums(again[0])])
        return [wide]

    record("ColumnSumsBackward", [input], [out], gradients)
    return out


@op
def sum(input: Tensor) -> Tensor:
    """The sum of all numbers."""
    out = Tensor([float(builtins.sum(input.data))], ())
    shape = input.shape
    record("SumBackward", [input], [out], lambda grads: [_filled(grads[0], shape)])
    return out


def _filled(input: Tensor, shape: tuple[int, ...]) -> Tensor:
    out = _zeros(shape)
    out.data[:] = input.data * len(out.data)
    record("FillBackward", [input], [out], lambda grads: [sum.compute(grads[0])])
    return out


@op
def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other, along their first dimension."""
    rows = builtins.sum(t.shape[0] for t in tensors)
    out = Tensor([x for t in tensors for x in t.data], (rows, *tensors[0].shape[1:]))
    sizes = [t.shape[0] for t in tensors]
    record("CatBackward", tensors, [out], lambda grads: _split(grads[0], sizes))
    return out


@op
def split(input: Tensor, sections: int = 2) -> tuple[Tensor, ...]:
    """Equal parts along the first dimension."""
    if input.shape[0] % sections:
        raise ValueError(f"{input.shape[0]} rows cannot be split into {sections} equal parts")
    return tuple(_split(input, [input.shape[0] // sections] * sections))


def _split(input: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    rest, step = input.shape[1:], len(input.data) // input.shape[0]
    outputs, start = [], 0
    for size in sizes:
        outputs.append(Tensor(input.data[start * step : (start + size) * step], (size, *rest)))
        start += size
    shapes = [out.shape for out in outputs]

    def gradients(grads: list[Tensor | None]) -> list[Tensor]:
        pairs = zip(grads, shapes, strict=True)
        return [cat.compute([_zeros(shape) if g is None else g for g, shape in pairs])]

    record("SplitBackward", [input], outputs, gradients)
    return outputs


@op
def detach(input: Tensor) -> Tensor:
    """The same numbers, in the same memory, outside of the graph."""
    return input.alias()


@functools.partial(LoopbackOp, inplace=True)
def add_(input: Tensor, other: Tensor | float) -> Tensor:
    """Add to `input` in place."""
    input.become(add.compute(input, other))
    return input


def manual_seed(seed: int) -> None:
    """Restart the random numbers of ``dropout``."""
    GENERATOR.seed(seed)


def rng_state() -> Any:
    """The state of the random number generator."""
    return GENERATOR.getstate()
