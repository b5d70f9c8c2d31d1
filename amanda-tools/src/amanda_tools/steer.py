"""The tool ``steer``: adds to activations, scales or replaces them, while a model runs.

::

    with amanda.apply(SteerTool(at=["model.layers.6.mlp.down_proj"], file="v.npy", tokens=["5-"])):
        model.generate(prompt)
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from amanda import OpContext
from amanda.errors import FileError, UnsupportedProgramError
from amanda.files import opened
from amanda.interface.points import PointContext
from amanda.results import Table, plural
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import type_names
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._bases.repetitions import Repetitions
from amanda_tools._values.recordings import Recording, TensorRecord
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensor_files import names_in, read_tensor
from amanda_tools._values.tensors import Array, arithmetic_of, reader_of

Recorded = dict[str, dict[int, dict[str, TensorRecord]]]
"""Recorded outputs by op id, number of the execution and name."""


@attrs.frozen(kw_only=True)
class SteerOptions:
    """The options of ``steer``.

    Attributes:
        at: op ids and module paths, patterns with * and ?; of a module the operators that read its
            weight. A safetensors file has them as the names of its tensors. With a recording those
            to change, of a module all that are recorded (default: all recorded operators).
        how: add to the outputs, scale (multiply) or replace them.
        value: a number; with a file what its tensors are multiplied by.
        file: .npy or .safetensors; a matrix has a row for each token, others are broadcast. Or a
            recording of dump, a folder or the index in it: each output has its own values.
        steps: numbers from 0, ranges such as 3-5 and 7- (default: all). In inference each forward
            pass is a step.
        tokens: positions in the sequence, likewise.
    """

    at: Sequence[str] = attrs.field(default=(), converter=type_names)
    how: Literal["add", "scale", "replace"] = "add"
    value: float = attrs.field(default=1.0, converter=float)
    file: str | None = None
    steps: Sequence[str] = attrs.field(default=(), converter=type_names)
    tokens: Sequence[str] = attrs.field(default=(), converter=type_names)


class SteerTool(PrintingTool[SteerOptions]):
    """Adds to activations, scales or replaces them, at steps and tokens.

    Example: ``amanda run -t steer:at=model.layers.6.mlp,how=scale,value=0 -o out -- generate.py``
    """

    name = "steer"
    group = "change"
    Options = SteerOptions
    differentiable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._recorded = _read_recording(self.options)
        self._values = dict.fromkeys(self._recorded, np.ones(())) or _read_values(self.options)
        self._in_steps = _ranges(self.options.steps)
        self._in_tokens = _ranges(self.options.tokens)
        self._by_token = bool(self.options.tokens) or 2 in map(np.ndim, self._values.values())
        self._positions: Array | None = None
        self._end = 0
        self._ops: dict[str, OpDescription] = {}
        self._counts = {key: collections.Counter[str]() for key in ("executions", "changed")}
        self._unmet = dict.fromkeys(self._values, "")
        self._repetitions = Repetitions(self)
        self.depends_on(MappingTool.standard())
        self.add_inst_for_pass(self._find_positions)
        self.add_inst_for_op(self._analyse)

    def _find_positions(self, point: PointContext) -> None:
        """Find the positions of the tokens that the model is given; a routine."""
        self._positions = None
        if not self._by_token or not point.inputs or len(point.inputs[0].shape) < 2:
            return
        count = int(point.inputs[0].shape[1])
        others = [tensor for tensor in point.inputs[1:] if tuple(tensor.shape[1:]) == (count,)]
        arrays = [reader_of(tensor).numpy(tensor) for tensor in others]
        given = [array for array in arrays if _are_positions(array)]
        # A mask that is as long as the tokens tells that nothing is cached.
        start = self._end if count == 1 and (not arrays or self._end == 1) else 0
        self._positions = given[0] if given else np.arange(start, start + count)[None]
        self._end = int(self._positions.max()) + 1

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        names = [op.id, op.module] if context["weight_index"] is not None else [op.id]
        if op.phase != "forward":
            return
        known = self._values.keys() & {op.id} if self._recorded else self._values
        places = [place for place in known if _is_at(place, *names)]
        for place in places:
            self._unmet.pop(place, None)
        for place in self._unmet:
            if fnmatchcase(op.module, place):
                self._unmet[place] = f"it runs {op.id}, to be named by its id"
        if places:
            self._ops[op.id] = op
            context.insert_after_op(self._steer, op=op.id, places=places)

    def _steer(self, *outputs: Any, op: str, places: Sequence[str]) -> Any:
        """Change the first output of an operator, or all that are recorded; a routine."""
        given = enumerate(outputs if self._recorded else outputs[:1])
        floating = [i for i, t in given if t is not None and reader_of(t).is_floating(t)]
        if not floating:
            return None
        is_new = not self._repetitions.is_one(op, self.steps_overlap)
        self._counts["executions"][op] += is_new
        if not _is_in(np.asarray(self.steps), self._in_steps):
            return None
        new: list[Any] = [None] * len(outputs)
        for i, place in itertools.product(floating, places):
            value = self._read(op, i) if self._recorded else self._values[place]
            output = outputs[i] if new[i] is None else new[i]
            changed = self._changed(output, value, op, place)
            new[i] = new[i] if changed is None else changed
        self._counts["changed"][op] += is_new and any(output is not None for output in new)
        return new

    def _read(self, op: str, position: int) -> Array:
        """Read an output of the current execution from the recording.

        Raises:
            UnsupportedProgramError: the recording does not have it.
            FileError: the file is damaged.
        """
        executions, execution = self._recorded[op], self._counts["executions"][op] - 1
        # Values of the only execution are for all.
        found = executions.get(next(iter(executions)) if len(executions) == 1 else execution, {})
        if f"output{position}" not in found:
            raise UnsupportedProgramError(
                f"steer: {self.options.file} has no output {position} of op {op}, "
                f"execution {execution}; record a run that has it"
            )
        return found[f"output{position}"].load() * np.float64(self.options.value)

    def _changed(self, output: Any, value: Array, op: str, place: str) -> Any:
        """Return an output with the values put in; None if no token of it is selected.

        Raises:
            UnsupportedProgramError: the values do not have the shape of the output.
        """
        shape = shape_of(output)
        mask = np.ones([1] * len(shape), bool)
        if self._by_token:
            rows = self._rows(shape, op)
            mask = _is_in(rows, self._in_tokens)
            if value.ndim == 2 and not self._recorded:
                mask &= rows < len(value)
                value = value[np.minimum(rows, len(value) - 1)]
            mask = mask[..., None]
        ends = zip(reversed(value.shape), reversed(shape), strict=False)
        is_broadcast = value.ndim <= len(shape) and all(size in (1, end) for size, end in ends)
        if not (value.shape == shape if self._recorded else is_broadcast):
            raise UnsupportedProgramError(
                f"steer: the tensor for {place} has the shape {value.shape}, op {op} gives {shape}"
            )
        if not mask.any():
            return None
        arithmetic, how = arithmetic_of(output), self.options.how
        given = arithmetic.constant(value, output)
        new = output + given if how == "add" else output * given if how == "scale" else given
        return arithmetic.where(arithmetic.constant(mask, output) > 0, new, output)

    def _rows(self, shape: Sequence[int], op: str) -> Array:
        """Return the positions of the rows of an output, in a shape that is broadcast to them.

        Raises:
            UnsupportedProgramError: the output has no row for each token.
        """
        known = self._positions
        if len(shape) > 2 and (known is None or shape[-2] == known.shape[1]):
            positions = np.arange(shape[-2])[None] if known is None else known
            return positions.reshape(len(positions), *[1] * (len(shape) - 3), -1)
        if len(shape) == 2 and known is not None and shape[0] % known.size == 0:
            # The tokens of all samples are in one axis.
            return np.resize(known, shape[0])
        raise UnsupportedProgramError(f"steer: op {op} gives {shape}, without a row for each token")

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator, with its ``executions`` and those that were ``changed``."""
        counts = self._counts.items()
        return [op.row() | {key: of[i] for key, of in counts} for i, op in self._ops.items()]

    def summary(self) -> dict[str, Any]:
        """Executions that were changed; places that no operator has, with a hint."""
        changed = self._counts["changed"].total()
        return {"options": attrs.asdict(self.options), "changed": changed, "unmet": self._unmet}

    def tables(self) -> Iterable[Table]:
        """Executions that were changed, by operator; places that no operator has."""
        rows = [(row["id"], row["executions"], row["changed"]) for row in self.op_rows()]
        title = f"steer: {plural(self._counts['changed'].total(), 'output')} changed"
        yield Table(f"{title} ({self.options.how})", ("op", "executions", "changed"), rows)
        if self._unmet:
            unmet = list(self._unmet.items())
            yield Table("steer: places that no operator has", ("place", "hint"), unmet)


