"""A request of TensorFlow to run one eager operator, and its form for core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.interface.calls import OpCall, Variable
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.tape_marks import Mark
from amanda_tensorflow.eager.variable_readings import VariableSource, VariableValues
from amanda_tensorflow.gradient_map.recording import MARK
from amanda_tensorflow.operators.description import NamedOperator, input_names, presented
from amanda_tensorflow.operators.types import has_one_output
from amanda_tensorflow.operators.variables import HandleVariable, parameter_name


@attrs.define(eq=False)
class Vanilla:
    """TensorFlow's own functions, as they were when the driver was attached.

    ``execute`` changes if TensorFlow replaces it meanwhile (``op_callbacks`` does).
    """

    fast_path: Callable[..., Any]
    execute: Callable[..., Any]
    record_gradient: Callable[..., Any]


@attrs.frozen(eq=False)
class OpRequest:
    """One operator that TensorFlow asks ``execute`` to run, without its inputs.

    Attributes:
        kind: the operator's type.
        count: how many outputs it has.
        attributes: names and values of its attributes, in turn; None if it has none.
        context: TensorFlow's context.
        name: the name that the caller gave.
        vanilla: TensorFlow's functions.
        has_fallen: whether the vanilla operator would have run on the fast path, but for callbacks
            of TensorFlow's.
    """

    kind: str
    count: int
    attributes: tuple[Any, ...] | None
    context: Any
    name: str | None
    vanilla: Vanilla
    has_fallen: bool = False

    def execute(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the operator; no tape records it. Returns its outputs."""
        try:
            result: list[Any] = self.vanilla.execute(
                # As callbacks are told of it on the path that the vanilla operator takes.
                self.kind if self.has_fallen else self.kind.encode(),
                self.count,
                list(inputs),
                self.attributes,
                self.context,
                self.name,
            )
        except tf.errors.OpError as error:
            is_named = self.has_fallen and not _internals.local_data().op_callbacks
            raise (_internals.named(error, self.name) if is_named else error) from None
        return result

    def record(self, inputs: Sequence[Any], outputs: Sequence[Any], mark: Mark | None) -> None:
        """Let the tapes record an execution, under `mark` if there is one."""
        attributes = self.attributes
        if mark is not None:
            attributes = (*(attributes or ()), MARK, mark)
        self.vanilla.record_gradient(self.kind, list(inputs), attributes, list(outputs))

    def execute_recorded(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the operator, recorded by the tapes of this thread. Returns its outputs."""
        outputs = self.execute(inputs)
        if not _internals.no_tape_records():
            self.record(inputs, outputs, None)
        return outputs

    def run(self, inputs: Sequence[Any]) -> Any:
        """Run and record the operator; returns its output, or the list if it declares several."""
        outputs = self.execute_recorded(inputs)
        return outputs[0] if has_one_output(self.kind) else outputs

    def presented_attributes(self) -> dict[str, Any]:
        """The attributes by name, as tools see them."""
        flat = self.attributes or ()
        return presented(self.kind, zip(flat[::2], flat[1::2], strict=True))

    def input_names(self, count: int) -> Sequence[str]:
        """The declared name of each of `count` inputs."""
        flat = self.attributes or ()
        return input_names(self.kind, count, dict(zip(flat[::2], flat[1::2], strict=True)))

    def call(self, op_id: str, inputs: list[Any], module: str, values: VariableValues) -> EagerCall:
        """The operator in the form for core.

        Args:
            module: the module path of the operator.
            values: the tensors that were read from variables.
        """
        attributes = self.presented_attributes()
        return EagerCall(
            op=NamedOperator(self.kind, op_id),
            op_id=op_id,
            inputs=inputs,
            names=input_names(self.kind, len(inputs), attributes),
            attributes=attributes,
            module=module,
            request=self,
            values=values,
        )


@attrs.define(eq=False)
class EagerCall(OpCall):
    """An eager operator that is about to run."""

    request: OpRequest = attrs.field(kw_only=True)
    values: VariableValues | None = None

    def _source(self, index: int) -> VariableSource | None:
        """The variable that an input is the handle or the value of; None for other inputs."""
        return None if self.values is None else self.values.source_of(self.inputs[index])

    def value(self, index: int) -> Any:
        """The value of the variable that input `index` was read from, or is; else None."""
        return None if self.values is None else self.values.of(self.inputs[index])

    def variable(self, index: int) -> Variable | None:
        """The variable that an input is the handle or the value of; None for other inputs."""
        source = self._source(index)
        handle = None if source is None else source.handle()
        return None if source is None or handle is None else HandleVariable(handle, source.steps)

    def parameter_name(self, index: int) -> str | None:
        """The path of a parameter that an input is the handle or the value of."""
        source = self._source(index)
        return None if source is None else parameter_name(source.handle())

    def is_collective(self) -> bool:
        """True if other processes take part."""
        return self.request.kind.startswith("Collective")

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        """See :meth:`OpRequest.run`."""
        return self.request.run
