"""Reading and computing with PyTorch's tensors; imported when the first of them comes."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from amanda_tools import _internals
from amanda_tools._values.tensors import Arithmetic, Array

_T = TypeVar("_T")

_NUMPY_FLOATS = {
    dtype: np.dtype(str(dtype).removeprefix("torch.")).str
    for dtype in (torch.float64, torch.float32, torch.float16)
}
"""NumPy's names of the floating-point types that it has as well."""

_OWN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""The classes whose tensors hold their numbers, and compute as PyTorch does."""

_PACKED = torch.float4_e2m1fn_x2
"""Dtypes whose elements are two numbers each, which no kernel reads."""

_transform = _internals.transform_check()
_is_old_batch = _internals.old_batch_check()


def _holds_numbers(tensor: Any) -> bool:
    return not (
        tensor.is_meta
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.layout is not torch.strided
        or tensor.dtype is _PACKED
        or _is_old_batch(tensor)
    )


def _plain(tensor: Any) -> Any:
    """Return a tensor of PyTorch's own class with the numbers of a tensor of any class.

    Of a distributed tensor it is the part of this process. None for a class that stores its numbers
    in a form of its own, which PyTorch cannot read as an array.
    """
    tensor, samples = _internals.below_transforms(tensor)
    if samples:
        return tensor.flatten(0, samples if tensor.dim() > samples else samples - 1)
    if type(tensor) in _OWN or tensor.is_nested:
        return tensor
    if _is_distributed(tensor):
        tensor = tensor.detach().to_local()
        # A collective operation may be under way in it.
        return tensor if type(tensor) in _OWN else getattr(tensor, "wait", lambda: None)()
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    with _internals.no_overrides():
        return tensor.detach()


def _numbers(tensor: Any) -> Any:
    """Return the elements of a tensor of :func:`_plain` as real numbers of a strided tensor.

    None where there are none, or PyTorch cannot read them.
    """
    if tensor.is_meta:
        return None
    if tensor.is_nested:
        items = [_numbers(item) for item in tensor.unbind()]
        if any(item is None for item in items):
            return None
        empty = torch.zeros(0, device=tensor.device)
        return torch.cat([item.flatten() for item in items] or [empty])
    if tensor.layout is not torch.strided:
        tensor = _internals.stored_values(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not _holds_numbers(tensor):
        return None
    # Few kernels accept floats of 8 bits (2.13).
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _is_distributed(tensor: Any) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def _outside() -> contextlib.AbstractContextManager[Any]:
    """Return a context without transforms of ``torch.func``, to create and read plain tensors."""
    return contextlib.nullcontext() if _transform() is None else _internals.no_transforms()


def _seen(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the plain tensor of :func:`_plain`, or None where there is none."""
    if type(tensor) in _OWN and _transform() is None:
        return contextlib.nullcontext(tensor)
    return _unwrapped(tensor)


@contextlib.contextmanager
def _unwrapped(tensor: Any) -> Iterator[Any]:
    """Yield the plain tensor, without gradients and transforms."""
    with _outside(), torch.no_grad():
        yield _plain(tensor)


def _of_numbers(tensor: Any, function: Callable[[Any], _T]) -> _T | None:
    """Call a function with the :func:`_numbers` of a tensor of any class; None without them."""
    with _seen(tensor) as plain:
        numbers = None if plain is None else _numbers(plain)
        return None if numbers is None else function(numbers)


_COMPUTING: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""Classes that override PyTorch's functions, and True for those that can be multiplied."""


def _computes(tensor: Any) -> bool:
    cls = type(tensor)
    if cls not in _COMPUTING:
        try:
            with torch.no_grad():
                found = isinstance(tensor * 1, torch.Tensor)
        except Exception:  # the class may raise anything
            found = False
        _COMPUTING[cls] = found and not _internals.takes_no_arithmetic(cls)
    return _COMPUTING[cls]


