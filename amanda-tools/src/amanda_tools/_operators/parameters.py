"""The model parameters among the inputs of operators, each counted once.

PyTorch has a type for parameters. TensorFlow has variables, which also hold the state of
optimizers, metrics and random generators; :class:`VariableUse` tells parameters apart by what
the run does with them::

    parameters = Parameters()
    used = parameters.used_by(context)          # in an analysis of a forward operator
    parameters.note_gradient(context.get_op_id())     # in an analysis of a backward operator
    sum(parameter.size for parameter in parameters.select(used))      # after the run
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import attrs

from amanda import OpContext
from amanda.interface.specs import TensorSpec
from amanda.python.references import Reference, nothing
from amanda_tools._operators.op_table import row_of
from amanda_tools._values.shapes import byte_size, element_count, size_of
from amanda_tools._values.tensors import reader_of


@attrs.frozen
class UsedParameter:
    """One parameter of a model, or a candidate for one.

    Attributes:
        number: identifies it within one :class:`Parameters`.
        size: number of elements.
        bytes: bytes of the elements.
    """

    number: int
    size: int
    bytes: int


@attrs.define(eq=False)
class VariableUse:
    """The uses of one variable in a run.

    Attributes:
        parameter: the variable, counted as a parameter.
        is_scalar: it has no axes.
        is_floating: its elements are floating-point numbers.
        has_role: a mapping rule names it as a weight or a bias.
        came_first: an operator read it before any gradient was computed.
        is_assigned: an operator wrote into it.
        users: ids of the operators that read it.
    """

    parameter: UsedParameter
    is_scalar: bool
    is_floating: bool
    has_role: bool = False
    came_first: bool = False
    is_assigned: bool = False
    users: set[str] = attrs.field(factory=set)

    def is_parameter(self, differentiated: set[str]) -> bool:
        """Decide whether the variable is a parameter of the model.

        It is if a gradient flows to one of its users. Without one (inference, statistics of a
        batch norm), it is if it holds floating-point numbers that are read before gradients are
        computed or are never written: the state of an optimizer comes later. A scalar that is
        written, such as the sum of a metric, is none.

        Args:
            differentiated: ids of the operators whose gradients were computed.
        """
        if self.has_role or (self.is_floating and not differentiated.isdisjoint(self.users)):
            return True
        if not self.is_floating or (self.is_scalar and self.is_assigned):
            return False
        return self.came_first or not (self.is_assigned or self.is_scalar)


class Parameters:
    """Recognizes parameters among the inputs of operators; keeps none of them alive."""

    def __init__(self) -> None:
        # By the identity of a value. Pairs of them would be an object more for each.
        self._values: dict[int, weakref.ref[Any]] = {}
        self._known: dict[int, UsedParameter] = {}
        self._by_input: dict[tuple[str, int], UsedParameter] = {}
        self._uses: dict[Hashable, VariableUse] = {}
        self._assigned: set[Hashable] = set()
        self._differentiated: set[str] = set()
        self._count = 0

    def used_by(self, context: OpContext) -> Sequence[UsedParameter]:
        """Return the parameters, and variables that may be some, that an operator reads.

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
            key = context.get_value_key(position)
            if key is not None:
                is_handle = position not in roles and _is_opaque(tensor)
                found += self._variable(context, position, key, is_handle=is_handle)
                continue
            value = context.get_value(position)
            if value is None or _is_of_metric(context, value):
                continue
            if position in roles or _is_torch_parameter(value):
                found.append(self._parameter(value, context, position))
        return found or ()

    def note_gradient(self, op_id: str) -> None:
        """Note that a gradient of this forward operator is computed."""
        self._differentiated.add(op_id)

    def select(self, parameters: Iterable[UsedParameter]) -> set[UsedParameter]:
        """Return the `parameters` that the run so far shows to be model parameters."""
        # Decided late: whether a variable is a parameter shows in the backward pass.
        others = {
            use.parameter
            for use in self._uses.values()
            if not use.is_parameter(self._differentiated)
        }
        return set(parameters) - others

    def _variable(
        self, context: OpContext, position: int, key: Hashable, *, is_handle: bool
    ) -> Iterator[UsedParameter]:
        """Note how an operator uses a variable; yield it if its value is used."""
        traits, has_role = row_of(str(context["op_type"])).traits, position in _roles(context)
        if "reads_variable" in traits or "queries_variable" in traits:
            return
        if is_handle:
            # An operator that takes the handle itself writes into the variable.
            self._assigned.add(key)
            if key in self._uses:
                self._uses[key].is_assigned = True
            return
        use = self._uses.get(key) or self._new_use(context.get_value(position), key)
        if use is not None:
            use.has_role |= has_role
            use.came_first |= not self._differentiated
            use.users.add(context.get_op_id())
            yield use.parameter

    def _new_use(self, value: Any, key: Hashable) -> VariableUse | None:
        if value is None:
            return None
        is_floating = reader_of(value).is_readable_float(value)
        use = VariableUse(
            self._new_parameter(value),
            is_scalar=len(value.shape) == 0,
            is_floating=is_floating,
            is_assigned=key in self._assigned,
        )
        self._uses[key] = use
        return use

    def _new_parameter(self, value: Any) -> UsedParameter:
        parameter = UsedParameter(self._count, _size_of(value), byte_size(value) or 0)
        self._count += 1
        return parameter

    def _parameter(self, value: Any, context: OpContext, position: int) -> UsedParameter:
        """Return the parameter of a value; equal for one object, or for one place and size."""
        reference = self._values.get(id(value))
        if reference is not None and reference() is value:
            return self._known[id(value)]
        if _is_torch_parameter(value):
            parameter = self._new_parameter(value)
        else:
            # A driver that gives values of variables makes a new object at each reading.
            place = context.get_op_id(), position
            found = self._by_input.get(place)
            if found is None or found.size != _size_of(value):
                found = self._by_input[place] = self._new_parameter(value)
            parameter = found
        try:
            reference = Reference(value, nothing)
            self._known[id(value)] = parameter
            self._values[id(value)] = reference
        except TypeError:
            # Objects that take no weak reference are recognized by their place alone.
            pass
        return parameter


