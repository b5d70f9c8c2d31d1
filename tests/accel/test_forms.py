"""The C extension of amanda-torch-accel, by itself: each form of a call is noticed, exactly once.

Everything here runs without PyTorch, on each version of CPython; in tests/torch the driver's own
tests run with the gate.
"""

from __future__ import annotations

import array
import functools
import gc
import math
import mmap
import operator
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

NO_OPERATOR: Any = []
ROOT = Path(__file__).parents[2]


class Frame:
    __slots__ = ("caller", "cells", "children", "generation", "module", "names")

    def __init__(self) -> None:
        self.module = None
        self.cells: dict[Any, Any] = {}
        self.names: dict[str, Any] = {}
        self.children: dict[int, Child] = {}
        self.generation = 0
        self.caller: Any = None


class Child:
    __slots__ = ("calls", "frames", "is_fused", "ref", "transparent")

    def __init__(self, module: Any) -> None:
        self.ref = weakref.ref(module)
        self.calls = 0
        self.frames = [Frame()]
        self.transparent = self.is_fused = False


class Known:
    __slots__ = (
        *("around_after", "around_before", "checked", "claimed", "claims", "gradients"),
        *("inlined_after", "inlined_before", "is_blind", "is_claim", "iterations", "layout"),
        *("name", "op_id", "owners", "resumed_after", "resumed_before", "run"),
    )

    def __init__(self, run: Callable[..., Any], is_claim: bool = False) -> None:
        self.run = run
        self.is_claim = self.claims = is_claim
        self.inlined_before = self.inlined_after = None


class Slots:
    __slots__ = ("cells", "frame", "generation", "iteration", "root", "stale", "thread")


