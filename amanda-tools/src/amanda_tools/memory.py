"""``memory``: who holds the memory at its peak, and where an operator did not end."""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda import OpContext
from amanda.interface.points import PointContext
from amanda.python.references import Reference, nothing
from amanda.results import Chart, Table
from amanda.tools.canonical import total
from amanda.tools.description import OpDescription, describe, place
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.parameters import is_opaque
from amanda_tools._output.ranked_charts import lines_over_steps
from amanda_tools._output.units import format_short, share_text
from amanda_tools._timelines.memory import allocator_peaks
from amanda_tools._values.holdings import Holding, Ledger
from amanda_tools._values.shapes import HANDLES, byte_size, total_bytes

KINDS = (
    *("parameters", "gradients", "optimizer state", "activations", "temporaries", "buffers"),
    "other",
)
"""What memory is held as. Temporaries are gradients of activations, and what an optimizer frees
again; other is data, and what is computed outside of the model."""

_MADE = {"forward": "activations", "backward": "temporaries", "optimizer": "temporaries"}
"""By phase, the kind of what an operator makes; ``other`` in other phases."""

_GIVEN = {"backward": "temporaries", "optimizer": "optimizer state"}
"""The same of what an operator is given that none has made."""


_KEPT = {"forward": "buffers", "optimizer": "optimizer state"}
"""The same of variables, parameters and buffers without a name."""


@attrs.frozen(kw_only=True)
class MemoryOptions:
    """The options of ``memory``.

    Attributes:
        csv: also write the rows of all operators as a table.
    """

    csv: bool = True


@attrs.define(eq=False)
class _Watch:
    """The routines around one operator.

    Attributes:
        names: paths of the parameters among its inputs, or whose gradients it computes.
        accumulates: path of the parameter whose gradient it accumulates.
        is_variable: of each input, whether it is read from a variable.
    """

    tool: MemoryTool
    op: OpDescription
    names: Mapping[int, str]
    variables: Sequence[int] = ()
    accumulates: str = ""

    def before(self, *inputs: Any) -> None:
        self.tool.begin(self.op)
        kind = _GIVEN.get(self.op.phase, "other")
        for i, tensor in enumerate(inputs):
            if tensor is not None and i not in self.variables:
                self.tool.ledger.note(tensor, self.op, kind)

    def after(self, *outputs: Any) -> None:
        self.tool.end(self)
        if self.op.type == "read_variable":
            return
        for i, tensor in enumerate(outputs):
            if tensor is not None:
                is_gradient = self.op.forward and self.tool.is_gradient(self.names.get(i, ""))
                self.tool.note_made(tensor, self.op, "gradients" if is_gradient else "")


