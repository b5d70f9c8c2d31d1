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
from amanda.state import STATE
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
from amanda_tools.export import check_target
from amanda_tools.export.model_of_run import ModelOfRun
from amanda_tools.partition.cut import CutOp, CutTensor, cut
from amanda_tools.partition.options import PartitionOptions


@attrs.frozen
class _Facts:
    """What is known of an operator.

    Attributes:
        call: number of the call of an outermost module in which it first ran; 0 outside of modules.
        flops: FLOPs of an execution; None if they are not known.
        parameters: the parameters that it reads.
        given: its inputs that are no parameters, buffers, variables or constants.
    """

    call: int
    flops: int | None
    parameters: frozenset[UsedParameter]
    given: Sequence[TracedTensor]


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
    """Cuts a model into parts that send few bytes to the next.

    The model is the call of an outermost module with the most operators.

    Example: ``amanda run -t partition:outside=head -o out -- infer.py``
    """

    name = "partition"
    Options = PartitionOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tracing = GraphTracingTool(follow=False)
        self._parameters = Parameters()
        self._facts: dict[str, _Facts] = {}
        self._calls = self._call = 0
        self._planned: tuple[int, Plan] | None = None
        self._models = ModelOfRun(self, self.options.export)
        if (folder := self._models.target) is not None:
            made = (folder, *folder.parents)
            nearest = next(path for path in made if path.exists())
            if not nearest.is_dir():
                raise NotADirectoryError(f"{nearest} is a file")
            check_target(nearest / f"part1.{self.options.format}")
        self.depends_on(self._tracing)
        self.add_inst_for_pass(self._begin)
        self.add_inst_for_pass(self._end, end=True)
        self.add_inst_for_op(self._analyse, require_outputs=True)

    @property
    def needs_end(self) -> bool:
        """True if the end of a program exports the model, or is an error; read by `amanda run`."""
        return self._models.target is not None or bool(self.plan().refusal)

    def _begin(self, _: PointContext) -> None:
        self._calls += 1
        self._call = self._calls

    def _end(self, _: PointContext) -> None:
        self._call = 0

    def _analyse(self, context: OpContext) -> None:
        op = self._tracing.graph.description(context.get_op_id())
        if op.id in self._facts or op.phase not in MODEL:
            return
        formula = formula_in(context, op.type, op.name)
        flops = 0 if is_free(op.type) else None
        if formula is not None:
            signature = OpSignature.of(context, op.type, op.attributes)
            specs = op.tensors.inputs or (), op.tensors.outputs or ()
            shapes = [[spec and spec.shape for spec in own] for own in specs]
            try:
                inputs, outputs = map(plain, shapes)
                flops = formula.flops(CallShapes(signature, inputs, outputs))
            except LookupError:
                flops = None
        read = self._tracing.graph.op(op.id).inputs
        # A parameter may be what an operator has initialised.
        own = [tensor for i, tensor in enumerate(read) if tensor and self._is_given(context, i)]
        parameters = frozenset(self._parameters.used_by(context))
        self._facts[op.id] = _Facts(self._call, flops, parameters, own)

    def _is_given(self, context: OpContext, position: int) -> bool:
        """Return True if an input is computed in this call, or has no value before the run."""
        tensor = self._tracing.graph.op(context.get_op_id()).inputs[position]
        maker = self._facts.get(tensor.producer) if tensor else None
        is_computed = maker is not None and maker.call == self._call
        return is_computed or context.get_value(position) is None

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
        calls = collections.Counter(facts.call for facts in self._facts.values())
        if not calls:
            raise UnsupportedProgramError("partition: no forward pass of a model has been seen")
        call = calls.most_common(1)[0][0]
        ids = [op_id for op_id, facts in self._facts.items() if facts.call == call]
        at = {op_id: number for number, op_id in enumerate(ids)}
        ops = [CutOp(self._facts[i].flops or 0, self._facts[i].parameters) for i in ids]
        readers: dict[TracedTensor, list[int]] = {}
        for op_id in ids:
            for tensor in self._facts[op_id].given:
                readers.setdefault(tensor, []).append(at[op_id])
        specs = {tensor: self._spec(tensor, ids[own[0]]) for tensor, own in readers.items()}
        tensors = {
            tensor: CutTensor(byte_size(specs[tensor]) or 0, at.get(tensor.producer, -1), own)
            for tensor, own in readers.items()
        }
        whole = sum(op.flops for op in ops), _bytes_of(self._facts[i] for i in ids)
        ends = self._named("inside", ids), self._named("outside", ids)
        parts, least = cut(ops, [*tensors.values()], *ends, self.options.limits(*whole))
        sent = []
        for tensor, of in tensors.items():
            begin = parts[of.maker] if of.maker >= 0 else 0
            if behind := sorted({parts[reader] + 1 for reader in of.readers} - {begin + 1}):
                op = tensor.producer if of.maker >= 0 else ""
                name = f"{op}[{tensor.position}]" if op else f"input of {ids[of.readers[0]]}"
                where = {"op": op, "tensor": name, "from": begin + 1, "to": behind}
                sent.append({**where, **specs[tensor].row(), "bytes": of.size})
        return Plan({op_id: parts[at[op_id]] + 1 for op_id in ids}, sent, least)

    def _named(self, option: str, ids: Sequence[str]) -> list[int]:
        """Return the numbers of the operators that an option names."""
        modules = [self._tracing.graph.op(op_id).module for op_id in ids]
        found = list[int]()
        for pattern in getattr(self.options, option):
            own = [
                number
                for number, (op_id, module) in enumerate(zip(ids, modules, strict=True))
                if any(
                    fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}[./#]*")
                    for name in (op_id, module)
                )
            ]
            if not own:
                guess = close_matches(pattern, [*dict.fromkeys(modules), *ids])
                raise UnsupportedProgramError(
                    f"partition: {option}={pattern} is no module and no op of the model{guess}"
                )
            found += own
        return found

    def _spec(self, tensor: TracedTensor, reader: str) -> Any:
        """Return the description of a tensor, whose size is known, and that an operator reads."""
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

    # -- export -------------------------------------------------------------

    def export_parts(
        self,
        model: Any,
        example_inputs: Any,
        folder: str | os.PathLike[str],
        *,
        format: Literal["pt2", "onnx"] = "pt2",
    ) -> list[Path]:
        """Write the parts of a PyTorch model, each of which runs on its own; return the files.

        The model is exported in evaluation mode, and is not changed. The files are read again, and
        must give the outputs of the whole exported model: the same bits from ``.pt2``, within 2e-6
        of their largest value from ``.onnx``.

        Args:
            model: the module that the tool has seen.
            example_inputs: a tuple of arguments, a dictionary of keyword arguments, or a tensor.
            folder: gets ``part1.pt2`` and so on, and ``parts.json``: the names of the model's
                inputs and outputs, and by part those of its own, with shapes, types and bytes.
            format: of the files.

        Raises:
            UnsupportedProgramError: there is no cut, the exporter refuses the model, it has
                changed, or the parts compute another result.
            OSError: the files cannot be written; nothing is left of them.
        """
        from amanda_tools.partition.parts import PartsExporter

        if (plan := self.plan()).refusal:
            raise UnsupportedProgramError(plan.refusal)
        if STATE.scopes:
            raise UnsupportedProgramError("partition: a model is exported after the with-block")
        exporter = PartsExporter(model, example_inputs)
        given = self._facts.items()
        makers = {op_id: [tensor.producer for tensor in of.given] for op_id, of in given}
        readers = {parameter.name: parts for parameter, parts in self._readers().items()}
        return exporter.write_parts(Path(folder), f".{format}", plan.part_of, makers, readers)

    def finish_run(self, _: Any) -> None:
        """Export the model that the program has run, if an option asks for it.

        Raises:
            UnsupportedProgramError, OSError: as of :meth:`export_parts`.
        """
        if (plan := self.plan()).refusal:
            raise UnsupportedProgramError(plan.refusal)
        if (folder := self._models.target) is not None:
            model, inputs = self._models.of(self.name, plan.part_of)
            self.export_parts(model, inputs, folder, format=self.options.format)

    # -- result -----------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Return the common form, with ``parts``, ``tensors``, those on the cuts, and
        ``shared_parameters``, those that several parts read."""
        own = {"parts": self._parts(), "tensors": self.plan().sent}
        return {**super().result(), **own, "shared_parameters": self._shared()}

    def _parts(self) -> list[dict[str, Any]]:
        ids: dict[int, list[str]] = {}
        for op_id, part in self.plan().part_of.items():
            ids.setdefault(part, []).append(op_id)
        return [
            {
                "part": part,
                "ops": len(own),
                "first": own[0],
                "last": own[-1],
                "flops": sum(self._facts[op_id].flops or 0 for op_id in own),
                "parameter_bytes": _bytes_of(self._facts[op_id] for op_id in own),
            }
            for part, own in sorted(ids.items())
        ]

    def _readers(self) -> dict[UsedParameter, set[int]]:
        """Return the parts that read each parameter."""
        parts: dict[UsedParameter, set[int]] = {}
        for op_id, part in self.plan().part_of.items():
            for parameter in self._facts[op_id].parameters:
                parts.setdefault(parameter, set()).add(part)
        return parts

    def _shared(self) -> list[dict[str, Any]]:
        return [
            {"parameter": parameter.name, "parts": sorted(own), "bytes": parameter.bytes}
            for parameter, own in self._readers().items()
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
                "parameter_bytes": _bytes_of([self._facts[op_id]]),
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
        return {
            "options": attrs.asdict(self.options),
            "bytes": sum(row["bytes"] * (row["to"][-1] - row["from"]) for row in plan.sent),
            "least_bytes": plan.least,
            "unknown_ops": sorted({self._tracing.graph.op(op_id).type for op_id in unknown}),
            "refusal": plan.refusal,
        }

    def tables(self) -> Iterable[Table]:
        """The parts; the tensors on the cuts; parameters of several parts."""
        of, parts, shared = self.summary(), self._parts(), self._shared()
        if of["refusal"]:
            yield Table(of["refusal"], (), [])
            return
        whole, bound = sum(part["flops"] for part in parts), "≥ " if of["unknown_ops"] else ""
        rows: list[tuple[Any, ...]] = [
            (
                *(part[key] for key in ("part", "ops", "first", "last")),
                bound + format_short(part["flops"], "FLOP"),
                share_text(part["flops"], whole),
                format_short(part["parameter_bytes"], "B"),
            )
            for part in parts
        ]
        least = "the least"
        if of["bytes"] > of["least_bytes"]:
            least = f"any cut: at least {format_short(of['least_bytes'], 'B')}"
        title = f"partition: {format_short(of['bytes'], 'B')} on the cut ({least})"
        yield Table(title, ("part", "ops", "first", "last", "FLOPs", "share", "parameters"), rows)
        rows = [
            (row["tensor"], f"{row['from']} to {_listed(row['to'])}", _listed(row["shape"], "x"),
             row["dtype"], row["bytes"])
            for row in self.plan().sent
        ]  # fmt: skip
        title = f"partition: {plural(len(rows), 'tensor')} on the cut"
        yield Table(title, ("tensor", "parts", "shape", "type", "bytes"), rows)
        if shared:
            rows = [(row["parameter"], _listed(row["parts"]), row["bytes"]) for row in shared]
            title = f"partition: {plural(len(rows), 'parameter')} in several parts"
            yield Table(title, ("parameter", "parts", "bytes"), rows)


def _listed(numbers: Iterable[int], between: str = ", ") -> str:
    return between.join(map(str, numbers))


def _bytes_of(facts: Iterable[_Facts]) -> int:
    """Return the bytes of the parameters of operators, each counted once."""
    return sum(parameter.bytes for parameter in {p for each in facts for p in each.parameters})
