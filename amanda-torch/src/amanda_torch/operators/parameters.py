"""The declared parameters of PyTorch's operators, and their places in a call.

:func:`slots_of` matches the form of a call against the operator's overloads::

    slots_of(torch.conv2d, "conv2d", "TTNO", (("padding", "O"),))

PyTorch's schemas give the order of a C-level operator's parameters and the parameters that are
tensors; ``torch.overrides`` has signatures of the few operators without a schema.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch

from amanda.python.signatures import signature_of
from amanda_torch import _internals
from amanda_torch.operators.names import base_name


@attrs.frozen
class SchemaParameter:
    """One declared parameter of an operator.

    Attributes:
        name: the name that tools see.
        keyword: the name by which the operator accepts it.
        positional: whether it may be passed by position.
        is_tensor: whether it is a tensor, an optional tensor or a list of them.
        default: its default, ``inspect.Parameter.empty`` where there is none.
        is_written: whether the operator writes into it.
    """

    name: str
    keyword: str
    is_tensor: bool
    positional: bool = True
    default: Any = inspect.Parameter.empty
    is_written: bool = False


_PUBLIC_ORDER: Mapping[str, tuple[str, ...]] = {
    # torch.embedding takes the weight first, torch.nn.functional.embedding the indices.
    "embedding": ("input", "weight"),
    "embedding_bag": ("input", "weight"),
    # torch.nn.functional.batch_norm takes the running statistics first, torch.batch_norm last.
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var"),
}
"""Operators shown in the order of their public function: the leading parameters."""

_RENAMED: Mapping[str, Mapping[str, str]] = {
    "embedding": {"indices": "input"},
    "embedding_bag": {"indices": "input"},
}
"""Parameters that the public function calls by another name than the schema."""

_INDEXED = SchemaParameter("input", "self", True), SchemaParameter("index", "index", True)

_INDEXING: Mapping[str, tuple[SchemaParameter, ...]] = {
    "__getitem__": _INDEXED,
    "__setitem__": (*_INDEXED, SchemaParameter("value", "value", True)),
}
"""Parameters of indexing: under these names the schemas describe TorchScript's lists."""

_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x2": "other", "x1": "self", "x": "self"}
"""NumPy's keywords, which PyTorch's argument parser also accepts."""


def _from_schema(schema: Any, name: str) -> tuple[SchemaParameter, ...]:
    renamed = _RENAMED.get(base_name(name), {})
    parameters: list[SchemaParameter] = []
    for argument in schema.arguments:
        if argument.is_out:
            continue
        public = renamed.get(argument.name, argument.name)
        first = not parameters and public in ("self", "x", "A", "a")
        parameters.append(
            SchemaParameter(
                name="input" if first else public,
                keyword=argument.name,
                is_tensor="Tensor" in str(argument.type),
                positional=not argument.kwarg_only,
                default=argument.default_value
                if argument.has_default_value()
                else inspect.Parameter.empty,
                is_written=argument.alias_info is not None and argument.alias_info.is_write,
            )
        )
    return tuple(parameters)