class _TrainInBackward(torch.autograd.Function):
    """Identity on tensors and on values of variables; its backward pass trains the variables."""

    @staticmethod
    def forward(ctx: Any, rate: float, variables: Sequence[Any], *tensors: Any) -> Any:
        ctx.rate, ctx.variables = rate, variables
        # Copies: a step must not change values that were saved for the backward pass.
        copies = [variable.detach().clone() for variable in variables]
        return (*(tensor.view_as(tensor) for tensor in tensors), *copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        count = len(gradients) - len(ctx.variables)
        with torch.no_grad():
            for variable, gradient in zip(ctx.variables, gradients[count:], strict=True):
                # A batch of gradients says nothing of a step.
                if gradient is not None and not _is_old_batch(gradient):
                    variable.sub_(gradient, alpha=ctx.rate)
        return (None, None, *gradients[:count])


class TorchArithmetic(Arithmetic):
    """PyTorch's tensors, on any device that has data."""

    # -- reading ----------------------------------------------------------

    def is_floating(self, tensor: Any) -> bool:
        if type(tensor) in _OWN:
            return bool(tensor.is_floating_point())
        with _internals.no_overrides():
            return bool(tensor.is_floating_point())

    def is_readable(self, tensor: Any) -> bool:
        with _seen(tensor) as plain:
            return plain is not None and _holds_numbers(plain)

    def refusal(self, tensor: Any) -> str:
        cls = type(tensor)
        if cls in _OWN:
            return "" if _holds_numbers(tensor) else f"is a tensor {_how_stored(tensor)}"
        if _is_distributed(tensor):
            return "is spread over processes, and this one has a part of it"
        if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or not _computes(tensor):
            return f"is of the class {cls.__name__}, which computes on its own"
        return ""

    def is_stacked(self, tensor: Any) -> bool:
        return _transform() is not None and _internals.is_stacked(tensor)

    def may_hold_nan(self, tensor: Any) -> bool:
        with _internals.no_overrides():
            return bool(tensor.is_floating_point() or tensor.is_complex())

    def is_finite(self, tensor: Any) -> bool | None:
        return _of_numbers(tensor, lambda numbers: bool(torch.isfinite(numbers).all()))

    def is_clean(self, tensor: Any) -> bool | None:
        if type(tensor) not in _OWN or _transform() is not None:
            return super().is_clean(tensor)
        # Quantized tensors have no sum, and PyTorch warns as it raises; integers are finite.
        if not tensor.is_floating_point():
            return super().is_clean(tensor)
        # One kernel and one number to the CPU. The sum of finite numbers may overflow: only a
        # finite sum is an answer.
        try:
            if math.isfinite(tensor.sum().item()):
                return True
        except RuntimeError:
            # No sum: nested, on the meta device.
            pass
        return super().is_clean(tensor)

    def has_nan(self, tensor: Any) -> bool | None:
        return _of_numbers(tensor, lambda numbers: bool(torch.isnan(numbers).any()))

    def numbers(self, tensor: Any) -> Array | None:
        return _of_numbers(tensor, _array)

    def kind(self, tensor: Any) -> str:
        with _internals.no_overrides():
            if tensor.is_meta:
                return "meta"
            if tensor.is_nested:
                return "nested"
            if tensor.layout is not torch.strided:
                return str(tensor.layout).removeprefix("torch.")
            if tensor.is_complex() or tensor.is_quantized or tensor.dtype is _PACKED:
                return self.dtype(tensor)
            if not tensor.is_floating_point():
                return ""
            return self.dtype(tensor) if type(tensor) in _OWN else type(tensor).__name__

    def shape(self, tensor: Any) -> list[int]:
        # A nested tensor of the strided layout raises when it is asked for its shape, and that of
        # the jagged one has a size that is not a number.
        return [] if tensor.is_nested else super().shape(tensor)

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def numpy(self, tensor: Any) -> Array:
        with _seen(tensor) as plain:
            if plain is None:
                raise TypeError(f"the numbers of a {type(tensor).__name__} cannot be read")
            return _array(plain)

    def numpy_view(self, tensor: Any) -> Array:
        # Zeros that forward-mode AD makes have no memory.
        if type(tensor) in _OWN and tensor.numel() and _transform() is None and tensor.data_ptr():
            return np.asarray(_Memory(tensor))
        return self.numpy(tensor)

    def storable(self, tensor: Any) -> Any:
        with _seen(tensor) as plain:
            if plain is None:
                return None
            plain = plain.detach().resolve_conj().resolve_neg()
            return torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)

    def copy(self, tensor: Any) -> Any:
        return tensor.detach().clone()

    # -- bits -------------------------------------------------------------

    def bits(self, tensor: Any, positions: Array) -> Array:
        if reason := self.refusal(tensor):
            raise TypeError(f"a tensor that {reason}")
        if self.is_stacked(tensor):
            raise TypeError("a tensor of torch.vmap, which stands for many samples")
        with _seen(tensor) as plain:
            return _as_integers(plain.detach()[_indices(plain, positions)].reshape(-1))

    def with_bits(self, tensor: Any, positions: Array, bits: Array) -> Any:
        # A clone keeps the order in memory, on which the last bits of later products depend.
        new = tensor.detach().clone()
        with _outside():
            elements = _from_integers(bits, tensor).to(tensor.device)
        new[_indices(tensor, positions)] = elements if new.dim() else elements[0]
        return new

    def to_bits(self, values: Array, like: Any) -> Array:
        with _outside():
            return _as_integers(torch.tensor(values).to(like.dtype))

    def from_bits(self, bits: Array, like: Any) -> Array:
        with _outside():
            return np.asarray(_from_integers(bits, like).double().numpy())

    # -- constants and variables ------------------------------------------

    def constant(self, array: Array, like: Any) -> Any:
        # Tensors made within a transform are wrapped, and of no use after it; those made in
        # inference mode cannot be multiplied by what is trained.
        with torch.inference_mode(False), _outside():
            return torch.tensor(array, dtype=like.dtype, device=like.device)

    def cast_like(self, constant: Any, like: Any) -> Any:
        return constant.to(device=like.device, dtype=like.dtype)

    def variable(self, array: Array, like: Any) -> Any:
        # A tensor made in inference mode cannot be trained later, nor can one of a transform.
        with torch.inference_mode(False), _outside():
            return self.constant(array, like).requires_grad_()

    def assign(self, target: Any, array: Array) -> None:
        with torch.no_grad(), _outside():
            target.copy_(self.constant(array, target))

    def train_in_backward(
        self, tensors: Sequence[Any], variables: Sequence[Any], rate: float
    ) -> tuple[list[Any], list[Any]]:
        if _transform() is not None:
            # torch.func runs no backward pass: the values stay as they are.
            return list(tensors), [variable.detach() for variable in variables]
        apply: Any = _TrainInBackward.apply
        found = apply(rate, list(variables), *tensors)
        return list(found[: len(tensors)]), list(found[len(tensors) :])

    def stop_gradient(self, tensor: Any) -> Any:
        return tensor.detach()

    # -- elementwise ------------------------------------------------------

    relu = staticmethod(torch.relu)
    sigmoid = staticmethod(torch.sigmoid)
    round = staticmethod(torch.round)
    divide = staticmethod(torch.div)

    def clip(self, tensor: Any, low: Any, high: Any, /) -> Any:
        if not torch.is_grad_enabled():
            return torch.clamp(tensor, low, high)
        # At a bound, clamp() gives the tensor the whole gradient up to PyTorch 2.13. From 2.14 on
        # it is a half of it, the bound having the other half, and nothing for bounds that are
        # numbers: zeros after a ReLU train a lower bound of zero.
        return torch.where(tensor > high, high, torch.where(tensor < low, low, tensor))

    def where(self, condition: Any, a: Any, b: Any, /) -> Any:
        return torch.where(condition, a, b)

    def widen(self, tensor: Any) -> Any:
        return tensor.float() if tensor.element_size() < 4 else tensor

    def round_trip(self, tensor: Any, dtype: str) -> Any:
        return tensor.to(getattr(torch, dtype)).to(tensor.dtype)

    # -- axes -------------------------------------------------------------

    matmul = staticmethod(torch.matmul)
    reshape = staticmethod(torch.reshape)

    def softmax(self, tensor: Any) -> Any:
        return tensor.softmax(-1)

    def min_max(self, tensor: Any, axis: int | None = None) -> tuple[Any, Any]:
        # By all axes: torch.onnx (2.13) cannot export a call without axes.
        axes = tuple(range(tensor.dim())) if axis is None else axis
        return tensor.amin(axes, axis is not None), tensor.amax(axes, axis is not None)

    def mean(self, tensor: Any, axes: Sequence[int]) -> Any:
        # In PyTorch an empty tuple of axes means all axes.
        return tensor.mean(tuple(axes)) if axes else tensor

    def sum(self, tensor: Any, axes: Sequence[int]) -> Any:
        return tensor.sum(tuple(axes)) if axes else tensor

    def transpose(self, tensor: Any, /) -> Any:
        return tensor.mT

    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        return tensor.index_select(axis, torch.tensor(indices, device=tensor.device))

    def top_mask(self, scores: Any, count: int) -> Any:
        order = scores.detach().argsort(dim=-1, descending=True, stable=True)
        return (order.argsort(-1) < count).to(scores.dtype)


