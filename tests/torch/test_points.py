"""Routines of an operator that has been met before: run together, with what is known of it.

The first execution of an operator is analysed and described; these tests look at those
after it, which read the tensors off the call by the layout that was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import _foreach_add, nn

import amanda
from amanda.errors import InPlaceWarning, RoutineResultError, SelectionError
from amanda.state import STATE, TOOL_LOCK
from tests.torch.support import Watcher, applied

A, B, C = torch.rand(2, 3), torch.rand(3, 3), torch.rand(3)
INDEX = torch.tensor([0, 1])


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self) -> Any:
        return self.call()


class Around(amanda.Tool):
    """Routines before and after the operators of a type; keeps what they are given."""

    def __init__(self, *names: str, before: Any = None, after: Any = None, **select: Any) -> None:
        super().__init__()
        self.given: list[tuple[Any, ...]] = []
        self.names = names
        self.routines = before, after
        self.select = select
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the routines."""
        if context.get_op().__name__ in self.names:
            before, after = self.routines
            context.insert_before_op(self.keep)
            if before is not None:
                context.insert_before_op(before, **self.select)
            context.insert_after_op(self.keep)
            if after is not None:
                context.insert_after_op(after)

    def keep(self, *tensors: Any) -> None:
        """Routine: note what there is."""
        self.given.append(tensors)


FORMS: Sequence[tuple[str, Callable[[], Any]]] = [
    ("linear", lambda: nn.functional.linear(A, B, C)),
    ("linear", lambda: nn.functional.linear(A, weight=B)),
    ("linear", lambda: nn.functional.linear(A, bias=None, weight=B)),
    ("cat", lambda: torch.cat([A, A])),
    ("cat", lambda: torch.cat(tensors=(A, B), dim=0)),
    ("stack", lambda: torch.stack([C, C, C], 1)),
    ("where", lambda: torch.where(A > 0.5, A, 0.0)),
    ("add", lambda: torch.add(A, A, alpha=2)),
    ("add", lambda: A + 1),
    ("add", lambda: torch.add(C, C, out=torch.empty(3))),
    ("mul_", lambda: A.clone().mul_(A)),
    ("split", lambda: A.split(1)),
    ("view", lambda: A.view(3, 2)),
    ("view", lambda: A.view((3, 2))),
    ("__getitem__", lambda: A[INDEX, :2]),
    ("__getitem__", lambda: A[[0, 1], [1, 1]]),
    ("embedding", lambda: nn.functional.embedding(INDEX, B)),
    ("batch_norm", lambda: nn.functional.batch_norm(A, None, None, C, training=True)),
    ("index_put", lambda: A.index_put((INDEX, INDEX), C[0])),
    ("einsum", lambda: torch.einsum("ij,jk->ik", A, B)),
    ("_foreach_add", lambda: _foreach_add([A, B], [A, B])),
    ("block_diag", lambda: torch.block_diag(A, B)),
    ("max", lambda: A.max(dim=1)),
]


@pytest.mark.parametrize(
    ("name", "call"), FORMS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(FORMS)]
)
def test_tensors_of_later_executions(name: str, call: Callable[[], Any]) -> None:
    """Routines get the same tensors at each execution, in whatever form the call is."""
    program, tool = Calls(call), Around(name)
    with applied(tool), torch.no_grad():
        results = [program() for _ in range(3)]
    assert len(tool.given) == 6
    for first, later in zip(tool.given[:2] * 2, tool.given[2:], strict=True):
        assert [type(t) for t in later] == [type(t) for t in first]
        assert all(x is None or torch.equal(x, y) for x, y in zip(first, later, strict=True))
    assert str(results[0]) == str(results[-1])


def test_an_operator_that_is_called_in_another_form() -> None:
    """One op id whose calls differ: routines get what each call was given."""
    forms = [
        lambda: nn.functional.linear(A, B, C),
        lambda: nn.functional.linear(A, B),
        lambda: nn.functional.linear(A, bias=C, weight=B),
        lambda: nn.functional.linear(A, bias=None, weight=B),
        lambda: nn.functional.linear(A, nn.Parameter(B), C),
    ] * 5
    program, tool = Calls(forms[0]), Around("linear")
    with applied(tool):
        for program.call in forms:
            program()
    befores = tool.given[::2]
    assert [given[2] is C for given in befores] == [True, False, True, False, True] * 5
    assert all(given[0] is A and torch.equal(given[1], B) for given in befores)