def _from_signature(function: Any, *, skip: int = 0) -> tuple[SchemaParameter, ...]:
    try:
        declared = list(signature_of(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        return ()
    return tuple(
        SchemaParameter(
            p.name, p.name, "Tensor" in str(p.annotation), p.kind is not p.KEYWORD_ONLY, p.default
        )
        for p in declared
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "out"
    )


_WRITING_NONE = frozenset({"send", "isend", "barrier", "monitored_barrier"})
"""Collectives that write into none of their tensors; others do into the first, ``gather`` into the
second."""


def _with_written(
    parameters: tuple[SchemaParameter, ...], name: str
) -> tuple[SchemaParameter, ...]:
    """The parameters of a function of ``torch.distributed``, with the one that it writes into."""
    if name in _WRITING_NONE:
        return parameters
    index = int(name == "c10d::gather")
    written = attrs.evolve(parameters[index], is_written=True)
    return (*parameters[:index], written, *parameters[index + 1 :])


_T = TypeVar("_T")
_OF_CLASSES: weakref.WeakKeyDictionary[type, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""The parameters of ``autograd.Function`` classes, while the program holds the classes."""


def _kept(function: Callable[..., _T]) -> Callable[..., _T]:
    """Return `function` with a cache that does not keep classes in its first argument alive."""
    cached = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def recall(func: Any, *rest: Any) -> _T:
        if not isinstance(func, type):
            return cached(func, *rest)
        known = _OF_CLASSES.setdefault(func, {})
        key = (function, *rest)
        if key not in known:
            known[key] = function(func, *rest)
        found: _T = known[key]
        return found

    return recall


@_kept
def _candidates(func: Any, name: str) -> tuple[tuple[SchemaParameter, ...], ...]:
    """The parameters of each overload of `func`."""
    if isinstance(func, _internals.OpOverload):
        return (_from_schema(_internals.schema_of(func), name),)
    if isinstance(func, _internals.OpOverloadPacket):
        overloads = [getattr(func, o) for o in func.overloads()]
        return tuple(_from_schema(_internals.schema_of(o), name) for o in overloads)
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        has_context = func.setup_context is torch.autograd.Function.setup_context
        return (_from_signature(func.forward, skip=int(has_context)),)
    if not isinstance(func, types.FunctionType):
        schemas = [] if name in _INDEXING else _internals.schemas_of(f"aten::{name}")
        if schemas:
            return tuple(_from_schema(schema, name) for schema in schemas)
    else:
        found = _from_signature(func)
        return (_with_written(found, name) if _internals.is_collective(func) else found,)
    if base_name(name) in _INDEXING:
        return (_INDEXING[base_name(name)],)
    dummy = torch.overrides.get_testing_overrides().get(func, func)
    return (_from_signature(dummy),)


def output_count(func: Any, name: str) -> int | None:
    """The number of tensors that the operator returns; None if it is undeclared or varies.

    It is 0 for operators that return nothing or a number, such as ``equal``.
    """
    # An `autograd.Function` is applied by a partial function, which holds its class.
    unknown = (types.FunctionType, type, functools.partial)
    if isinstance(func, types.FunctionType) and _internals.is_collective(func):
        return 0
    return None if isinstance(func, unknown) else _output_count(func, name)


@functools.lru_cache(maxsize=4096)
def _output_count(func: Any, name: str) -> int | None:
    if isinstance(func, _internals.OpOverload):
        schemas = [_internals.schema_of(func)]
    elif isinstance(func, _internals.OpOverloadPacket):
        schemas = [_internals.schema_of(getattr(func, o)) for o in func.overloads()]
    else:
        schemas = _internals.schemas_of(f"aten::{name}")
    counts = set()
    for schema in schemas:
        tensors = [t for value in schema.returns if "Tensor" in (t := str(value.type))]
        # Without any tensor it is an overload of TorchScript, for numbers and lists.
        is_on_tensors = tensors or any("Tensor" in str(a.type) for a in schema.arguments)
        if not is_on_tensors or any(kind != "Tensor" for kind in tensors):
            return None
        counts.add(len(tensors))
    return counts.pop() if len(counts) == 1 else None


_NO_PARAMETER = 4
"""Mismatch of an argument for which an overload has no parameter."""

_NO_ARGUMENT = 2
"""Mismatch of a required parameter without an argument; 1 is the mismatch of a tensor and another
type. Valid calls fit one overload, but the argument parser allows more than the schemas (``view(2,
3)``), so that the best fit need not be 0."""


def _mismatch(
    parameters: Sequence[SchemaParameter], kinds: Sequence[str], keywords: Mapping[str, str]
) -> int:
    """The mismatch of a call and an overload; 0 is a fit."""
    positional = [p for p in parameters if p.positional]
    named = {p.keyword: p for p in parameters}
    wrong = _NO_PARAMETER * max(0, len(kinds) - len(positional))
    for kind, parameter in zip(kinds, positional, strict=False):
        wrong += (kind in "TL") != parameter.is_tensor and kind != "N"
    given = {p.keyword for p in positional[: len(kinds)]}
    for keyword, kind in keywords.items():
        actual = _keyword(keyword, named)
        if actual not in named:
            wrong += _NO_PARAMETER
            continue
        given.add(actual)
        wrong += (kind in "TL") != named[actual].is_tensor and kind != "N"
    return wrong + _NO_ARGUMENT * sum(
        p.default is inspect.Parameter.empty and p.keyword not in given for p in parameters
    )


def _keyword(keyword: str, named: Mapping[str, SchemaParameter]) -> str:
    """The declared name for a keyword as the caller wrote it."""
    if keyword in named:
        return keyword
    alias = _ALIASES.get(keyword, keyword)
    if keyword == "input" or alias == "self":
        return "self" if "self" in named else next(iter(named), keyword)
    return alias


Source = tuple[str, Any]
"""``("arg", index)``, ``("args", first index)`` or ``("kwarg", name)``."""


@attrs.frozen
class Slot:
    """One parameter in one form of call.

    Attributes:
        source: its place in the caller's arguments; None if it was left out.
        name, keyword, is_tensor, default, is_written: see :class:`SchemaParameter`.
    """

    name: str
    keyword: str
    source: Source | None
    is_tensor: bool
    default: Any
    is_written: bool = False


@_kept
def slots_of(
    func: Any, name: str, kinds: str, keywords: tuple[tuple[str, str], ...]
) -> tuple[Slot, ...]:
    """The slots of a call of one form, in the order in which tools see them.

    Args:
        func: the operator.
        name: its name.
        kinds: a letter for each positional argument: T is a tensor, L a list of tensors,
            N None, O something else.
        keywords: the names and kinds of the keyword arguments.
    """
    best = min(_candidates(func, name), key=lambda ps: _mismatch(ps, kinds, dict(keywords)))
    named = {p.keyword: p for p in best}
    positional = [p for p in best if p.positional]
    sources: dict[str, Source] = {}
    extra: list[Slot] = []
    for index in range(len(kinds)):
        if index < len(positional):
            sources[positional[index].keyword] = ("arg", index)
        elif positional and set(kinds[len(positional) - 1 :]) == {"O"}:
            # Sizes and dimensions may be given one by one: view(2, 3).
            sources[positional[-1].keyword] = ("args", len(positional) - 1)
            break
        else:
            extra.append(Slot(f"arg{index}", "", ("arg", index), False, None))
    for keyword, _ in keywords:
        actual = _keyword(keyword, named)
        if actual in named and actual not in sources:
            sources[actual] = ("kwarg", keyword)
        else:
            extra.append(Slot(keyword, keyword, ("kwarg", keyword), False, None))
    slots = [
        Slot(p.name, p.keyword, sources.get(p.keyword), p.is_tensor, p.default, p.is_written)
        for p in best
    ]
    front = _PUBLIC_ORDER.get(base_name(name), ())
    slots.sort(key=lambda slot: front.index(slot.name) if slot.name in front else len(front))
    return tuple(slots + extra)
