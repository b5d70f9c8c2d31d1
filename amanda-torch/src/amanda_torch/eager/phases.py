"""The phase of an operator: setup, forward, backward, optimizer or other.

Operators of modules are forward ones. Outside of modules the phase follows from the code that calls
the operator: a constructor of a module, an optimizer, a data loader. If that is inconclusive, an
operator that is recorded for differentiation is a forward one, since it leads to a loss. ::

    phase = phase_outside("mul", (x, 2.0), tracker)     # before it is counted
    call.phase = phase_of(call, tracker)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amanda.interface.specs import Phase
from amanda_torch import _internals

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
    # Recomputation in a backward pass.
    ("torch.utils.checkpoint", "forward"),
    ("keras.src.initializers", "setup"),
    ("keras.src.random.seed_generator", "setup"),
    ("keras.src.optimizers", "optimizer"),
    ("keras.src.backend.torch.optimizers", "optimizer"),
    ("keras.src.metrics", "other"),
)
"""Python modules, with all modules in them, whose code runs operators of one phase."""

_OF_MODULES = frozenset(
    """__init__ apply _apply to load_state_dict _load_from_state_dict reset_parameters
    initialize_parameters""".split()
)
"""Methods that build or initialise a module, of ``nn.Module`` or by convention of its
subclasses."""

_OF_OPTIMIZERS = frozenset({"step", "zero_grad", "__init__"})

_MEASURING = frozenset(
    """argmax argmin argsort sort topk eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    isnan isfinite isinf detach item tolist numpy cpu allclose equal any all""".split()
)
"""Operators outside of modules that begin the computation of metrics: no loss passes through
them."""

_INITIALISING = frozenset({"requires_grad_", "__set__"})

_ASKED = _MEASURING | _INITIALISING
"""Operators whose phase depends on the calling code even if they are recorded."""

_FILLING = frozenset(
    """bernoulli_ cauchy_ copy_ exponential_ fill_ fill_diagonal_ geometric_ log_normal_ normal_
    random_ uniform_ zero_""".split()
)
"""In-place operators that do not read the tensor."""

_DEEPEST = 60
"""Calling functions that are examined, at most."""


def phase_of(call: TorchCall, tracker: Tracker) -> Phase:
    """The phase of the operator that is about to run for the first time."""
    frame = tracker.frame
    if frame.phase:
        return frame.phase
    name = call.op.__name__
    if frame.phase is None:
        # Lazy modules and Keras' layers draw their weights within the first call of the module.
        may_build = "keras" in sys.modules or makes(name, call.inputs)
        return "setup" if may_build and _by_caller(tracker) == "setup" else "forward"
    # Checked operators of the root frame are forward ones, see Tracker.root.
    if frame.is_checked:
        # PyTorch's own code in Python, and hooks, run operators of a backward pass.
        return "backward" if _by_caller(tracker) == "backward" else "forward"
    return _phase_of_code(name, call.inputs, tracker, _by_caller(tracker))


def phase_outside(name: str, values: Sequence[Any], tracker: Tracker) -> Phase:
    """The phase of an operator outside of modules.

    Args:
        name: its name.
        values: its arguments.
        tracker: the thread's tracker, which keeps facts that follow from the operator.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for value in values:
        if isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, torch.Tensor)]
    found = _by_caller(tracker)
    phase = _phase_of_code(name, tensors, tracker, found)
    if found == "setup":
        tracker.is_building = True
    elif phase == "forward" and _is_recorded(tensors):
        tracker.note_recorded()
    return phase


def is_plainly_recorded(name: str, args: Sequence[Any]) -> bool:
    """True if an operator outside of modules is a forward one, by a quick check of its
    arguments."""
    # Function modes see reads of tensors' attributes.
    if not torch.is_grad_enabled() or name in _ASKED or _internals.mode_depth():
        return False
    # Not any(): a generator is one more frame, at each operator of a loss.
    for value in args:
        if type(value) is torch.Tensor:
            if value.requires_grad:
                return True
        elif type(value) is list:
            # A list of the parts of a loss, as torch.stack() gets it.
            for item in value:
                if type(item) is torch.Tensor and item.requires_grad:
                    return True
    return False