def test_changed_inputs_in_a_later_execution() -> None:
    """A routine may begin to change inputs when its operator is long known; routines after
    it see the change, and so does the operator."""
    calls: list[None] = []

    def double(x: torch.Tensor, *_: Any) -> Any:
        calls.append(None)
        return (x * 2, None, None) if len(calls) > 2 else None

    seen: list[torch.Tensor] = []
    program = Calls(lambda: nn.functional.linear(A, B, C))
    tool, watch = (
        Around("linear", before=double),
        Around("linear", before=lambda *t: seen.append(t[0])),
    )
    with applied(tool, watch):
        results = [program() for _ in range(4)]
    assert torch.equal(results[1], nn.functional.linear(A, B, C))
    assert torch.equal(results[3], nn.functional.linear(A * 2, B, C))
    assert [torch.equal(x, A * 2) for x in seen] == [False, False, True, True]


def test_changed_outputs_in_a_later_execution() -> None:
    """The same of outputs, also of an operator that writes in place."""
    calls: list[None] = []

    def negate(y: torch.Tensor) -> Any:
        calls.append(None)
        return -y if len(calls) > 4 else None

    x = torch.ones(2)
    kept: list[bool] = []

    def call() -> Any:
        z = x.clone()
        kept.append(z.add_(1) is z)
        return z.add(3)

    program = Calls(call)
    with applied(Around("add_", "add", after=negate)):
        results = [program().tolist() for _ in range(4)]
    assert results == [[5, 5], [5, 5], [-1, -1], [-1, -1]]
    assert all(kept)


def test_gradients_of_later_executions() -> None:
    """A routine that changes a value in a later execution passes the gradient straight
    through, and one that changes nothing leaves it bit-identical."""
    weight = nn.Parameter(B.clone())
    program = Calls(lambda: nn.functional.linear(A, weight, C).sin().sum())
    vanilla = torch.autograd.grad(program(), weight)[0]
    scale = [None, None, None, 2.0]
    tool = Around("linear", before=lambda x, *_: x * f if (f := scale.pop(0)) else None)
    tool.select = {"inputs": [0]}
    with applied(tool, Watcher()):
        gradients = [torch.autograd.grad(program(), weight)[0] for _ in range(4)]
    assert all(torch.equal(gradient, vanilla) for gradient in gradients[:3])
    expected = torch.autograd.grad(nn.functional.linear(2 * A, weight, C).sin().sum(), weight)[0]
    assert torch.equal(gradients[3], expected)


def test_routines_of_later_executions_are_isolated() -> None:
    """No gradients are recorded in them, though the model records its own; what they run,
    modules too, is not instrumented."""
    other, seen = nn.Linear(3, 3), []
    weight = nn.Parameter(B.clone())

    def look(x: torch.Tensor, *_: Any) -> None:
        seen.append((torch.is_grad_enabled(), other(x).requires_grad))

    program = Calls(lambda: nn.functional.linear(A, weight, C))
    tool = Around("linear", before=look)
    blind = amanda.Tool()
    blind.add_inst_for_op(
        lambda c: (
            c.insert_after_op(lambda: seen.append((torch.is_grad_enabled(), False)), outputs=[])
            if c.get_op().__name__ == "linear"
            else None
        )
    )
    with applied(tool, watcher := Watcher()):
        assert all(program().requires_grad for _ in range(3))
    with applied(blind):
        assert all(program().requires_grad for _ in range(3))
    assert seen == [(False, False)] * 6
    assert set(watcher.seen) == {"Calls/linear:0"} | {
        op_id for op_id in watcher.seen if op_id.startswith("Calls/linear:0/grad/")
    }


