"""The positions of an operator's inputs in its arguments, found once per form of call.

:class:`~amanda_torch.operators.calls.TorchCall` describes a call by the operator's schema, which
takes time. A model calls an operator in the same form every time, and the form determines the
positions of the flat inputs::

    layout = Layout.of(call, name, func)     # once
    inputs = layout.values(func, args, kwargs)   # at every call; None if its form is another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from amanda_torch import _internals
from amanda_torch.operators.calls import TorchCall
from amanda_torch.operators.names import is_in_place
from amanda_torch.operators.parameters import output_count


class Layout:
    """The positions of an operator's inputs in calls of one form.

    A form is the function, the types of the arguments, the names of the keywords, and the
    types of the items of lists.

    Attributes:
        is_in_place: True if the operator writes into its first input or an ``out=`` tensor.
        writes: True if it writes into any input.
        written: of an operator that returns None: positions of the inputs that count as its
            outputs.
        form: the data for the extension: function, keywords, types, lists, places, `is_in_place`
            and `writes`; None if outputs are inputs.
    """

    __slots__ = (
        "_func",
        "_keywords",
        "_lists",
        "_places",
        "_types",
        "form",
        "is_in_place",
        "writes",
        "written",
    )

    def __init__(
        self,
        func: Any,
        keywords: tuple[str, ...],
        flat: Sequence[Any],
        lists: Sequence[int],
        places: Sequence[int],
        is_in_place: bool,
        writes: bool = False,
        written: Sequence[int] = (),
    ) -> None:
        self._func = func
        self._keywords = keywords
        self._types = tuple(map(type, flat))
        self._lists = [(index, tuple(map(type, flat[index]))) for index in lists]
        self._places = places
        self.is_in_place = is_in_place
        self.writes = writes
        self.written = written
        form = func, keywords, self._types, self._lists, list(places), is_in_place, writes
        self.form = None if written else form

    @classmethod
    def of(cls, call: TorchCall, name: str, key: Any) -> Self | None:
        """The layout of calls of the same form; None if the form does not determine it.

        Args:
            call: the call.
            name: the operator's name.
            key: the operator; the same in all calls of this form.
        """
        flat = [*call.args, *call.kwargs.values()]
        lists = [index for index, value in enumerate(flat) if type(value) in (list, tuple)]
        nested = [item for index in lists for item in flat[index]]
        others = [v for i, v in enumerate(flat) if i not in lists and type(v) is not torch.Size]
        if any(isinstance(value, (list, tuple, dict)) for value in (*others, *nested)):
            return None
        if any(map(_internals.overrides, flat)):
            # Reads of such tensors by the driver must not reach their class.
            return None
        in_place, written = is_in_place(name, call.kwargs), call.written
        writes = in_place or bool(written)
        if written and output_count(call.func, name) != 0:
            written = ()
        places = _places_of(call, flat, lists)
        return cls(key, tuple(call.kwargs), flat, lists, places, in_place, writes, written)

    def values(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any = None
    ) -> list[Any] | None:
        """The flat inputs of a call, None for an absent one; None if it has another form.

        Args:
            key: the operator, if it is not `func`.
        """
        key = key or func
        if kwargs or self._keywords:
            if tuple(kwargs) != self._keywords:
                return None
            args = (*args, *kwargs.values())
        if tuple(map(type, args)) != self._types or (key is not self._func and key != self._func):
            return None
        flat = (*args, None)
        for index, types in self._lists:
            items = args[index]
            if tuple(map(type, items)) != types:
                return None
            flat += tuple(items)
        # A comprehension would cost a frame.
        return list(map(flat.__getitem__, self._places))


def _places_of(call: TorchCall, flat: Sequence[Any], lists: Sequence[int]) -> list[int]:
    """The position of each input, counted through the arguments, then None for absent tensors, then
    the items of the lists."""
    starts: dict[int, int] = {}
    end = len(flat) + 1
    for index in lists:
        starts[index] = end
        end += len(flat[index])
    names = tuple(call.kwargs)
    places = []
    for place in call.places:
        if isinstance(place, str):
            places.append(len(flat))
            continue
        (where, position), path = place
        index = position if where == "arg" else len(call.args) + names.index(position)
        places.append(starts[index] + path[0] if path else index)
    return places


NO_LAYOUT = Layout(None, (), (), (), (), False)
"""The layout of no call: its ``values()`` are None."""
