"""Binding the arguments of a call to flat inputs and attributes (contract rule 4).

An operator is called with positional and keyword arguments, defaults, lists of tensors and
optional tensors. Tools see flat inputs in the order of the declared parameters::

    signature = Signature(function, is_tensor)
    arguments = signature.bind(args, kwargs)
    arguments.inputs        # tensors, lists expanded in place; None for an absent optional one
    arguments.names         # the parameter of each input
    arguments.attributes    # all other arguments by name, defaults included
    function(*args, **kwargs) == arguments.call(function, arguments.inputs)

A call with other inputs has the form of the caller's: positional arguments stay positional,
keywords stay keywords, and defaults are not spelled out. A framework may treat the two forms
differently, as autograd does: it differentiates positional arguments only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from amanda.python.signatures import signature_of

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@attrs.frozen
class _Tensor:
    """Represents the input `index` in a tensor-free argument."""

    index: int

    def filled(self, inputs: Sequence[Any]) -> Any:
        return inputs[self.index]


@attrs.frozen
class _Nested:
    """A tensor-free list, tuple or dictionary that has contained tensors."""

    kind: Any
    items: tuple[Any, ...]
    keys: tuple[Any, ...] | None = None

    def filled(self, inputs: Sequence[Any]) -> Any:
        items = [_filled(item, inputs) for item in self.items]
        if self.keys is not None:
            return self.kind(zip(self.keys, items, strict=True))
        if hasattr(self.kind, "_make"):  # a named tuple takes its items one by one
            return self.kind(*items)
        return self.kind(items)


@attrs.frozen(eq=False)
class Arguments:
    """The arguments of one call.

    Attributes:
        inputs: flat tensors in the order of the declared parameters; None for an absent
            optional one.
        names: the parameter of each input; the items of a list have one name.
        attributes: the arguments that hold no tensor, by parameter.
    """

    inputs: list[Any]
    names: list[str]
    attributes: Mapping[str, Any]
    _positional: Sequence[Any]
    _keywords: Mapping[str, Any]
    _absent: Mapping[str, Any]

    def without_tensors(self) -> Arguments:
        """The same arguments without tensors, to be kept and called with other inputs."""
        return attrs.evolve(self, inputs=[])

    def rebuild(self, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a call with other tensors.

        Args:
            inputs: as many as `names`. A tensor for an optional input that the caller left out
                becomes a keyword.
        """
        keywords = {name: _filled(value, inputs) for name, value in self._keywords.items()}
        for name, value in self._absent.items():
            if (tensor := _filled(value, inputs)) is not None:
                keywords[name] = tensor
        return [_filled(value, inputs) for value in self._positional], keywords

    def call(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Call `function` with these arguments and other tensors."""
        args, kwargs = self.rebuild(inputs)
        return function(*args, **kwargs)


class Signature:
    """The declared parameters of an operator.

    Args:
        function: the operator, an :class:`inspect.Signature`, or None without a declaration: then
            all arguments keep their order and have no names.
        is_tensor: function that returns True for a tensor.
        tensors: parameters that take a tensor or a list of tensors, so that None is an absent
            tensor there and not an attribute. By default, a parameter is one of them from the first
            call with a tensor on.
    """

    def __init__(
        self,
        function: Any,
        is_tensor: Callable[[Any], bool],
        tensors: Collection[str] | None = None,
    ) -> None:
        self._signature = _signature_of(function)
        self._is_tensor = is_tensor
        self._learns = tensors is None
        self._tensors = set(tensors or ())

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Split the arguments of one call into flat inputs and attributes.

        Raises:
            TypeError: they do not fit the signature.
        """
        binding = _Binding(self, len(args), kwargs)
        if self._signature is None:
            binding.positional += [binding.tensor_free("", value) for value in args]
            binding.take_keywords(kwargs)
            return binding.arguments()
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            binding.take(name, self._signature.parameters[name].kind, value)
        return binding.arguments()

    def is_tensor(self, value: Any) -> bool:
        """True if an argument is a tensor."""
        return value is not None and self._is_tensor(value)

    def takes_tensor(self, name: str, value: Any) -> bool:
        """True if the parameter `name` takes tensors, so that None is an absent one."""
        if self._learns and self.is_tensor(value):
            self._tensors.add(name)
        return name in self._tensors


class _Binding:
    """Collects the inputs and attributes of one call, parameter by parameter.

    Attributes:
        positional: the tensor-free positional arguments.
    """

    def __init__(self, signature: Signature, count: int, given: Mapping[str, Any]) -> None:
        self.positional: list[Any] = []
        self._signature = signature
        self._count = count
        self._given = given
        self._inputs: list[Any] = []
        self._names: list[str] = []
        self._attributes: dict[str, Any] = {}
        self._keywords: dict[str, Any] = {}
        self._absent: dict[str, Any] = {}

    def take(self, name: str, kind: Any, value: Any) -> None:
        """Take the value of one parameter."""
        if kind is inspect.Parameter.VAR_KEYWORD:
            self.take_keywords(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            self.positional += self._tensor_free_items(name, value)
        elif kind in _POSITIONAL and len(self.positional) < self._count:
            self.positional.append(self.tensor_free(name, value))
        elif name in self._given:
            self._keywords[name] = self.tensor_free(name, value)
        elif isinstance(slot := self.tensor_free(name, value), _Tensor):
            self._absent[name] = slot

    def take_keywords(self, values: Mapping[str, Any]) -> None:
        """Take undeclared keyword arguments."""
        for name, value in values.items():
            self._keywords[name] = self.tensor_free(name, value)

    def tensor_free(self, name: str, value: Any) -> Any:
        """The tensor-free form of one argument; its tensors are added to the inputs."""
        takes_tensor = self._signature.takes_tensor(name, value)
        is_list = isinstance(value, (list, tuple))
        if self._holds_tensor(value) or (takes_tensor and (value is None or is_list)):
            return self._extracted(name, value)
        self._attributes[name or f"argument{len(self._attributes)}"] = value
        return value

    def arguments(self) -> Arguments:
        """The bound arguments."""
        return Arguments(
            self._inputs,
            self._names,
            self._attributes,
            self.positional,
            self._keywords,
            self._absent,
        )

    def _tensor_free_items(self, name: str, values: tuple[Any, ...]) -> list[Any]:
        """The tensor-free form of the arguments that ``*args`` takes."""
        if not any(map(self._holds_tensor, values)):
            if values:
                self._attributes[name] = values
            return list(values)
        return [
            self._extracted(name, value)
            if self._holds_tensor(value) or value is None
            else self.tensor_free(f"{name}[{position}]", value)
            for position, value in enumerate(values)
        ]

    def _holds_tensor(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._holds_tensor, value))
        if isinstance(value, dict):
            return any(map(self._holds_tensor, value.values()))
        return self._signature.is_tensor(value)

    def _extracted(self, name: str, value: Any) -> Any:
        """Return `value` with slots in place of its tensors, which are added to the inputs."""
        if value is None or self._signature.is_tensor(value):
            self._inputs.append(value)
            self._names.append(name)
            return _Tensor(len(self._inputs) - 1)
        if isinstance(value, (list, tuple)):
            items = tuple(self._extracted(name, item) for item in value)
            return _Nested(type(value), items)
        if isinstance(value, dict) and self._holds_tensor(value):
            items = tuple(self._extracted(name, item) for item in value.values())
            return _Nested(type(value), items, tuple(value))
        return value


def _filled(value: Any, inputs: Sequence[Any]) -> Any:
    """An argument with `inputs` in its slots."""
    return value.filled(inputs) if isinstance(value, (_Tensor, _Nested)) else value


def _signature_of(function: Any) -> inspect.Signature | None:
    if function is None or isinstance(function, inspect.Signature):
        return function
    try:
        return signature_of(function)
    except (TypeError, ValueError):  # a C function without a text signature
        return None
