"""The table of operators: what the tools know of each canonical type.

It has one row for each type, and a column for each question; a tool reads its column::

    row_of("conv2d").flops          # the formula of its FLOPs
    row_of("reshape").group         # "view"
    set_row("my_gate", like="relu") # a row of somebody else's

A type without a row, such as a custom operator, is unknown, and tools say so. The rows of
this package are in op_table.toml, column by column.

The drivers have small tables of views as well. Those are about other questions: through which
operators a variable's value is followed (TensorFlow), and which outputs autograd treats as aliases
(PyTorch). The names of canonical attributes are in :mod:`amanda.tools.canonical`.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from amanda import OpContext
from amanda.errors import close_matches
from amanda.tools.description import OpDescription
from amanda_tools._operators import cost, gradient_cost
from amanda_tools._operators.decompositions import COUNTS
from amanda_tools._operators.signature import CallShapes, Suffices


@attrs.frozen
class FlopFormula:
    """The FLOP formula of a type.

    Attributes:
        formula: the function, see :func:`amanda_tools.flops.register`.
        reads_outputs: False if it does not read ``call.outputs``.
        suffices: given the signature and the shapes of the inputs, None for unknown ones: True if
            it needs no other of these. None for a formula that may read each of them.
        source: where it comes from, as results show it.
    """

    formula: Callable[[CallShapes], int | None]
    reads_outputs: bool = True
    source: str = "formula"
    suffices: Suffices | None = None

    def flops(self, call: CallShapes) -> int | None:
        """Return the FLOPs of a call; None for a form that the formula does not know."""
        try:
            return self.formula(call)
        except (LookupError, TypeError, ValueError, StopIteration):
            return None


@attrs.frozen
class OperatorRow:
    """What the tools know of one type.

    Attributes:
        group: what it computes, one of :data:`GROUPS`; "" for a product or what is not known.
        traits: its properties, of :data:`TRAITS`.
        bounds: lower and upper bound of its outputs, where it saturates, else None.
        flops: the formula of its FLOPs; None without one.
        path: the extraction rule of ``path``, or the name of one of ``path``'s own; None without.
        default_of: tools that act on it unless told otherwise: ``quantize``, or ``prune:tile`` for
            a method.
    """

    group: str = ""
    traits: frozenset[str] = frozenset()
    bounds: tuple[float, float] | None = None
    flops: FlopFormula | None = None
    path: Callable[..., Any] | str | None = None
    default_of: frozenset[str] = frozenset()


# -- the columns, with the rows of this package ------------------------------------

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""The content of op_table.toml: for each column its values, and the types that have each."""

GROUPS: Mapping[str, str] = _TABLES["groups"]
"""What types compute. All of these count no floating-point operation, as papers that compare models
count: only sums of products do.

- view: their outputs may share the memory of their input;
- moving: they move, select or pad elements; drawing: they draw random numbers;
- making: their outputs depend on no tensor, or on its shape;
- calling: they run other operators, which count for themselves, or only order them.
"""

TRAITS: Mapping[str, str] = _TABLES["traits"]
"""Properties of types.

- passes_values: its outputs are elements of its inputs, or zero: it makes no NaN from numbers. So
  are those of views that do not convert;
- places_values: it writes values that the program gave, or leaves memory as it is;
- no_activation: its outputs are values of parameters, constants or sizes. Nor are those of views;
- uninitialized: its output is what the memory happened to hold;
- takes_sizes: its output depends on the shape of its input only;
- selects_rows: it selects elements of a weight;
- reads_variable: it passes a variable's value on to the operators that use it;
- queries_variable: it takes a variable's handle without reading or changing its value;
- scales_scores: it may stand between the product of queries and keys and the softmax;
- multiplies_activations: a product that counts as ``linear`` if one of the factors is a parameter;
- recurrent: a network over steps, or one step of it, with several weights;
- allocates_nothing: its outputs take no memory of their own in a graph, as those of views;
- waits: its time may be that of other processes;
- converts: it may convert to an element type with a smaller range, which can make infinities.
"""

# -- the table ---------------------------------------------------------------------

_Columns = dict[str, Any]
"""Some attributes of an :class:`OperatorRow`, by name."""


def _pairs(name: str) -> Iterator[tuple[str, str]]:
    """Yield value and type of each entry of a table in op_table.toml."""
    return ((value, kind) for value, kinds in _TABLES[name].items() for kind in kinds.split())


def _fill(forward: dict[str, _Columns], backward: dict[str, _Columns]) -> None:
    """Add the rows of this package to the tables of forward and backward types."""
    for tools, kind in _pairs("defaults"):
        row = forward.setdefault(kind, {})
        row["default_of"] = row.get("default_of", frozenset()) | set(tools.split())
    for table, column in ((forward, "traits"), (backward, "traits_of_backward")):
        for trait, kind in _pairs(column):
            row = table.setdefault(kind, {})
            row["traits"] = row.get("traits", frozenset()) | {trait}
    for column, source in (("group", "groups"), ("path", "paths")):
        for value, kind in _pairs(source):
            forward.setdefault(kind, {})[column] = value
    for kinds, bounds in _TABLES["bounds"].items():
        for kind in kinds.split():
            forward[kind]["bounds"] = tuple(bounds)
    for kind, formula in {**cost.FORMULAS, **COUNTS}.items():
        reads_outputs = formula in cost.READING_OUTPUTS
        suffices = cost.SUFFICING.get(formula)
        found = FlopFormula(formula, reads_outputs, suffices=suffices)
        forward.setdefault(kind, {})["flops"] = found
    for kind, gradient in gradient_cost.FORMULAS.items():
        reads_outputs = gradient not in gradient_cost.READING_INPUTS
        suffices = gradient_cost.SUFFICING.get(gradient)
        found = FlopFormula(gradient, reads_outputs, suffices=suffices)
        backward.setdefault(kind, {})["flops"] = found