def _size_of(value: Any) -> int:
    """Return the elements of a parameter, of a nested one those of all items."""
    count = element_count(value)
    return size_of(value) if count is None else count


def _is_in_use(context: OpContext, tensor: Any, position: int, *, has_role: bool) -> bool:
    """Return True if a tensor of PyTorch is a parameter of a model, with a size."""
    is_value = has_role and context.get_value(position) is not None
    if not (is_value or _is_torch_parameter(tensor)):
        return False
    # One of a lazy module has no size before the module's first call.
    is_lazy: bool = sys.modules["torch"].nn.parameter.is_lazy(tensor)
    return not is_lazy and not _is_of_metric(context, tensor)


def parameter_positions(context: OpContext) -> frozenset[int]:
    """Return the positions of the inputs that are parameters, or variables of the program."""
    roles = (context["weight_index"], context["bias_index"])
    found = set()
    for position, tensor in enumerate(context.get_inputs()):
        if tensor is None:
            continue
        if context.get_value_key(position) is not None:
            # A variable, whose value is not read for this.
            found.add(position)
            continue
        value = context.get_value(position)
        if value is not None and (position in roles or _is_torch_parameter(value)):
            found.add(position)
    return frozenset(found)


def inputs_of(context: OpContext) -> Sequence[Any]:
    """Return descriptions of the inputs of an operator of a graph built ahead.

    Reading the tensors themselves makes TensorFlow's drivers copy the graph.
    """
    return context.get_tensor_specs().inputs or ()


def _roles(context: OpContext) -> tuple[int | None, int | None]:
    return context["weight_index"], context["bias_index"]


def _is_opaque(tensor: Any) -> bool:
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