def _read_recording(options: SteerOptions) -> Recorded:
    """Return the outputs at the places of a recording; none if the file is of another kind.

    Raises:
        FileError: it cannot be read, or has no output at a place.
    """
    path = Path(options.file or "")
    if not options.file or not (path.is_dir() or path.suffix in ("", ".json")):
        return {}
    found: Recorded = {}
    unmet = wanted = set(options.at or "*")
    for record in Recording.read(path, "steer").records:
        places = {at for at in wanted if _is_at(at, record.id, record.module)}
        if places and record.kind == "activations" and record.phase == "forward":
            unmet = unmet - places
            found.setdefault(record.id, {}).setdefault(record.step, {})[record.tensor] = record
    if unmet:
        raise FileError(f"steer: {path} has no outputs of {' and '.join(sorted(unmet))}")
    return found


def _is_at(place: str, *names: str) -> bool:
    return place in names or any(fnmatchcase(name, place) for name in names)


def _read_values(options: SteerOptions) -> dict[str, Array]:
    """Return the tensors by place.

    Raises:
        ValueError: the options do not say which, or where.
        FileError: the file cannot be read.
    """
    path = Path(options.file or "")
    values = dict.fromkeys(options.at, np.ones(()))
    if path.suffix == ".safetensors" and not values:
        values = {name: read_tensor(path, name) for name in names_in(path)}
        if not values:
            raise FileError(f"steer: {path} has no tensors")
    elif path.suffix == ".npy" and values:
        with opened(path) as file:
            try:
                array = np.load(file, allow_pickle=False).astype(float, casting="same_kind")
            except (TypeError, ValueError, EOFError) as error:
                raise FileError(f"steer: {path} cannot be read: {error}") from error
        values = dict.fromkeys(values, array)
    elif options.file is not None or not values:
        raise ValueError(
            "give at=, op ids and module paths, alone or with an .npy file; or only a "
            ".safetensors file, whose tensors have such names, or the folder of a recording"
        )
    return {place: value * np.float64(options.value) for place, value in values.items()}


def _are_positions(array: Array) -> bool:
    """True for ``position_ids``, and False for a mask and types of tokens."""
    if array.shape[1] == 1:
        return bool((array != 1).any())
    # Labels rise by more somewhere; packed and padded positions fall.
    rises = np.diff(array)
    return bool(array.max() > 1 and (rises <= 1).all() and (rises[:, -1] == 1).any())


def _ranges(texts: Sequence[Any]) -> list[tuple[float, float]]:
    """Return the first and the last number of ranges.

    Raises:
        ValueError: a text is none.
    """
    found = []
    for text in texts or ["0-"]:
        match = re.fullmatch(r"(\d+)(-?)(\d*)", str(text))
        if match is None or (match[3] and int(match[3]) < int(match[1])):
            raise ValueError(f"{text!r} is no number, and no range such as 3-5 or 7-")
        last = match[3] or "inf" if match[2] else match[1]
        found.append((float(match[1]), float(last)))
    return found


def _is_in(numbers: Array, ranges: Iterable[tuple[float, float]]) -> Array:
    parts = [(first <= numbers) & (numbers <= last) for first, last in ranges]
    return np.asarray(np.logical_or.reduce(parts))
