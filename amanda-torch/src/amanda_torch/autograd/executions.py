"""Facts about one execution of an operator, for the analyses of its backward operators."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from amanda.engine.backward import OpHandle, PastTensor
from amanda.python.references import Reference, nothing
from amanda_torch.operators.calls import TorchCall
from amanda_torch.operators.layouts import Layout
from amanda_torch.operators.names import CONSTANTS, is_constant


class Execution:
    """One execution of an operator; the first analysis that reads it has its call described.

    Args:
        describe: returns the description of the call.
        modules: returns references to the running modules, innermost first.
        key, args, kwargs: the operator and the arguments, from which a
            :class:`~amanda_torch.operators.layouts.Layout` reads the inputs; `key` is None for an
            operator without a layout.
    """

    __slots__ = ("_args", "_call", "_describe", "_kwargs", "_past", "key", "modules")

    def __init__(
        self,
        describe: Callable[[], TorchCall],
        modules: Callable[[], Sequence[weakref.ref[nn.Module]]],
        key: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._describe = describe
        self.modules = modules
        self.key = key
        self._args = args
        self._kwargs: Mapping[str, Any] = kwargs or {}
        self._call: TorchCall | None = None
        self._past: Past | None = None

    def call(self) -> TorchCall:
        """The call."""
        self._call = self._call or self._describe()
        return self._call

    def layout(self) -> Layout | None:
        """The layout that finds the inputs of other executions; None without a key."""
        call = self.call()
        return None if self.key is None else Layout.of(call, call.op.__name__, self.key)

    def past(self, outputs: Sequence[Any], layout: Layout | None = None) -> Past:
        """The tensors of the execution, held weakly.

        Args:
            layout: reads the inputs without a description of the call.
        """
        if self._past is None:
            inputs: Sequence[Any] | None = None
            if layout is not None and self.key is not None:
                inputs = layout.values(self.key, self._args, self._kwargs)
            inputs = self.call().inputs if inputs is None else inputs
            self._past = Past(inputs, outputs, self.modules())
        return self._past


class Past(list[Any]):
    """The tensors of a past execution, held weakly.

    The object is the list of all references: to inputs, to outputs and to modules.

    Args:
        modules: references to the modules that were running, innermost first.
    """

    __slots__ = ("_handle", "_inputs", "_outputs")

    def __init__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        modules: Sequence[weakref.ref[nn.Module]],
    ) -> None:
        tensors = (*inputs, *outputs)
        super().__init__([None if t is None else Reference(t, nothing) for t in tensors])
        self += modules
        self._inputs = len(inputs)
        self._outputs = len(outputs)
        self._handle: OpHandle | None = None

    def handle(self, bare: OpHandle) -> OpHandle:
        """A handle like `bare`, which also leads to the tensors."""
        if self._handle is None:
            scopes = [scope for scope in (ref() for ref in bare.scopes) if scope is not None]
            tensors, count = self._past(), self._inputs
            inputs, outputs = tensors[:count], tensors[count:]
            self._handle = OpHandle(bare.op_id, scopes, inputs, outputs, model=bare.model)
        return self._handle

    def bare(self) -> Past:
        """A copy without the handle, which would keep the operator's records alive."""
        count = self._inputs + self._outputs
        copy = Past((), (), self[count:])
        copy[:0] = self[:count]
        copy._inputs, copy._outputs = self._inputs, self._outputs
        return copy

    def _past(self) -> list[PastTensor | None]:
        count = self._inputs + self._outputs
        # Not methods, which would be a cycle.
        running = functools.partial(_alive, self[count:])
        facts = functools.partial(_constant, running), functools.partial(_name, running)
        return [None if ref is None else PastTensor(ref, *facts) for ref in self[:count]]


Running = Callable[[], list[nn.Module]]


def _alive(modules: Sequence[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for module in (ref() for ref in modules) if module is not None]


def _constant(running: Running, tensor: Any) -> Any:
    """The tensor if it is a parameter, buffer or constant of the modules that were running."""
    return tensor if is_constant(tensor, running) else None


def _name(running: Running, tensor: Any) -> str | None:
    """The path of the tensor if it is a parameter of the modules; None for a view of a parameter,
    which has another gradient."""
    return CONSTANTS.name(running(), tensor)
