"""The context of a backward operator: a child of its forward operator's.

It reads the keys of the forward context, and writes none of them. Reading a released forward tensor
raises :class:`~amanda.errors.TensorReleased`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from amanda.errors import TensorReleased
from amanda.interface.action import ActionKind
from amanda.interface.calls import KnownTensor
from amanda.interface.context import OpContext, OpState
from amanda.interface.specs import TensorSpec, specs_of


class ReleasableTensors(Sequence[Any]):
    """Forward tensors in a backward analysis: reading a released one raises."""

    def __init__(self, op_id: str, kind: str, tensors: Sequence[Any]) -> None:
        self._op_id = op_id
        self._kind = kind
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        entry = self._tensors[index]
        if not callable(entry):
            return entry
        tensor = entry()
        if tensor is None:
            raise TensorReleased(
                f"{self._kind} {index} of op {self._op_id} was released after the forward "
                "pass; keep a copy of it in a forward routine (insert_before_op or "
                "insert_after_op)"
            )
        return tensor

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class BackwardOpContext(OpContext):
    """The context of a backward operator: a child of its forward operator's context.

    Reads of the mapping see the parent's keys; writes stay here.
    """

    __slots__ = ("_parent",)

    def __init__(self, parent: OpContext, state: OpState) -> None:
        super().__init__(state, parent.namespace, parent.runs_at_once)
        self._parent = parent

    def __missing__(self, key: Any) -> Any:
        return self._parent[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return dict.get(self, key, self._parent.get(key, default))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or key in self._parent

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys([*self._parent, *dict.__iter__(self)]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def keys(self) -> Any:
        return dict.fromkeys(self).keys()

    def items(self) -> Any:
        return {key: self[key] for key in self}.items()

    def values(self) -> Any:
        return {key: self[key] for key in self}.values()

    def is_forward(self) -> bool:
        return False

    def get_input_names(self) -> list[str]:
        return self._parent.get_input_names()

    def get_inputs(self) -> Sequence[Any]:
        return ReleasableTensors(self._state.op_id, "input", self._state.open_backward().inputs)

    def get_input_specs(self) -> Sequence[TensorSpec | None]:
        shown = self._state.open_backward().shown_inputs()
        return specs_of(self.get_inputs() if shown is None else shown)

    def get_outputs(self) -> Sequence[Any]:
        return ReleasableTensors(self._state.op_id, "output", self._state.open_backward().outputs)

    def get_value(self, index: int) -> Any:
        call = self._state.open_backward()
        names = self.get_input_names()
        entry = call.inputs[self._position(index, names, len(call.inputs), "inputs")]
        return entry.constant() if isinstance(entry, KnownTensor) else None

    def get_variable(self, index: int) -> None:
        """None: forward analyses read the variables of an operator."""

    def _parameter_name(self, index: int) -> str | None:
        return self._state.open_backward().parameter_name(index, self.get_input_names())

    def get_backward_op(self) -> Any:
        return self._state.backward_op

    def get_backward_op_id(self) -> str | None:
        return self._state.backward_op_id

    def get_grad_outputs(self) -> Sequence[Any] | None:
        self._state.open_backward()
        return None if self._state.gradients[0] is None else list(self._state.gradients[0])

    def get_grad_inputs(self) -> Sequence[Any] | None:
        self._state.open_backward()
        return None if self._state.gradients[1] is None else list(self._state.gradients[1])

    def get_grad_input_names(self) -> list[str]:
        return list(self._state.backward.names) if self._state.backward is not None else []

    def _selectable(self, kind: ActionKind) -> tuple[list[str], int | None]:
        grad_outputs, grad_inputs = self._state.gradients
        if kind is ActionKind.AFTER_BACKWARD_OP:
            names = self.get_grad_input_names()
            return names, None if grad_inputs is None else len(grad_inputs)
        return [], None if grad_outputs is None else len(grad_outputs)

    def _role(self, name: str, kind: str) -> int | None:
        roles = self["grad_input_roles"] if kind == "grad_inputs" else None
        return roles.get(name) if roles else None
