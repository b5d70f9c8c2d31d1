"""Extracts paths: from the critical elements of a pass's output back to its inputs.

``Extraction(run, Start.of(output, -1, None), 0.5, keep_synapses=False).paths`` are the paths of the
inputs of a recorded pass. It goes through the executions from the last one on, and applies the
rule of each type (``rules``, ``weighted_sums``) to the elements that later operators named.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from amanda.errors import UnsupportedProgramError
from amanda_tools._values.tensors import Array
from amanda_tools.path import weighted_sums as _weighted_sums  # noqa: F401 - registers rules
from amanda_tools.path.effective_paths import Mask, OpPath, Path
from amanda_tools.path.recording import RecordedExecution, RecordedPass
from amanda_tools.path.rule_call import Call, NoRule, Wanted
from amanda_tools.path.rules import add_everything, rule_of

CriticalPart = tuple[Array, Array | None]


@attrs.frozen(eq=False)
class Start:
    """Where the paths of a batch begin.

    Attributes:
        output: the execution whose output is explained.
        position: position of the output.
        index: for each input of the batch the critical flat indices.
        labels: for each input its class; None if the output has several positions.
    """

    output: RecordedExecution
    position: int
    index: Sequence[Array]
    labels: Sequence[int | None]

    @classmethod
    def of(cls, output: RecordedExecution, axis: int, labels: Sequence[int] | None) -> Start:
        """Begin at the predicted class of each input, or at its label.

        Raises:
            UnsupportedProgramError: axis or labels do not fit.
        """
        position = output.real_outputs()[0]
        scores = output.outputs[position]
        assert scores is not None
        name = output.op.about.id
        shape = scores.shape if scores.ndim > 1 else (1, *scores.shape)
        if not -len(shape) < axis < len(shape) or axis == 0:
            raise UnsupportedProgramError(
                f"tool path: axis={axis} is not an axis of classes of op {name}, whose output has "
                f"the shape {scores.shape} with the batch in front"
            )
        ordered = np.moveaxis(scores.reshape(shape), axis, -1)
        best = ordered.argmax(axis=-1)
        if labels is not None:
            given = np.asarray(labels)
            fits = given.shape == best.shape and given.dtype.kind in "iu"
            if not fits or (given < 0).any() or (given >= ordered.shape[-1]).any():
                raise UnsupportedProgramError(
                    f"tool path: labels must be {best.shape} whole numbers below "
                    f"{ordered.shape[-1]} for op {name}, got the shape {given.shape}: "
                    f"{given!r:.80}"
                )
            best = given
        places = np.moveaxis(np.arange(scores.size).reshape(shape), axis, -1)
        index = np.take_along_axis(places, best[..., None], axis=-1)
        return cls(
            output,
            position,
            [np.sort(part.reshape(-1)) for part in index],
            [int(label) if best.ndim == 1 else None for label in best],
        )


class Extraction:
    """Extracts the paths of the inputs of one batch.

    Args:
        run: the pass.
        start: where the paths begin.
        theta: fraction of a value that critical contributions make up.
        keep_synapses: keep the numbers of the critical products.

    Attributes:
        paths: the path of each input.
        skipped: operator id to the reason why no rule was applied.
        executions: those between the model's input and the output.
        sequences: number of the model's inputs, if the rows of the output are their tokens; None
            if they are the inputs themselves.
    """

    def __init__(
        self, run: RecordedPass, start: Start, theta: float, *, keep_synapses: bool
    ) -> None:
        self.skipped: dict[str, str] = {}
        self._theta = theta
        self._keeps = keep_synapses
        self._batch = len(start.index)
        self._critical: dict[tuple[int, RecordedExecution, int], list[CriticalPart]] = (
            collections.defaultdict(list)
        )
        self._ops: list[dict[str, OpPath]] = [{} for _ in start.index]
        self._inputs: dict[str, list[list[Array]]] = {}
        self._input_shapes: dict[str, tuple[int, ...]] = {}
        for sample, index in enumerate(start.index):
            self._critical[sample, start.output, start.position].append((index, None))
        self._read = {(start.output, start.position)}
        self._model = _model_of(run, start.output)
        self.executions = self._order(run, start.output)
        for execution in self.executions:
            self._extract(execution)
        self.paths = self._paths(start.labels)
        self.sequences = _count_sequences(self._input_shapes.values(), self._batch)

    def _order(self, run: RecordedPass, output: RecordedExecution) -> list[RecordedExecution]:
        """Return the executions that the output depends on, readers before what they read."""
        reached, found = {output}, []
        for execution in reversed(list(run.executions.values())):
            if execution in reached:
                found.append(execution)
                read = {s for s in execution.data_sources() if s[0] in self._model}
                self._read |= read
                reached |= {source for source, _ in read}
        return found

    # -- one operator -----------------------------------------------------------

    def _extract(self, execution: RecordedExecution) -> None:
        call, outputs = Call(execution, self._theta), self._outputs(execution)
        if not outputs:
            return
        found = [
            [self._treated(call, wanted) for wanted in self._wanted(sample, execution, outputs)]
            for sample in range(self._batch)
        ]
        shapes = [o.shape for p in outputs if (o := execution.outputs[p]) is not None]
        size = sum(int(np.prod(shape)) for shape in shapes)
        neurons = self._neurons(shapes, found)
        by_sample = [self._pass_on(sample, execution, parts) for sample, parts in enumerate(found)]
        weights = _weights(execution, by_sample)
        for sample, parts in enumerate(found):
            found_synapses = self._synapses(parts, size, call.width)
            self._ops[sample][execution.op.about.id] = OpPath(
                neurons[sample], weights[sample], *found_synapses
            )

    def _outputs(self, execution: RecordedExecution) -> list[int]:
        """Return the positions of the outputs that the path goes through; note why there are
        none."""
        if execution.written:
            what = ", ".join(map(str, execution.written))
            self.skipped[execution.op.about.id] = f"something has written into its input {what}"
        outputs = [
            position
            for position, array in enumerate(execution.outputs)
            if array is not None and (execution, position) in self._read
        ]
        if not outputs:
            self.skipped[execution.op.about.id] = "its output has no real numbers: the path ends"
        return outputs

    def _synapses(
        self, parts: Sequence[Wanted], size: int, width: int
    ) -> tuple[Array | None, int, int]:
        """Return the critical synapses if they are kept, their number, and that of all.

        Args:
            parts: what is critical of each output.
            size: elements of the outputs.
            width: products in an element.
        """
        synapses = [s + wanted.output * size * width for wanted in parts for s in wanted.synapses]
        critical = sum(map(len, synapses))
        # The output holds the whole batch, unless the batch does not divide its size.
        total = max(critical, size * width // (1 if size % self._batch else self._batch))
        if not self._keeps:
            return None, critical, total
        return np.unique(np.concatenate(synapses or [np.zeros(0, np.int64)])), critical, total

    def _wanted(
        self, sample: int, execution: RecordedExecution, outputs: Sequence[int]
    ) -> list[Wanted]:
        """Merge what all readers name of each output; where they disagree, the output's own
        values count."""
        found = []
        for position in outputs:
            parts = self._critical.pop((sample, execution, position), [])
            output = execution.outputs[position]
            assert output is not None
            own = output.reshape(-1)
            index = np.concatenate([np.zeros(0, np.int64), *(index for index, _ in parts)])
            values = np.concatenate([np.zeros(0), *(own[i] if v is None else v for i, v in parts)])
            order = np.argsort(index, kind="stable")
            places, first = np.unique(index[order], return_index=True)
            if len(places):
                low = np.minimum.reduceat(values[order], first)
                high = np.maximum.reduceat(values[order], first)
                values = np.where(low == high, low, own[places])
            found.append(Wanted(places, values, position))
        return found

    def _treated(self, call: Call, wanted: Wanted) -> Wanted:
        """Apply the rule, or add everything and note why."""
        op = call.execution.op.about
        rule = rule_of(op.type)
        if not len(wanted.index):
            return wanted
        if rule is None:
            self.skipped[op.id] = "no rule for its type"
            add_everything(call, wanted)
            return wanted
        try:
            rule(call, wanted)
        except Exception as error:
            # An error of a third party's rule must not end the program.
            is_known = isinstance(error, NoRule)
            self.skipped[op.id] = str(error) if is_known else f"{type(error).__name__}: {error}"
            wanted = Wanted(wanted.index, wanted.values, wanted.output)
            add_everything(call, wanted)
        if not wanted.synapses:
            every = wanted.index[:, None] * call.width + np.arange(call.width)
            wanted.synapses.append(every.reshape(-1))
        return wanted

    def _pass_on(
        self, sample: int, execution: RecordedExecution, parts: Sequence[Wanted]
    ) -> dict[int, Array]:
        """Pass critical elements on to the sources of the inputs; return those on weights."""
        weights: dict[int, Array] = {}
        for position, index, values in (part for wanted in parts for part in wanted.critical):
            source, array = execution.sources[position], execution.inputs[position]
            if not execution.is_data[position]:
                weights[position] = np.union1d(weights.get(position, index), index)
            elif source is not None and source[0] in self._model:
                self._critical[sample, *source].append((index, values))
            elif array is not None:
                key = f"{execution.op.about.id}:{position}"
                self._input_shapes[key] = array.shape
                known = self._inputs.setdefault(key, [[] for _ in range(self._batch)])
                known[sample].append(index)
        return weights

    # -- masks ------------------------------------------------------------------

    def _neurons(
        self, shapes: Sequence[tuple[int, ...]], found: Sequence[Sequence[Wanted]]
    ) -> list[Mask]:
        """Return the mask of each input's neurons; several outputs are strung together."""
        if len(shapes) == 1:
            return self._masks(shapes[0], [parts[0].index for parts in found])
        per_output = [
            self._masks(shape, [parts[i].index for parts in found])
            for i, shape in enumerate(shapes)
        ]
        strung = []
        for masks in zip(*per_output, strict=True):
            flat = np.concatenate([mask.array.reshape(-1) for mask in masks])
            strung.append(Mask.of(flat.shape, np.flatnonzero(flat)))
        return strung

    def _masks(self, shape: tuple[int, ...], index: Sequence[Array]) -> list[Mask]:
        """Return a mask per input: without the batch axis where each input has its own entries."""
        batch = self._batch
        for axis, count in enumerate(shape):
            if count != batch:
                continue
            inner = int(np.prod(shape[axis + 1 :]))
            if all((part // inner % batch == i).all() for i, part in enumerate(index)):
                rest = (*shape[:axis], *shape[axis + 1 :])
                return [Mask.of(rest, p // (inner * batch) * inner + p % inner) for p in index]
        size = int(np.prod(shape))
        block = size // batch
        if size % batch == 0 and all((p // block == i).all() for i, p in enumerate(index) if block):
            whole = shape and shape[0] % batch == 0
            rest = (shape[0] // batch, *shape[1:]) if whole else (block,)
            return [Mask.of(rest, p - i * block) for i, p in enumerate(index)]
        return [Mask.of(shape, part) for part in index]

    def _paths(self, labels: Sequence[int | None]) -> list[Path]:
        inputs: list[dict[str, Mask]] = [{} for _ in labels]
        nothing = np.zeros(0, np.int64)
        for key, by_sample in self._inputs.items():
            index = [np.unique(np.concatenate([nothing, *parts])) for parts in by_sample]
            for sample, mask in enumerate(self._masks(self._input_shapes[key], index)):
                inputs[sample][key] = mask
        return [Path(*parts) for parts in zip(labels, self._ops, inputs, strict=True)]


def _count_sequences(shapes: Iterable[tuple[int, ...]], rows: int) -> int | None:
    """Return the number of sequences whose tokens are rows: batch and tokens are one axis there."""
    shapes = list(shapes)
    if any(shape[:1] == (rows,) for shape in shapes):
        return None
    for shape in shapes:
        if any(math.prod(shape[:count]) == rows for count in range(2, len(shape) + 1)):
            return shape[0]
    return None


def _weights(
    execution: RecordedExecution, by_sample: Sequence[dict[int, Array]]
) -> list[Mask | None]:
    """Return the mask of the weight for each input, None without a weight."""
    op = execution.op
    positions = [position for parts in by_sample for position in parts]
    if (
        len(op.signature.weight_layout) > 1
        and op.signature.weight is not None
        and not execution.is_data[op.signature.weight]
    ):
        positions.append(op.signature.weight)
    if not positions:
        return [None] * len(by_sample)
    position = positions[0]
    array = execution.inputs[position]
    shape = op.parameters.get(position) if array is None else array.shape
    if shape is None:
        return [None] * len(by_sample)
    nothing = np.zeros(0, np.int64)
    return [Mask.of(shape, parts.get(position, nothing)) for parts in by_sample]


def _model_of(run: RecordedPass, output: RecordedExecution) -> set[RecordedExecution]:
    """Return the executions between the model's inputs and its output.

    Operators outside of modules that make a module's input do not belong to it, nor operators that
    make something from nothing.
    """
    found: set[RecordedExecution] = set()
    for execution in run.executions.values():
        reads = any(source is not None and source[0] in found for source in execution.sources)
        inside = execution.op.is_in_module or not output.op.is_in_module
        if any(execution.is_data) and (inside or reads):
            found.add(execution)
    return found
