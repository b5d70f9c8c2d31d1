"""Each form of a call of PyTorch's builtins is noticed once, as a mode notices it."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from amanda.python.patching import PatchSet
from amanda_torch import _internals, extension
from amanda_torch.eager import gate
from amanda_torch.eager.interceptors import Interceptor, NoTools
from amanda_torch.eager.module_names import Labels

pytestmark = pytest.mark.skipif(
    bool(gate.reason_unusable()), reason=f"the gate is not used here: {gate.reason_unusable()}"
)


def _made(cls: type[Interceptor]) -> Interceptor:
    interceptor = cls(NoTools(), Labels())  # type: ignore[arg-type]
    interceptor.stale = False
    # Operators outside of modules are not asked for their phase.
    interceptor.root.check(False)
    return interceptor


def counted(interceptor: Interceptor) -> dict[str, int]:
    """How often each operator was counted since this was last asked."""
    found = {name: cell[0] for name, cell in interceptor.root.names.items() if cell[0]}
    interceptor.root.restart()
    return found


@contextlib.contextmanager
def entered() -> Iterator[Interceptor]:
    """The gate is on, and an interceptor of this thread is entered."""
    patches = PatchSet()
    gate.switch_on(patches)
    interceptor = _made(gate.gated_class())
    interceptor.enter()
    try:
        yield interceptor
    finally:
        interceptor.exit()
        patches.undo()


@pytest.fixture
def noticing() -> Iterator[Interceptor]:
    """See :func:`entered`."""
    with entered() as interceptor:
        yield interceptor


def by_mode(form: Callable[[torch.Tensor], Any]) -> dict[str, int]:
    """The operators of a form that a mode counts."""
    interceptor = _made(Interceptor)
    with interceptor:
        _call(form)
    return counted(interceptor)


def _call(form: Callable[[torch.Tensor], Any]) -> BaseException | None:
    try:
        form(torch.ones(2, 2))
    except (TypeError, RuntimeError) as error:
        return error
    return None


add, bound = torch.add, torch.ones(2, 2).mul

FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a function": lambda x: add(x, x),
    "with names": lambda x: torch.add(input=x, other=x, alpha=2),
    "with a tuple and a dict": lambda x: torch.add(*(x, x), alpha=2),
    "of other arguments": lambda x: [torch.stack([x, x]), torch.split(x, 1), torch.zeros(2)],
    "a method": lambda x: x.add(x),
    "a method with names": lambda x: x.add(other=x, alpha=2),
    "a method without arguments": lambda x: x.relu(),
    "a method of one argument": lambda x: x.dot if x.dim() == 1 else x.matmul(x),
    "bound before": lambda x: [bound(2.0), bound(x)],
    "unbound": lambda x: torch.Tensor.add(x, x),
    "of the base": lambda x: _internals.TENSOR_BASE.add(x, x),
    "operators": lambda x: [x + 1, 1 + x, x - x, 2 / x, -x, ~(x > 0), x == x, abs(x), x @ x, x**2],
    "functions of operators": lambda x: [operator.add(x, x), operator.neg(x), operator.eq(x, 1)],
    "in place": lambda x: [operator.iadd(x, 1), x.mul_(2), x.__imul__(2)],
    "items": lambda x: [x[0], x[:, None], operator.getitem(x, 1), x.__getitem__(0)],
    "assigned items": lambda x: [operator.setitem(x, 0, 1.0), x.__setitem__(0, x[1])],
    "properties": lambda x: [x.T, x.mT, x.real, x.shape, x.dtype, x.is_cuda],
    "mapped": lambda x: list(map(torch.neg, [x, x, x])),
    "partial": lambda x: functools.partial(torch.add, x)(1.0),
    "sorted by a function": lambda x: sorted([x, x], key=torch.sum),
    "torch.ops": lambda x: [torch.ops.aten.relu.default(x), torch.ops.aten.relu(x)],
    "torch.ops with names": lambda x: torch.ops.aten.add.Tensor(x, x, alpha=2),
    "functions in Python": lambda x: [nn.functional.softsign(x), torch.einsum("ij,jk", x, x)],
    "functions of namespaces": lambda x: [torch.fft.fft(x), torch.linalg.inv(x + torch.eye(2))],
    "a subclass": lambda x: x.as_subclass(nn.Parameter) + 1,
    "reads": lambda x: [len(x), float(x.sum()), str(x), x.tolist(), x.numpy(), x.size()],
    "nothing that fits": lambda x: x.add(x, x, x, x),
    "nothing that fits by a sign": lambda x: x + object(),
    "a name that is not there": lambda x: torch.add(x, x, nothing=1),
    "sizes that do not fit": lambda x: x + torch.ones(3),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_counted_as_by_a_mode(name: str) -> None:
    """Each form of a call counts the operators that a mode counts, at its first execution, at later
    ones, and in a loop whose instructions CPython has specialised."""
    form = FORMS[name]
    expected = by_mode(form)
    with entered() as noticing:
        for _ in range(3):
            _call(form)
            assert counted(noticing) == expected
        for _ in range(40):
            _call(form)
        assert counted(noticing) == {key: 40 * count for key, count in expected.items()}


def test_functions_keep_their_hashes() -> None:
    """Dictionaries by functions find what was put there without the gate."""
    table = {torch.add: 1, torch.Tensor.add: 2, torch.relu: 3}
    with entered():
        assert (table[torch.add], table[torch.Tensor.add], table[torch.relu]) == (1, 2, 3)


def test_the_stack_looks_as_if_the_mode_lay_there(noticing: Interceptor) -> None:
    """Every question about the stack of modes is answered with the mode, among others, too."""

    class Other(TorchFunctionMode):
        pass

    assert (_internals.mode_depth(), _internals.mode_at(0)) == (1, noticing)
    with Other() as other:
        assert [_internals.mode_at(i) for i in range(_internals.mode_depth())] == [noticing, other]
        with _made(gate.gated_class()) as inner:
            assert _internals.mode_at(2) is inner
            assert _internals.mode_depth() == 3
    assert _internals.pop_mode() is noticing
    assert _internals.mode_depth() == 0
    _internals.push_mode(noticing)
    with pytest.raises(TypeError):
        _internals.mode_at("0")  # type: ignore[arg-type]


def test_modes_that_are_pushed_in_c_lie_above(noticing: Interceptor) -> None:
    """A device that is set with a with-statement lies above the mode, and is taken off alone."""
    with torch.device("meta"):
        assert _internals.mode_depth() == 2
        assert torch.ones(2).is_meta
    assert _internals.mode_depth() == 1
    assert not torch.ones(2).is_meta


def test_modes_that_are_off_notice_nothing(noticing: Interceptor) -> None:
    """Within ``DisableTorchFunction`` no operator is counted."""
    with DisableTorchFunction():
        torch.ones(2).add(1)
    assert counted(noticing) == {}
    torch.ones(2).add(1)
    assert counted(noticing) == {"ones": 1, "add": 1}


def test_exceptions_leave_the_mode_on(noticing: Interceptor) -> None:
    """An operator that raises is counted, and the next one is noticed."""
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.ones(2) + torch.ones(3)
        assert counted(noticing) == {"ones": 2, "add": 1}
        assert _internals.mode_at(0) is noticing


def test_threads_have_modes_of_their_own(noticing: Interceptor) -> None:
    """Another thread has no mode, and does not count in this one's."""
    depths: list[int] = []

    def run() -> None:
        depths.append(_internals.mode_depth())
        torch.ones(2).add(1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert depths == [0]
    assert counted(noticing) == {}


def test_subclasses_that_are_made_meanwhile(noticing: Interceptor) -> None:
    """Items of a class of tensors that is made while the gate is on are noticed, and later, too."""

    class Late(torch.Tensor):
        pass

    late = torch.ones(2).as_subclass(Late)
    counted(noticing)
    _ = late[0]
    assert counted(noticing) == {"__getitem__": 1}


def test_no_mode_outlives_the_gate() -> None:
    """Where the gate is taken off, its mode is on no stack any more, and dies with its owner."""
    with entered() as interceptor:
        gate.SWITCH.is_on = False
        assert _internals.mode_depth() == 0
        gone = weakref.ref(interceptor)
        interceptor.exit()
    del interceptor
    gc.collect()
    assert gone() is None


def test_only_what_is_still_ours_is_put_back() -> None:
    """PyTorch is as it was once the gate is off; unknown builtins are refused by name."""
    native = extension.load()
    before = [row[:4] for row in native.sites()]
    gate.SWITCH.is_on = True
    assert [row[:4] for row in native.sites()] != before
    with pytest.raises(RuntimeError, match="installed"):
        native.add(torch.add, False)
    gate.SWITCH.is_on = False
    assert [row[:4] for row in native.sites()] == before
    for builtin in (vars(str)["split"], len, object()):
        with pytest.raises(ValueError, match=r"split|len|object"):
            native.add(builtin, False)


def test_calls_look_like_the_function() -> None:
    """An object in the place of a function has its name, its documentation and its attributes."""

    def function(x: Any) -> Any:
        """Documented."""
        return x

    call = extension.load().reported(function)
    assert (call.__name__, call.__doc__, call.__module__) == ("function", "Documented.", __name__)
    assert call.__wrapped__ is function
    assert call(1) == 1
