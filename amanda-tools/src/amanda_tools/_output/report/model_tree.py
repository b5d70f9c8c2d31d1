"""The model of a run as a tree of modules and operators, with figures, for a page.

::

    model = model_of(report.tools, report.modules)
    model.total("flops", "forward")
    model.data()                    # JSON data for model.js

The tree has the figures of all tools. Modules are in the order of their first operator. Consecutive
modules with equal contents whose names differ only in a number, such as repeated blocks, get a
parent of the kind ``repeat``: the browser shows them once, with a count.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from amanda.results import ToolReport
from amanda_tools._output.report.model_ops import (
    FIGURES,
    Figure,
    ModelOp,
    has_last_step,
    list_of,
    mapping_of,
    merge_ops,
    number_of,
    pairs_of,
    shapes_text,
    steps_of,
    tensor_text,
)

MAX_OPS = 50_000
"""Operators of a tree; a page with more of them has no tree."""

_MOST_CHILDREN = 150
"""A node with more children gets a level between: a browser lays out small groups quickly."""

_FEW_OPS = 12
"""Operators in a row that are not folded among many children."""

_FEW_TYPES = 3
"""A module without a type is described by its operators, if they have at most this many types."""

_DIGITS = re.compile(r"\d+")
_LAST_NUMBER = re.compile(r"[0-9]+$")

_OTHER = {
    "setup": "setup: building and initialising",
    "optimizer": "optimizer",
    "other": "outside of the model",
}
"""Phases beside the model's, in the order of the page, and what their nodes are called."""


@attrs.frozen(kw_only=True)
class ModelView:
    """The model of a run.

    Attributes:
        names: names of the models, in the order of the run.
        steps: number of steps; 0 if unknown, and figures are those of the whole run.
        of: the span of figures that add up over executions, as text: ``one step, the last of 3``;
            "" if there are none.
        device: device of the tensors; "" if unknown.
        inputs: shapes of the first inputs of the model; "" if unknown.
        figures: the figures that operators have.
        nodes: all nodes, parents before their children.
        edges: pairs of numbers of nodes.
    """

    names: Sequence[str]
    steps: int
    of: str
    device: str
    inputs: str
    figures: Sequence[Figure]
    nodes: Sequence[TreeNode]
    edges: Sequence[tuple[int, int]]

    def data(self) -> dict[str, Any]:
        """Return the JSON data for the browser."""
        return {
            "figures": [
                {"name": f.name, "unit": f.unit, "over": bool(f.over), "tool": f.tool}
                for f in self.figures
            ],
            "steps": self.steps,
            "nodes": [self._row(node) for node in self.nodes],
            "edges": self.edges,
        }

    def _row(self, node: TreeNode) -> list[Any]:
        """Return parent, kind, name, type, shapes, figures forward and backward, and details."""
        figures = [self._values(op.values) for op in node.ops]
        backward = [[op.id, op.type, *values] for op, values in zip(node.ops, figures, strict=True)]
        row = [node.parent, node.kind, node.name, node.type, node.shape]
        if node.op is None:
            values = [self._values(node.values)] if node.values else []
            return [*row, node.details, *values] if node.details else row
        own = self._values(node.op.values)
        return [*row, {"id": node.op.id, **node.details}, own, backward]

    def _values(self, values: Mapping[str, float]) -> list[Any]:
        return [self._value(values, figure) for figure in self.figures]

    def _value(self, values: Mapping[str, float], figure: Figure) -> Any:
        value = values.get(figure.key)
        if value is None:
            return None
        if figure.over:
            return [value, values.get(figure.over, 0.0)]
        return float(f"{value:.6g}") if value % 1 else int(value)

    def total(self, key: str, direction: str) -> float | None:
        """Return the sum of a figure over the model's operators; None if no operator has it."""
        found: list[float] = []
        for node in self.nodes[1:]:
            if node.kind == "phase":
                # The phases beside the model come after it.
                break
            ops = [node.op, *node.ops] if node.op is not None else []
            found += [
                op.values[key] for op in ops if key in op.values and op.direction == direction
            ]
            if key in node.values and direction == "forward":
                found.append(node.values[key])
        return sum(found) if found else None


@attrs.define
class TreeNode:
    """A node of the tree.

    Attributes:
        parent: number of its parent; -1 for the root.
        kind: ``root``, ``module``, ``op``, ``repeat`` (equal modules in a row), ``part`` (some of
            many children), ``phase`` (what does not belong to the model).
        name, type, shape: for people.
        op: the operator.
        ops: backward operators of the operator.
        details: further lines by heading.
        values: of a module, figures by key that its operators do not have, or have too often.
        children: nodes in order.
    """

    parent: int
    kind: str
    name: str
    type: str = ""
    shape: str = ""
    op: ModelOp | None = None
    ops: list[ModelOp] = attrs.field(factory=list)
    details: dict[str, str] = attrs.field(factory=dict)
    values: dict[str, float] = attrs.field(factory=dict)
    children: list[TreeNode] = attrs.field(factory=list)


