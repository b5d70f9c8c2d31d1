"""The model that a program runs, and the arguments of its first call, for an export at the end."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import amanda
from amanda.errors import UnsupportedProgramError
from amanda.interface.points import PointContext
from amanda.tool import vanilla
from amanda_tools._internals import leaves_of


class ModelOfRun:
    """Notes the outermost modules of PyTorch and Keras that a program calls.

    Args:
        tool: gets the routines.
        target: what is exported at the end of the program, a file or folder; "" for nothing.

    Attributes:
        target: its path; None for nothing.
    """

    def __init__(self, tool: amanda.Tool, target: str) -> None:
        self._calls: dict[str, tuple[Any, Any]] = {}
        # Absolute: the program may change the current folder.
        self.target = Path(target).absolute() if target else None
        if self.target is not None:
            tool.add_inst_for_pass(self.note)
            tool.add_inst_for_pass(self.note, end=True)

    def note(self, context: PointContext) -> None:
        """Routine at the begin and the end of a forward pass: note the first call of a model."""
        model, name = context.target, context.id
        if not hasattr(model, "register_forward_pre_hook"):
            # The pass of a graph has the function's name, and knows its model at its end.
            name = getattr(model, "name", "")
            if context.inputs and name not in self._calls:
                self._calls[name] = model, _example_of_layer(model, context.inputs)
            return
        if name in self._calls:
            return

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            handle.remove()
            with vanilla():
                self._calls[name] = module, _example(module, args, kwargs)

        # Only a hook gets the arguments as they were given; it runs in this call.
        handle = model.register_forward_pre_hook(keep, prepend=True, with_kwargs=True)

    def of(self, tool: str, ops: Iterable[str]) -> tuple[Any, Any]:
        """Return the model that runs all of these operators, and example inputs of it.

        Raises:
            UnsupportedProgramError: there is none.
        """
        owners = {self._owner(op_id) for op_id in ops}
        if len(owners) != 1 or None in owners:
            found = ", ".join(sorted(filter(None, owners))) or "no module"
            raise UnsupportedProgramError(
                f"{tool}: nothing is exported: the operators that it has changed are not those of "
                f"one model, but of {found}; tool.export_model(model, example_inputs, path) does it"
            )
        return self._calls[str(owners.pop())]

    def _owner(self, op_id: str) -> str | None:
        """Return the model that runs an operator."""
        known = (name for name in self._calls if op_id.startswith((f"{name}.", f"{name}/")))
        return next(known, None)


def copied(value: Any, tensors: Iterable[Any] | None = None) -> Any:
    """Copy a value of PyTorch, outside of inference mode, whose tensors gradients cannot use.

    Args:
        value: a model, or arguments of one.
        tensors: of a model, the tensors and others that its modules hold.
    """
    torch = importlib.import_module("torch")
    with torch.inference_mode(False):
        # By this memo, tensors are copied without their history, which cannot be copied.
        memo = {
            id(leaf): leaf.detach().clone()
            for leaf in (leaves_of(value) if tensors is None else tensors)
            if isinstance(leaf, torch.Tensor) and (tensors is None or not leaf.is_leaf)
        }
        return copy.deepcopy(value, memo)


def _example(model: Any, args: Any, kwargs: Any) -> Any:
    """Copy the arguments of a call: a tuple, or a dictionary if some are keyword arguments."""
    args, kwargs = copied((args, kwargs))
    if not kwargs:
        return args
    return {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}


def _example_of_layer(model: Any, inputs: Sequence[Any]) -> Any:
    """Return arguments of a model of Keras, from its tensors in order."""
    given = [_value(tensor) for tensor in inputs]
    if len(given) == 1 or not getattr(model, "inputs", None):
        return tuple(given)
    return (importlib.import_module("tensorflow").nest.pack_sequence_as(model.input, given),)


def _value(tensor: Any) -> Any:
    """Return a tensor; numbers in place of one of which a graph tells the shape only."""
    if hasattr(tensor, "numpy"):
        return tensor
    numbers = np.random.default_rng(0).random(tuple(tensor.shape))
    # As indices of an embedding all are 0.
    return numbers.astype(tensor.dtype.as_numpy_dtype)
