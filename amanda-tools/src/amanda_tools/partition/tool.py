"""The tool ``partition``."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import attrs

from amanda import OpContext
from amanda.errors import UnsupportedProgramError, close_matches
from amanda.interface.points import PointContext
from amanda.results import Table, plural
from amanda.tools.graph_tracing import GraphTracingTool, TracedTensor
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.call_shapes import plain
from amanda_tools._operators.flop_registry import formula_in
from amanda_tools._operators.model_phases import MODEL
from amanda_tools._operators.op_table import is_free
from amanda_tools._operators.parameters import Parameters, UsedParameter
from amanda_tools._operators.signature import CallShapes, OpSignature
from amanda_tools._output.units import format_short, share_text
from amanda_tools._values.shapes import byte_size
from amanda_tools.export import check_target, outside_of_scopes
from amanda_tools.export.model_of_run import ModelOfRun
from amanda_tools.partition.cut import FIRST, LAST, CutOp, CutTensor, Problem
from amanda_tools.partition.options import PartitionOptions


@attrs.frozen
class _Facts:
    """What is known of an operator.

    Attributes:
        number: the pass of the outermost module in which it first ran; 0 outside of modules.
        flops: FLOPs of an execution; None if they are not known.
        parameters: the parameters that it reads.
    """

    number: int
    flops: int | None
    parameters: Sequence[UsedParameter]


@attrs.frozen
class Plan:
    """A cut.

    Attributes:
        part_of: the part of each operator by id, from 1.
        sent: rows of the tensors that go from part to part: ``op`` gives it, "" for an input of the
            model; ``from`` and ``to``, the parts that give and read it; ``shape``, ``bytes``.
        least: bytes that any cut has at least.
        refusal: why there is none; "" if there is.
    """

    part_of: Mapping[str, int]
    sent: Sequence[dict[str, Any]]
    least: int
    refusal: str = ""


class PartitionTool(PrintingTool[PartitionOptions]):
    """Cuts a model into parts that run one after the other, and send few bytes to the next.

    The model is the call of an outermost module with the most operators.

    Example: ``amanda run -t partition:outside=head,flops=0.2- -o out -- infer.py``
    """

    name = "partition"
    Options = PartitionOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tracing = GraphTracingTool(follow=False)
        self._parameters = Parameters()
        self._facts: dict[str, _Facts] = {}
        self._passes = self._number = 0
        self._planned: tuple[int, Plan] | None = None
        self._models = ModelOfRun()
        # Absolute: the program may change the current folder.
        self._folder = Path(self.options.export).absolute() if self.options.export else None
        if self._folder is not None:
            check_target(self._folder.with_suffix(f".{self.options.format}"))
            if self._folder.is_file():
                raise NotADirectoryError(f"{self._folder} is a file")
            self.add_inst_for_pass(self._models.note)
        self.depends_on(self._tracing)
        self.add_inst_for_pass(self._begin)
        self.add_inst_for_pass(self._end, end=True)
        self.add_inst_for_op(self._analyse, require_outputs=True)

    def _begin(self, _: PointContext) -> None:
        self._passes += 1
        self._number = self._passes

    def _end(self, _: PointContext) -> None:
        self._number = 0

    def _analyse(self, context: OpContext) -> None:
        op = self._tracing.graph.description(context.get_op_id())
        if op.id in self._facts or op.phase not in MODEL:
            return
        formula = formula_in(context, op.type, op.name)
        flops = 0 if is_free(op.type) else None
        if formula is not None:
            signature = OpSignature.of(context, op.type, op.attributes)
            inputs, outputs = op.tensors.inputs or (), op.tensors.outputs or ()
            shapes = [[spec and spec.shape for spec in specs] for specs in (inputs, outputs)]
            try:
                flops = formula.flops(CallShapes(signature, *map(plain, shapes)))
            except LookupError:
                flops = None
        self._facts[op.id] = _Facts(self._number, flops, self._parameters.used_by(context))

    # -- the cut ------------------------------------------------------------

    def plan(self) -> Plan:
        """Cut the model."""
        if self._planned is None or self._planned[0] != len(self._facts):
            try:
                found = self._cut()
            except UnsupportedProgramError as refusal:
                found = Plan({}, (), 0, str(refusal))
            self._planned = len(self._facts), found
        return self._planned[1]

    def _cut(self) -> Plan:
        numbers = collections.Counter(facts.number for facts in self._facts.values())
        if not numbers:
            raise UnsupportedProgramError("partition: no forward pass of a model has been seen")
        number = max(numbers, key=numbers.__getitem__)
        ids = [op_id for op_id, facts in self._facts.items() if facts.number == number]
        places = self._places(ids)
        ops = [
            CutOp(i, self._facts[i].flops or 0, frozenset(self._facts[i].parameters), places[i])
            for i in ids
        ]
        at = {op_id: number for number, op_id in enumerate(ids)}
        readers: dict[TracedTensor, list[int]] = {}
        for op_id in ids:
            for tensor in self._tracing.graph.op(op_id).inputs:
                if tensor is not None and not tensor.is_parameter:
                    readers.setdefault(tensor, []).append(at[op_id])
        specs = {tensor: self._spec(tensor, ids[own[0]]) for tensor, own in readers.items()}
        tensors = [
            CutTensor(byte_size(specs[tensor]) or 0, at.get(tensor.producer, -1), own)
            for tensor, own in readers.items()
        ]
        flops = sum(op.flops for op in ops)
        memory = _parameter_bytes(parameter for op in ops for parameter in op.parameters)
        parts, least = Problem(ops, tensors, *self.options.ranges(flops, memory)).cut()
        sent = []
        for tensor, of in zip(readers, tensors, strict=True):
            begin = parts[of.maker] if of.maker >= 0 else 0
            if behind := sorted({parts[reader] + 1 for reader in of.readers} - {begin + 1}):
                op = tensor.producer if of.maker >= 0 else ""
                name = f"{op}[{tensor.position}]" if op else f"input of {ids[of.readers[0]]}"
                ends = {"op": op, "tensor": name, "from": begin + 1, "to": behind}
                sent.append({**ends, **specs[tensor].row(), "bytes": of.size})
        return Plan({op_id: parts[at[op_id]] + 1 for op_id in ids}, sent, least)

    def _places(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the places of operators that the options ask for.

        Raises:
            UnsupportedProgramError: an option names nothing, or both name an operator.
        """
        modules = {op_id: self._tracing.graph.op(op_id).module for op_id in ids}
        found = dict.fromkeys(ids, 0)
        for option, patterns, own in (
            ("inside", self.options.inside, FIRST),
            ("outside", self.options.outside, LAST),
        ):
            for pattern in patterns:
                named = [op_id for op_id in ids if _is_at(pattern, op_id, modules[op_id])]
                if not named:
                    guess = close_matches(pattern, [*dict.fromkeys(modules.values()), *ids])
                    raise UnsupportedProgramError(
                        f"partition: {option}={pattern} is no module and no op of the model{guess}"
                    )
                for op_id in named:
                    if found[op_id] == -own:
                        raise UnsupportedProgramError(
                            f"partition: op {op_id} is named by inside and by outside"
                        )
                    found[op_id] = own
        return found

    def _spec(self, tensor: TracedTensor, reader: str) -> Any:
        """Return the description of a tensor.

        Args:
            reader: id of an operator that reads it.

        Raises:
            UnsupportedProgramError: its size is not known.
        """
        graph = self._tracing.graph
        if tensor.producer:
            spec = (graph.description(tensor.producer).tensors.outputs or ())[tensor.position]
        else:
            position = graph.op(reader).inputs.index(tensor)
            spec = (graph.description(reader).tensors.inputs or ())[position]
        if byte_size(spec) is None:
            raise UnsupportedProgramError(
                f"partition: the size of a tensor that op {reader} reads is not known; run the "
                "model with inputs of fixed shapes"
            )
        return spec

    def export_parts(
        self,
        model: Any,
        example_inputs: Any,
        folder: str | os.PathLike[str],
        *,
        format: Literal["pt2", "onnx"] = "pt2",
    ) -> list[Path]:
        """Write the parts of a PyTorch model, each of which runs on its own.

        The model is exported in evaluation mode, and is not changed. The files are read again, and
        must give the outputs of the whole exported model: the same bits from ``.pt2``, within 2e-6
        of their largest value from ``.onnx``.

        Args:
            model: the module that the tool has seen.
            example_inputs: a tuple of arguments, a dictionary of keyword arguments, or a tensor.
            folder: gets ``part1.pt2`` and so on, and ``parts.json``: the names of the model's
                inputs and outputs, and by part those of its own, with shapes, types and bytes.
            format: of the files.

        Returns:
            The paths of the files.

        Raises:
            UnsupportedProgramError: there is no cut, the exporter refuses the model, it has
                changed, or the parts compute another result.
            OSError: the files cannot be written; nothing is left of them.
        """
        from amanda_tools.partition.parts import PartsExporter

        part_of = self._checked().part_of
        return outside_of_scopes(
            lambda: PartsExporter(model, example_inputs).write_parts(
                Path(folder), f".{format}", part_of
            )
        )

    def finish_run(self, _: Any) -> None:
        """Export the model that the program has run, if an option asks for it.

        Raises:
            UnsupportedProgramError, OSError: as of :meth:`export_parts`.
        """
        plan = self._checked()
        if self._folder is not None:
            model, inputs = self._models.of(self.name, plan.part_of)
            self.export_parts(model, inputs, self._folder, format=self.options.format)

    def _checked(self) -> Plan:
        if (plan := self.plan()).refusal:
            raise UnsupportedProgramError(plan.refusal)
        return plan

    # -- result -----------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Return the common form, with ``parts``, ``tensors``, those on the cuts, and
        ``shared_parameters``, those that several parts read."""
        return {
            **super().result(),
            "parts": self._parts(),
            "tensors": self.plan().sent,
            "shared_parameters": self._shared(),
        }

    def _parts(self) -> list[dict[str, Any]]:
        plan, found = self.plan(), []
        for part in sorted({*plan.part_of.values()}):
            ids = [op_id for op_id, own in plan.part_of.items() if own == part]
            of = [self._facts[op_id] for op_id in ids]
            found.append({
                "part": part,
                "ops": len(ids),
                "first": ids[0],
                "last": ids[-1],
                "flops": sum(facts.flops or 0 for facts in of),
                "parameter_bytes": _parameter_bytes(p for facts in of for p in facts.parameters),
                "sent_bytes": sum(row["bytes"] for row in plan.sent if row["from"] == part),
            })  # fmt: skip
        return found

    def _shared(self) -> list[dict[str, Any]]:
        parts: dict[UsedParameter, set[int]] = {}
        for op_id, part in self.plan().part_of.items():
            for parameter in self._facts[op_id].parameters:
                parts.setdefault(parameter, set()).add(part)
        return [
            {"parameter": parameter.name, "parts": sorted(own), "bytes": parameter.bytes}
            for parameter, own in parts.items()
            if len(own) > 1
        ]

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator of the model: its ``part``; ``forward_flops``, of an execution, None
        if they are not known; ``parameter_bytes``, and ``sent_bytes`` of its outputs that are on a
        cut. ``parts_before`` of ``parts_but_one`` colours the page's graph."""
        plan, sent = self.plan(), collections.Counter[str]()
        for tensor in plan.sent:
            sent[tensor["op"]] += tensor["bytes"]
        return [
            {
                **self._tracing.graph.description(op_id).row(),
                "part": part,
                "forward_flops": self._facts[op_id].flops,
                "parameter_bytes": _parameter_bytes(self._facts[op_id].parameters),
                "sent_bytes": sent[op_id],
                "parts_before": part - 1,
                "parts_but_one": self.options.parts - 1,
            }
            for op_id, part in plan.part_of.items()
        ]

    def summary(self) -> dict[str, Any]:
        """Bytes that cross the cuts, one tensor in each that it crosses; ``least_bytes``, which any
        cut has at least; ``unknown_ops``, the types without known FLOPs, which count zero;
        ``refusal``, why there is no cut."""
        plan = self.plan()
        unknown = [op_id for op_id in plan.part_of if self._facts[op_id].flops is None]
        types = {self._tracing.graph.description(op_id).type for op_id in unknown}
        return {
            "options": attrs.asdict(self.options),
            "bytes": sum(row["bytes"] * (row["to"][-1] - row["from"]) for row in plan.sent),
            "least_bytes": plan.least,
            "refusal": plan.refusal,
            "unknown_ops": sorted(types),
        }

    def tables(self) -> Iterable[Table]:
        """The parts; the tensors on the cuts; parameters of several parts."""
        if refusal := self.plan().refusal:
            yield Table(refusal, (), [])
            return
        summary, parts = self.summary(), self._parts()
        whole = sum(part["flops"] for part in parts)
        bound = "" if summary["bytes"] == summary["least_bytes"] else (
            f" (any cut: at least {format_short(summary['least_bytes'], 'B')})"
        )  # fmt: skip
        lines = [
            (
                part["part"],
                part["ops"],
                f"{part['first']} … {part['last']}",
                ("≥ " if summary["unknown_ops"] else "") + format_short(part["flops"], "FLOP"),
                share_text(part["flops"], whole),
                format_short(part["parameter_bytes"], "B"),
            )
            for part in parts
        ]
        columns = ("part", "ops", "from … to", "FLOPs", "share", "parameters")
        title = f"partition: {format_short(summary['bytes'], 'B')} on the cut{bound}"
        yield Table(title, columns, lines)
        rows = [
            (row["tensor"], row["from"], ", ".join(map(str, row["to"])),
             "x".join(map(str, row["shape"])), row["dtype"], row["bytes"])
            for row in self.plan().sent
        ]  # fmt: skip
        columns = ("tensor", "from part", "to", "shape", "type", "bytes")
        yield Table(f"partition: {plural(len(rows), 'tensor')} on the cut", columns, rows)
        if shared := self._shared():
            shown = [(row["parameter"], ", ".join(map(str, row["parts"])), row["bytes"])
                     for row in shared]  # fmt: skip
            title = f"partition: {plural(len(shown), 'parameter')} of several parts"
            yield Table(title, ("parameter", "parts", "bytes"), shown)


def _is_at(pattern: str, op_id: str, module: str) -> bool:
    return any(fnmatchcase(name, each) for name, each in (
        (op_id, pattern), (module, pattern), (module, f"{pattern}[./]*")
    ))  # fmt: skip


def _parameter_bytes(parameters: Iterable[UsedParameter]) -> int:
    """Return the bytes of parameters, each counted once."""
    return sum(parameter.bytes for parameter in {*parameters})
