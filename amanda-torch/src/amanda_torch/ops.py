"""What an operator of PyTorch is: the leaf policy, names, and argument lists.

The boundary is PyTorch's own: C-level functions and methods, ``torch.ops`` and
``autograd.Function``s are operators; Python-level functions are descended
(design section 7).
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import attrs
import torch
from torch import nn

from amanda.calls import OpCall
from amanda_torch import _internals
from amanda_torch.scopes import is_constant


class Kind(enum.Enum):
    """How a torch-function event is treated."""

    LEAF = enum.auto()
    COMPOSITE = enum.auto()
    IGNORED = enum.auto()


VIEW_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")
"""Properties that make a view, and so are operators."""

_IGNORED = frozenset(
    # properties, sizes and other metadata
    """__get__ __set__ __delete__ size dim ndimension numel nelement stride storage_offset
    element_size is_contiguous is_floating_point is_complex is_signed is_same_size is_set_to
    is_nonzero is_inference is_conj is_neg is_pinned is_shared is_distributed is_coalesced
    is_cuda is_cpu has_names get_device dense_dim sparse_dim _dimI _dimV _nnz _is_view
    _is_zerotensor _is_all_true _is_any_true _has_symbolic_sizes_strides _version dim_order
    data_ptr const_data_ptr untyped_storage storage _typed_storage layout device qscheme
    q_scale q_zero_point q_per_channel_axis can_cast result_type promote_types names
    sym_size sym_numel sym_stride sym_storage_offset sym_is_contiguous
    """.split()
    # leaving the framework for Python
    + """item _local_scalar_dense tolist numpy __len__ __bool__ __int__ __float__ __complex__
    __index__ __nonzero__ __repr__ __str__ __format__ __hash__ __dir__ __array__
    __reduce_ex__ __setstate__ __dlpack__ __dlpack_device__
    """.split()
    # autograd's and PyTorch's own bookkeeping
    + """backward requires_grad_ retain_grad register_hook
    register_post_accumulate_grad_hook _backward _set_grad_enabled _set_data _fix_weakref
    _make_subclass _make_wrapper_subclass _make_dtensor as_subclass share_memory_
    record_stream _record_function_enter _record_function_enter_new _record_function_exit
    _get_tracing_state _dispatch_keys _use_cudnn_ctc_loss _cudnn_rnn_flatten_weight
    _view_func_unsafe _rev_view_func_unsafe module_load __torch_function__
    __torch_dispatch__ _to_functional_tensor _from_functional_tensor
    """.split()
)

_BACKWARD_ENTRIES = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@functools.cache
def _view_property(func: Any) -> str | None:
    """Name of the view property whose getter `func` is."""
    for name in VIEW_PROPERTIES:
        if func == getattr(torch.Tensor, name).__get__:
            return name
    return None


def base_name(name: str) -> str:
    """An operator's name without its overload: ``add`` of ``add.Tensor``."""
    return name.partition(".")[0]


def name_of(func: Any) -> str:
    """The operator's name: ``conv2d``, ``add``, ``T``, ``my_op.default``."""
    name = getattr(func, "__name__", None) or type(func).__name__
    if name == "__get__":
        return _view_property(func) or name
    return str(name)


def kind_of(func: Any) -> Kind:
    """Whether `func` is an operator, is descended, or is no operator."""
    if func in _BACKWARD_ENTRIES:
        return Kind.COMPOSITE
    name = name_of(func)
    base = name.partition(".")[0]
    if base in _IGNORED or base.startswith(("_record_function", "sym_")):
        return Kind.IGNORED
    return Kind.COMPOSITE if isinstance(func, types.FunctionType) else Kind.LEAF