_OTHER_RUN = " B"
"""Added to the keys of figures of a second run."""


def model_of(
    tools: Sequence[ToolReport],
    modules: Sequence[Mapping[str, Any]] = (),
    other: Sequence[ToolReport] = (),
) -> ModelView | None:
    """Create the tree of a run; None if no tool has rows of operators, or if there are too many.

    Args:
        modules: as of :class:`~amanda.results.RunReport`.
        other: the results of a second run, whose figures stand beside those of the first.
    """
    ops, givers = merge_ops(tools)
    other_givers = _add_run(ops, other)
    if not ops or len(ops) > MAX_OPS:
        return None
    pairs = pairs_of([*tools, *other])
    root, at = _tree(ops)
    both = (*other, *tools)
    of_tools = [row for tool in both for row in list_of(mapping_of(tool.result).get("modules"))]
    known = _modules_by_path([*of_tools, *modules])
    _note(root, known)
    figures = list(_figures(root, tools, ops, givers))
    if other:
        figures = _side_by_side(figures, _figures(root, other, ops, other_givers, _OTHER_RUN))
    _divide(root)
    nodes = list(_numbered(root))
    numbers = {id(node): number for number, node in enumerate(nodes)}
    shown = {op_id: numbers[id(node)] for op_id, node in at.items() if ops[op_id].is_model}
    first = [op for op in ops.values() if op.is_model]
    names = _names(root)
    return ModelView(
        names=names,
        steps=steps_of(tools),
        of=_span_of(tools, other) if any(figure.per_step for figure in figures) else "",
        device=", ".join(dict.fromkeys(op.device for op in first if op.device)),
        inputs=_inputs(known, names),
        figures=figures,
        nodes=nodes,
        edges=[(shown[a], shown[b]) for a, b in pairs if a in shown and b in shown],
    )


def _add_run(ops: dict[str, ModelOp], other: Sequence[ToolReport]) -> Mapping[str, str]:
    """Add the figures of a second run; return the tool that each is from."""
    found, givers = merge_ops(other)
    for op in found.values():
        values = ops.setdefault(op.id, attrs.evolve(op, values={})).values
        values.update({f"{key}{_OTHER_RUN}": value for key, value in op.values.items()})
    return givers


def _side_by_side(ours: Iterable[Figure], theirs: Iterable[Figure]) -> list[Figure]:
    """Return the figures of two runs, the same ones beside each other."""
    named = [attrs.evolve(figure, name=f"{figure.name} A") for figure in ours]
    named += [attrs.evolve(figure, name=f"{figure.name} B") for figure in theirs]
    order = [figure.key for figure in FIGURES]
    return sorted(named, key=lambda figure: order.index(figure.key.removesuffix(_OTHER_RUN)))


_NOT_ZERO = ("not_finite", "saved_bytes")
"""Figures that are left out if all are zero: the bytes that TensorFlow saves cannot be seen."""


_OF_MODULES = {"params": "parameters", "flops": "flops", "activation_bytes": "activation_bytes"}
"""Keys of figures, and those of the same figures in the rows of modules."""


def _figures(
    root: TreeNode,
    tools: Sequence[ToolReport],
    ops: Mapping[str, ModelOp],
    givers: Mapping[str, str],
    run: str = "",
) -> Iterator[Figure]:
    """Yield the figures of the tree, after adding those that only the rows of modules have.

    Args:
        run: the end of the keys of a second run.
    """
    rows = {tool.name: list_of(mapping_of(tool.result).get("modules")) for tool in tools}
    known = _modules_by_path(itertools.chain.from_iterable(rows.values()))
    told = {
        # Parameters that several operators read count once in rows of modules.
        key + run: name for key, name in _OF_MODULES.items() if key == "params" or key not in givers
        if any(number_of(row.get(name)) is not None for row in known.values())
    }  # fmt: skip
    _add_sums(root, known, told)
    for figure in FIGURES:
        key = figure.key + run
        if key in told:
            # Operations are those of one forward pass, however many a step has.
            name = "forward FLOPs" if figure.key == "flops" else figure.name
            tool = next(name for name, found in rows.items() if found)
            yield attrs.evolve(figure, key=key, name=name, per_step=False, tool=tool)
        elif figure.key in givers:
            has_some = any(op.values.get(key) for op in ops.values())
            if has_some or figure.key not in _NOT_ZERO:
                over = figure.over and figure.over + run
                yield attrs.evolve(figure, key=key, over=over, tool=givers[figure.key])