def _phase_of_code(
    name: str, tensors: Sequence[Any], tracker: Tracker, found: Phase | None
) -> Phase:
    """The phase of an operator outside of modules; `found` is the phase by its callers."""
    is_recorded = _is_recorded(tensors)
    if found is not None:
        # A closure of an optimizer computes its loss within the optimizer's step.
        return "forward" if found == "optimizer" and is_recorded else found
    if is_recorded and name not in _ASKED:
        return "forward"
    return _phase_without_loss(name, tensors, tracker)


def _phase_without_loss(name: str, tensors: Sequence[Any], tracker: Tracker) -> Phase:
    """The phase of an operator that no loss passes through, if its callers determine none."""
    if _updates(name, tensors):
        return "setup" if tracker.is_building else "optimizer"
    if name in _MEASURING and tracker.has_run:
        return "other"
    if tracker.is_result(tensors):
        return "forward"
    if not tensors and name not in _INITIALISING:
        # Weights are made within a constructor, or with requires_grad. Data are made in each
        # iteration, by operators that have the same id in the first one.
        return "other"
    if tracker.is_building:
        return "setup"
    if makes(name, tensors):
        is_first = name in _INITIALISING and not (tracker.has_run or tracker.has_trained)
        return "setup" if is_first else "other"
    return "forward" if _computes(tensors, tracker) else "other"


def _updates(name: str, tensors: Sequence[Any]) -> bool:
    """True if an operator writes into a parameter, and records no gradient."""
    first = tensors[0] if tensors else None
    if not name.endswith("_") or torch.is_grad_enabled():
        return False
    return isinstance(first, torch.Tensor) and first.requires_grad and first.is_leaf


def _computes(tensors: Sequence[Any], tracker: Tracker) -> bool:
    """True if an operator without gradients and without modules belongs to functional code."""
    if tracker.is_measured(tensors):
        return False
    if not tracker.has_trained:
        return True
    # In training such operators belong to data, metrics or updates.
    is_functional = not tracker.has_run
    return is_functional and (torch.is_grad_enabled() or any(map(_wants_gradient, tensors)))


def makes(name: str, values: Sequence[Any]) -> bool:
    """True if an operator creates a tensor, or sets its first values."""
    if name in _FILLING or name in _INITIALISING:
        return True
    return not any(isinstance(value, torch.Tensor) for value in values)


def _is_recorded(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(map(_wants_gradient, tensors))


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _by_caller(tracker: Tracker) -> Phase | None:
    """The phase by the calling functions: by the innermost one that determines it."""
    frame = inspect.currentframe()
    codes, depth = tracker.codes, _DEEPEST
    while frame is not None and depth:
        # By identity: code that Dynamo has made may hold constants without a hash. It is kept
        # alive.
        meaning = codes.get(id(frame.f_code), _UNKNOWN)
        if meaning is _UNKNOWN:
            meaning = codes[id(frame.f_code)] = _meaning_of(frame)
            tracker.known_codes.append(frame.f_code)
        if meaning is not None:
            phase = _phase_by(meaning, frame)
            if phase is not None:
                return phase
        frame = frame.f_back
        depth -= 1
    return None


_UNKNOWN = object()


def _phase_by(meaning: Any, frame: FrameType) -> Phase | None:
    """The phase by one calling function.

    Args:
        meaning: meaning of its code, see :func:`_meaning_of`.
    """
    if meaning is nn.Module:
        return "setup" if isinstance(_first_argument(frame), nn.Module) else None
    if meaning is torch.optim.Optimizer:
        return "optimizer" if isinstance(_first_argument(frame), meaning) else None
    phase: Phase | None = meaning
    return phase


def _meaning_of(frame: FrameType) -> Any:
    """The phase of the operators that a function calls, or the required class of its first
    argument."""
    module = frame.f_globals.get("__name__", "")
    if isinstance(module, str) and module.startswith(("torch", "keras")):
        for prefix, phase in _BY_CODE:
            if module == prefix or module.startswith(f"{prefix}."):
                return phase
        if module == "torch.autograd":
            return "backward"
    name = frame.f_code.co_name
    if name in _OF_OPTIMIZERS and isinstance(_first_argument(frame), torch.optim.Optimizer):
        return torch.optim.Optimizer
    if name in _OF_MODULES:
        return nn.Module
    return torch.optim.Optimizer if name in _OF_OPTIMIZERS else None


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None
