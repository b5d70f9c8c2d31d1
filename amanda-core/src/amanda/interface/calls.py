"""One execution of an operator, as a driver describes it to core.

A driver of a framework whose operators are Python functions makes a :class:`BoundCall`, which has
names and attributes and can run the operator again; other drivers fill an :class:`OpCall`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs

from amanda.errors import CapabilityError
from amanda.interface.binding import Arguments
from amanda.interface.specs import Phase
from amanda.state import STATE


class Variable(abc.ABC):
    """A variable that an operator reads, with the view in which it reads it.

    It does not keep the variable alive, and stays usable after the analysis.

    Attributes:
        name: the framework's name of the variable; "" without one.
        key: equal for all uses of the variable, and different for other variables.
        view: identifies the view (reshaped, transposed); () for the variable itself.
    """

    name: str = ""
    key: Hashable = None
    view: Hashable = ()

    @abc.abstractmethod
    def change(self, function: Callable[[Any], Any]) -> None:
        """Write ``function(value)`` into the variable.

        Args:
            function: gets the current value in the operator's view (reshaped, transposed) and in
                the variable's own element type; returns a tensor of the same shape.

        Raises:
            AmandaError: the variable is gone, or cannot be written.
        """


class ParameterName(str):
    """The path of a parameter, with the model that holds it.

    Attributes:
        model: beginning of the ids of the model's operators; None if unknown.
    """

    __slots__ = ("model",)

    model: str | None

    def __new__(cls, path: str, model: str | None) -> ParameterName:
        name = super().__new__(cls, path)
        name.model = model
        return name


@attrs.define(eq=False)
class OpCall:
    """One forward operator about to be executed (or, in a graph mode, rewritten).

    Drivers may subclass it.

    Attributes:
        op: the framework's own operator or a thin view of it.
        op_id: the operator's id: readable, equal across iterations and processes.
        inputs: the flat list of input tensors; None for an absent optional one.
        names: the declared name of each input, "" where there is none.
        attributes: the operator's non-tensor arguments by name.
        module: path of the module that runs the operator, "" outside of modules.
        own_key: the key of its records, if not `op_id`: a model has the same ids in several graphs,
            and the operators of each graph are analysed separately.
        phase: what the operator belongs to.
    """

    op: Any
    op_id: str
    inputs: Sequence[Any]
    names: Sequence[str] = ()
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    module: str = ""
    own_key: str = ""
    phase: Phase = "forward"

    @property
    def key(self) -> str:
        """The key of the operator's records in a scope."""
        return self.own_key or self.op_id

    def shown_inputs(self) -> Sequence[Any]:
        """Objects with the shapes, element types and devices of the inputs."""
        return self.inputs

    def shown_outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Objects with those of the outputs; a graph mode may have them without `outputs`."""
        return outputs

    def value(self, index: int) -> Any:
        """The current value of input `index` if it is a parameter, buffer, variable
        or constant; None otherwise."""
        return None

    def variable(self, index: int) -> Variable | None:
        """The variable that input `index` was read from; None if :meth:`value` returns the
        parameter itself or None, and for constants."""
        return None

    def parameter_name(self, index: int) -> str | None:
        """The path of the parameter that input `index` is, see ``OpContext.get_parameter_name()``;
        None for other inputs."""
        return None

    def is_collective(self) -> bool:
        """True if other processes take part, which would have to run it again, too."""
        return False

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        """A function that runs the operator again on a flat list of inputs.

        It holds the non-tensor arguments and no tensor.

        Raises:
            CapabilityError: this driver cannot run a single operator again.
        """
        raise CapabilityError(
            f"the driver of op {self.op_id} cannot run a single operator again "
            "(it lacks Capability.REPLAY)"
        )


def no_name(tensor: Any) -> None:
    """The path of a parameter in drivers that do not know names: None."""


@attrs.define(eq=False)
class BoundCall(OpCall):
    """The call of an operator that is a Python function, bound by its signature.

    Attributes:
        arguments: the bound arguments; `inputs`, `names` and `attributes` come from them.
        function: runs the vanilla operator on the framework's own arguments.
        current_value: the value of an input that is a parameter, buffer, variable or
            constant; None for other tensors.
        name_of: the path of an input that is a parameter; None for other tensors, and by default.
    """

    arguments: Arguments = attrs.field(kw_only=True)
    function: Callable[..., Any] = attrs.field(kw_only=True)
    current_value: Callable[[Any], Any] = attrs.field(kw_only=True)
    name_of: Callable[[Any], str | None] = attrs.field(default=no_name, kw_only=True)

    def run(self, inputs: Sequence[Any]) -> Any:
        """Run the vanilla operator on flat inputs."""
        return self.arguments.call(self.function, inputs)

    def value(self, index: int) -> Any:
        tensor = self.inputs[index]
        return None if tensor is None else self.current_value(tensor)

    def parameter_name(self, index: int) -> str | None:
        tensor = self.inputs[index]
        return None if tensor is None else self.name_of(tensor)

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        arguments, function = self.arguments.without_tensors(), self.function
        return lambda inputs: arguments.call(function, inputs)


class KnownTensor:
    """A forward tensor for backward analyses, with further facts."""

    __slots__ = ()

    def constant(self) -> Any:
        """The current value of a parameter, buffer, variable or constant; None for others."""
        return None

    def parameter_name(self) -> str | None:
        """The path of a parameter; None for other tensors."""
        return None


@attrs.define(eq=False)
class BackwardCall:
    """One backward operator about to be executed.

    Attributes:
        op: the framework's own backward operator or a thin view of it.
        op_id: id of the backward operator.
        names: for each output of the backward operator, name of the forward input whose gradient it
            is; "" for other outputs.
        inputs, outputs: the forward operator's tensors, if they are alive; a callable entry, such
            as a :class:`KnownTensor`, is called when the tensor is read.
    """

    op: Any
    op_id: str
    names: Sequence[str] = ()
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()

    def shown_inputs(self) -> Sequence[Any] | None:
        """Tensors of the shapes and types of the forward inputs; None to use the inputs
        themselves."""
        return None

    def parameter_name(self, index: int, names: Sequence[str]) -> str | None:
        """The path of the parameter whose gradient output `index` is; None for other gradients.

        Args:
            names: the declared names of the forward inputs.
        """
        name = self.names[index] if index < len(self.names) else ""
        # Items of a list share a name, which identifies none of them. A driver may name a gradient
        # of no declared input.
        if not name or names.count(name) != 1:
            return None
        entry = self.inputs[names.index(name)]
        return entry.parameter_name() if isinstance(entry, KnownTensor) else None

    def shown(
        self, grad_outputs: Sequence[Any] | None, grad_inputs: Sequence[Any] | None
    ) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
        """Tensors of the shapes and types of the gradients, or the gradients themselves.

        Args:
            grad_outputs, grad_inputs: gradients that the operator consumes and produces; None where
                they do not exist yet.
        """
        return grad_outputs, grad_inputs


@attrs.frozen
class NamedOp:
    """The view of an operator that only has a name.

    ``get_op()`` and ``get_backward_op()`` return it if the framework's own object would keep
    tensors or a graph alive.
    """

    __name__: str


class OpFunction:
    """A function of an operator's flat inputs that runs it; it holds no tensor.

    Args:
        op_id: of the operator.
        run: runs the operator with the attributes that it had in its analysis.
    """

    def __init__(self, op_id: str, run: Callable[[Sequence[Any]], Any]) -> None:
        # Error messages call a routine by this name.
        self.__name__ = self.__qualname__ = "function"
        self._op_id = op_id
        self._run = run

    def __call__(self, *inputs: Any) -> Any:
        return self.now().run(inputs)

    def run(self, inputs: Sequence[Any]) -> Any:
        """Run the operator with the attributes that this function holds."""
        return self._run(inputs)

    def now(self) -> OpFunction:
        """The function with the current attributes.

        Within a replacement they are the attributes of the execution that is replaced; the
        returned function keeps them after the replacement has run.
        """
        call = STATE.call
        if call is None or call.op_id != self._op_id:
            return self
        return OpFunction("", call.freeze())
