"""The model that a program runs, and the arguments of its first call, for an export at the end."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

from amanda.errors import UnsupportedProgramError
from amanda.interface.points import PointContext
from amanda.tool import vanilla
from amanda_tools._internals import leaves_of


class ModelOfRun:
    """Notes the outermost modules of PyTorch that a program calls."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[Any, Any]] = {}

    def note(self, context: PointContext) -> None:
        """Routine at the begin of a forward pass: have the first call of a model noted."""
        model, name = context.target, context.id
        if name in self._calls or not hasattr(model, "register_forward_pre_hook"):
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
                f"one model, but of {found}"
            )
        return self._calls[str(owners.pop())]

    def _owner(self, op_id: str) -> str | None:
        """Return the model that runs an operator."""
        known = (name for name in self._calls if op_id.startswith((f"{name}.", f"{name}/")))
        return next(known, None)


def _example(model: Any, args: Any, kwargs: Any) -> Any:
    """Copy the arguments of a call: a tuple, or a dictionary if some are keyword arguments."""
    # By this memo, tensors are copied without their history, which cannot be copied.
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if hasattr(leaf, "detach")]
    memo = {id(tensor): tensor.detach().clone() for tensor in tensors}
    args, kwargs = copy.deepcopy((args, kwargs), memo)
    if not kwargs:
        return args
    return {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