def is_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the operator writes into its first input or an ``out=`` tensor."""
    base = name.partition(".")[0]
    if base.startswith("__"):
        return base == "__setitem__" or (
            base.startswith("__i") and base not in ("__invert__", "__index__", "__int__")
        )
    return base.endswith("_") or kwargs.get("out") is not None


class OpView:
    """A thin view of an operator whose own object has another name."""

    def __init__(self, func: Callable[..., Any], name: str) -> None:
        self.__name__ = name
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operator {self.__name__}>"


class BackwardOpView:
    """A backward operator: an autograd node, by name. It does not hold the node."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.name = name

    def __repr__(self) -> str:
        return f"<backward operator {self.__name__}>"


def op_view(func: Any, name: str) -> Any:
    """`func` itself if it bears its operator's name, else a view that does."""
    return func if getattr(func, "__name__", None) == name else OpView(func, name)


# -- argument lists -------------------------------------------------------


@attrs.frozen
class Parameter:
    """One declared parameter of an operator.

    Attributes:
        name: as tools see it.
        keyword: the name by which the operator accepts it.
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
    # The leaves take the weight first; torch.nn.functional does not.
    "embedding": ("input", "weight"),
    "embedding_bag": ("input", "weight"),
    # torch.nn.functional takes the running statistics first; its leaf does not.
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var"),
}
"""Leaves presented in the order of their public function: the leading parameters."""

_RENAMED: Mapping[str, Mapping[str, str]] = {
    "embedding": {"indices": "input"},
    "embedding_bag": {"indices": "input"},
}

_INDEXING: Mapping[str, tuple[Parameter, ...]] = {
    "__getitem__": (Parameter("input", "self", True), Parameter("index", "index", True)),
    "__setitem__": (
        Parameter("input", "self", True),
        Parameter("index", "index", True),
        Parameter("value", "value", True),
    ),
}
"""Schemas of the same name belong to TorchScript's lists."""

_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x2": "other", "x1": "self", "x": "self"}


def _from_schema(schema: Any, name: str) -> tuple[Parameter, ...]:
    renamed = _RENAMED.get(base_name(name), {})
    parameters: list[Parameter] = []
    for argument in schema.arguments:
        if argument.is_out:
            continue
        public = renamed.get(argument.name, argument.name)
        first = not parameters and public in ("self", "x", "A", "a")
        parameters.append(
            Parameter(
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


def _from_signature(function: Any, *, skip: int = 0) -> tuple[Parameter, ...]:
    try:
        declared = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        return ()
    return tuple(
        Parameter(
            p.name, p.name, "Tensor" in str(p.annotation), p.kind is not p.KEYWORD_ONLY, p.default
        )
        for p in declared
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "out"
    )


@functools.lru_cache(maxsize=4096)
def _candidates(func: Any, name: str) -> tuple[tuple[Parameter, ...], ...]:
    """The parameter lists that `func` may be called with, one per overload."""
    if isinstance(func, _internals.OpOverload):
        return (_from_schema(func._schema, name),)
    if isinstance(func, _internals.OpOverloadPacket):
        overloads = [getattr(func, o) for o in func.overloads()]
        return tuple(_from_schema(o._schema, name) for o in overloads)
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        has_context = func.setup_context is torch.autograd.Function.setup_context
        return (_from_signature(func.forward, skip=int(has_context)),)
    if not isinstance(func, types.FunctionType):
        schemas = [] if name in _INDEXING else _internals.schemas_of(f"aten::{name}")
        if schemas:
            return tuple(_from_schema(schema, name) for schema in schemas)
    else:
        return (_from_signature(func),)
    if base_name(name) in _INDEXING:
        return (_INDEXING[base_name(name)],)
    dummy = torch.overrides.get_testing_overrides().get(func, func)
    return (_from_signature(dummy),)


@functools.lru_cache(maxsize=4096)
def output_count(func: Any, name: str) -> int | None:
    """How many tensors the operator returns; None if that is not declared or varies."""
    if isinstance(func, _internals.OpOverload):
        schemas = [func._schema]
    elif isinstance(func, (types.FunctionType, type, _internals.OpOverloadPacket)):
        return None
    else:
        schemas = _internals.schemas_of(f"aten::{name}")
    counts = set()
    for schema in schemas:
        if any(str(value.type) != "Tensor" for value in schema.returns):
            return None
        counts.add(len(schema.returns))
    return counts.pop() if len(counts) == 1 else None


def _mismatch(
    parameters: Sequence[Parameter], kinds: Sequence[str], keywords: Mapping[str, str]
) -> int:
    """How badly a call fits an overload; 0 is a fit."""
    positional = [p for p in parameters if p.positional]
    named = {p.keyword: p for p in parameters}
    wrong = 4 * max(0, len(kinds) - len(positional))
    for kind, parameter in zip(kinds, positional, strict=False):
        wrong += (kind in "TL") != parameter.is_tensor and kind != "N"
    given = {p.keyword for p in positional[: len(kinds)]}
    for keyword, kind in keywords.items():
        actual = _keyword(keyword, named)
        if actual not in named:
            wrong += 4
            continue
        given.add(actual)
        wrong += (kind in "TL") != named[actual].is_tensor and kind != "N"
    return wrong + 2 * sum(
        p.default is inspect.Parameter.empty and p.keyword not in given for p in parameters
    )


def _keyword(keyword: str, named: Mapping[str, Parameter]) -> str:
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
    """One parameter of one form of call: its name, where the caller passed it, if he did."""

    name: str
    keyword: str
    source: Source | None
    is_tensor: bool
    default: Any
    is_written: bool = False


@functools.lru_cache(maxsize=4096)
def _layout(
    func: Any, name: str, kinds: str, keywords: tuple[tuple[str, str], ...]
) -> tuple[Slot, ...]:
    """The slots of a call of this form, in the order in which tools see them."""
    best = min(_candidates(func, name), key=lambda ps: _mismatch(ps, kinds, dict(keywords)))
    named = {p.keyword: p for p in best}
    positional = [p for p in best if p.positional]
    sources: dict[str, Source] = {}
    extra: list[Slot] = []
    for index in range(len(kinds)):
        if index < len(positional):
            sources[positional[index].keyword] = ("arg", index)
        elif set(kinds[len(positional) - 1 :]) == {"O"}:
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


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple)):
        return any(_has_tensor(item) for item in value)
    if isinstance(value, dict):
        return any(_has_tensor(item) for item in value.values())
    return False


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "T"
    if value is None:
        return "N"
    return "L" if _has_tensor(value) else "O"


