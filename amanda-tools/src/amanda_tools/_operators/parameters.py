"""The model parameters among the inputs of operators, each counted once.

PyTorch has a type for parameters. TensorFlow has variables, which also hold the state of
optimizers, metrics and random generators; parameters have a path (``get_parameter_name``)::

    parameters = Parameters()
    used = parameters.used_by(context)          # in an analysis of a forward operator
    sum(parameter.size for parameter in set(used))
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import attrs

from amanda import OpContext
from amanda.interface.specs import TensorSpec
from amanda.python.references import Reference, nothing
from amanda_tools._values.shapes import byte_size, element_count
from amanda_tools._values.tensors import reader_of


@attrs.frozen
class UsedParameter:
    """One parameter of a model.

    Attributes:
        number: identifies it within one :class:`Parameters`.
        size: number of elements.
        bytes: bytes of the elements.
        name: its path where it was read first; "" without one.
    """

    number: int
    size: int
    bytes: int
    name: str = attrs.field(default="", eq=False)


class Parameters:
    """Recognizes parameters among the inputs of operators; keeps none of them alive."""

    def __init__(self) -> None:
        # By the identity of a value. Pairs of them would be an object more for each.
        self._values: dict[int, weakref.ref[Any]] = {}
        self._known: dict[int, UsedParameter] = {}
        self._by_input: dict[tuple[str, int], UsedParameter] = {}
        self._variables: dict[Hashable, UsedParameter] = {}
        self._count = 0

    def used_by(self, context: OpContext) -> Sequence[UsedParameter]:
        """Return the parameters that an operator reads.

        Call it in an analysis of a forward operator.
        """
        # Of each new operator: a missing key costs no function so.
        roles = (context.get("weight_index"), context.get("bias_index"))
        found: list[UsedParameter] = []
        in_graph, torch = not context.runs_at_once, sys.modules.get("torch")
        for position, tensor in enumerate(inputs_of(context) if in_graph else context.get_inputs()):
            if tensor is None:
                continue
            if torch is not None and isinstance(tensor, torch.Tensor):
                # Asked of each new operator: it has no key, and a parameter is its own value.
                if _is_in_use(context, tensor, position, has_role=position in roles):
                    found.append(self._parameter(tensor, context, position))
                continue
            variable = context.get_variable(position)
            if variable is not None:
                # An operator that takes the handle itself reads or writes for others.
                is_used = position in roles or not is_opaque(tensor)
                if is_used and context.get_parameter_name(position):
                    found += self._of_variable(variable.key, context, position)
            elif (position in roles or context.get_parameter_name(position)) and (
                value := context.get_value(position)
            ) is not None:
                found.append(self._parameter(value, context, position))
        return found or ()

    def _of_variable(
        self, key: Hashable, context: OpContext, position: int
    ) -> Sequence[UsedParameter]:
        """Return the parameter that a variable is; nothing for one that has no value yet."""
        if key not in self._variables:
            value = context.get_value(position)
            if value is None:
                return ()
            self._variables[key] = self._new_parameter(value, context, position)
        return (self._variables[key],)

    def _new_parameter(self, value: Any, context: OpContext, position: int) -> UsedParameter:
        sizes = element_count(value) or 0, byte_size(value) or 0
        name = context.get_parameter_name(position) or ""
        parameter = UsedParameter(self._count, *sizes, name)
        self._count += 1
        return parameter

    def _parameter(self, value: Any, context: OpContext, position: int) -> UsedParameter:
        """Return the parameter of a value; equal for one object, or for one place and size."""
        reference = self._values.get(id(value))
        if reference is not None and reference() is value:
            return self._known[id(value)]
        if _is_torch_parameter(value):
            parameter = self._new_parameter(value, context, position)
        else:
            # A driver that gives values of variables makes a new object at each reading.
            place = context.get_op_id(), position
            found = self._by_input.get(place)
            if found is None or found.size != element_count(value):
                found = self._by_input[place] = self._new_parameter(value, context, position)
            parameter = found
        try:
            reference = Reference(value, nothing)
            self._known[id(value)] = parameter
            self._values[id(value)] = reference
        except TypeError:
            # Objects that take no weak reference are recognized by their place alone.
            pass
        return parameter


def _is_in_use(context: OpContext, tensor: Any, position: int, *, has_role: bool) -> bool:
    """Return True if a tensor of PyTorch is a parameter of a model, with a size."""
    is_value = has_role and context.get_value(position) is not None
    if not (is_value or _is_torch_parameter(tensor)):
        return False
    # One of a lazy module has no size before the module's first call.
    is_lazy: bool = sys.modules["torch"].nn.parameter.is_lazy(tensor)
    return not is_lazy and not _is_of_metric(context, tensor)


def parameters_of(context: OpContext) -> dict[int, str | None]:
    """Return the positions of the inputs that are parameters, or variables of the program, with
    the path of a parameter that has one.

    Of a backward operator, those of the gradients of parameters.
    """
    if context.is_backward():
        count = max(1, len(context.get_grad_input_names()))
        named = {i: context.get_parameter_name(i) for i in range(count)}
        return {position: name for position, name in named.items() if name}
    roles = (context["weight_index"], context["bias_index"])
    found = {}
    for position, tensor in enumerate(context.get_inputs()):
        if tensor is None:
            continue
        # The value of a variable is not read for this.
        is_variable = context.get_variable(position) is not None
        value = None if is_variable else context.get_value(position)
        if is_variable or (value is not None and (position in roles or _is_torch_parameter(value))):
            found[position] = context.get_parameter_name(position)
    return found


def inputs_of(context: OpContext) -> Sequence[Any]:
    """Return descriptions of the inputs of an operator of a graph built ahead.

    Reading the tensors themselves makes TensorFlow's drivers copy the graph.
    """
    return context.get_tensor_specs().inputs or ()


def is_opaque(tensor: Any) -> bool:
    """True for a tensor that is a handle, or the description of one."""
    if isinstance(tensor, TensorSpec):
        return tensor.dtype in ("resource", "variant") or tensor.dtype.endswith("_ref")
    return reader_of(tensor).is_opaque(tensor)


def _is_of_metric(context: OpContext, value: Any) -> bool:
    """Return whether a parameter of PyTorch is the sum of a metric of Keras, or its count.

    It is a scalar without a gradient that an operator outside of modules reads.
    """
    if not context.get_op_id().startswith("/") or not _is_torch_parameter(value):
        return False
    return value.dim() == 0 and not value.requires_grad


def _is_torch_parameter(value: Any) -> bool:
    """True for ``torch.nn.Parameter``, which is one at any input of an operator."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Parameter)