def _readable(tensor: Any) -> Any:
    """The tensor on the CPU, as numbers of a type that NumPy has, in the order of its memory."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point() and tensor.dtype not in _NUMPY_FLOATS:
        tensor = tensor.float()
    return tensor.resolve_conj().resolve_neg()


def _array(tensor: Any) -> Array:
    # A copy before numpy(), after which PyTorch refuses to resize the tensor's memory (2.13): that
    # is how FSDP2 frees parameters.
    copy = _readable(tensor).clone(memory_format=torch.contiguous_format)
    array: Array = copy.numpy()
    return array


class _Memory:
    """The memory of a tensor, for NumPy to read; an array of it keeps it alive.

    Unlike ``tensor.numpy()`` it leaves PyTorch free to resize that memory.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor = _readable(tensor)
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": _NUMPY_FLOATS[tensor.dtype],
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def _how_stored(tensor: Any) -> str:
    if tensor.is_meta:
        return "without data"
    if tensor.is_nested:
        return "of several shapes (nested)"
    if _is_old_batch(tensor):
        return "that stands for a batch of gradients"
    return "of quantized numbers" if tensor.is_quantized else f"of the layout {tensor.layout}"


def _indices(tensor: Any, positions: Array) -> Any:
    axes = np.unravel_index(positions, tuple(tensor.shape)) if tensor.dim() else ()
    return tuple(torch.tensor(axis, device=tensor.device) for axis in axes)


def _as_integers(tensor: Any) -> Array:
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"elements of type {tensor.dtype}")
    size = 8 * tensor.element_size()
    integers = tensor.view(getattr(torch, f"int{size}")).cpu().numpy()
    return np.asarray(integers.view(f"uint{size}"))


def _from_integers(bits: Array, like: Any) -> Any:
    signed = bits.view(f"int{8 * bits.dtype.itemsize}")
    return torch.from_numpy(signed).view(like.dtype)


ARITHMETIC = TorchArithmetic()
