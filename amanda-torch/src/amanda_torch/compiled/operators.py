"""The single operator that a call in a graph runs, with its arguments derived from those of the
call.

A graph may call a function of PyTorch that is written in Python, ``F.layer_norm(x, (3,))``, which
runs one operator, ``torch.layer_norm(x, (3,), None, None, 1e-05, True)``, and returns its result::

    found = Operator.found(F.layer_norm, [met], args, kwargs, result, is_static=True)
    found.arguments((y, (3,)), {})        # those of the operator, in the next run
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Self

import attrs

from amanda_torch.eager.interceptors import Met
from amanda_torch.operators.calls import Place, TorchCall
from amanda_torch.operators.names import name_of

_CONSTANTS = (bool, int, float, complex, str, type(None))


@attrs.frozen
class Argument:
    """The source of an operator's argument.

    Attributes:
        key: the position or keyword of the call's argument that it is; None for a constant.
        value: the constant.
    """

    key: int | str | None
    value: Any = None

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The argument, from those of the call."""
        if self.key is None:
            return self.value
        return args[self.key] if isinstance(self.key, int) else kwargs[self.key]


@attrs.frozen
class Operator:
    """The single operator that a call runs.

    Attributes:
        func: its function.
        key: the object that declares its parameters, if not `func`.
        args, kwargs: sources of its arguments.
        places: places of its inputs among its arguments.
    """

    func: Any
    key: Any
    args: Sequence[Argument]
    kwargs: dict[str, Argument]
    places: Sequence[Place]

    @classmethod
    def found(
        cls,
        met: Sequence[Met],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        is_static: bool,
    ) -> Self | None:
        """The operator of a call that has just run; None if the call runs no single operator with
        such arguments.

        Args:
            met: the operators that have run in the call.
            args, kwargs, result: arguments and result of the call.
            is_static: True if numbers are the same in all runs.
        """
        if len(met) != 1:
            return None
        _, _, func, given, keywords, key, returned = met[0]
        if returned is not result:
            return None
        is_direct = len(given) == len(args) and all(map(is_, given, args))
        is_direct = is_direct and keywords.keys() == kwargs.keys()
        is_direct = is_direct and all(keywords[name] is v for name, v in kwargs.items())
        if is_direct:
            found: list[Any] = [Argument(position) for position in range(len(args))]
            named: dict[str, Any] = {name: Argument(name) for name in kwargs}
        else:
            found = [_source(value, args, kwargs, is_static) for value in given]
            named = {name: _source(v, args, kwargs, is_static) for name, v in keywords.items()}
            if None in found or None in named.values():
                return None
        places = TorchCall.of(func, name_of(func), "", given, keywords, key=key).places
        return cls(func, key, found, named, places)

    def arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The operator's arguments, from those of the call."""
        return (
            tuple([argument.of(args, kwargs) for argument in self.args]),
            {name: argument.of(args, kwargs) for name, argument in self.kwargs.items()},
        )


def _source(
    value: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_static: bool
) -> Argument | None:
    """The source of an argument; None if it is ambiguous."""
    if isinstance(value, _CONSTANTS):
        # Equal numbers may be one object: with symbolic sizes a number may equal another argument
        # by chance, or be computed from it.
        is_sure = is_static or not isinstance(value, (int, float)) or isinstance(value, bool)
        return Argument(None, value) if is_sure else None
    for position, item in enumerate(args):
        if item is value:
            return Argument(position)
    for name, item in kwargs.items():
        if item is value:
            return Argument(name)
    # Sizes that a function of PyTorch has put into a list.
    is_list = is_static and isinstance(value, (list, tuple))
    if is_list and all(isinstance(item, _CONSTANTS) for item in value):
        return Argument(None, value)
    return None
