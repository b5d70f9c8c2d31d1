"""One call of an operator of PyTorch: flat inputs and attributes, and the arguments rebuilt from
them.

::

    call = TorchCall.of(torch.cat, "cat", "/cat:0", ([x, y],), {"dim": 1})
    call.inputs                   # [x, y]
    call.attributes               # {"dim": 1}
    call.rebuilt([x, z])          # ([[x, z]], {"dim": 1})

:func:`tensors_of` and :func:`with_tensors` do the same for an operator's result.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import attrs
import torch
from torch import nn

from amanda.errors import CapabilityError
from amanda.interface.calls import OpCall
from amanda.python.memo import Memo
from amanda.python.nested import leaves
from amanda_torch import _internals
from amanda_torch.operators.names import is_constant, op_view, parameter_name
from amanda_torch.operators.parameters import Slot, Source, slots_of

Path = tuple[Any, ...]
"""The indices and keys that lead to an item of nested lists, tuples and dicts."""

Place = str | tuple[Source, Path]
"""The place of an input in a call: in an argument, or the keyword of an absent optional tensor."""


_CONTAINERS = (list, tuple, dict)
"""Types whose items are inputs of an operator, if they are tensors."""


def items_of(value: Any) -> Iterable[Any] | None:
    """The items of an operator's argument that may be inputs; None if it is not a container."""
    if isinstance(value, dict):
        return dict.values(value)
    return value if isinstance(value, (list, tuple)) else None


_PLAIN = frozenset({bool, float, int, str, type(None), torch.device, torch.dtype})
"""Types of most arguments that are no tensors."""


def _is_plain(value: Any) -> bool:
    """True for an argument of these types, or a list of such items, as sizes: it has no tensor."""
    kind = type(value)
    if kind is list or kind is tuple or kind is torch.Size:
        return _PLAIN.issuperset(map(type, value))
    return kind in _PLAIN


def _has_tensor(value: Any) -> bool:
    if _is_plain(value):
        return False
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves(value, items_of))


def _kind(value: Any) -> str:
    """The kind of an argument, see :func:`~amanda_torch.operators.parameters.slots_of`."""
    if isinstance(value, torch.Tensor):
        return "T"
    if value is None:
        return "N"
    return "L" if _has_tensor(value) else "O"