class Mode(Slots):
    """Counts as the driver's interceptor does; what it has seen once has an empty plan."""

    def __init__(self) -> None:
        self.root = self.frame = Frame()
        self.cells = self.frame.cells
        self.generation = 0
        self.stale = False
        self.thread = {"paused": 0}
        self.asked: list[str] = []

    def handle(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked.append(func.__name__)
        cell = self.cells.setdefault(func, [0])
        cell[0] += 1
        if len(cell) <= cell[0]:
            cell.append(None)
        return func(*args, **(kwargs or {}))

    def counts(self) -> dict[str, int]:
        return {func.__name__: cell[0] for func, cell in self.cells.items() if cell[0]}

    def restart(self) -> None:
        self.asked.clear()
        for cell in self.cells.values():
            cell[0] = 0


@pytest.fixture(scope="session")
def ready(built: tuple[Any, Any]) -> tuple[Any, Any]:
    gate, toy = built
    Mode.__torch_function__ = gate.event(Mode.handle)  # type: ignore[attr-defined]
    builtins = (toy.push, toy.pop, toy.length, toy.at, toy.is_disabled)
    guards = [vars(cls)[name] for cls in (toy.Guard, toy.Placing) for name in _GUARD]
    known = lambda name, func: func.__name__ == name or name == "T"  # noqa: E731
    gate.configure(
        Mode, Frame, Child, Known, NO_OPERATOR, known, (*builtins, *guards, toy.is_disabled)
    )
    for name in ("keywords", "__add__", "none", "one", "all", "T"):
        gate.add(vars(toy.Base)[name], False)
    gate.add(toy.function, False)
    gate.add_mapping(toy.Base)
    return gate, toy


_GUARD = ("__enter__", "__exit__")


@pytest.fixture
def gate(ready: tuple[Any, Any]) -> Iterator[Any]:
    """The gate; afterwards everything is as before."""
    gate, toy = ready
    before = [row[:4] for row in gate.sites()]
    yield gate
    while toy.length():
        toy.pop()
    gate.restore()
    assert [row[:4] for row in gate.sites()] == before
    assert toy.length() == 0


@pytest.fixture
def toy(ready: tuple[Any, Any]) -> Any:
    return ready[1]


class Heap:
    """Makes subclasses of the toy's type, as torch.Tensor and nn.Parameter are."""

    @staticmethod
    def of(toy: Any) -> Any:
        return type("Sub", (type("Heap", (toy.Base,), {}),), {})


def forms(toy: Any) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Each form of a call, with the name that is reported."""
    early = toy.function
    unbound = toy.Base.keywords
    return {
        "method": ("keywords", lambda x: x.keywords(1)),
        "method, keywords": ("keywords", lambda x: x.keywords(a=1)),
        "method, unpacked": ("keywords", lambda x: x.keywords(*(1,), a=2)),
        "method, unbound": ("keywords", lambda x: unbound(x, 1)),
        "method, by name": ("keywords", lambda x: getattr(x, "keywords")(1)),  # noqa: B009
        "method, partial": ("keywords", lambda x: functools.partial(x.keywords, 1)()),
        "method, map": ("keywords", lambda x: list(map(x.keywords, [1]))),
        "no arguments": ("none", lambda x: x.none()),
        "no arguments, bound": ("none", lambda x: [f() for f in [x.none]]),
        "no arguments, by operator": ("none", lambda x: operator.methodcaller("none")(x)),
        "one argument": ("one", lambda x: x.one(1)),
        "one argument, unbound": ("one", lambda x: toy.Base.one(x, 1)),
        "one argument, map": ("one", lambda x: list(map(x.one, [1]))),
        "a tuple": ("all", lambda x: x.all(1, 2)),
        "a tuple, unpacked": ("all", lambda x: x.all(*(1, 2))),
        "addition": ("__add__", lambda x: x + 1),
        "addition, by operator": ("__add__", lambda x: operator.add(x, 1)),
        "addition, reduce": ("__add__", lambda x: functools.reduce(operator.add, [x, 1])),
        "addition, by method": ("__add__", lambda x: x.__add__(1)),
        "property": ("keywords", lambda x: x.T),
        "property, by name": ("keywords", lambda x: operator.attrgetter("T")(x)),
        "item": ("__getitem__", lambda x: x[0]),
        "item, by operator": ("__getitem__", lambda x: operator.getitem(x, 0)),
        "item, by method": ("__getitem__", lambda x: x.__getitem__(0)),
        "item, of the type": ("__getitem__", lambda x: toy.Base.__getitem__(x, 0)),
        "assignment": ("__setitem__", lambda x: operator.setitem(x, 0, 1)),
        "assignment, by method": ("__setitem__", lambda x: x.__setitem__(0, 1)),
        "function": ("function", lambda x: toy.function(x)),
        "function, keywords": ("function", lambda x: toy.function(x, a=1)),
        "function, unpacked": ("function", lambda x: toy.function(*(x,), a=1)),
        "function, bound early": ("function", lambda x: early(x)),
        "function, map": ("function", lambda x: list(map(toy.function, [x]))),
        "function, partial": ("function", lambda x: functools.partial(early, a=1)(x)),
    }


NAMES = list(forms(type("toy", (), {"Base": type("B", (), {"keywords": 0}), "function": 0})))


def repeated(form: Callable[[Any], Any], x: Any, times: int) -> None:
    for _ in range(times):
        form(x)


@pytest.mark.parametrize("name", NAMES)
def test_every_form_is_counted_exactly(gate: Any, toy: Any, name: str) -> None:
    """A call is one event in every form, also where the interpreter has specialised it before, and
    none before and after; what runs the second time runs without Python."""
    reported, form = forms(toy)[name]
    x = Heap.of(toy)()
    repeated(form, x, 100)
    gate.install()
    mode = Mode()
    toy.push(mode)
    repeated(form, x, 100)
    assert mode.counts() == {reported: 100}
    assert len(mode.asked) == 100
    mode.restart()
    repeated(form, x, 100)
    assert mode.counts() == {reported: 100}
    assert mode.asked == []
    assert toy.pop() is mode
    mode.restart()
    repeated(form, x, 100)
    assert mode.counts() == {}
    gate.restore()
    repeated(form, x, 100)
    assert mode.counts() == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_running_loop_is_noticed(gate: Any, toy: Any, name: str) -> None:
    """A loop that runs already is noticed from the next call on, and no longer after that."""
    reported, form = forms(toy)[name]
    x, mode, seen = Heap.of(toy)(), Mode(), []
    for i in range(300):
        if i == 100:
            gate.install()
            toy.push(mode)
        if i == 200:
            toy.pop()
            gate.restore()
        form(x)
        seen.append(sum(mode.counts().values()))
    assert seen[99] == 0
    assert seen[199] == seen[299] == 100
    assert mode.counts() == {reported: 100}


def test_functions_keep_their_hashes(gate: Any, toy: Any) -> None:
    """A dictionary by functions, as programs have them, works while the gate is on."""
    handlers = {toy.function: "known"}
    gate.install()
    assert handlers[toy.function] == "known"
    assert toy.function in {toy.function}


def test_what_does_not_fit_is_no_event(gate: Any, toy: Any) -> None:
    """A call whose arguments are refused is not counted, also where nothing is asked."""
    x, mode = Heap.of(toy)(), Mode()
    gate.install()
    toy.push(mode)
    repeated(lambda x: x + 1, x, 2)
    repeated(lambda x: x.keywords(1), x, 2)
    mode.restart()
    with pytest.raises(TypeError, match="unsupported operand"):
        x + "text"
    with pytest.raises(TypeError, match="no strings"):
        x.keywords("text")
    toy.pop()
    assert mode.counts() == {}


def test_nothing_inside_of_a_call_is_noticed(gate: Any, toy: Any) -> None:
    """What an operator calls is a part of it: as a mode, the gate is off meanwhile."""
    x, mode = Heap.of(toy)(), Mode()

    class Index:
        def __index__(self) -> int:
            return int(x.none())

    def call() -> Any:
        return operator.index(Index())

    operator_call = gate.operator_call(lambda op: call())
    op = type("Op", (), {"__call__": operator_call, "__name__": "op"})()
    gate.install()
    toy.push(mode)
    mode.cells[op] = [0, None, None]
    op()
    op()
    assert mode.counts() == {"op": 2}
    call()
    assert mode.counts() == {"op": 2, "none": 1}
    toy.pop()


def test_the_stack_looks_as_if_the_mode_lay_there(gate: Any, toy: Any) -> None:
    """Length, position, pop and push give what they would give with the mode on the stack."""
    gate.install()
    ours, other, another = Mode(), object(), object()
    for stack in ([ours], [other, ours], [ours, other], [other, ours, another]):
        for mode in stack:
            toy.push(mode)
        assert toy.length() == len(stack)
        assert [toy.at(i) for i in range(len(stack))] == stack
        popped = [toy.pop() for _ in stack]
        assert popped == stack[::-1]
        assert toy.length() == 0


def test_modes_that_are_pushed_in_c_lie_above(gate: Any, toy: Any) -> None:
    """``with torch.device(...)`` pushes a mode without asking Python: ours stays below it."""
    gate.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    with toy.Placing() as placing:
        assert placing is None
        assert [type(toy.at(i)) for i in range(2)] == [Mode, toy.Placing]
        x.none()
    assert toy.length() == 1
    x.none()
    assert mode.counts() == {"none": 2}
    assert toy.pop() is mode


def test_modes_that_are_off_notice_nothing(gate: Any, toy: Any) -> None:
    """Where a program turns modes off, the gate is off, too."""
    gate.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    repeated(lambda x: x.none(), x, 3)
    with toy.Guard():
        repeated(lambda x: x.none(), x, 3)
    repeated(lambda x: x.none(), x, 3)
    assert mode.counts() == {"none": 6}
    assert toy.pop() is mode


def test_what_acts_is_run_directly(gate: Any, toy: Any) -> None:
    """A known way to run an operator gets what PyTorch would report, and its result counts."""
    gate.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    x.keywords(1)
    calls: list[Any] = []

    def run(known: Any, func: Any, args: Any, kwargs: Any) -> Any:
        calls.append((known, func, args, kwargs))
        return "result"

    known = Known(run)
    cell = mode.cells[toy.Base.keywords]
    cell[1:] = [known]
    mode.restart()
    assert x.keywords(1) == "result"
    assert isinstance(x.keywords(2, a=3), int)
    cell[2:] = [None, known]
    assert x.keywords(2, a=3) == "result"
    assert calls == [
        (known, toy.Base.keywords, (x, 1), {}),
        (known, toy.Base.keywords, (x, 2), {"a": 3}),
    ]
    assert mode.counts() == {"keywords": 3}
    # Arguments of types that were not reported yet may be refused.
    assert mode.asked == ["keywords"]
    mode.restart()
    with pytest.raises(TypeError, match="no strings"):
        x.keywords("text")
    assert mode.counts() == {}
    toy.pop()


def test_claims_run_plainly_without_gradients(gate: Any, toy: Any) -> None:
    """An operator of which a tool wants the backward operators alone runs at once where none is
    recorded. (In the toy they are recorded where modes are off.)"""
    gate.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    x.none()
    cell = mode.cells[toy.Base.none]
    mode.restart()
    cell[1:] = [Known(lambda *_: "run", is_claim=True), Known(lambda *_: "run")]
    assert isinstance(x.none(), int)
    assert x.none() == "run"
    assert mode.counts() == {"none": 2}
    assert mode.asked == []
    toy.pop()


def test_a_stale_mode_is_asked(gate: Any, toy: Any) -> None:
    """Where plans may be out of date, Python is asked, whatever was known."""
    gate.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    x.none()
    mode.restart()
    mode.stale = True
    x.none()
    assert mode.asked == ["none"]
    toy.pop()


class Module:
    def __init__(self, below: Any = None) -> None:
        self.below = below


def called(function: Any) -> Any:
    """Calls a function as the instance of a class with that ``__call__`` is called: from C."""
    return functools.partial(operator.call, function)


def test_modules_are_entered_and_left(gate: Any, toy: Any) -> None:
    """A module that was called at its place before gets its frame, with counters at zero, and the
    way back leads to the caller's, also after an exception."""
    gate.install()
    mode, module, x = Mode(), Module(), Heap.of(toy)()
    outer = mode.frame = Frame()
    mode.cells = outer.cells
    child = outer.children[id(module)] = Child(module)
    frame = child.frames[0]
    frame.names["none"] = frame.cells[toy.Base.none] = [7, None, None]
    seen: list[Any] = []

    def forward(self: Any, fails: bool) -> None:
        seen.append((mode.frame, frame.caller, frame.names["none"][0], child.calls))
        x.none()
        if fails:
            raise ValueError("on purpose")

    wrapper = called(gate.module_call(forward, lambda *_: pytest.fail("Python was asked")))
    toy.push(mode)
    # The reported function is learned, in a frame of its own.
    mode.cells, kept = {}, mode.cells
    x.none()
    mode.cells = kept
    wrapper(module, False)
    assert seen == [(frame, outer, 0, 1)]
    assert frame.names["none"][0] == 1
    assert mode.frame is outer
    assert frame.caller is None
    child.calls = 0
    with pytest.raises(ValueError, match="on purpose"):
        wrapper(module, True)
    assert mode.frame is outer
    assert mode.cells is outer.cells
    toy.pop()


@pytest.mark.parametrize("change", ["calls", "generation", "fused", "transparent", "dead", "pause"])
def test_uncommon_modules_are_pythons(gate: Any, toy: Any, change: str) -> None:
    """A module that is new at its place, or needs more than a frame, is left to Python."""
    gate.install()
    mode, module = Mode(), Module()
    outer = mode.frame = Frame()
    mode.cells = outer.cells
    child = outer.children[id(module)] = Child(module)
    if change == "calls":
        child.calls = 1
    elif change == "generation":
        mode.generation = 1000
    elif change == "fused":
        child.is_fused = True
    elif change == "transparent":
        child.transparent = True
    elif change == "dead":
        child.ref = weakref.ref(Module())
    else:
        mode.thread["paused"] = 1
    asked: list[Any] = []
    python = lambda *args: asked.append(args)  # noqa: E731
    wrapper = called(gate.module_call(lambda *_: pytest.fail("C did it"), python))
    toy.push(mode)
    wrapper(module, 5)
    toy.pop()
    assert asked == [(module, 5)]
    assert mode.frame is outer


def test_subclasses_that_are_made_meanwhile(gate: Any, toy: Any) -> None:
    """A subclass made while the gate is on is noticed, and vanilla afterwards; one with a method of
    its own keeps that."""
    gate.install()
    mode = Mode()
    toy.push(mode)
    made = Heap.of(toy)
    own = type("Own", (toy.Base,), {"__getitem__": lambda self, index: "own"})
    made()[0]
    made() + 1
    assert own()[0] == "own"
    assert mode.counts() == {"__getitem__": 1, "__add__": 1}
    toy.pop()
    gate.restore()
    toy.push(mode)
    mode.restart()
    made()[0]
    toy.pop()
    # The mode is on the stack for real: the library reports to it.
    assert mode.asked == ["__getitem__"]


def test_only_what_is_still_ours_is_put_back(gate: Any, toy: Any) -> None:
    """restore() leaves alone what another library has replaced meanwhile."""
    made = Heap.of(toy)
    gate.install()
    made.__getitem__ = lambda self, index: "another"
    gate.restore()
    assert made()[0] == "another"


def test_no_mode_outlives_the_gate(gate: Any, toy: Any) -> None:
    """A mode that a thread has left on is none once another thread has taken the gate off, also if
    the gate is put on again."""
    gate.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    other = threading.Thread(target=gate.restore)
    other.start()
    other.join()
    assert toy.length() == 0
    gate.install()
    assert toy.length() == 0
    x.none()
    assert mode.counts() == {}


def test_threads_have_modes_of_their_own(gate: Any, toy: Any) -> None:
    """The gate of one thread notices nothing of another one, however the two interleave."""
    gate.install()
    mode, x, stop = Mode(), Heap.of(toy)(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            x.none()
            toy.function(x)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    toy.push(mode)
    repeated(lambda x: x.none(), x, 1000)
    popped = toy.pop()
    for _ in range(200):
        gate.restore()
        gate.install()
    stop.set()
    for thread in threads:
        thread.join()
    assert popped is mode
    assert mode.counts() == {"none": 1000}


def test_exceptions_leave_the_mode_on(gate: Any, toy: Any) -> None:
    """An exception in the handler reaches the caller, and the mode is as before."""
    gate.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    mode.cells = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        x.none()
    mode.cells = {}
    x.none()
    assert mode.counts() == {"none": 1}
    assert toy.pop() is mode


def test_nothing_is_kept_alive(gate: Any, toy: Any) -> None:
    """Calls change no reference count, and a mode that was popped is gone."""
    cases = list(forms(toy).values())
    x, argument = Heap.of(toy)(), object()
    gate.install()
    mode = Mode()
    toy.push(mode)

    def run(mode: Mode) -> None:
        mode.restart()
        for _, form in cases:
            form(x)
        toy.function(argument, a=argument)
        x.keywords(argument, a=argument)
        x.one(argument)

    repeated(run, mode, 5)
    # What earlier tests have left in cycles would drop None meanwhile.
    gc.collect()
    before = [sys.getrefcount(value) for value in (x, argument, mode, None, toy.Base)]
    repeated(run, mode, 200)
    after = [sys.getrefcount(value) for value in (x, argument, mode, None, toy.Base)]
    # None is immortal since 3.12, and before that others hold and drop it, too.
    assert [b - a for a, b in zip(before, after, strict=True)][:3] == [0, 0, 0]
    assert abs(after[3] - before[3]) < 50
    toy.pop()
    gone = weakref.ref(mode)
    del mode
    gc.collect()
    assert gone() is None


def test_names_are_those_of_the_function(gate: Any) -> None:
    """An object that stands for a function has its name and its documentation."""

    def function(x: int) -> int:
        """A function."""
        return x

    for call in (gate.reported(function), gate.operator_call(function)):
        assert call.__name__ == "function"
        assert call.__doc__ == "A function."
        assert call.__wrapped__ is function
        assert call(1) == 1


def test_unknown_forms_are_refused(gate: Any) -> None:
    """A builtin that is called in another way is not replaced, and the error names it."""
    for builtin in (vars(str)["split"], len, object()):
        with pytest.raises(ValueError, match=r"split|len|object"):
            gate.add(builtin, False)


@pytest.mark.parametrize("mode", ["attempt", "skip", "require"])
def test_without_a_compiler(mode: str, tmp_path: Path) -> None:
    """Without a C compiler the package is installed without its extension; `require` fails."""
    pytest.importorskip("setuptools")
    source = shutil.copytree(ROOT / "amanda-torch" / "accel", tmp_path / "source")
    for old in source.rglob("*.so"):
        old.unlink()
    environment = {**os.environ, "CC": "/bin/false", "AMANDA_TORCH_ACCEL_BUILD": mode}
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", str(tmp_path / "built")],
        cwd=source,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert (run.returncode == 0) == (mode != "require")
    if mode != "require":
        built = {path.suffix for path in (tmp_path / "built").rglob("*.*")}
        assert built == {".py", ".pyi", ".typed"}


# -- inlined routines ---------------------------------------------------------------


class Counter:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Log:
    __slots__ = ("due", "numbers")

    def __init__(self, due: int | None = None) -> None:
        self.numbers: Any = array.array("q")
        self.due = due


class Timer:
    __slots__ = ("_started", "executions", "log", "nanoseconds", "number")

    def __init__(self, log: Log | None = None) -> None:
        self.log, self.number = log, 5
        self.executions = self.nanoseconds = 0
        self._started: dict[int, int] = {}

    def start(self) -> None:
        raise AssertionError("it runs in C")

    def stop(self) -> None:
        # Only what was started elsewhere.
        self.executions -= 100


class MemoryUse:
    __slots__ = ("peak", "used")

    def __init__(self) -> None:
        self.used: Any = None
        self.peak: Any = 0


class MemoryChange:
    __slots__ = ("_held", "bytes", "use")

    def __init__(self, use: MemoryUse) -> None:
        self.bytes, self.use = 0, use
        self._held: dict[int, int] = {}

    def before(self) -> None:
        pass

    def after(self) -> None:
        pass


class Check:
    __slots__ = ("_held", "name", "overwrites", "trail")

    def __init__(self, overwrites: bool | None = False) -> None:
        self._held: dict[int, Any] = {}
        self.name, self.overwrites, self.trail = "name", overwrites, deque[str]()

    def before(self) -> None:
        raise AssertionError("it runs in C")

    def after(self) -> None:
        raise AssertionError("it runs in C")


class Sum:
    __slots__ = ("_held", "_weights", "amount", "executions", "expected", "last", "of", "total")

    def __init__(self, of: Any = None) -> None:
        self._held: dict[int, Any] = {}
        self._weights: dict[Any, Any] = {}
        self.amount = self.executions = 0
        self.total, self.of, self.last = Counter(), of, "shapes"
        self.expected: list[Any] = []

    def before(self) -> None:
        raise AssertionError("it runs in C")

    def after(self) -> None:
        raise AssertionError("it runs in C")

    def expect(self, key: Any) -> None:
        self.expected.append(key)


class Graph:
    __slots__ = ("asked", "form", "inner", "layout", "natives", "pending")


class Gradients:
    __slots__ = ("asked", "form", "graph", "handle", "hooks", "natives")


class Handle:
    __slots__ = ("scopes",)

    def __init__(self) -> None:
        self.scopes = ("scope",)


class Hooks:
    __slots__ = ("_dispatcher", "_handle", "_key", "calls", "has_after", "has_before")

    def __init__(self, dispatcher: Any, before: bool = True, after: bool = True) -> None:
        self._dispatcher, self._key = dispatcher, "key"
        self._handle = Handle()
        self.has_before, self.has_after = before, after
        self.calls: list[Any] = []

    def before(self, *gradients: Any) -> Any:
        self.calls.append(("before", *gradients))
        return "changed"

    def after(self, *gradients: Any) -> Any:
        self.calls.append(("after", *gradients))


class Routines:
    __slots__ = ("inlined_after", "inlined_before")


class Layout:
    """That of an operator with a tensor, a list of two, an absent tensor, and a keyword."""

    __slots__ = ("_func", "_keywords", "_lists", "_places", "_types", "is_in_place")

    def __init__(self, func: Any) -> None:
        self._func, self._keywords, self._types = func, ("key",), (Tensor, list, Tensor)
        self._lists = [(1, (Tensor, Tensor))]
        # After the arguments comes what stands for an absent tensor, and then the list's items.
        self._places = [0, 4, 5, 3, 2]
        self.is_in_place = False


class Action:
    __slots__ = ("func", "kwargs", "select")

    def __init__(self, func: Any, select: Any = None, **kwargs: Any) -> None:
        self.func, self.select, self.kwargs = func, select, kwargs


class Dispatcher:
    def __init__(self) -> None:
        self._quiet: dict[object, None] = {}
        self.settled: dict[object, Any] = {}

    def quieten(self) -> None:
        self._quiet[None] = None


class State:
    def __init__(self) -> None:
        self.enabled = self.cache = True
        self.held = False
        self.paused = 0


class Tensor:
    _base = None

    def __init__(
        self, grad_fn: Any = None, number: Any = 1.0, shape: Any = (2,), dtype: Any = "float"
    ) -> None:
        self.grad_fn, self.number, self.shape, self.dtype = grad_fn, number, shape, dtype


def item(number: Any) -> Any:
    """What the sum of a tensor says."""
    if isinstance(number, BaseException):
        # Another one each time: from Python 3.12 on, an exception keeps the frames it has left.
        raise type(number)(*number.args)
    return number


class Node:
    """A node of autograd, with the hooks that it was given."""

    def __init__(self, registered: Callable[..., Any], number: int = 0, *following: Any) -> None:
        self.hooks: list[Any] = []
        self._registered = registered
        self._number = number
        self.next_functions = tuple((node, 0) for node in following)
        self.metadata: dict[str, Any] = {}

    def _sequence_nr(self) -> int:
        return self._number

    def register_prehook(self, hook: Any) -> Any:
        return self._register(None, hook)

    def register_hook(self, hook: Any) -> Any:
        return self._register(None, hook)

    def _register(self, hooks: Any, hook: Any) -> Any:
        hooks, handle = self._registered(hooks, hook)
        self.hooks += hooks.values()
        return handle


class Leaf(Node):
    """The node that accumulates the gradient of a leaf."""

    def __init__(self, registered: Callable[..., Any]) -> None:
        super().__init__(registered)
        self.variable = Tensor()


class OfFunction(Node):
    """The node of a function of the program's own, whose class stands in no table."""


STATE = State()
PASS: dict[str, Any] = {"task": 1, "node": None, "next": 8, "check": None}
PASS.update(level=-1, recording=[], lock=[])
UNPAUSED = {"driver": 1}
looks: list[Any] = []
asked: list[Any] = []
_INLINED: dict[str, Any] = {}


@pytest.fixture
def inlining(gate: Any) -> Any:
    """The gate, which knows the classes above."""
    _INLINED.update(
        {
            "counter": Counter,
            "timer": Timer,
            "log": Log,
            "start": Timer.start,
            "clock": time.perf_counter_ns,
            "native": threading.get_native_id,
            "look": lambda log, now: looks.append((log, now)),
            "memory": MemoryUse,
            "change": MemoryChange,
            "ended": MemoryChange.after,
            "as_routine": lambda routine: asked.append(routine) or routine(),
            "check": Check,
            "before": Check.before,
            "sums": Sum,
            "add_after": Sum.after,
            "tensors": (Tensor,),
            "sum": lambda tensor: tensor.number,
            "item": item,
            "dtype": lambda tensor: tensor.dtype,
            "summed": frozenset({"float", "integer"}),
            "set_recording": PASS["recording"].append,
            "plain": (lambda: None, lambda: 0, (PASS, "level")),
            "graph": Graph,
            "gradients": Gradients,
            "hooks": Hooks,
            "routines": Routines,
            "tensor": Tensor,
            "state": STATE,
            "sequence": lambda: PASS["next"],
            "checks": (lambda: PASS["check"] and PASS["check"](),),
            "handle": Handle,
            "accumulation": Child,
            "reference": weakref.ref,
            "nothing": callable,
            "resume": lambda *_: None,
            "kinds": {Node: 0, Leaf: 1},
            "function": OfFunction,
            "task": lambda: PASS["task"],
            "node": lambda: PASS["node"],
            "layout": Layout,
            "action": Action,
            # Numbers stand for tensors that have been changed as often as they say.
            "version": vars(int)["numerator"],
            "tensors_of": lambda result: [*result],
            "acquire": lambda: PASS["lock"].append("acquired"),
            "release": lambda: PASS["lock"].append("released"),
            "unpaused": UNPAUSED,
            "raised": lambda error, action, name: ValueError(str(error), action.kwargs, name),
            "numbers": array.array("q", (1, 2, 3)),
            "changed": lambda action: None,
        }
    )
    PASS["lock"].clear()
    gate.configure_inlined(_INLINED)
    looks.clear()
    asked.clear()
    vars(STATE).update(vars(State()))
    return gate


@pytest.mark.parametrize("numbers", [array.array("q"), array.array("l"), []], ids=str)
def test_inlined_routines_run_without_python(inlining: Any, toy: Any, numbers: Any) -> None:
    """Counters and timers around an operator do what their Python code says, and run none, whatever
    a log keeps its numbers in."""
    inlining.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    x.none()
    counter, log, known = Counter(), Log(), Known(lambda *_: "run")
    timer = Timer(log)
    known.inlined_before = (counter, timer.start)  # type: ignore[assignment]
    known.inlined_after = (timer.stop, counter, counter)  # type: ignore[assignment]
    mode.cells[toy.Base.none][1:] = [known] * 3
    log.numbers = numbers
    counts = sys.getrefcount(counter), sys.getrefcount(timer), sys.getrefcount(log)
    for due in (None, 0, time.perf_counter_ns() + 10**12):
        log.due = due
        mode.restart()
        assert isinstance(x.none(), int)
    assert (counter.count, timer.executions) == (9, 3)
    rows = [log.numbers[at : at + 4] for at in range(0, 12, 4)]
    assert all(row[0] == 5 and row[3] == threading.get_native_id() for row in rows)
    assert timer.nanoseconds == sum(end - start for _, start, end, _ in rows) > 0
    assert looks == [(log, rows[1][2])]
    looks.clear()
    assert counts == (sys.getrefcount(counter), sys.getrefcount(timer), sys.getrefcount(log))
    assert mode.asked == []
    toy.pop()


def test_numbers_that_are_looked_into_are_not_moved(inlining: Any, toy: Any) -> None:
    """A log whose array is exported as a buffer takes no number, as in Python, and goes on when it
    is not."""
    inlining.install()
    mode, x = Mode(), Heap.of(toy)()
    toy.push(mode)
    x.none()
    timer, known = Timer(Log()), cast("Any", Known(lambda *_: "run"))
    known.inlined_before, known.inlined_after = (timer.start,), (timer.stop,)
    mode.cells[toy.Base.none][1:] = [known] * 200
    x.none()
    with memoryview(timer.log.numbers) as view:  # type: ignore[union-attr]
        assert len(view) == 4
        with pytest.raises(BufferError):
            x.none()
    for _ in range(100):
        x.none()
    assert timer.executions == len(timer.log.numbers) // 4 + 1  # type: ignore[union-attr]
    toy.pop()


class Allocates:
    """An operator that takes new pages, with a timer and a change of memory around it."""

    def __init__(self, inlining: Any, toy: Any) -> None:
        self.change, self.timer, self.mode = MemoryChange(MemoryUse()), Timer(), Mode()
        self.memory = mmap.mmap(-1, 1 << 26)
        self.error: Exception | None = None
        known = cast("Any", Known(lambda *_: "run"))
        self.op = type("Op", (), {"__call__": inlining.operator_call(self.run), "__name__": "op"})()
        known.inlined_before = (self.change.before, self.timer.start)
        known.inlined_after = (self.timer.stop, self.change.after)
        self.mode.cells[self.op] = [0, *[known] * 5]
        inlining.install()
        toy.push(self.mode)

    def run(self, op: Any) -> Any:
        """What the operator does."""
        if self.error is not None:
            raise self.error
        self.memory.write(bytes([1]) * len(self.memory))
        self.memory.seek(0)
        return ONE


reads_memory = pytest.mark.skipif(sys.platform != "linux", reason="Python reads it elsewhere")


@reads_memory
def test_a_change_of_memory_runs_without_python(inlining: Any, toy: Any) -> None:
    """The memory of the process is read in C, around a timer; its peak is noted."""
    of = Allocates(inlining, toy)
    assert of.op() is ONE
    first, peak = of.change.bytes, of.change.use.peak
    assert first > len(of.memory) / 2
    assert peak > first
    of.change.use.peak = 2**70
    assert of.op() is ONE
    # The pages are there.
    assert abs(of.change.bytes - first) < len(of.memory) / 2
    assert of.change.use.peak == 2**70
    assert of.change._held == {}  # noqa: SLF001
    assert (asked, of.timer.executions) == ([], 2)
    toy.pop()


@reads_memory
def test_a_change_of_memory_at_an_operator_that_raises(inlining: Any, toy: Any) -> None:
    """It is not counted, and the next one begins anew; without a begin in its thread Python ends
    the change."""
    of = Allocates(inlining, toy)
    of.error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        of.op()
    left = of.change._held  # noqa: SLF001
    assert (of.change.bytes, [*left]) == (0, [threading.get_ident()])
    of.error = None
    assert of.op() is ONE
    assert left == {}
    known = of.mode.cells[of.op][1]
    known.inlined_before = (of.timer.start,)
    assert of.op() is ONE
    assert asked == [of.change.after]
    toy.pop()


@reads_memory
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_memory_of_a_child_is_its_own(inlining: Any, toy: Any) -> None:
    """A child of a fork reads its own memory, and goes on where all its files are closed."""
    of = Allocates(inlining, toy)
    assert of.op() is ONE
    of.memory = mmap.mmap(-1, 1 << 26)
    of.change.bytes = 0
    child = os.fork()
    if not child:
        failed = of.op() is not ONE or of.change.bytes < len(of.memory) / 2
        os.closerange(3, 256)
        failed = failed or of.op() is not ONE
        of.memory, of.change.bytes = mmap.mmap(-1, 1 << 26), 0
        failed = failed or of.op() is not ONE or of.change.bytes < len(of.memory) / 2
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    toy.pop()


def test_the_memory_of_a_device_is_read_in_python(inlining: Any, toy: Any) -> None:
    """The two routines are called where a function says what is in use."""
    of = Allocates(inlining, toy)
    of.change.use.used = len
    assert of.op() is ONE
    assert asked == [of.change.before, of.change.after]
    assert (of.change.bytes, of.change.use.peak, of.timer.executions) == (0, 0, 1)
    toy.pop()


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_timer_around_an_operator(inlining: Any, toy: Any, error: type[Exception] | None) -> None:
    """A timer that starts last before an operator and stops first after it measures it alone; where
    the operator raises, its start is left for a stop in Python."""
    timer, known, mode = Timer(Log()), cast("Any", Known(lambda *_: "run")), Mode()

    def run(op: Any) -> Any:
        assert timer._started == {}  # noqa: SLF001
        if error is not None:
            raise error
        return ONE

    op = type("Op", (), {"__call__": inlining.operator_call(run), "__name__": "op"})()
    known.inlined_before, known.inlined_after = (timer.start,), (timer.stop,)
    mode.cells[op] = [0, *[known] * 3]
    inlining.install()
    toy.push(mode)
    if error is None:
        assert op() is ONE
    else:
        with pytest.raises(error):
            op()
    assert toy.pop() is mode
    assert timer.executions == (error is None)
    assert list(timer._started) == ([] if error is None else [threading.get_ident()])  # noqa: SLF001


class Around:
    """An operator with routines in Python, what they were given, and what Python was asked."""

    def __init__(self, inlining: Any, toy: Any, after: Any = None) -> None:
        self.given: list[Any] = []
        self.asked: list[Any] = []
        self.returned: Any = None
        self.known = known = cast("Any", Known(lambda *_: self.ask("run")))
        call = inlining.operator_call(lambda op, *args, **kwargs: ONE)
        self.op = type("Op", (), {"__call__": call, "__name__": "op"})()
        known.is_blind, known.layout, known.name = False, Layout(self.op), "op"
        known.around_before = (Action(self.take), Action(self.take, (1, -1), more=5))
        known.around_after = () if after is None else (Action(after),)
        known.resumed_before = lambda *given: self.ask("before", *given[1:])
        known.resumed_after = lambda *given: self.ask("after", *given[1:])
        self.mode = Mode()
        self.mode.cells[self.op] = [0, *[known] * 1000]
        inlining.install()
        toy.push(self.mode)

    def take(self, *values: Any, **kwargs: Any) -> Any:
        self.given.append((*values, self.mode.thread["paused"], *kwargs.values()))
        return self.returned

    def ask(self, *what: Any) -> str:
        self.asked.append(what)
        return str(what[0])

    def __call__(self, *others: Any, last: Any = None, **kwargs: Any) -> Any:
        return self.op(ONE, [TWO, THREE], **({"key": last or FOUR} | kwargs))


ONE, TWO, THREE, FOUR = (Tensor(number=number) for number in (1.0, 2.0, 3.0, 4.0))


def test_routines_in_python_are_called_from_c(inlining: Any, toy: Any) -> None:
    """A routine is given the inputs that it selects, as code of a tool: nothing else of Python's
    runs, and nothing is kept."""
    op = Around(inlining, toy, after=lambda value: op.take(value))
    counts = [sys.getrefcount(one) for one in (ONE, TWO, FOUR, op.known)]
    for _ in range(3):
        op.given.clear()
        assert op() is ONE
        assert op.given == [(ONE, TWO, THREE, None, FOUR, 1), (TWO, FOUR, 1, 5), (ONE, 1)]
        op.given.clear()
    assert (op.asked, op.mode.asked, op.mode.thread["paused"]) == ([], [], 0)
    assert PASS["lock"] == ["acquired", "released"] * 6
    assert counts == [sys.getrefcount(one) for one in (ONE, TWO, FOUR, op.known)]
    assert toy.pop() is op.mode


@pytest.mark.parametrize("name", ["types", "keywords", "transform", "driver", "no layout"])
def test_routines_of_calls_in_another_form_are_pythons(inlining: Any, toy: Any, name: str) -> None:
    """Where the form of a call is not known, or operators are not plain, Python runs all of it."""
    op = Around(inlining, toy)
    try:
        if name == "transform":
            PASS["level"] = 1
        elif name == "driver":
            UNPAUSED["other"] = 2
        elif name == "no layout":
            op.known.layout = None
        given = {"other": FOUR} if name == "keywords" else {}
        op(last=5 if name == "types" else None, **given)
    finally:
        PASS["level"] = -1
        UNPAUSED.pop("other", None)
    assert (op.asked, op.given, PASS["lock"]) == ([("run",)], [], [])
    assert toy.pop() is op.mode


def test_what_routines_return_is_pythons(inlining: Any, toy: Any) -> None:
    """Once a routine has returned something, or selects what is not there, Python goes on."""
    op = Around(inlining, toy)
    inputs = [ONE, TWO, THREE, None, FOUR]
    op.returned = "new"
    assert op() == "before"
    args = (ONE, [TWO, THREE]), {"key": FOUR}
    assert op.asked == [("before", op.op, *args, 1, inputs, "new")]
    op.returned = None
    op.known.around_before = (Action(op.take), Action(op.take, (7,)))
    assert op() == "before"
    assert op.asked[1:] == [("before", op.op, *args, 1, inputs, None)]
    op.known.around_before, op.known.around_after = (), (Action(lambda value: "other"),)
    op.asked.clear()
    assert op() == "after"
    assert op.asked == [("after", ONE, 1, inputs, "other")]
    assert op.mode.thread["paused"] == 0
    assert toy.pop() is op.mode


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_what_routines_raise(inlining: Any, toy: Any, error: type[BaseException]) -> None:
    """What a routine raises is what Python makes of it; the thread is as before, the lock free."""

    def fail(*_: Any, **__: Any) -> None:
        raise error("text")

    op = Around(inlining, toy)
    op.known.around_before = (Action(op.take), Action(fail, (0,), why=1))
    for _ in range(3):
        with pytest.raises(ValueError, match="text") as raised:
            op()
        assert raised.value.args == ("text", {"why": 1}, "op")
    assert PASS["lock"] == ["acquired", "released"] * 3
    assert (op.mode.thread["paused"], op.asked) == (0, [])
    assert toy.pop() is op.mode


def test_routines_that_take_no_tensor(inlining: Any, toy: Any) -> None:
    """Those need no description of the call, and run in any form of it."""
    op = Around(inlining, toy, after=lambda *values: op.take(*values, "after"))
    op.known.is_blind, op.known.layout = True, None
    op.known.around_before = (Action(op.take, ()),)
    op.known.around_after[0].select = ()
    assert op(other=5) is ONE
    assert (op.given, op.asked) == ([(1,), ("after", 1)], [])
    assert toy.pop() is op.mode


class Checked:
    """An operator with a check, which returns what it is told to, and what was left to Python."""

    def __init__(self, inlining: Any, toy: Any, check: Any) -> None:
        self.check, self.asked, self.result = check, list[str](), None
        PASS["task"] = -1
        self.known = known = Known(lambda *_: self.ask("run"))
        known.checked = lambda *given: self.ask("checked")  # type: ignore[attr-defined]
        known.inlined_before = (check.before,)  # type: ignore[assignment]
        known.inlined_after = (check.after,)  # type: ignore[assignment]
        call = inlining.operator_call(lambda op, *args, **kwargs: self.result)
        self.op = type("Op", (), {"__call__": call, "__name__": "op"})()
        self.mode = Mode()
        self.mode.cells[self.op] = [0, *[known] * 1000]
        inlining.install()
        toy.push(self.mode)

    def ask(self, what: str) -> str:
        self.asked.append(what)
        return what

    def __call__(self, result: Any, *args: Any, **kwargs: Any) -> tuple[list[str], int]:
        """Run it: what Python was asked, and how long the trail is."""
        self.result = result
        self.asked.clear()
        self.op(*args, **kwargs)
        return list(self.asked), len(getattr(self.check, "trail", ()))


FINITE, INFINITE = Tensor(), Tensor(number=math.inf)
OTHERS: dict[str, Any] = {
    "an infinity": INFINITE,
    "NaN": Tensor(number=math.nan),
    "in a tuple": (FINITE, INFINITE),
    "no sum": Tensor(number=RuntimeError("none")),
    "complex": Tensor(number=1j),
    "a dtype without a sum": Tensor(dtype="quantized"),
    "another class": type("Sub", (Tensor,), {})(),
    "another object": object(),
    "nested": (((FINITE,),),),
}


def test_checks_of_finite_outputs_run_in_c(inlining: Any, toy: Any) -> None:
    """Where all outputs are finite, a check leaves its trail and asks nothing of Python."""
    op = Checked(inlining, toy, Check())
    integer = Tensor(number=3, dtype="integer")
    results = FINITE, (FINITE, None, FINITE), [FINITE], None, 5, 2.0, "text", (), integer
    counts = [sys.getrefcount(one) for one in (FINITE, op.check, op.known, op.check.trail)]
    for number, result in enumerate(results, 1):
        assert op(result, INFINITE) == ([], number)
    op.result = result = None
    again = [sys.getrefcount(one) for one in (FINITE, op.check, op.known, op.check.trail)]
    assert again == counts
    toy.pop()


@pytest.mark.parametrize("name", OTHERS)
def test_checks_of_other_outputs_are_pythons(inlining: Any, toy: Any, name: str) -> None:
    """Where an output is not finite, or not known to be, Python runs the routines after it."""
    op = Checked(inlining, toy, Check())
    result = OTHERS[name]
    # What tests before this one have left in cycles may hold it.
    gc.collect()
    count = sys.getrefcount(result)
    for _ in range(10):
        assert op(result) == (["checked"], 0)
    op.result = None
    assert sys.getrefcount(result) == count
    toy.pop()


def test_checks_of_overwritten_inputs(inlining: Any, toy: Any) -> None:
    """Where inputs may be overwritten they are looked at before; where one is not finite, or where
    that is yet to be found out, Python runs the operator."""
    op = Checked(inlining, toy, Check(overwrites=True))
    assert op(FINITE, FINITE, 1, [FINITE, None], key=FINITE) == ([], 1)
    for given in (INFINITE, [INFINITE], object()):
        assert op(FINITE, given) == (["run"], 1)
        assert op(FINITE, key=given) == (["run"], 1)
    op.check.overwrites = None
    assert op(FINITE, FINITE) == (["run"], 1)
    toy.pop()


def test_checks_where_tensors_are_not_plain(inlining: Any, toy: Any) -> None:
    """Below other modes, and where an operator is transformed, Python runs it."""
    op = Checked(inlining, toy, Check())
    try:
        PASS["level"] = 1
        assert op(FINITE) == (["run"], 0)
    finally:
        PASS["level"] = -1
    toy.pop()
    other = Mode()
    toy.push(other := object())
    toy.push(op.mode)
    assert op(FINITE) == (["run"], 0)
    assert [toy.pop(), toy.pop()] == [op.mode, other]


@pytest.mark.parametrize("place", ["sum", "trail", "checked", "plain"])
def test_what_checks_raise(inlining: Any, toy: Any, place: str) -> None:
    """What is raised while tensors are looked at reaches the program, and the mode stays on."""
    op = Checked(inlining, toy, Check())
    results = {"sum": Tensor(number=KeyboardInterrupt()), "checked": INFINITE}
    error = KeyboardInterrupt if place == "sum" else AttributeError
    try:
        if place == "trail":
            op.check.trail = object()  # type: ignore[assignment]
        elif place == "checked":
            del op.known.checked  # type: ignore[attr-defined]
        elif place == "plain":
            PASS["level"], error = "no number", TypeError
        if place != "plain":
            with pytest.raises(error):
                op(results.get(place, FINITE))
        else:
            assert op(FINITE) == (["run"], 0)
    finally:
        PASS["level"] = -1
    assert toy.pop() is op.mode


def test_checks_while_the_gate_goes(inlining: Any, toy: Any) -> None:
    """A gate that another thread takes off, or a list that it changes, while a tensor is looked at
    does no harm."""
    op, values = Checked(inlining, toy, Check()), [FINITE, FINITE]

    class Sum:
        def __get__(self, instance: Any, owner: Any) -> float:
            values.clear()
            inlining.restore()
            return 1.0

    values.insert(0, type("Sub", (), {"number": Sum(), "dtype": "float"})())
    inlining.configure_inlined(_INLINED | {"tensors": (Tensor, type(values[0]))})
    assert op(values) == ([], 1)
    assert values == []
    assert toy.length() == 0
    inlining.configure_inlined(_INLINED)


def test_hooks_with_checks(inlining: Any) -> None:
    """A hook runs checks whose gradients are finite, and else asks Python, also where its routine
    before the operator was Python's."""
    dispatcher, check, routines = Dispatcher(), Check(), Routines()
    hooks = Hooks(dispatcher)
    hook = inlining.hook(hooks)
    routines.inlined_before, routines.inlined_after = (check.before,), (check.after,)
    dispatcher.settled["key"] = routines
    finite, infinite = (FINITE, None), (None, INFINITE)

    def run(outputs: Any, inputs: Any) -> list[str]:
        hooks.calls.clear()
        hook(outputs)
        hook(inputs, outputs)
        return [name for name, *_ in hooks.calls]

    assert run(finite, finite) == run(infinite, finite) == []
    assert run(finite, infinite) == ["after"]
    check.overwrites = True
    assert run(finite, finite) == []
    assert run(infinite, finite) == ["before"]
    check.overwrites = None
    assert run(finite, finite) == ["before"]
    check.overwrites = False
    check._held[0] = ()  # noqa: SLF001
    assert run(finite, finite) == ["before", "after"]
    assert len(check.trail) == 5


def test_sums_of_shapes_that_were_met(inlining: Any, toy: Any) -> None:
    """An execution of a kind whose number is known is added in C; of others Python is told the
    kind, which differs where a shape, a name, a type or the structure of a list does."""
    op = Checked(inlining, toy, total := Sum())
    small, large = Tensor(), Tensor(shape=(3,))
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (small, (small,), {}),
        (large, (small,), {}),
        (small, (large,), {}),
        (small, (small, 1), {}),
        (small, (small, 1.0), {}),
        (small, (), {"a": small}),
        (small, (), {"b": small}),
        (small, ([small], small), {}),
        (small, ([small, small],), {}),
        ((small,), (small,), {}),
    ]
    for number, (result, args, kwargs) in enumerate(calls):
        assert op(result, *args, **kwargs) == (["checked"], 0)
        total._weights[total.expected[-1]] = (10**number, number)  # noqa: SLF001
    assert len(set(total.expected)) == len(calls)
    kinds = len(total.expected)
    counts = sys.getrefcount(total), sys.getrefcount(op.known)
    for _ in range(3):
        for number, (result, args, kwargs) in enumerate(calls):
            assert op(result, *args, **kwargs) == ([], 0)
            assert total.last == number
    again = sys.getrefcount(total), sys.getrefcount(op.known)
    assert again == counts
    assert len(total.expected) == kinds
    assert (total.executions, total.amount) == (30, 3333333333)
    assert total.total.count == total.amount
    toy.pop()
    PASS["task"] = 1


@pytest.mark.parametrize("name", ["a backward pass", "an object", "a shape", "raises", "lost"])
def test_sums_of_what_is_not_known(inlining: Any, toy: Any, name: str) -> None:
    """In a backward pass Python runs the operator; tensors without a shape, or with one that cannot
    be looked up, and other objects are no kind; a number that is none is an error."""
    op, x = Checked(inlining, toy, total := Sum()), Tensor()
    expected: Any = (["checked"], 0)
    if name == "a backward pass":
        PASS["task"], expected = 5, (["run"], 0)
    elif name == "an object":
        x = object()  # type: ignore[assignment]
    elif name == "a shape":
        del x.shape
    elif name == "raises":
        x.shape = []
    else:
        op(x, x)
        total._weights[total.expected[-1]] = ("no number", ())  # noqa: SLF001
    if name in ("lost", "raises"):
        with pytest.raises(TypeError):
            op(x, x)
    else:
        assert op(x, x) == expected
        assert not total.expected
    assert total.executions == (name == "lost")
    assert toy.pop() is op.mode
    PASS["task"] = 1


def test_hooks_with_sums(inlining: Any) -> None:
    """A hook adds executions whose shapes were met, beside the last shapes of another sum, and else
    asks Python."""
    dispatcher, forward, routines = Dispatcher(), Sum(), Routines()
    total, hooks = Sum(of=forward), Hooks(dispatcher)
    hook = inlining.hook(hooks)
    routines.inlined_before, routines.inlined_after = (total.before,), (total.after,)
    dispatcher.settled["key"] = routines

    def run() -> list[str]:
        hooks.calls.clear()
        hook((FINITE,))
        hook((FINITE, None), (FINITE,))
        return [name for name, *_ in hooks.calls]

    assert run() == ["after"]
    total._weights[total.expected[-1], forward.last] = (7, "last")  # noqa: SLF001
    assert run() == run() == []
    forward.last = "others"
    assert run() == ["after"]
    assert (total.executions, total.amount, total.last) == (2, 14, "last")
    total._held[0] = ()  # noqa: SLF001
    assert run() == ["before", "after"]


@pytest.mark.parametrize("number", [1.0, math.inf, RuntimeError("none"), KeyboardInterrupt()])
def test_checks_record_no_gradients(inlining: Any, toy: Any, number: Any) -> None:
    """Gradients are not recorded while tensors are looked at, and again afterwards, whatever is
    raised. (In the toy they are recorded where modes are off.)"""
    dispatcher, check, routines = Dispatcher(), Check(), Routines()
    hook = inlining.hook(Hooks(dispatcher))
    routines.inlined_before, routines.inlined_after = (), (check.after,)
    dispatcher.settled["key"] = routines
    PASS["recording"].clear()
    with toy.Guard():
        if isinstance(number, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                hook((Tensor(number=number),), (FINITE,))
        else:
            hook((Tensor(number=number),), (FINITE,))
    assert PASS["recording"] == [False, True]


def test_a_timer_that_another_thread_started(inlining: Any, toy: Any) -> None:
    """What C does not know of, such as a timer of two threads, is Python's."""
    inlining.install()
    mode, x, known = Mode(), Heap.of(toy)(), Known(lambda *_: "run")
    toy.push(mode)
    x.none()
    timer = Timer()
    known.inlined_before, known.inlined_after = (), (timer.stop,)  # type: ignore[assignment]
    mode.cells[toy.Base.none][1:] = [known]
    mode.restart()
    x.none()
    assert timer.executions == -100
    toy.pop()


def test_hooks_run_inlined_routines(inlining: Any) -> None:
    """A hook runs the routines of its operator if all are inlined, and else asks Python: before
    they are known, and in threads that are paused, disabled or without the cache."""
    dispatcher, counter = Dispatcher(), Counter()
    hooks, node = Hooks(dispatcher), Node(inlining.hook_registrar(None))
    inlining.register(hooks, node)
    before, after = node.hooks
    assert before((1,)) == "changed"
    routines = Routines()
    routines.inlined_before, routines.inlined_after = (counter,), None
    dispatcher.settled["key"] = routines
    assert before((1,)) is None
    assert after((1,), (2,)) is None
    assert before((None,)) is None
    assert after((1,), (None, None)) is None
    assert hooks.calls == [("before", (1,)), ("after", (1,), (2,))]
    for name, value in (("paused", 1), ("enabled", False), ("cache", False), ("held", True)):
        usual = getattr(STATE, name)
        setattr(STATE, name, value)
        assert before((1,)) == "changed"
        setattr(STATE, name, usual)
    dispatcher.quieten()
    assert before((1,)) == "changed"
    assert counter.count == 1


def test_hooks_forget_routines(inlining: Any) -> None:
    """A hook keeps the routines that its dispatcher has settled, until it is told to forget them or
    the gate is taken off."""
    dispatcher, counter, routines = Dispatcher(), Counter(), Routines()
    hook = inlining.hook(Hooks(dispatcher))
    routines.inlined_before, routines.inlined_after = (counter,), None
    quiet = vars(dispatcher)["_quiet"]
    counts = sys.getrefcount(routines), sys.getrefcount(quiet)
    for drop in (inlining.forget, inlining.restore):
        inlining.install()
        dispatcher.settled = {"key": routines}
        assert hook((1,)) is None
        dispatcher.settled = {}
        assert hook((1,)) is None
        dispatcher.quieten()
        assert hook((1,)) == "changed"
        quiet.clear()
        drop()
        assert hook((1,)) == "changed"
        assert (sys.getrefcount(routines), sys.getrefcount(quiet)) == counts
    dispatcher.settled = {"key": routines}
    assert hook((1,)) is None
    dispatcher.settled = {}
    assert hook((1,)) == "changed"
    assert counter.count == 5
    # A hook that goes is none of those that are told.
    inlining.install()
    dispatcher.settled = {"key": routines}
    assert hook((1,)) is None
    del hook
    dispatcher.settled = {}
    assert (sys.getrefcount(routines), sys.getrefcount(quiet)) == counts
    inlining.forget()
    inlining.restore()


def test_dicts_of_hooks_are_used_again(inlining: Any) -> None:
    """A hook keeps dicts with nothing but it in them, none with a program's hooks; it lives no
    longer for it, and neither do the hooks of its operator."""
    inlining.install()
    registered, hooks = inlining.hook_registrar(None), Hooks(Dispatcher())
    count = sys.getrefcount(hooks)
    hook = inlining.hook(hooks)
    dicts = [registered(None, hook)[0] for _ in range(20)]
    assert len({id(one) for one in dicts}) == 20
    assert all(list(one.items()) == [(hook, hook)] for one in dicts)
    dicts[0][len] = len
    references = [weakref.ref(one) for one in dicts]
    owned = sys.getrefcount(hook)
    dicts.clear()
    assert not any(reference() for reference in references)
    assert sys.getrefcount(hook) == owned - 2 * 20
    again = [registered(None, hook)[0] for _ in range(20)]
    assert all(list(one.items()) == [(hook, hook)] for one in again)
    assert sys.getrefcount(hook) == owned
    del again
    last = registered(None, hook)[0]
    del hook
    assert len(last) == 1
    del last
    assert sys.getrefcount(hooks) == count
    inlining.restore()


def test_hooks_of_one_end(inlining: Any) -> None:
    """A node is hooked where there is something to do; hooks of others are registered as ever."""
    registered: list[Any] = []

    def vanilla(hooks: Any, hook: Any) -> Any:
        registered.append(hook)
        return {1: hook}, "handle"

    registrar = inlining.hook_registrar(vanilla)
    for before, after in ((True, False), (False, True), (False, False)):
        node = Node(registrar)
        inlining.register(Hooks(Dispatcher(), before, after), node)
        assert len(node.hooks) == before + after
    assert not registered
    assert Node(registrar).register_hook(len) == "handle"
    assert registered == [len]


def test_hooks_are_freed(inlining: Any) -> None:
    """A hook holds its operator's hooks and nothing else; both go with the node."""
    hooks = Hooks(Dispatcher())
    count = sys.getrefcount(hooks)
    node = Node(inlining.hook_registrar(None))
    inlining.register(hooks, node)
    assert sys.getrefcount(hooks) == count + 1
    node.hooks[0]((1,))
    del node
    gc.collect()
    assert sys.getrefcount(hooks) == count


class Owner(weakref.ref[Tensor]):
    __slots__ = ("is_idle", "op_id")

    def __new__(cls, leaf: Tensor, op_id: str) -> Owner:
        return super().__new__(cls, leaf)

    def __init__(self, leaf: Tensor, op_id: str) -> None:
        super().__init__(leaf)
        self.op_id = op_id
        self.is_idle = False


class Claimed:
    """An operator of two nodes, which uses a leaf, and what is known of it."""

    def __init__(self, inlining: Any) -> None:
        registered = inlining.hook_registrar(None)
        self.counter, self.dispatcher = Counter(), Dispatcher()
        routines = Routines()
        routines.inlined_before = routines.inlined_after = (self.counter,)
        self.dispatcher.settled["key"] = routines
        self.leaf = Leaf(registered)
        self.inner = Node(registered, 6, self.leaf, None)
        self.entry = Node(registered, 7, self.inner)
        self.known = known = Known(lambda *_: None)
        known.op_id, known.iterations = "op", {}  # type: ignore[attr-defined]
        owner = Owner(self.leaf.variable, "op")
        known.owners = {id(self.leaf.variable): owner}  # type: ignore[attr-defined]
        known.gradients = gradients = Gradients()  # type: ignore[attr-defined]
        gradients.form, gradients.graph = None, Graph()
        gradients.handle, gradients.natives = Handle(), [inlining.hook(self.hooks())]
        gradients.graph.form = [Node, [1], Node, [-3, -1]]
        gradients.graph.natives = [inlining.hook(self.hooks()), inlining.hook(self.hooks())]
        gradients.graph.inner = [[(0, 0, 1)]]
        self.mode = Mode()
        self.mode.thread["cache"] = True  # type: ignore[assignment]
        self.mode.iteration = 3
        self.claim = lambda start=6: inlining.claim(self.mode, known, Tensor(self.entry), start)

    def hooks(self) -> Hooks:
        return Hooks(self.dispatcher, before=False)


def test_an_interrupt_while_operators_are_claimed(inlining: Any) -> None:
    """An interrupt in what the gate asks before it claims backward operators reaches the program;
    where operators are recorded, Python claims them. Nothing is done either way."""
    op = Claimed(inlining)

    def interrupted() -> None:
        raise KeyboardInterrupt

    try:
        PASS["check"] = interrupted
        with pytest.raises(KeyboardInterrupt):
            op.claim()
        PASS["check"] = lambda: True
        assert op.claim() is False
    finally:
        PASS["check"] = None
    assert op.entry.hooks == op.leaf.hooks == []
    assert op.leaf.metadata == {}
    assert op.known.iterations == {}  # type: ignore[attr-defined]
    assert op.claim() is True


def test_backward_operators_are_claimed(inlining: Any) -> None:
    """The nodes of an operator whose gradient graph is known are hooked without Python, those
    behind its outputs when a pass comes to it; a leaf's accumulation runs in such a pass only."""
    op = Claimed(inlining)
    assert op.claim() is True
    assert op.known.iterations == {"op": 3}  # type: ignore[attr-defined]
    # One hook does all of it, after the node: a pass comes to what is behind it later.
    (entry,) = op.entry.hooks
    assert op.inner.hooks == []
    (leaf,) = op.leaf.hooks
    assert leaf((None, 1), (1,)) is None
    assert op.counter.count == 0
    PASS["node"] = op.entry
    assert entry((1,), (None,)) is None
    assert op.inner.hooks == []
    assert op.counter.count == 0
    assert entry((1,), (1,)) is None
    assert entry((1,), (1,)) is None
    assert len(op.inner.hooks) == 1
    leaf((1,), (1,))
    assert op.counter.count == 3
    for number in range(2, 80):
        PASS["task"] = number
        entry((1,), (1,))
    leaf((1,), (1,))
    PASS["task"] = 2
    leaf((1,), (1,))
    assert op.counter.count == 82
    # A second operator on the leaf is told of its accumulation.
    marks = op.leaf.metadata["amanda"].marks()
    assert marks == {"scope": leaf}
    marks["scope"].note_pass(2, False)
    leaf((1,), (1,))
    assert op.counter.count == 83
    PASS.update(task=1, node=None)


def test_nodes_with_something_before_them_have_two_hooks(inlining: Any) -> None:
    """Where something is to be done before the node of an output, too, a second hook does it, with
    what is done for the nodes behind it."""
    op = Claimed(inlining)
    op.known.gradients.graph.natives[0] = inlining.hook(Hooks(op.dispatcher))  # type: ignore[attr-defined]
    assert op.claim() is True
    before, after = op.entry.hooks
    PASS["node"] = op.entry
    assert before((1,)) is None
    assert (op.counter.count, len(op.inner.hooks)) == (1, 1)
    assert after((1,), (1,)) is None
    assert op.counter.count == 2
    PASS["node"] = None


def test_what_is_not_known_is_claimed_by_python(inlining: Any) -> None:
    """Where something has changed nothing is done: another form, another owner of a leaf, a thread
    without the cache."""
    op = Claimed(inlining)

    def refused() -> bool:
        return not (op.claim() or op.entry.hooks or op.leaf.hooks or op.leaf.metadata)

    graph = op.known.gradients.graph  # type: ignore[attr-defined]
    form, graph.form = graph.form, [Node, [1], Node, [-3, -2]]
    assert refused()
    graph.form, natives = form, graph.natives
    graph.natives = None
    assert refused()
    graph.natives = natives
    op.known.owners.clear()  # type: ignore[attr-defined]
    assert refused()
    owner = Owner(op.leaf.variable, "other")
    op.known.owners[id(op.leaf.variable)] = owner  # type: ignore[attr-defined]
    assert refused()
    op.mode.thread["cache"] = False  # type: ignore[assignment]
    assert refused()
    op.mode.thread["cache"] = True  # type: ignore[assignment]
    # The other operator has run in this iteration: the leaf is its. Where it has something to do
    # there, its graph is gone with its mark.
    op.known.iterations["other"] = 3  # type: ignore[attr-defined]
    assert refused()
    owner.is_idle = True
    assert op.claim()
    assert op.leaf.hooks == []
    assert len(op.entry.hooks) == 1


def test_claimed_nodes_are_freed(inlining: Any) -> None:
    """Nothing that is hooked outlives the nodes, and the dict of hooks takes weak references."""
    counts = []
    op = Claimed(inlining)
    inlining.install()
    registered = inlining.hook_registrar(None)
    for _ in range(3):
        op.leaf.hooks.clear()
        op.entry.hooks.clear()
        op.inner.hooks.clear()
        op.leaf.metadata.clear()
        counts.append([sys.getrefcount(h) for h in op.known.gradients.graph.natives])  # type: ignore[attr-defined]
        for _ in range(100):
            op.leaf.metadata.clear()
            assert op.claim()
            PASS["node"] = op.entry
            op.entry.hooks[-1]((1,), (1,))
    assert counts[0] == counts[1] == counts[2]
    hooks, _ = registered(None, inlining.hook(op.hooks()))
    gone = weakref.ref(hooks)
    assert not gc.is_tracked(hooks) or sys.version_info >= (3, 14)
    hooks[1] = [hooks]
    assert gc.is_tracked(hooks)
    del hooks
    gc.collect()
    assert gone() is None
    PASS["node"] = None


@pytest.mark.parametrize("kind", ["legacy", "isolated"])
def test_other_interpreters_are_refused(gate: Any, kind: str) -> None:
    """The gate is loaded in the main interpreter only: what it writes to belongs to the process."""
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    argument = repr(kind) if sys.version_info >= (3, 13) else f"isolated={kind == 'isolated'}"
    loading = f"""
from importlib import util
spec = util.spec_from_file_location("gate", {gate.__file__!r})
try:
    spec.loader.exec_module(util.module_from_spec(spec))
except ImportError as error:
    print("refused:", error)
"""
    code = f"import {name} as all; all.run_string(all.create({argument}), {loading!r})"
    # PyGILState_Check(), which PyTorch asks, is true in a process that has had another interpreter.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused:"), done
