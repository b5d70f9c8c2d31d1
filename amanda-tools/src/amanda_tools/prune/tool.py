"""The tool ``prune``."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda import OpContext
from amanda.driver import Driver
from amanda.errors import AmandaError, CapabilityError, FileError
from amanda.results import Table
from amanda.tools.description import OpDescription
from amanda.tools.graph_tracing import GraphTracingTool
from amanda_tools._bases.exporting import ExportingTool
from amanda_tools._operators.weights import Weight, WeightsOfRun, not_executed, weak_reference
from amanda_tools._output.units import format_short
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.export import Change, Exported, Mask, export_model
from amanda_tools.prune import files
from amanda_tools.prune.attention import CAUSAL, AttentionPruning
from amanda_tools.prune.channel import ChannelPruning
from amanda_tools.prune.cut import Cut, StructuralPruning
from amanda_tools.prune.dynamic import Gate, GatedPruning
from amanda_tools.prune.given_masks import name_of
from amanda_tools.prune.options import STATIC_METHODS, PruneOptions
from amanda_tools.prune.spatial import SpatialPruning
from amanda_tools.prune.static import PrunedWeight, StaticPruning

Pruning = StaticPruning | GatedPruning | AttentionPruning | StructuralPruning

_METHODS: Mapping[str, Callable[[PruneOptions], Pruning]] = {
    "channel": ChannelPruning,
    "activation": SpatialPruning,
    "attention": AttentionPruning,
}


class PruneTool(ExportingTool[PruneOptions]):
    """Prunes weights or activations, in training and in inference.

    The static methods (magnitude, nm, tile) give a weight one mask: under it the weight reads as
    zero in the forward pass and has no gradient. The weights themselves do not change until
    :meth:`bake`. The dynamic methods (channel, activation, attention) choose for each sample what
    is left out; with ``cut=true``, channel changes nothing until :meth:`cut_model`.

    Example: ``amanda run -t prune:method=nm,n=2,m=4 -o out -- train.py``
    """

    name = "prune"
    Options = PruneOptions
    file_option = "bake"
    # A weight under a mask, and a gate, have gradients of their own.
    differentiable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        method = StructuralPruning if self.options.cut else _METHODS.get(self.options.method)
        self._pruning: Pruning = (method or StaticPruning)(self.options)
        self._dense_readers: dict[str, tuple[Callable[[], Any], Hashable]] = {}
        if isinstance(self._pruning, AttentionPruning):
            self.depends_on(GraphTracingTool())
        if self.options.masks:
            self.load(self.options.masks)

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        super().enter_scope(drivers)
        if isinstance(self._pruning, StaticPruning):
            self._pruning.enter_scope()

    def types(self) -> Sequence[str]:
        return self.options.types

    def treat(self, context: OpContext, op: OpDescription) -> None:
        self._pruning.treat(context, op)

    def analyse(self, context: OpContext) -> None:
        super().analyse(context)
        op_id, index = context.get_op_id(), context["weight_index"]
        value = None if index is None or op_id in self.ops else context.get_value(index)
        if value is not None:
            key = None if (variable := context.get_variable(index)) is None else variable.key
            self._dense_readers[op_id] = weak_reference(value), key

    # -- masks ------------------------------------------------------------

    @property
    def masks(self) -> dict[str, Array]:
        """Masks by op id, in the framework's layout of the weight, True where it stays.

        Operators that share a weight share its mask. Only static methods have masks.
        """
        weights = self._weights()
        return {id: w.mask.copy() for id, w in weights.items() if w.mask is not None}

    def parameters(self) -> list[Any]:
        """Return what the gates of a dynamic method learn, for an optimizer; known after the
        first run."""
        return [value for gate in self._gates().values() for value in gate.values.values()]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the masks, or the values of the gates, by op id.

        Raises:
            AmandaError: there are none.
        """
        masks = self.masks
        if masks:
            names = {id: name for id, w in self._weights().items() if (name := name_of(w.weight))}
            options = {"method": self.options.method, "sparsity": self.options.sparsity}
            return files.write(path, "masks", masks, weights=names, **options)
        gates = {
            f"{id}|{name}": array
            for id, gate in self._gates().items()
            for name, array in gate.arrays().items()
        }
        if not gates:
            raise AmandaError("prune: there is nothing to save; run the model under the tool first")
        return files.write(path, "gates", gates, method=self.options.method)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Use the masks, or the values of gates, of a file instead of new ones.

        Masks hold from the next analysis on, and stay; an operator without a mask in the file is an
        error that names it, as is a mask of a weight of another name. Gates must have been met
        before.

        Raises:
            FileError: the file cannot be read, or is for another method or model.
        """
        if isinstance(self._pruning, StaticPruning):
            masks, header = files.read(path, "masks")
            self._pruning = StaticPruning(self.options)
            self._pruning.use(masks, str(path), files.weight_names(header))
            self.ops.clear()
            self.reanalyse()
            return
        arrays, _ = files.read(path, "gates")
        for op_id, gate in self._gates().items():
            for name, value in gate.values.items():
                array = arrays.get(f"{op_id}|{name}")
                if array is None:
                    raise FileError(f"prune: {path} has no {name} for op {op_id}")
                if array.shape != shape_of(value):
                    raise FileError(
                        f"prune: {path}: {name} of op {op_id} has the shape {array.shape}, and not "
                        f"{shape_of(value)}: it is of another model"
                    )
                arithmetic_of(value).assign(value, array)

    # -- smaller models ---------------------------------------------------

    def cut_model(self, model: Any, example_inputs: Any) -> Any:
        """Return a copy of a PyTorch model without the weakest channels and heads (``cut=true``).

        Args:
            model: the module; it need not have run.
            example_inputs: a tuple of arguments, a dictionary of keyword arguments, or a tensor.

        Raises:
            UnsupportedProgramError: nothing can be cut.
            AmandaError: the tool is not to cut.
        """
        if not isinstance(self._pruning, StructuralPruning):
            raise AmandaError("prune: only method=channel,cut=true cuts a model")
        return self._pruning.cut(model, example_inputs)

    def export_model(
        self, model: Any, example_inputs: Any, path: str | os.PathLike[str], **options: Any
    ) -> Exported:
        if not isinstance(self._pruning, StructuralPruning):
            return super().export_model(model, example_inputs, path, **options)
        smaller = self.cut_model(model, example_inputs)
        exported = export_model(None, smaller, example_inputs, path, name=self.name)
        found = self._pruning.found
        assert found is not None
        layers, gap = [row["layer"] for row in found.layers], found.difference
        return attrs.evolve(exported, ops=layers, difference=max(gap, exported.difference))

    # -- baked weights ----------------------------------------------------

    def bake(self, run: Callable[[], Any]) -> None:
        """Write the zeros into the model's own weights, which then runs the same without the tool.

        Args:
            run: runs the model once, as it was run under the tool.

        Raises:
            AmandaError: there are no masks yet; another operator reads such a weight without the
                mask, or in another view, and would change; or `run` does not read all weights that
                have masks.
            CapabilityError: a weight cannot be written.
        """
        self._check_masks()
        self._check_readers()
        for weight, found in self._weights_of(run):
            try:
                weight.write_zeros(found)
            except (TypeError, AmandaError) as error:
                raise CapabilityError(
                    f"prune: the weight of op {weight.readers[0]} cannot be written: {error}"
                ) from error

    def changes(self) -> list[Change]:
        """Return the masks, for an export.

        Raises:
            AmandaError: there are none yet, the method has none, or as for :meth:`bake`.
        """
        self._check_masks()
        self._check_readers()
        masks = self.masks
        return [Mask(op_id, self._weights()[op_id].weight.index, m) for op_id, m in masks.items()]

    def _check_readers(self) -> None:
        """Check that nothing reads a weight without its mask.

        Raises:
            AmandaError: an operator does, or in another view.
        """
        if shared := self._shared():
            op_id, reader = next(iter(shared.items()))
            raise AmandaError(
                f"prune: op {reader} reads the weight of op {op_id} without its mask and would "
                "change, too; add its type to ops"
            )

    def _check_masks(self) -> None:
        """Check that all pruned operators have masks.

        Raises:
            AmandaError: one has none yet.
        """
        if not isinstance(self._pruning, StaticPruning):
            raise AmandaError(
                f"prune: method={self.options.method} chooses anew for every input, so that no "
                f"weight can have zeros; the methods {', '.join(STATIC_METHODS)} have masks"
            )
        weights = self._weights()
        if not weights:
            raise AmandaError(
                "prune: there are no masks yet; run the model under the tool first, and see the "
                "summary for operators that were skipped"
            )
        for op_id, weight in weights.items():
            if weight.mask is None:
                raise AmandaError(
                    f"prune: op {op_id} has no mask yet: it has had {weight.step} training steps, "
                    f"and masks begin at step {self.options.start}"
                )

    def _weights_of(self, run: Callable[[], Any]) -> list[tuple[PrunedWeight, Weight]]:
        """Return the weights that have masks, each as the run has read it.

        Raises:
            AmandaError: `run` does not read one of the weights.
        """
        known = list({id(weight): weight for weight in self._weights().values()}.values())
        places = {op_id: (weight.weight.index,) for op_id, weight in self._weights().items()}
        weights = WeightsOfRun(run, places)
        taken = {weight.weight.identity for weight in known}
        found = []
        for weight in known:
            one = weights.of_variable(weight.weight.identity)
            for op_id in weight.readers if one is None else ():
                other = weights.of_op(op_id, *places[op_id])
                # In another mode the operator with this id can read a weight with another mask.
                if other is not None and other.identity not in taken:
                    one = other
            if one is None:
                raise not_executed(self.name, weight.readers[0])
            weight.check_is(one)
            found.append((weight, one))
        return found

    def _shared(self) -> dict[str, str]:
        """Return pruned op id to another op that reads its weight without the mask, or in another
        view."""
        found = {}
        for op_id, weight in self._weights().items():
            value, key = weight.source(), weight.weight.key
            for reader, (source, other) in self._dense_readers.items():
                is_same = key == other if key is not None else value is not None
                if is_same and (key is not None or source() is value):
                    found.update({} if reader in weight.readers else {op_id: reader})
            for reader, pruned in self._weights().items():
                if key is not None and pruned is not weight and pruned.weight.key == key:
                    found[op_id] = reader
        return found

    def _weights(self) -> Mapping[str, Any]:
        return self._pruning.weights if isinstance(self._pruning, StaticPruning) else {}

    def _unused(self) -> list[str]:
        return self._pruning.unused() if isinstance(self._pruning, StaticPruning) else []

    def _cut(self) -> Cut | None:
        return self._pruning.found if isinstance(self._pruning, StructuralPruning) else None

    def _gates(self) -> Mapping[str, Gate]:
        return self._pruning.gates if isinstance(self._pruning, GatedPruning) else {}

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per pruned operator."""
        return [{**op.row(), **self._figures(op.id)} for op in self._treated()]

    def _treated(self) -> list[OpDescription]:
        """Return the pruned operators; those found to be causal when they ran become skipped
        ones."""
        if isinstance(self._pruning, AttentionPruning):
            for op_id in self._pruning.causal & self.ops.keys():
                self.targets.skip(self.ops.pop(op_id), CAUSAL)
        return list(self.ops.values())

    def _figures(self, op_id: str) -> dict[str, Any]:
        """Return the figures of one operator."""
        if gate := self._gates().get(op_id):
            return {"channels_kept": gate.kept} if gate.kept is not None else {}
        weight = self._weights().get(op_id)
        if weight is None:
            return {}
        mask = weight.mask
        zeros = 0 if mask is None else int(mask.size - mask.sum())
        size = 0 if mask is None else mask.size
        return {
            "parameter": weight.weight.parameter,
            "shape": list(weight.shape),
            "weights": size,
            "zeros": zeros,
            "sparsity": zeros / size if size else 0.0,
            "steps": weight.step,
            "shares_weight_with": [reader for reader in weight.readers if reader != op_id],
        }

    def summary(self) -> dict[str, Any]:
        """Sparsity over all weights, each counted once, null of a dynamic method; operators that
        are not pruned, with reasons."""
        is_static = isinstance(self._pruning, StaticPruning)
        ops = len(self._treated())
        weights = {id(w): w for w in self._weights().values() if w.mask is not None}.values()
        size = sum(w.mask.size for w in weights)
        zeros = size - sum(int(w.mask.sum()) for w in weights)
        return {
            **super().summary(),
            "ops": ops,
            "weights": size,
            "zeros": zeros,
            "sparsity": zeros / max(size, 1) if is_static else None,
            "read_without_mask": self._shared(),
            "masks_never_used": [op_id for op_id in self._unused() if op_id not in self.ops],
            **({"cut": attrs.asdict(cut)} if (cut := self._cut()) else {}),
        }

    def tables(self) -> Iterable[Table]:
        """Pruned operators, and operators that cannot be pruned, with reasons."""
        found, method = self.summary(), self.options.method
        rows = self.op_rows()
        if (cut := self._cut()) is not None:
            yield from _cut_tables(cut)
            yield from self.export_tables()
            return
        if self._weights():
            title = f"prune: {method}, {found['zeros']} of {found['weights']} weights are zero"
            columns = ("op", "parameter", "shape", "zeros", "sparsity")
            cells = [
                (
                    r["id"],
                    r["parameter"] or "-",
                    "x".join(map(str, r["shape"])),
                    r["zeros"],
                    round(r["sparsity"], 4),
                )
                for r in rows
            ]
            yield Table(title, columns, cells)
        else:
            title = f"prune: {method}, {self.options.sparsity:.0%} of each of {len(rows)} ops"
            yield Table(title, ("op", "type"), [(row["id"], row["type"]) for row in rows])
        if shared := found["read_without_mask"]:
            yield Table(
                "prune: weights that others read whole", ("op", "other op"), [*shared.items()]
            )
        if unused := found["masks_never_used"]:
            yield Table("prune: masks never used", ("op",), [(op_id,) for op_id in unused])
        yield from self.targets.tables("prune")
        yield from self.export_tables()

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>.masks.safetensors``; of a dynamic method ``<stem>.gates.safetensors``."""
        kind = "masks" if self.masks else "gates" if self._gates() else ""
        return [self.save(folder / f"{stem}.{kind}.safetensors")] if kind else []


def _cut_tables(cut: Cut) -> Iterable[Table]:
    """The layers that are cut, and those that are left."""
    size, flops = ((format_short(n, "") for n in pair) for pair in (cut.parameters, cut.flops))
    bound, ratio = "≥ " if cut.is_bound else "", cut.seconds[1] / cut.seconds[0]
    title = (
        f"prune: {' to '.join(size)} parameters, {bound}{' to '.join(flops)} FLOPs, {ratio:.2f} of "
        f"the time (medians of 5 passes); difference to the masked model {cut.difference:.2g}"
    )
    columns = ("layer", "kind", "before", "after")
    yield Table(title, columns, [tuple(row[key] for key in columns) for row in cut.layers])
    if cut.left:
        yield Table("prune: layers that are not cut", ("layer", "reason"), [*cut.left.items()])
