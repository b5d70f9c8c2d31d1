"""What an operator belongs to: setup, forward, optimizer or other, at its first execution.

Operators of modules are forward ones. Outside of modules the code that calls an operator tells:
a constructor of a module, an optimizer, a data loader. Where it does not, gradients do: what is
recorded for differentiation leads to a loss. ::

    call.phase = phase_of(call, tracker)
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amanda.interface.specs import Phase

if TYPE_CHECKING:
    from amanda_torch.eager.op_ids import Tracker
    from amanda_torch.operators.calls import TorchCall

_BY_CODE: tuple[tuple[str, Phase], ...] = (
    ("torch.nn.init", "setup"),
    ("torch.optim", "optimizer"),
    ("torch.nn.utils.clip_grad", "optimizer"),
    ("torch.amp.grad_scaler", "optimizer"),
    ("torch.cuda.amp.grad_scaler", "optimizer"),
    ("torch.utils.data", "other"),
    ("keras.src.initializers", "setup"),
    ("keras.src.random.seed_generator", "setup"),
    ("keras.src.optimizers", "optimizer"),
    ("keras.src.backend.torch.optimizers", "optimizer"),
    ("keras.src.metrics", "other"),
)
"""Modules of Python, with all below them, whose code runs operators of one phase."""

_OF_MODULES = frozenset(
    "__init__ apply _apply to load_state_dict _load_from_state_dict reset_parameters".split()
)
"""Methods of ``nn.Module`` that build or initialise, or that its subclasses have for that."""

_OF_OPTIMIZERS = frozenset({"step", "zero_grad", "__init__"})

_MEASURING = frozenset(
    """argmax argmin argsort sort topk eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    isnan isfinite isinf detach clone_ item tolist numpy cpu allclose equal any all""".split()
)
"""Operators outside of modules through which no loss is computed: what follows are metrics."""

_INITIALISING = frozenset({"requires_grad_", "__set__"})

_DEEPEST = 60
"""Calling functions that are looked at."""


def phase_of(call: TorchCall, tracker: Tracker) -> Phase:
    """What the operator that is about to run for the first time belongs to."""
    in_module = tracker.frame is not tracker.root
    has_keras = "keras" in sys.modules
    if in_module and not has_keras:
        return "forward"
    found = _by_caller()
    if in_module:
        # Keras builds a layer, and draws its weights, in the layer's first call.
        return "setup" if found == "setup" else "forward"
    name, is_recorded = call.op.__name__, torch.is_grad_enabled() and _wants_gradient(call)
    if found is not None:
        # A closure of an optimizer computes its loss within the optimizer's step.
        return "forward" if found == "optimizer" and is_recorded else found
    if is_recorded and name not in _MEASURING and name not in _INITIALISING:
        return "forward"
    if not tracker.has_run:
        return _before_any_module(call)
    if name.endswith("_") and not torch.is_grad_enabled() and _changes_parameter(call):
        return "optimizer"
    is_result = tracker.is_result(call.inputs)
    return "forward" if is_result and name not in _MEASURING else "other"


def _before_any_module(call: TorchCall) -> Phase:
    """The phase of an operator before any module was called, which gradients do not tell."""
    is_new = all(tensor is None for tensor in call.inputs)
    name = call.op.__name__
    # What makes tensors or fills them; a program without modules computes with them.
    is_filling = name.endswith("_") and not name.endswith("__")
    return "setup" if is_new or is_filling or name in _INITIALISING else "forward"


def _wants_gradient(call: TorchCall) -> bool:
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in call.inputs)


def _changes_parameter(call: TorchCall) -> bool:
    first = call.inputs[0] if call.inputs else None
    return isinstance(first, torch.Tensor) and first.requires_grad and first.is_leaf


def _by_caller() -> Phase | None:
    """The phase that a calling function tells, the innermost one that does."""
    frame: FrameType | None = inspect.currentframe()
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        module = frame.f_globals.get("__name__", "")
        if isinstance(module, str) and module.startswith(("torch", "keras")):
            for prefix, phase in _BY_CODE:
                if module == prefix or module.startswith(f"{prefix}."):
                    return phase
            if module == "torch.autograd":
                return "backward"
        name = frame.f_code.co_name
        if name in _OF_MODULES and isinstance(_first_argument(frame), nn.Module):
            return "setup"
        if name in _OF_OPTIMIZERS and isinstance(_first_argument(frame), torch.optim.Optimizer):
            return "optimizer"
        frame = frame.f_back
    return None


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None
