"""The arithmetic of the optimization tools on PyTorch; imported when a tensor of it is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from amanda_tools._values.arithmetic import Arithmetic


class _Entrance(torch.autograd.Function):
    """Tensors and values of variables as they are; the way back trains the variables."""

    @staticmethod
    def forward(ctx: Any, rate: float, variables: Sequence[Any], *tensors: Any) -> Any:
        ctx.rate, ctx.variables = rate, variables
        # Copies: what was saved for the backward pass must not be changed by a step.
        copies = [variable.detach().clone() for variable in variables]
        return (*(tensor.view_as(tensor) for tensor in tensors), *copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        count = len(gradients) - len(ctx.variables)
        with torch.no_grad():
            for variable, gradient in zip(ctx.variables, gradients[count:], strict=True):
                if gradient is not None:
                    variable.sub_(gradient, alpha=ctx.rate)
        return (None, None, *gradients[:count])


class TorchArithmetic(Arithmetic):
    """On tensors of PyTorch."""

    def numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        value = tensor.detach().cpu()
        if value.is_floating_point() and value.element_size() < 4:
            value = value.float()
        return np.array(value.numpy())

    def bits(self, tensor: Any, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        picked = tensor.detach()[self._indices(tensor, positions)].reshape(-1)
        return self._as_integers(picked)

    def with_bits(
        self, tensor: Any, positions: np.ndarray[Any, Any], bits: np.ndarray[Any, Any]
    ) -> Any:
        # A clone keeps the order in memory, on which the last bits of products depend.
        new = tensor.detach().clone()
        elements = self._from_integers(bits, tensor).to(tensor.device)
        new[self._indices(tensor, positions)] = elements if new.dim() else elements[0]
        return new

    def to_bits(self, values: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        return self._as_integers(self.framework.tensor(values).to(like.dtype))

    def from_bits(self, bits: np.ndarray[Any, Any], like: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self._from_integers(bits, like).double().numpy())

    def _indices(self, tensor: Any, positions: np.ndarray[Any, Any]) -> Any:
        axes = np.unravel_index(positions, tuple(tensor.shape)) if tensor.dim() else ()
        return tuple(self.framework.tensor(axis, device=tensor.device) for axis in axes)

    def _as_integers(self, tensor: Any) -> np.ndarray[Any, Any]:
        torch = self.framework
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"elements of type {tensor.dtype}")
        size = 8 * tensor.element_size()
        integers = tensor.view(getattr(torch, f"int{size}")).cpu().numpy()
        return np.asarray(integers.view(f"uint{size}"))

    def _from_integers(self, bits: np.ndarray[Any, Any], like: Any) -> Any:
        signed = bits.view(f"int{8 * bits.dtype.itemsize}")
        return self.framework.from_numpy(signed).view(like.dtype)

    def is_floating(self, tensor: Any) -> bool:
        return bool(tensor.is_floating_point())

    def constant(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return self.framework.tensor(array, dtype=like.dtype, device=like.device)

    def matched(self, constant: Any, like: Any) -> Any:
        return constant.to(device=like.device, dtype=like.dtype)

    def variable(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        # What is made in inference mode could never be trained.
        with self.framework.inference_mode(False):
            return self.constant(array, like).requires_grad_()

    def assign(self, target: Any, array: np.ndarray[Any, Any]) -> None:
        with self.framework.no_grad():
            target.copy_(self.constant(array, target))

    def training(
        self, tensors: Sequence[Any], variables: Sequence[Any], rate: float
    ) -> tuple[list[Any], list[Any]]:
        apply: Any = _Entrance.apply
        found = apply(rate, list(variables), *tensors)
        return list(found[: len(tensors)]), list(found[len(tensors) :])

    def stop_gradient(self, tensor: Any) -> Any:
        return tensor.detach()

    def relu(self, tensor: Any) -> Any:
        return tensor.relu()

    def sigmoid(self, tensor: Any) -> Any:
        return tensor.sigmoid()

    def softmax(self, tensor: Any) -> Any:
        return tensor.softmax(-1)

    def matmul(self, a: Any, b: Any) -> Any:
        return a @ b

    def single(self, tensor: Any) -> Any:
        return tensor.float() if tensor.element_size() < 4 else tensor

    def through(self, tensor: Any, dtype: str) -> Any:
        return tensor.to(getattr(self.framework, dtype)).to(tensor.dtype)

    def round(self, tensor: Any) -> Any:
        return tensor.round()

    def clip(self, tensor: Any, low: Any, high: Any) -> Any:
        return tensor.clamp(low, high)

    def extremes(self, tensor: Any) -> tuple[Any, Any]:
        return tensor.amin(), tensor.amax()

    def mean(self, tensor: Any, axes: Sequence[int]) -> Any:
        # Without axes PyTorch would take all of them.
        return tensor.mean(tuple(axes)) if axes else tensor

    def sum(self, tensor: Any, axes: Sequence[int]) -> Any:
        return tensor.sum(tuple(axes)) if axes else tensor

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return tensor.reshape(tuple(shape))

    def transpose(self, tensor: Any) -> Any:
        return tensor.mT

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return self.framework.where(condition, a, b)

    def take(self, tensor: Any, indices: Sequence[int], axis: int) -> Any:
        positions = self.framework.tensor(indices, device=tensor.device)
        return tensor.index_select(axis, positions)

    def top(self, scores: Any, count: int) -> Any:
        order = scores.detach().argsort(dim=-1, descending=True, stable=True)
        return (order.argsort(-1) < count).to(scores.dtype)


ARITHMETIC = TorchArithmetic(torch)
