"""Canonical attributes of operators: one name and one form on every framework.

A stride is ``stride: 2`` in PyTorch and ``strides: [1, 2, 2, 1]`` in TensorFlow; a tool that
depends on ``MappingTool.standard()`` reads it in one way::

    def analyse(self, context):
        if context["op_type"] == "conv2d":
            canonical.attributes(context)["stride"]     # (2, 2), on both

A package adds attributes for operators of its own with a mapping rule, from
:func:`attribute_rules`. :data:`ATTRIBUTES` is the vocabulary.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.errors import ContextExpiredError, MappingError, TensorReleased, described
from amanda.interface.context import OpContext
from amanda.interface.specs import TensorSpec

AttributeRule = Callable[[OpContext], Mapping[str, Any]]
"""A function of a context that gives the canonical attributes of its operator."""

RULE = "attribute_rule"
"""The key of a context that holds its :data:`AttributeRule`; mapping rules set it."""

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    **{
        kind: tuple(names.split())
        for kinds, names in _TABLES["named"].items()
        for kind in kinds.split()
    },
    **dict.fromkeys(_TABLES["unnamed"].split(), ()),
}
"""The canonical types with a description, each with the names of its canonical attributes."""


def attributes(context: OpContext) -> dict[str, Any]:
    """The canonical attributes of the operator; of a backward operator those of the forward one.

    Axes and sizes are counted as in the tensors that the operator has: those of channels-last data
    differ from those of channels-first data. What is per place, such as ``stride``, has an item for
    each axis of space in the order depth, height, width.

    Args:
        context: a context of a tool that depends on ``MappingTool.standard()``, while an analysis
            of its operator runs.

    Returns:
        Names to numbers, text, True or False, None, and tuples of them. A name is missing where its
        value is not known, such as that of a size that the graph does not tell. Empty for an
        operator without attributes or without a rule.

    Raises:
        MappingError: the operator's rule fails, or returns no mapping of names.
    """
    rule = context[RULE]
    if rule is None:
        return {}
    try:
        found = rule(context)
    except ContextExpiredError:
        raise
    except Exception as error:
        raise MappingError(
            f"{_where(context)} cannot give its canonical attributes: {type(error).__name__}: "
            f"{error}; the operator's own attributes are {context.get_attrs()!r:.300}"
        ) from error
    # For each operator that is new: a generator would cost frames.
    is_mapping = type(found) is dict or isinstance(found, Mapping)
    if not is_mapping or not _STR.issuperset(map(type, found)):
        _check_names(context, found)
    return dict(found)


def _check_names(context: OpContext, found: Any) -> None:
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise MappingError(
            f"{_where(context)} must return a mapping of attribute names to values, got "
            f"{described(found)}"
        )


def _where(context: OpContext) -> str:
    rule = _name_of(context[RULE])
    return f"rule {rule} for op {context.get_op_id()} ({context['op_type']})"


def attribute_rules(
    rules: Mapping[str, AttributeRule | Mapping[str, Any]],
) -> Callable[[OpContext], None]:
    """A mapping rule that gives operators canonical attributes, in place of others' rules.

    ::

        MappingTool([["pytorch", attribute_rules({"shifted_conv": read_shifted_conv})]])

    Args:
        rules: by canonical type or by the framework's own name, a function of the context that
            returns the attributes, or the attributes themselves where they are always the same.

    Raises:
        TypeError: a rule is neither a function nor a mapping.
    """
    parsed = {kind: _parsed(kind, rule) for kind, rule in rules.items()}

    def set_attribute_rule(context: OpContext) -> None:
        rule = parsed.get(str(context["op_type"])) or parsed.get(op_name(context.get_op()))
        if rule is not None and context.is_forward():
            context[RULE] = rule

    return set_attribute_rule


def _parsed(kind: str, rule: AttributeRule | Mapping[str, Any]) -> AttributeRule:
    if isinstance(rule, Mapping):
        return lambda context: rule
    if not callable(rule):
        raise TypeError(
            f"an attribute rule is a function of a context or a mapping, got {described(rule)} "
            f"for {kind!r}"
        )
    return rule


def op_name(op: Any) -> str:
    """The framework's name for an operator: its ``__name__``, or its ``type``."""
    name = getattr(op, "__name__", None) or getattr(op, "type", None)
    return str(name or type(op).__name__)


def _name_of(rule: Any) -> str:
    return str(getattr(rule, "__qualname__", None) or type(rule).__name__)


# -- for rules ----------------------------------------------------------------


def shape_of(context: OpContext, index: int) -> tuple[int | None, ...] | None:
    """The shape of an input: None for a size that is not known, or where there is no shape."""
    try:
        spec = context.get_input_specs()[index]
    except (IndexError, TensorReleased):
        return None
    return None if spec is None else spec.shape


LACKS_OUTPUTS = object()
"""Key of the context of an operator whose rule has asked for outputs that were not there yet."""