def _expand(
    value: Any, path: Path, found: list[tuple[Any, Path]], around: tuple[Any, ...] = ()
) -> None:
    """Collect the tensors of a nested argument, each with the path that leads to it.

    Args:
        value: the argument, or what is in it.
        path: leads to it.
        found: is added to.
        around: the enclosing containers: one that contains itself is not entered again.
    """
    if isinstance(value, torch.Tensor):
        found.append((value, path))
    elif isinstance(value, _CONTAINERS) and not any(one is value for one in around):
        around = (*around, value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _expand(item, (*path, key), found, around)


def with_item(container: Any, path: Path, value: Any) -> Any:
    """A copy of a nested list, tuple or dict with one item replaced."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    new = with_item(container[key], rest, value)
    if isinstance(container, dict):
        return {**container, key: new}
    items = [*container[:key], new, *container[key + 1 :]]
    if isinstance(container, list):
        return items
    return type(container)(*items) if hasattr(container, "_fields") else tuple(items)


def item_at(place: Place, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The item of a call at one place; None for an absent tensor."""
    if isinstance(place, str):
        return kwargs.get(place)
    (where, key), path = place
    found = args[key] if where == "arg" else kwargs[key]
    for step in path:
        found = found[step]
    return found


def put_item(place: Place, args: list[Any], kwargs: dict[str, Any], value: Any) -> None:
    """Put `value` at one place of a call, into copies of containers."""
    if isinstance(place, str):
        kwargs[place] = value
        return
    (where, key), path = place
    box: Any = args if where == "arg" else kwargs
    box[key] = with_item(box[key], path, value)


@attrs.define(eq=False)
class TorchCall(OpCall):
    """One call of an operator, with flat inputs.

    Attributes:
        func: the function that is called.
        args, kwargs: the caller's arguments.
        written: positions of the inputs that the operator writes into.
        places: the place of each input.
        modules: a function that gives the running modules, innermost first.
        edges: edges of the inputs' gradients, see :func:`amanda_torch.autograd.nodes.edge_of`; read
            before an in-place operator, which changes them.
    """

    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    places: Sequence[Place] = ()
    written: Sequence[int] = ()
    modules: Callable[[], list[nn.Module]] = list
    edges: list[Any] | None = None

    @classmethod
    def of(
        cls,
        func: Any,
        name: str,
        op_id: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        module: str = "",
        modules: Callable[[], list[nn.Module]] = list,
        key: Any = None,
    ) -> Self:
        """The call ``func(*args, **kwargs)``.

        Args:
            func, name, op_id: the operator's function, name and id.
            args, kwargs, module, modules: see the attributes.
            key: the object that declares the parameters, if `func` is a closure without a
                declaration.
        """
        kinds = "".join(["T" if isinstance(arg, torch.Tensor) else _kind(arg) for arg in args])
        keywords: tuple[Any, ...] = ()
        if kwargs:
            keywords = tuple([(k, _kind(v)) for k, v in kwargs.items() if k != "out"])
        flat = FlatArguments(slots_of(key or func, name, kinds, keywords), args, kwargs)
        if _internals.is_collective(func):
            flat.attributes.update(_internals.group_of(flat.attributes))
        return cls(
            op=op_view(func, name),
            op_id=op_id,
            inputs=flat.inputs,
            names=flat.shared_names(),
            attributes=flat.attributes,
            module=module,
            func=func,
            args=args,
            kwargs=kwargs,
            places=flat.places,
            written=flat.written,
            modules=modules,
        )

    def rebuilt(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with `values` in place of the inputs."""
        return _placed(self.args, self.kwargs, self.places, self.inputs, values)

    def shown_inputs(self) -> Sequence[Any]:
        return [*map(_internals.shown_part, self.inputs)]

    def shown_outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        return [*map(_internals.shown_part, outputs)]

    def value(self, index: int) -> Any:
        tensor = self.inputs[index]
        return tensor if is_constant(tensor, self.modules) else None

    def parameter_name(self, index: int) -> str | None:
        return parameter_name(self.inputs[index], self.modules)

    def is_collective(self) -> bool:
        return _internals.is_collective(self.func)

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        return FrozenCall(self)


class FrozenCall:
    """Runs an operator again. It keeps no tensor, and no code and no model of the program, to which
    an ``autograd.Function`` leads."""

    __slots__ = ("_args", "_func", "_kwargs", "_op_id", "_places")

    def __init__(self, call: TorchCall) -> None:
        marker = [None if tensor is None else _EMPTY for tensor in call.inputs]
        args, kwargs = _placed(call.args, call.kwargs, call.places, call.inputs, marker)
        kwargs.pop("out", None)
        self._func, self._args = _weak(call.func), [*map(_weak, args)]
        self._kwargs = {name: _weak(value) for name, value in kwargs.items()}
        self._op_id, self._places = call.op_id, call.places

    def __call__(self, inputs: Sequence[Any]) -> Any:
        func, *args = map(_strong, (self._func, *self._args))
        kwargs = {name: _strong(value) for name, value in self._kwargs.items()}
        if any(one is _GONE for one in (func, *args, *kwargs.values())):
            raise CapabilityError(
                f"op {self._op_id} cannot be run again: the program has dropped its function, or a "
                "function or module that it was given; keep them while you replay"
            )
        empty = [None] * len(self._places)
        args, kwargs = _placed(args, kwargs, self._places, empty, inputs)
        return func(*args, **kwargs)


_NAMES: Memo[tuple[str, ...], tuple[str, ...]] = Memo(1024)
"""The names of inputs, one object for equal sequences, which all operators keep. Concatenations
have a sequence for each number of tensors."""


_GONE = object()
"""Represents an object that the program has dropped."""


class _Weak(weakref.ref[Any]):
    """The reference of :func:`_weak`."""


def _weak(value: Any) -> Any:
    """An operator's function or argument, or a reference to it that keeps no code and no module of
    the program alive.

    An ``autograd.Function`` that is defined in a function leads to models and tensors, which tools
    must not keep alive.
    """
    # For each operator that is traced: most arguments are tensors, which are empty here, or plain.
    if value is _EMPTY or type(value) in _PLAIN:
        return value
    if _is_of_one(value):
        return functools.partial(value.func, _weak(value.args[0]))
    return _Weak(value) if isinstance(value, _OF_PROGRAMS) else value


_OF_PROGRAMS = (type, types.FunctionType, nn.Module)


def _is_of_one(value: Any) -> bool:
    """True for ``functools.partial(function, argument)``."""
    return isinstance(value, functools.partial) and not value.keywords and len(value.args) == 1


def _strong(value: Any) -> Any:
    """The object of :func:`_weak`; ``_GONE`` for one that the program has dropped."""
    if _is_of_one(value):
        found = _strong(value.args[0])
        return _GONE if found is _GONE else functools.partial(value.func, found)
    if type(value) is not _Weak:
        return value
    return _GONE if (found := value()) is None else found


_EMPTY = object()
"""Replaces a tensor in a call that must hold none."""


class FlatArguments:
    """The arguments of a call as flat inputs and as attributes.

    Args:
        slots: the parameters of the operator in calls of this form.
        args, kwargs: the arguments.

    Attributes:
        inputs: the tensors, and None for each tensor that is left out.
        names: the parameter of each input.
        places: the place of each input among the arguments.
        attributes: the arguments that are no tensors, by parameter.
        written: the positions of inputs that the operator writes into.
    """

    def __init__(
        self, slots: Iterable[Slot], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.inputs: list[Any] = []
        self.names: list[str] = []
        self.places: list[Place] = []
        self.attributes: dict[str, Any] = {}
        self.written: list[int] = []
        for slot in slots:
            start, source = len(self.inputs), slot.source
            if source is None:
                self._add_default(slot)
            elif source[0] == "args":
                self.attributes[slot.name] = tuple(args[source[1] :])
            else:
                value = args[source[1]] if source[0] == "arg" else kwargs[source[1]]
                self._add_value(slot, source, value)
            if slot.is_written:
                self.written += range(start, len(self.inputs))

    def shared_names(self) -> tuple[str, ...]:
        """The names as a tuple that all calls with the same names share."""
        names = tuple(self.names)
        known = _NAMES.get(names)
        if known is None:
            known = _NAMES[names] = names
        return known

    def _add_default(self, slot: Slot) -> None:
        if slot.is_tensor:
            if slot.default is None:
                self._add_input(slot, None, slot.keyword)
        elif slot.default is not inspect.Parameter.empty:
            self.attributes[slot.name] = slot.default

    def _add_value(self, slot: Slot, source: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) or (value is None and slot.is_tensor):
            self._add_input(slot, value, (source, ()))
            return
        found: list[tuple[Any, Path]] = []
        if not _is_plain(value):
            _expand(value, (), found)
        for tensor, path in found:
            self._add_input(slot, tensor, (source, path))
        if found:
            if found[0][1]:
                self.attributes.update(_rest_of(slot.name, value))
        elif not (slot.is_tensor and isinstance(value, (list, tuple)) and not value):
            self.attributes[slot.name] = value

    def _add_input(self, slot: Slot, tensor: Any, place: Place) -> None:
        self.inputs.append(tensor)
        self.names.append(slot.name)
        self.places.append(place)


def _rest_of(name: str, value: Any) -> dict[str, Any]:
    """The attribute for a list of tensors and other items, such as an index: tensors are None."""
    if not isinstance(value, (list, tuple)):
        return {}
    plain = [None if _has_tensor(item) else item for item in value]
    return {name: tuple(plain)} if any(item is not None for item in plain) else {}


def _placed(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Sequence[Place],
    old: Sequence[Any],
    new: Sequence[Any],
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with the items of `new` that differ from `old` put in."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for place, before, after in zip(places, old, new, strict=True):
        if after is not before:
            put_item(place, new_args, new_kwargs, after)
    return new_args, new_kwargs


# -- results --------------------------------------------------------------


def tensors_of(result: Any) -> list[Any]:
    """The tensors of an operator's result, flat."""
    if isinstance(result, torch.Tensor):
        return [result]
    found: list[tuple[Any, Path]] = []
    _expand(result, (), found)
    return [tensor for tensor, _ in found]


def is_no_output(result: Any) -> bool:
    """True for the result of an operator that returns no tensor; ``recv`` returns a number."""
    return result is None or type(result) is int


def outputs_of(result: Any, inputs: Sequence[Any], written: Sequence[int]) -> list[Any]:
    """The outputs of an operator: the tensors of its result, or the written inputs of an operator
    without a result, as of fused optimizers.

    Args:
        written: positions of the written inputs.
    """
    if isinstance(result, torch.Tensor):
        return [result]
    if written and is_no_output(result):
        return [inputs[index] for index in written if inputs[index] is not None]
    return tensors_of(result)


def tensors_in(value: Any) -> list[Any]:
    """The input or output tensors of a module, flat, including those in mappings and data classes.

    A container that is held twice is searched once; a tensor counts at each place.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    found = []
    # Not nested.leaves(), which calls functions for each leaf.
    waiting = [iter(_items(value))]
    # A nested object may lead back to its container, as a node of a graph does.
    seen = {id(value): value}
    while waiting:
        for item in waiting[-1]:
            # Most items are tensors.
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif item is not None and type(item) not in _internals.PLAIN and id(item) not in seen:
                seen[id(item)] = item
                waiting.append(iter(_items(item)))
                break
        else:
            waiting.pop()
    return found


def _items(value: Any) -> Iterable[Any]:
    """The items of an object in which a module's tensors may be."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (dict, Mapping)):
        # Most are dictionaries; a check with the abstract class takes a microsecond.
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def with_tensors(result: Any, old: Sequence[Any], new: Sequence[Any]) -> Any:
    """Return `result` with its tensors `old` replaced by `new`, in the same structure."""
    if new is old:
        return result
    if all(a is b for a, b in zip(old, new, strict=True)):
        return result
    if isinstance(result, torch.Tensor):
        return new[0]
    found: list[tuple[Any, Path]] = []
    _expand(result, (), found)
    # torch.return_types (max, sort) are C structs, which take their items as one sequence.
    if isinstance(result, tuple) and hasattr(type(result), "n_sequence_fields"):
        return type(result)(with_tensors(tuple(result), old, new))
    for (_, path), before, after in zip(found, old, new, strict=True):
        if after is not before:
            result = with_item(result, path, after)
    return result
