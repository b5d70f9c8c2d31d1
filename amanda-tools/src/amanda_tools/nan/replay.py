"""An operator with copies of its inputs, to be run again alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import amanda
from amanda.errors import CapabilityError
from amanda.files import replaced
from amanda.tools.description import OpDescription
from amanda_tools._values.tensors import reader_of


@attrs.frozen(eq=False)
class OpReplay:
    """The first operator that produced NaN or an infinity, with copies of its inputs.

    Attributes:
        op: the operator.
        names: name of each input: ``0.input``, ``1.weight``.
        inputs: copies, None for absent ones; of a backward operator the gradients that it consumed.
        function: runs a forward operator on its inputs; None where that is not possible.
    """

    op: OpDescription
    names: Sequence[str]
    inputs: Sequence[Any]
    function: Callable[..., Any] | None

    @classmethod
    def of(
        cls,
        op: OpDescription,
        function: Callable[..., Any] | None,
        names: Sequence[str],
        inputs: Sequence[Any],
    ) -> OpReplay:
        """Copy the inputs of an execution."""
        copies = [None if t is None else reader_of(t).copy(t) for t in inputs]
        given = [names[i] if i < len(names) else "" for i in range(len(copies))]
        numbered = [f"{i}.{name}" if name else str(i) for i, name in enumerate(given)]
        return cls(op, numbered, copies, function)

    def run(self) -> Any:
        """Run the operator again, uninstrumented, on copies of the inputs.

        Raises:
            CapabilityError: the operator is a backward one, or the driver cannot run it alone.
        """
        if self.function is None:
            raise CapabilityError(
                f"op {self.op.id} cannot be run alone; its inputs are in replay.inputs"
            )
        copies = [None if t is None else reader_of(t).copy(t) for t in self.inputs]
        with amanda.disabled():
            return self.function(*copies)

    def write(self, path: Path) -> Path:
        """Write the inputs as NumPy arrays, and ``op``, a JSON text with the operator and element
        types.

        Element types that NumPy lacks become float32; inputs without elements (handles, lists) are
        left out.
        """
        given = zip(self.names, self.inputs, strict=True)
        pairs = [(n, t) for n, t in given if t is not None and reader_of(t).is_readable(t)]
        arrays: dict[str, Any] = {name: reader_of(t).numpy(t) for name, t in pairs}
        dtypes = {name: reader_of(tensor).dtype(tensor) for name, tensor in pairs}
        arrays["op"] = np.array(json.dumps({**self.op.identity(), "dtypes": dtypes}))
        with replaced(path, binary=True) as file:
            np.savez_compressed(file, **arrays)
        return path