class MemoryTool(PrintingTool[MemoryOptions]):
    """Shows what holds the memory at its peak, and at an error.

    Example: ``amanda run -t memory -o out -- train.py``

    Attributes:
        ledger: the memory of the tensors that operators were given or have made.
    """

    name = "memory"
    figures = ("peak_bytes",)
    Options = MemoryOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ledger = Ledger()
        self._ops: dict[str, OpDescription] = {}
        # By path, the parameters that have an attribute `grad`.
        self._leaves: dict[str, Any] = {}
        # By thread: operators that have begun and not ended, with the moment.
        self._begun: dict[int, list[tuple[OpDescription, int, int, int]]] = {}
        self._of_step: list[Holding] = []
        self._in_graphs: dict[str, int | None] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_backward, backward=True)
        self.add_inst_for_op(self._analyse_outputs, require_outputs=True)
        self.add_inst_for_iteration(self._begin_iteration)
        self.add_inst_for_iteration(self._end_iteration, end=True)

    # -- analyses ---------------------------------------------------------

    def _analyse(self, context: OpContext) -> None:
        op = self._ops[context.get_op_id()] = describe(context)
        variables = []
        for i, tensor in enumerate(context.get_inputs()):
            if tensor is None:
                continue
            name = context.get_parameter_name(i) or ""
            kind = "parameters" if name else _KEPT.get(op.phase, "other")
            if variable := context.get_variable(i):
                variables.append(i)
                if (value := context.get_value(i)) is not None:
                    size = byte_size(value) or 0
                    self.ledger.note_variable(variable.key, size, op).claim(op, kind, name)
            elif context.runs_at_once and (value := context.get_value(i)) is not None:
                if held := self.ledger.note(value, op, "other"):
                    held.claim(op, kind, name)
                if name and getattr(value, "is_leaf", False):
                    self._leaves[name] = Reference(value, nothing)
            elif is_opaque(tensor):
                variables.append(i)
        if context.runs_at_once:
            watch = _Watch(self, op, {}, variables)
            context.insert_before_op(watch.before)
            context.insert_after_op(watch.after)

    def _analyse_outputs(self, context: OpContext) -> None:
        if not context.runs_at_once and context.get_phase() not in ("setup", "other"):
            op, outputs = describe(context), context.get_tensor_specs().outputs or ()
            parts = [one for one in outputs if one is not None and one.dtype not in HANDLES]
            # Lists grow in loops.
            size = None if "TensorList" in op.name else total_bytes(parts)
            self._in_graphs[op.id] = size

    def _analyse_backward(self, context: OpContext) -> None:
        op = self._ops[str(context.get_backward_op_id())] = describe(context)
        if not context.runs_at_once:
            return
        count = len(context.get_grad_input_names())
        names = {i: context.get_parameter_name(i) or "" for i in range(max(1, count))}
        watch = _Watch(self, op, names, (), "" if count else names[0])
        context.insert_before_backward_op(watch.before)
        context.insert_after_backward_op(watch.after)

    # -- routines ---------------------------------------------------------

    def begin(self, op: OpDescription) -> None:
        """Note that an operator begins."""
        ledger = self.ledger
        ledger.settle()
        begun = self._begun.setdefault(threading.get_ident(), [])
        begun.append((op, ledger.now, ledger.bytes, ledger.step))

    def end(self, watch: _Watch) -> None:
        """Note that an operator has ended; those within it that have raised have, too."""
        begun = self._begun.get(threading.get_ident(), [])
        for i in range(len(begun) - 1, -1, -1):
            if begun[i][0] is watch.op:
                del begun[i:]
                break
        leaf = self._leaves.get(watch.accumulates)
        if leaf and (gradient := getattr(leaf(), "grad", None)) is not None:
            self.note_made(gradient, watch.op, "gradients", watch.accumulates)

    def is_gradient(self, name: str) -> bool:
        """True if what is computed for a parameter is its gradient; PyTorch accumulates it into
        another one."""
        return bool(name) and name not in self._leaves

    def note_made(self, tensor: Any, op: OpDescription, kind: str, name: str = "") -> None:
        """Note what an operator has made.

        Args:
            kind: its kind, if it is known.
        """
        now = self.ledger.now
        made = kind or _MADE.get(op.phase, "other")
        if (found := self.ledger.note(tensor, op, made, name)) is None:
            return
        found.claim(op, kind, name)
        if op.phase == "optimizer" and self.ledger.now > now:
            self._of_step.append(found)

    def _begin_iteration(self, point: PointContext) -> None:
        self.ledger.step, self.ledger.step_peak = point.iteration, self.ledger.bytes

    def _end_iteration(self, point: PointContext) -> None:
        self.ledger.settle()
        for each in self._of_step:
            if each.died == math.inf:
                each.kind = "optimizer state"
        self._of_step.clear()
        self.ledger.drop([moment for of in self._begun.values() for _, moment, *_ in of])

    # -- result -----------------------------------------------------------

    def momentary_figures(self) -> dict[str, float]:
        """``held_bytes`` at the end of a step, and ``peak_bytes`` within it."""
        return {"held_bytes": self.ledger.bytes, "peak_bytes": self.ledger.step_peak}

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator whose memory is held at the peak.

        ``peak_bytes``, of what it has made or was given first, and ``kinds``, those by kind;
        ``parameters``, the paths of those among them.
        """
        rows: dict[str, dict[str, Any]] = {}
        for held in self.ledger.held(self.ledger.peak_at):
            row = rows.setdefault(
                held.op.id, {**held.op.row(), "peak_bytes": 0, "kinds": {}, "parameters": []}
            )
            row["peak_bytes"] += held.bytes
            row["kinds"][held.kind] = row["kinds"].get(held.kind, 0) + held.bytes
            row["parameters"] += [held.name] if held.kind == "parameters" else []
        return sorted(rows.values(), key=lambda row: -row["peak_bytes"])

    def summary(self) -> dict[str, Any]:
        """``peak_bytes``, in ``peak_step``, ``by_kind`` and ``by_module``: of tensors that
        operators were given or have made, a lower bound; ``unfinished``, the last operator that did
        not end, with what was held when it began, or None; ``graph_bytes``, an upper bound of what
        TensorFlow's graphs hold beside variables, None if unknown; ``unknown``, looks at tensors
        whose memory cannot be seen; ``allocators``, the peaks of devices as the framework tells
        them."""
        ledger = self.ledger
        return {
            "peak_bytes": ledger.peak,
            "peak_step": ledger.peak_step,
            **_parts(ledger.held(ledger.peak_at)),
            "unfinished": self._unfinished(),
            "graph_bytes": total(self._in_graphs.values()),
            "unknown": ledger.unknown,
            "allocators": allocator_peaks(),
        }

    def _unfinished(self) -> dict[str, Any] | None:
        """The last operator that has begun and not ended: the error was raised in it."""
        found = [of[-1] for of in self._begun.values() if of]
        if not found:
            return None
        op, moment, size, step = max(found, key=lambda each: each[1])
        about = {"id": op.id, "module": op.place, "step": step, "bytes": size}
        return {**about, **_parts(self.ledger.held(moment))}

    # -- for people -------------------------------------------------------

    def tables(self) -> Iterable[Table]:
        """What is held at the peak by kind, by module and by operator; the same at an error."""
        found = self.summary()
        peak, step = format_short(found["peak_bytes"], "B"), found["peak_step"]
        title = f"memory: at least {peak} in tensors at the peak, in step {step}"
        yield from _tables(title, found, "memory: by module")
        lines = [
            (row["id"], row["type"], "+".join(row["kinds"]), format_short(row["peak_bytes"], "B"))
            for row in self.op_rows()
        ]
        yield Table("memory: by operator", ("operator", "type", "kinds", "bytes"), lines)
        if error := found["unfinished"]:
            size = format_short(error["bytes"], "B")
            title = f"memory: {error['id']} did not end in step {error['step']}; {size} were held"
            yield from _tables(title, error, "memory: the same by module")
        if self._in_graphs:
            most = found["graph_bytes"]
            text = "an unknown size" if most is None else format_short(most, "B")
            yield Table(f"memory: graphs hold at most {text} more, all of their results", (), ())
        if peaks := found["allocators"]:
            title = "memory: peaks of the framework's allocators"
            devices = [(name, format_short(of["peak"], "B")) for name, of in peaks.items()]
            yield Table(title, ("device", "peak"), devices)

    def charts(self) -> Iterable[Chart]:
        """The memory of each step."""
        both = {"peak": "peak_bytes", "at its end": "held_bytes"}
        yield from lines_over_steps(
            "memory of tensors per step", self.figures_of_steps(), both, "B"
        )


def _parts(holdings: Iterable[Holding]) -> dict[str, Any]:
    """The bytes of holdings by kind and by module, the most first."""
    kinds, modules = collections.Counter[str](), collections.Counter[str]()
    for held in holdings:
        kinds[held.kind] += held.bytes
        modules[place(held.op.forward or held.op.id, held.op.module)] += held.bytes
    return {
        "by_kind": {kind: kinds[kind] for kind in KINDS if kinds[kind]},
        "by_module": dict(modules.most_common()),
    }


def _tables(by_kind: str, found: Mapping[str, Any], by_module: str) -> Iterable[Table]:
    for key, title in (("by_kind", by_kind), ("by_module", by_module)):
        total = sum(found[key].values())
        lines = [
            (name, format_short(size, "B"), share_text(size, total))
            for name, size in found[key].items()
        ]
        yield Table(title, (key.removeprefix("by_"), "bytes", "share"), lines)
