"""Tools and comparisons that the tests of the PyTorch driver share."""

from __future__ import annotations

import collections
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda_torch import _internals
from amanda_torch.plugin import TorchEagerDriver


def applied(*tools: amanda.Tool) -> amanda.apply:
    """``amanda.apply`` with this driver, installed or not."""
    return amanda.apply(*tools, drivers=[TorchEagerDriver])


# -- what a program may have -----------------------------------------------


class Dispatches(TorchDispatchMode):
    """A user's mode below autograd, which notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Standing:
    """No tensor, but stands for one in PyTorch's operators, as a variable of Keras does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (value.tensor if isinstance(value, cls) else value for value in args)
        return func(*values, **(kwargs or {}))


# -- tools ----------------------------------------------------------------


class Watcher(amanda.Tool):
    """Analyses at all four points, which look and do nothing."""

    def __init__(self) -> None:
        self.seen: collections.Counter[str] = collections.Counter()
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(self.look, backward, require_outputs)

    def look(self, context: amanda.OpContext) -> None:
        context.get_inputs()
        context.get_outputs()
        context.get_grad_outputs()
        context.get_grad_inputs()
        self.seen[context.get_backward_op_id() or context.get_op_id()] += 1


def same(*tensors: Any) -> Sequence[Any]:
    """A routine that returns what it is given."""
    return tensors


class Identity(amanda.Tool):
    """Routines at all four points that return their arguments, on every backward operator."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(same)
        context.insert_after_op(same)

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(same)
        context.insert_after_backward_op(same)


class WholeIdentity(amanda.Tool):
    """The same, with the backward routines on each forward operator as a whole."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.forward)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(same)
        context.insert_after_op(same)
        context.insert_before_backward_op(same)
        context.insert_after_backward_op(same)


TRANSPARENT: tuple[Callable[[], amanda.Tool], ...] = (Watcher, Identity, WholeIdentity)
"""Tools that change nothing."""


class Counter(amanda.Tool):
    """Counts executions by operator name and by id, with a routine on every operator."""

    def __init__(self) -> None:
        self.ops: collections.Counter[str] = collections.Counter()
        self.ids: list[str] = []
        self.backward_ops: collections.Counter[str] = collections.Counter()
        self.backward_ids: list[str] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        name, op_id = context.get_op().__name__, context.get_op_id()

        def count(*_: Any) -> None:
            self.ops[name] += 1
            self.ids.append(op_id)

        context.insert_before_op(count)

    def backward(self, context: amanda.OpContext) -> None:
        name, op_id = context.get_backward_op().__name__, context.get_backward_op_id()

        def count(*_: Any) -> None:
            self.backward_ops[name] += 1
            self.backward_ids.append(str(op_id))

        context.insert_before_backward_op(count)


class ForwardCounter(Counter):
    """A :class:`Counter` that looks at no backward operator."""

    def __init__(self) -> None:
        super().__init__()
        del vars(self)["_analyses"]
        self.add_inst_for_op(self.forward)


class On(amanda.Tool):
    """Acts on the operators with certain names: ``On(relu=lambda c: ...)``."""

    def __init__(self, **actions: Callable[[amanda.OpContext], Any]) -> None:
        self.actions = actions
        self.met: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        action = self.actions.get(context.get_op().__name__)
        if action is not None:
            self.met.append(context.get_op_id())
            action(context)


def before(routine: Callable[..., Any], inputs: Any = None) -> Callable[[amanda.OpContext], None]:
    """An action: `routine` before the operator."""
    return lambda context: context.insert_before_op(routine, inputs)


def after(routine: Callable[..., Any], outputs: Any = None) -> Callable[[amanda.OpContext], None]:
    """An action: `routine` after the operator."""
    return lambda context: context.insert_after_op(routine, outputs)


# -- comparisons ----------------------------------------------------------


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything that tells a tensor from another, its bytes included."""
    plain = tensor.detach()
    stride = plain.stride() if plain.layout is torch.strided else plain.layout
    about = (type(tensor), tensor.shape, stride, tensor.dtype, tensor.requires_grad)
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.is_cuda:
        plain = plain.cpu()
    data = plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    content = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return (*about, content)


def flatten(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from flatten(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)


def fingerprint(value: Any) -> list[tuple[Any, ...]]:
    """:func:`bits` of all tensors in `value`."""
    return [bits(tensor) for tensor in flatten(value)]


class Cube(torch.autograd.Function):
    """An operator of the user's, in the classic form."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class LiveTensors:
    """The tensors that this process holds, to tell those that are made later from them.

    A count would not do: what earlier tests have left may be freed at any time.
    """

    def __init__(self) -> None:
        gc.collect()
        self._known = {id(tensor): weakref.ref(tensor) for tensor in self._all()}

    def made_since(self) -> list[torch.Tensor]:
        """The tensors that are alive now and were not there before."""
        gc.collect()
        return [
            t for t in self._all() if (known := self._known.get(id(t))) is None or known() is not t
        ]

    def _all(self) -> Iterator[torch.Tensor]:
        # Not isinstance(), which asks proxies: Dynamo has weak ones, of what is gone.
        return (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))


# -- the framework's state ------------------------------------------------

_OWNERS: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.nn.Module,
    torch.nn.functional,
    torch.functional,
    sys.modules["torch._tensor"],
    torch.overrides,
    torch.autograd,
    torch.autograd.graph,
    torch.autograd.function,
    torch.autograd.Function,
    torch.autograd.function.BackwardCFunction,
    torch.utils.checkpoint,
    torch.utils.checkpoint.CheckpointFunction,
    torch.compiler,
    *torch.autograd.Function.__mro__[1:-1],
)
"""Modules and classes in which a driver may replace something."""


def _named_owners() -> dict[str, Any]:
    return {getattr(owner, "__qualname__", owner.__name__): owner for owner in _OWNERS}


def _home(owner: str, name: str) -> str:
    """The module that a patchable attribute's present value comes from."""
    value = vars(_named_owners()[owner]).get(name) if owner in _named_owners() else None
    return str(getattr(value, "__module__", ""))


def ours(owner: str, name: str) -> bool:
    """Whether an attribute of PyTorch is Amanda's now."""
    return _home(owner, name).startswith("amanda")


def dynamos(owner: str, name: str) -> bool:
    """Whether an attribute of PyTorch is now what Dynamo has put there."""
    return _home(owner, name).startswith("torch._dynamo")


def framework_state() -> dict[tuple[str, str], int]:
    """Identity of every attribute of PyTorch's patchable places, and of its mode stack."""
    state = {
        (where, name): id(value)
        for where, owner in _named_owners().items()
        for name, value in vars(owner).items()
        if not name.startswith("__") or callable(value)
    }
    state["modes", "depth"] = _internals.mode_depth()
    state["grad", "enabled"] = torch.is_grad_enabled()
    return state
