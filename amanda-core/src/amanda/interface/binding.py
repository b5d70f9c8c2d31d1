"""Binding the arguments of a call to flat inputs and attributes (contract rule 4).

An operator is called with positional and keyword arguments, defaults, lists of tensors and
optional tensors. Tools see flat inputs in the order of the declared parameters::

    signature = Signature(function, is_tensor)
    arguments = signature.bind(args, kwargs)
    arguments.inputs        # tensors, lists expanded in place; None for an absent optional one
    arguments.names         # the parameter of each input
    arguments.attributes    # all other arguments by name
    function(*args, **kwargs) == arguments.call(function, arguments.inputs)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


_TENSOR = object()
"""Stands for one tensor in a tensor-free argument."""


@attrs.frozen
class _Nested:
    """A tensor-free list, tuple or dictionary in which tensors stood."""

    kind: type
    items: tuple[Any, ...]
    keys: tuple[Any, ...] | None = None

    def filled(self, rest: Iterator[Any]) -> Any:
        """The collection with the next tensors of `rest`."""
        items = [_filled(item, rest) for item in self.items]
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
    _positional: tuple[Any, ...]
    _keywords: Mapping[str, Any]

    def without_tensors(self) -> Arguments:
        """The same arguments with no tensor, to be kept and called with other inputs."""
        return attrs.evolve(self, inputs=[])

    def rebuild(self, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a call with other tensors.

        Args:
            inputs: as many as `names`.
        """
        rest = iter(inputs)
        positional: list[Any] = []
        for value in self._positional:
            if isinstance(value, _VarPositional):
                positional += [_filled(item, rest) for item in value.items]
            else:
                positional.append(_filled(value, rest))
        return positional, {name: _filled(v, rest) for name, v in self._keywords.items()}

    def call(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Call `function` with other tensors in the place of those of this call."""
        args, kwargs = self.rebuild(inputs)
        return function(*args, **kwargs)


@attrs.frozen
class _VarPositional:
    """The arguments that ``*args`` of the signature takes."""

    items: tuple[Any, ...]


class Signature:
    """The declared parameters of an operator.

    Args:
        function: the operator, an :class:`inspect.Signature`, or None where nothing is
            declared: then all arguments keep their order and have no names.
        is_tensor: tells a tensor from an attribute.
        tensors: parameters that take a tensor or a list of tensors, so that None is an absent
            tensor there and not an attribute. If left out, a parameter counts as one from
            the first call on in which it gets a tensor.
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
        binding = _Binding(self)
        if self._signature is None:
            given = tuple(binding.slot("", value) for value in args)
            return binding.arguments(given, {n: binding.slot(n, v) for n, v in kwargs.items()})
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        positional: tuple[Any, ...] = ()
        keywords: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind in _POSITIONAL:
                positional += (binding.slot(name, value),)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                positional += (_VarPositional(binding.slots(name, value)),)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                keywords |= {n: binding.slot(n, v) for n, v in value.items()}
            else:
                keywords[name] = binding.slot(name, value)
        return binding.arguments(positional, keywords)

    def is_tensor(self, value: Any) -> bool:
        """Whether an argument is a tensor."""
        return value is not None and self._is_tensor(value)

    def takes_tensor(self, name: str, value: Any) -> bool:
        """Whether the parameter `name` takes tensors, so that None is an absent one."""
        if self._learns and self.is_tensor(value):
            self._tensors.add(name)
        return name in self._tensors


class _Binding:
    """Collects the inputs and attributes of one call."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._inputs: list[Any] = []
        self._names: list[str] = []
        self._attributes: dict[str, Any] = {}

    def slot(self, name: str, value: Any) -> Any:
        """The tensor-free form of one argument; its tensors join the inputs."""
        takes_tensor = self._signature.takes_tensor(name, value)
        is_list = isinstance(value, (list, tuple))
        if self._holds_tensor(value) or (takes_tensor and (value is None or is_list)):
            return self._without_tensors(name, value)
        self._attributes[name or f"argument{len(self._attributes)}"] = value
        return value

    def slots(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The tensor-free form of the arguments that ``*args`` takes."""
        if not any(map(self._holds_tensor, values)):
            if values:
                self._attributes[name] = values
            return values
        return tuple(
            self._without_tensors(name, value)
            if self._holds_tensor(value) or value is None
            else self.slot(f"{name}[{position}]", value)
            for position, value in enumerate(values)
        )

    def arguments(self, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> Arguments:
        return Arguments(self._inputs, self._names, self._attributes, positional, keywords)

    def _holds_tensor(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._holds_tensor, value))
        if isinstance(value, dict):
            return any(map(self._holds_tensor, value.values()))
        return self._signature.is_tensor(value)

    def _without_tensors(self, name: str, value: Any) -> Any:
        if value is None or self._signature.is_tensor(value):
            self._inputs.append(value)
            self._names.append(name)
            return _TENSOR
        if isinstance(value, (list, tuple)):
            items = tuple(self._without_tensors(name, item) for item in value)
            return _Nested(type(value), items)
        if isinstance(value, dict) and self._holds_tensor(value):
            items = tuple(self._without_tensors(name, item) for item in value.values())
            return _Nested(type(value), items, tuple(value))
        return value


def _filled(value: Any, rest: Iterator[Any]) -> Any:
    """An argument with the next tensors of `rest` where tensors stood."""
    if value is _TENSOR:
        return next(rest)
    return value.filled(rest) if isinstance(value, _Nested) else value


def _signature_of(function: Any) -> inspect.Signature | None:
    if function is None or isinstance(function, inspect.Signature):
        return function
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a C function without a text signature
        return None