@pytest.mark.parametrize(
    ("routine", "error", "message"),
    [
        (lambda *_: 3, RoutineResultError, "must return None or"),
        (lambda *_: (None,), RoutineResultError, "must return None or"),
        (lambda *_: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_errors_in_later_executions(routine: Any, error: Any, message: str) -> None:
    """They name routine and op id, as at the first execution, and leave PyTorch vanilla."""
    late = [lambda *_: None, lambda *_: None, routine]
    program = Calls(lambda: nn.functional.linear(A, B, C))
    with applied(Around("linear", before=lambda *tensors: late.pop(0)(*tensors))):
        program()
        program()
        with pytest.raises(error, match=message) as caught:
            program()
        late.append(lambda *_: None)
        program()
    about = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "<lambda> at op Calls/linear:0" in about
    assert_left()


def assert_left() -> None:
    """No routine of this thread is running."""
    assert torch.is_grad_enabled()
    assert not STATE.paused
    assert not TOOL_LOCK.is_owned()


@pytest.mark.parametrize("result", [ValueError("now"), KeyboardInterrupt("now"), 3, []])
def test_errors_in_later_executions_of_counters(result: Any) -> None:
    """The same of a routine that takes no tensor; an empty sequence is its right to return."""
    late = [None, None, result, None]

    def count() -> Any:
        if isinstance(value := late.pop(0), BaseException):
            raise value
        return value

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(count, outputs=[]))
    program = Calls(lambda: nn.functional.linear(A, B, C))
    expected = RoutineResultError if result == 3 else type(result) if result else ()
    with applied(tool):
        program()
        program()
        with pytest.raises(expected, match=r"count|now") if expected else nullcontext() as caught:
            program()
        assert_left()
        program()
    assert not late
    if isinstance(result, ValueError):
        assert "count at op Calls/linear:0" in caught.value.__notes__[0]


def test_a_selection_that_a_later_execution_does_not_have() -> None:
    """A call with fewer tensors than the one that was analysed: the error names the op."""
    program = Calls(lambda: torch.cat([A, A, A]))
    tool = Around("cat", before=lambda *_: None, inputs=[2])
    with applied(tool):
        for _ in range(3):
            program()
        program.call = lambda: torch.cat([A, A])
        for _ in range(2):
            with pytest.raises(SelectionError, match=r"inputs=\[2\].*Calls/cat:0.*2 inputs"):
                program()


def test_in_place_changes_in_later_executions() -> None:
    """They are warned of at whichever execution they happen, once for each routine's."""
    weight = nn.Parameter(B.clone())
    late = [0.0, 0.0, 1.0, 0.0]

    def add(_: Any, w: torch.Tensor, *__: Any) -> None:
        if amount := late.pop(0):
            w.add_(amount)

    program = Calls(lambda: nn.functional.linear(A, weight, C))
    with applied(Around("linear", before=add)):
        program()
        program()
        with pytest.warns(
            InPlaceWarning, match="add changed a tensor of op Calls/linear:0"
        ) as record:
            program()
        program()
    assert len(record) == 1


def test_inference_tensors_in_later_executions() -> None:
    """Tensors of inference mode have no count of in-place changes, and are looked at as others."""
    program, tool = Calls(lambda: nn.functional.linear(A + 0, B, C)), Around("linear")
    with applied(tool), torch.inference_mode():
        results = [program() for _ in range(3)]
    assert len(tool.given) == 6
    assert torch.equal(results[0], results[2])


def test_a_forward_pass_ends_where_a_routine_at_its_entry_has_raised() -> None:
    """Begins and ends of forward passes come in pairs, also around the error of a routine."""
    told, passes, failing = list[str](), amanda.Tool(), amanda.Tool()
    passes.add_inst_for_pass(lambda point: told.append("begin"))
    passes.add_inst_for_pass(lambda point: told.append("end"), end=True)

    def fail(_: Any) -> None:
        raise ValueError("on purpose")

    failing.add_inst_for_module(fail)
    with applied(passes, failing), pytest.raises(ValueError, match="on purpose"):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert told == ["begin", "end"]