Path = tuple[Any, ...]


def _expand(value: Any, path: Path, found: list[tuple[Any, Path]], listed: bool) -> None:
    """Collect the tensors of a nested argument; None counts within lists of tensors."""
    if isinstance(value, torch.Tensor) or (value is None and listed):
        found.append((value, path))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _expand(item, (*path, index), found, False)
    elif isinstance(value, dict):
        for key, item in value.items():
            _expand(item, (*path, key), found, False)


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


@attrs.define(eq=False)
class TorchCall(OpCall):
    """One call of an operator, with its tensors laid out flat.

    Attributes:
        func: what is called.
        args, kwargs: as the caller passed them.
        written: positions of the inputs that the operator writes into.
        places: for each input where it sits: ``(source, path)``, or the
            keyword of an absent optional tensor.
        modules: gives the running modules, innermost first.
        edges: where the inputs' gradients go, noted before an operator that may
            move them; see ``backward.edge_of``.
    """

    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    places: Sequence[Any] = ()
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
        """The call ``func(*args, **kwargs)``; `key` stands for `func` where that is a closure."""
        kinds = "".join([_kind(arg) for arg in args])
        keywords = tuple((k, _kind(v)) for k, v in kwargs.items() if k != "out")
        inputs: list[Any] = []
        names: list[str] = []
        places: list[Any] = []
        attributes: dict[str, Any] = {}
        written: list[int] = []
        for slot in _layout(key or func, name, kinds, keywords):
            start = len(inputs)
            _fill(slot, args, kwargs, inputs, names, places, attributes)
            if slot.is_written:
                written += range(start, len(inputs))
        return cls(
            op=op_view(func, name),
            op_id=op_id,
            inputs=inputs,
            names=names,
            attributes=attributes,
            module=module,
            func=func,
            args=args,
            kwargs=kwargs,
            places=places,
            written=written,
            modules=modules,
        )

    def rebuilt(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with `values` in place of the inputs."""
        return _placed(self.args, self.kwargs, self.places, self.inputs, values)

    def value(self, index: int) -> Any:
        tensor = self.inputs[index]
        return tensor if is_constant(tensor, self.modules) else None

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        empty = [None] * len(self.inputs)
        marker = [None if tensor is None else _EMPTY for tensor in self.inputs]
        args, kwargs = _placed(self.args, self.kwargs, self.places, self.inputs, marker)
        kwargs.pop("out", None)
        func, places = self.func, tuple(self.places)

        def run(inputs: Sequence[Any]) -> Any:
            new_args, new_kwargs = _placed(args, kwargs, places, empty, inputs)
            return func(*new_args, **new_kwargs)

        return run


_EMPTY = object()


def _fill(
    slot: Slot,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inputs: list[Any],
    names: list[str],
    places: list[Any],
    attributes: dict[str, Any],
) -> None:
    """Add what one slot holds to the flat inputs or to the attributes."""
    source = slot.source
    if source is None:
        if not slot.is_tensor:
            if slot.default is not inspect.Parameter.empty:
                attributes[slot.name] = slot.default
        elif slot.default is None:
            inputs.append(None)
            names.append(slot.name)
            places.append(slot.keyword)
        return
    if source[0] == "args":
        attributes[slot.name] = tuple(args[source[1] :])
        return
    value = args[source[1]] if source[0] == "arg" else kwargs[source[1]]
    if value is None and slot.is_tensor:
        inputs.append(None)
        names.append(slot.name)
        places.append((source, ()))
        return
    found: list[tuple[Any, Path]] = []
    _expand(value, (), found, False)
    for tensor, path in found:
        inputs.append(tensor)
        names.append(slot.name)
        places.append((source, path))
    if not found and not (slot.is_tensor and isinstance(value, (list, tuple)) and not value):
        attributes[slot.name] = value
    elif found and found[0][1]:
        attributes.update(_rest_of(slot.name, value))


def _rest_of(name: str, value: Any) -> dict[str, Any]:
    """The non-tensor items of a mixed list such as an index, tensors shown as None."""
    if not isinstance(value, (list, tuple)):
        return {}
    plain = [None if _has_tensor(item) else item for item in value]
    return {name: tuple(plain)} if any(item is not None for item in plain) else {}


def _placed(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Sequence[Any],
    old: Sequence[Any],
    new: Sequence[Any],
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with the items of `new` that differ from `old` put in."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for place, before, after in zip(places, old, new, strict=True):
        if after is before:
            continue
        if isinstance(place, str):
            if after is not _EMPTY:
                new_kwargs[place] = after
            continue
        (where, key), path = place
        box: Any = new_args if where == "arg" else new_kwargs
        box[key] = with_item(box[key], path, after)
    return new_args, new_kwargs


# -- results --------------------------------------------------------------


def tensors_of(result: Any) -> list[Any]:
    """The tensors of an operator's result, flat."""
    if isinstance(result, torch.Tensor):
        return [result]
    found: list[tuple[Any, Path]] = []
    _expand(result, (), found, False)
    return [tensor for tensor, _ in found]


def with_tensors(result: Any, old: Sequence[Any], new: Sequence[Any]) -> Any:
    """`result` with its tensors replaced, in the structure it has."""
    if all(a is b for a, b in zip(old, new, strict=True)):
        return result
    if isinstance(result, torch.Tensor):
        return new[0]
    found: list[tuple[Any, Path]] = []
    _expand(result, (), found, False)
    if isinstance(result, tuple) and hasattr(type(result), "n_sequence_fields"):
        return type(result)(with_tensors(tuple(result), old, new))
    for (_, path), before, after in zip(found, old, new, strict=True):
        if after is not before:
            result = with_item(result, path, after)
    return result