_FORWARD: dict[str, _Columns] = {}
_BACKWARD: dict[str, _Columns] = {}
_fill(_FORWARD, _BACKWARD)


def row_of(kind: str, *, backward: bool = False) -> OperatorRow:
    """Return the row of a canonical type, or of a framework's own name; an empty one if unknown."""
    return OperatorRow(**(_BACKWARD if backward else _FORWARD).get(kind, {}))


def set_row(name: str, *, backward: bool = False, like: str = "", **columns: Any) -> None:
    """Add a row to the table, or set columns of the row that a type has.

    Args:
        name: the canonical type; the framework's own name for an operator without one.
        backward: True for the type or name of a backward operator.
        like: a type whose columns the row begins with; "" for its own columns.
        columns: attributes of :class:`OperatorRow`. A function as ``flops`` is a formula that reads
            the shapes of the outputs, too.

    Raises:
        TypeError: there is no such column, or `name` is no text.
        ValueError: there is no such group, trait or type to be like.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of an operator is text, not {name!r}")
    table = _BACKWARD if backward else _FORWARD
    if like:
        _check(like, table, "type")
    if columns.get("group"):
        _check(columns["group"], GROUPS, "group")
    if "traits" in columns:
        columns["traits"] = frozenset(columns["traits"])
    for trait in columns.get("traits", ()):
        _check(trait, TRAITS, "trait")
    if callable(flops := columns.get("flops")):
        columns["flops"] = FlopFormula(flops)
    columns = {**table.get(like or name, {}), **columns}
    OperatorRow(**columns)
    table[name] = columns


def _check(name: str, known: Iterable[str], what: str) -> None:
    if name not in known:
        guess = close_matches(name, list(known))
        raise ValueError(f"there is no {what} {name!r} in the table of operators{guess}")


def default_types(tool: str) -> tuple[str, ...]:
    """Return the types that a tool acts on unless told otherwise: of ``quantize``, ``prune:nm``."""
    return tuple(kind for kind, row in _FORWARD.items() if tool in row.get("default_of", ()))


# -- questions to several columns --------------------------------------------------


_PREFIXES = tuple(" ".join(_TABLES["prefixes"].values()).split())
"""Prefixes of further types that count no floating-point operation."""


def is_free(kind: str) -> bool:
    """Return True if a canonical type counts no floating-point operation."""
    if row_of(kind.lstrip("_").removesuffix("_backward")).group:
        return True
    return kind.startswith(_PREFIXES) or kind.endswith(("_dataset", "_summary"))


_PER_ELEMENT = {"elementwise": 1, "reducing": 1, "loss": 1, "normalizing": 5}
"""Operations for each element of the largest tensor, by group. A softmax has five: the maximum, a
difference, an exponential, a sum and a quotient; a norm has about as many."""


def elementwise_formula(kind: str) -> FlopFormula | None:
    """Return the formula of work that counts zero by convention; None for types without any.

    Args:
        kind: canonical type, also that of a backward operator.
    """
    each = _PER_ELEMENT.get(row_of(kind.removesuffix("_backward").lstrip("_")).group)
    if each is None:
        return None
    return FlopFormula(
        lambda call: (
            each * max(math.prod(s) for s in (*call.inputs, *call.outputs) if s is not None)
        )
    )


_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


def is_free_name(name: str) -> bool:
    """Return True if operators of this name in a framework (``StridedSlice``) count no FLOP."""
    return is_free(_WORD.sub("_", re.sub(r"V\d+$", "", name)).lower())


def is_free_backward(kind: str, name: str) -> bool:
    """Return True if a backward operator counts no floating-point operation.

    Args:
        kind: its canonical type.
        name: the framework's name for it.
    """
    # Also of a gradient of a gradient. PyTorch's gradients of a product of vectors scale these.
    of = re.sub("(_backward)+$", "", kind)
    is_elementwise = kind == "accumulate_grad" or name in ("DotBackward0", "VdotBackward0")
    is_named = "::" not in kind and is_free_name(name)  # else the name is a library's
    return is_elementwise or is_free(of) or is_named


def has_activation(kind: str) -> bool:
    """Return True if the outputs of a type are activations."""
    row = row_of(kind)
    return row.group != "view" and "no_activation" not in row.traits


def can_produce(op: OpDescription) -> bool:
    """Return True if an operator can produce a NaN or infinity from finite inputs."""
    row = row_of(op.type, backward=op.direction == "backward")
    if op.direction == "forward" and row.group == "view":
        return "converts" in row.traits
    return "passes_values" not in row.traits and "places_values" not in row.traits


def updates_a_value(context: OpContext, name: str) -> bool:
    """Return True if the operator writes into a parameter or buffer: a batch norm counts batches.

    Args:
        name: the framework's name for the operator.
    """
    if name.startswith(("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")):
        return context.get_parameter_name(0) is not None
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place and bool(context.get_inputs()) and context.get_value(0) is not None