def output_shape(context: OpContext) -> tuple[int | None, ...] | None:
    """The shape of the first output; None before the operator has run."""
    try:
        outputs = context.get_outputs()
        if outputs is None:
            context[LACKS_OUTPUTS] = True
        return TensorSpec(outputs[0]).shape if outputs else None
    except TensorReleased:
        return None


_STR = frozenset({str})


def per_place(value: Any, count: int) -> tuple[int, ...]:
    """A number for each axis of space: a single one holds for all of them."""
    items = list(value) if isinstance(value, Iterable) else [value]
    return tuple(int(item) for item in (items * count if len(items) == 1 else items))


def same_padding(
    sizes: Iterable[int | None],
    kernel: Iterable[int],
    stride: Iterable[int],
    dilation: Iterable[int],
) -> tuple[tuple[int, int], ...] | None:
    """The padding with which an output has the size of the input divided by the stride.

    Args:
        sizes: of the input along the axes of space.
        kernel, stride, dilation: along the same axes.

    Returns:
        Before and after the data, per axis; None where a size is not known and decides.
    """
    found = []
    for size, width, step, spread in zip(sizes, kernel, stride, dilation, strict=False):
        reach = spread * (width - 1) + 1
        if size is None and step != 1:
            return None
        # With a stride of 1 any size gives the same padding.
        outputs = math.ceil(size / step) if size is not None else 0
        total = reach - 1 if size is None else max((outputs - 1) * step + reach - size, 0)
        found.append((total // 2, total - total // 2))
    return tuple(found)


def axes(value: Any, rank: int | None) -> tuple[int, ...] | None:
    """Axes counted from the first one.

    Args:
        value: an axis or several, counted from the last one if negative; None for all.
        rank: of the tensor; None if it is not known.

    Returns:
        The axes in order; None where they depend on an unknown rank.
    """
    if value is None:
        return None if rank is None else tuple(range(rank))
    given = [int(item) for item in (value if isinstance(value, Iterable) else [value])]
    if rank is None and any(item < 0 for item in given):
        return None
    return tuple(sorted(item % rank if rank else item for item in given))


def axis(value: Any, rank: int | None) -> int | None:
    """One axis, counted from the first one; None where it depends on an unknown rank."""
    found = axes(int(value), rank)
    return found[0] if found else None


def resolved(shape: Sequence[int], size: int | None) -> tuple[int, ...]:
    """A shape with its -1 replaced, for a tensor of `size` elements; as it is without a size."""
    numbers = tuple(int(item) for item in shape)
    rest = math.prod(item for item in numbers if item != -1)
    if -1 not in numbers or size is None or not rest:
        return numbers
    return tuple(size // rest if item == -1 else item for item in numbers)


def element_count(shape: Sequence[int | None] | None) -> int | None:
    """The number of elements of a tensor of this shape; None where a size is not known."""
    if shape is None or any(size is None for size in shape):
        return None
    return math.prod(size for size in shape if size is not None)


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum of numbers; None where one is not known."""
    found = list(numbers)
    return None if None in found else sum(number or 0 for number in found)


def known(**found: Any) -> dict[str, Any]:
    """The attributes whose value is known, which None is not."""
    return {name: value for name, value in found.items() if value is not None}


def index_items(items: Iterable[Any], shape: Sequence[int | None] | None) -> tuple[Any, ...] | None:
    """An index in its canonical form, an item for each part of it.

    A number for a selected position, (begin, end, step) for a slice, None for a new axis, and
    "tensor" for a tensor of positions. Slices at the end that take everything are left out.

    Args:
        items: numbers, slices, ``...``, None, and "tensor".
        shape: of the tensor that is indexed; None if it is not known.

    Returns:
        The items; None where ``...`` stands for an unknown number of axes before other items.
    """
    parts = list(items)
    if shape is None and any(item is ... for item in parts[:-1]):
        return None
    taken = sum(item is not None and item is not ... for item in parts)
    position, found, last = 0, list[Any](), 0
    for item in parts:
        if item is ...:
            rest = range(max(len(shape) - taken, 0) if shape is not None else 0)
            found += [_item(slice(None), shape, position + number) for number in rest]
            position += len(rest)
            continue
        found.append(None if item is None else _item(item, shape, position))
        takes_all = isinstance(item, slice) and found[-1] == _item(slice(None), shape, position)
        position += item is not None
        last = last if takes_all else len(found)
    return tuple(found[:last])


def _item(item: Any, shape: Sequence[int | None] | None, position: int) -> Any:
    """One number, slice or "tensor" of an index."""
    size = shape[position] if shape is not None and position < len(shape) else None
    if isinstance(item, slice):
        return item.indices(size) if size is not None else (item.start, item.stop, item.step)
    if isinstance(item, str):
        return item
    number = int(item)
    return number + size if number < 0 and size is not None else number