def _add_sums(
    node: TreeNode, known: Mapping[str, Mapping[str, Any]], keys: Mapping[str, str]
) -> dict[str, float]:
    """Give modules what their rows have more than all below them; return the sums of a node.

    Args:
        keys: of figures, and the keys of the rows.
    """
    parts = [_add_sums(child, known, keys) for child in node.children]
    parts += [op.values for op in (node.op, *node.ops) if op is not None]
    sums = {key: sum(part.get(key, 0.0) for part in parts) for key in keys}
    row = known.get(node.details["path"], {}) if node.kind == "module" else {}
    for key, of_row in keys.items():
        if (whole := number_of(row.get(of_row))) is not None:
            node.values[key] = whole - sums[key]
            sums[key] = whole
    return sums


def _names(root: TreeNode) -> list[str]:
    """Return the names of the models: of those with parameters, if there are any, since a loss and
    a loop of training are modules as well."""
    tops = [child for child in root.children if child.kind == "module"]
    trained = [child for child in tops if _has_parameters(child)]
    return list(dict.fromkeys(child.name for child in trained or tops))


def _span_of(tools: Sequence[ToolReport], other: Sequence[ToolReport] = ()) -> str:
    """Return the span of figures that add up over executions, as text."""
    if other:
        return " and ".join(dict.fromkeys((f"{_span_of(tools)} (A)", f"{_span_of(other)} (B)")))
    steps = steps_of(tools)
    if not steps:
        return "the whole run"
    if has_last_step(tools):
        return f"one step, the last of {steps:,}" if steps > 1 else "the only step"
    return f"one step, the mean of {steps:,}" if steps > 1 else "the only step"


def _inputs(known: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the shape of the first input of each model, with its name if there are several."""
    found = {name: _first_text(known.get(name, {}).get("inputs")) for name in names}
    shapes = {name: text for name, text in found.items() if text}
    if len(shapes) > 1:
        return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return next(iter(shapes.values()), "")


def _has_parameters(node: TreeNode) -> bool:
    op = node.op
    own = op is not None and (op.values.get("params", 0) > 0 or op.type == "read_variable")
    return own or node.values.get("params", 0) > 0 or any(map(_has_parameters, node.children))


def _tree(ops: Mapping[str, ModelOp]) -> tuple[TreeNode, dict[str, TreeNode]]:
    """Return the root, and the node of each operator by its id."""
    root = TreeNode(-1, "root", "run")
    modules: dict[tuple[str, ...], TreeNode] = {(): root}
    at: dict[str, TreeNode] = {}
    aside: dict[str, dict[str, TreeNode]] = {}
    for op in ops.values():
        if op.forward in at:
            at[op.forward].ops.append(op)
            at[op.id] = at[op.forward]
            continue
        parent = _module(modules, op.path) if op.is_model else _aside(aside, op)
        at[op.id] = TreeNode(-1, "op", op.type, op.type, op.outputs, op, details=dict(op.details))
        parent.children.append(at[op.id])
    for phase in sorted(aside, key=lambda name: [*_OTHER, name].index(name)):
        node = TreeNode(-1, "phase", _OTHER.get(phase, phase), details={"phase": phase})
        node.children = list(aside[phase].values())
        root.children.append(node)
    return root, at


def _module(modules: dict[tuple[str, ...], TreeNode], path: tuple[str, ...]) -> TreeNode:
    if path not in modules:
        node = TreeNode(-1, "module", path[-1], details={"path": ".".join(path)})
        _module(modules, path[:-1]).children.append(node)
        modules[path] = node
    return modules[path]


def _aside(aside: dict[str, dict[str, TreeNode]], op: ModelOp) -> TreeNode:
    """Return the node of operators of this type in a phase beside the model's."""
    part = TreeNode(-1, "part", op.type, op.type)
    return aside.setdefault(op.phase, {}).setdefault(op.type, part)


def _modules_by_path(rows: Iterable[Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rows of modules by their paths, the last of each."""
    known: dict[str, Mapping[str, Any]] = {}
    for row in map(mapping_of, rows):
        if isinstance(row.get("path"), str):
            # As in the tree, whose separator is one for all frameworks.
            path = row["path"].replace("/", ".")
            # Of two models, both have a module of this path.
            known[path] = known[f"{row.get('model', '')}.{path}".strip(".")] = row
    return known


def _note(node: TreeNode, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Set types and shapes of modules; the last operator of a module may give something else than
    the module."""
    for child in node.children:
        _note(child, known)
    if node.kind != "module":
        return
    path = node.details["path"]
    row = known.get(path) or known.get(path.partition(".")[2] or path) or {}
    node.type = str(row.get("type") or _types(node))
    node.shape = _first_text(row.get("outputs")) or tensor_text({"shape": row.get("output")})
    if given := shapes_text(row.get("inputs")):
        node.details["inputs"] = given


def _first_text(tensors: Any) -> str:
    """Format the first of several tensors; "" without one."""
    return tensor_text(mapping_of(next(iter(list_of(tensors)), None)))


def _types(node: TreeNode) -> str:
    """Return the types of the operators of a module that holds nothing else."""
    if any(child.kind != "op" for child in node.children):
        return ""
    names = list(dict.fromkeys(child.name for child in node.children))
    return ", ".join(names) if len(names) <= _FEW_TYPES else f"{len(node.children)} operators"


def _divide(root: TreeNode) -> None:
    """Put nodes of repeated modules, and of parts of many children, between parents and children,
    from the leaves up."""
    signatures: dict[int, int] = {}
    known: dict[Any, int] = {}

    def visit(node: TreeNode) -> None:
        for child in node.children:
            visit(child)
        shape = node.shape if node.op is not None else ""
        content = tuple(signatures[id(child)] for child in node.children)
        names = tuple(_DIGITS.sub("#", child.name) for child in node.children)
        part = None if node.op is None else node.op.values.get("parts_before")
        signature = (node.kind, node.type, shape, len(node.ops), part, names, content)
        signatures[id(node)] = known.setdefault(signature, len(known))
        if node.kind in ("root", "module"):
            node.children = list(_repeats(node.children, signatures))
        if len(node.children) > _MOST_CHILDREN:
            node.children = list(_parts_of_ops(node.children))

    visit(root)


def _repeats(children: Sequence[TreeNode], signatures: Mapping[int, int]) -> Iterator[TreeNode]:
    at = 0
    while at < len(children):
        row = [children[at]]
        while at + len(row) < len(children) and _is_like(row[0], children[at + len(row)]):
            if signatures[id(row[0])] != signatures[id(children[at + len(row)])]:
                break
            row.append(children[at + len(row)])
        at += len(row)
        if len(row) == 1:
            yield row[0]
        else:
            name = _range(row[0].name, row[-1].name)
            yield TreeNode(-1, "repeat", name, row[0].type, row[-1].shape, children=row)


def _range(first: str, last: str) -> str:
    """Name modules that differ in a number: ``layer_0 … 11``, ``a0_norm … a3_norm``."""
    number = _LAST_NUMBER.search(last)
    is_last = number is not None and _LAST_NUMBER.sub("", first) == last[: number.start()]
    return f"{first} … {number[0] if number and is_last else last}"


def _is_like(one: TreeNode, other: TreeNode) -> bool:
    """True if two nodes are modules whose names differ only in a number."""
    name = _DIGITS.sub("#", one.name)
    return (
        one.kind == other.kind == "module" and "#" in name and name == _DIGITS.sub("#", other.name)
    )


def _parts_of_ops(children: Sequence[TreeNode]) -> Iterator[TreeNode]:
    """Yield children with parts for operators in a row, or for all if there are many others."""
    if sum(child.kind != "op" for child in children) > _MOST_CHILDREN:
        yield from _parts(children)
        return
    for is_op, group in itertools.groupby(children, lambda child: child.kind == "op"):
        row = list(group)
        if is_op and len(row) > _FEW_OPS:
            yield from _parts(row)
        else:
            yield from row


def _parts(children: Sequence[TreeNode]) -> Iterator[TreeNode]:
    size = _MOST_CHILDREN
    while len(children) > size * _MOST_CHILDREN:
        size *= _MOST_CHILDREN
    for at in range(0, len(children), size):
        part = list(children[at : at + size])
        name = f"operators {at + 1:,} to {at + len(part):,} of {len(children):,}"
        kept = list(_parts(part)) if len(part) > _MOST_CHILDREN else part
        yield TreeNode(-1, "part", name, "", part[-1].shape, children=kept)


def _numbered(root: TreeNode) -> Iterator[TreeNode]:
    """Yield nodes, parents first, and set the numbers of their parents."""
    number = -1

    def visit(node: TreeNode, parent: int) -> Iterator[TreeNode]:
        nonlocal number
        number += 1
        node.parent, own = parent, number
        yield node
        for child in node.children:
            yield from visit(child, own)

    return visit(root, -1)
