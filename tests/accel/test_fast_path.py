"""The C extension of amanda-tensorflow-accel, by itself: its decisions, and what it keeps alive.

Everything here runs without TensorFlow, on each version of CPython; in tests/tensorflow the tests
of the driver run with it and without.
"""

from __future__ import annotations

import array
import functools
import gc
import itertools
import statistics
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.accel.conftest import GATE, compiled

FAST_PATH = (
    Path(__file__).parents[2] / "amanda-tensorflow/accel/src/amanda_tensorflow_accel/fast_path.c"
)


class Slots:
    """Made of keyword arguments; what is not given is None."""

    __slots__: tuple[str, ...] = ()

    def __init__(self, **values: Any) -> None:
        for name in self.__slots__:
            setattr(self, name, values.get(name))


class Tracker(Slots):
    __slots__ = (
        *("cells", "depth", "generation", "gradients", "local", "marking", "muted", "native"),
        *("outdated", "owned", "passes", "run", "stale", "sums", "thread", "watches"),
    )

    def note_owner(self, output: Any, mark: Any) -> None:
        self.owned.append((output, mark))


class AnyScope(dict[str, Any]):
    __slots__ = ("cells",)

    def __init__(self, cells: dict[str, Any]) -> None:
        super().__init__()
        self.cells = cells


class SlowPath(Slots):
    __slots__ = ("may_pass", "plan")


class Inlined(Slots):
    __slots__ = ("counters", "plan", "timers")


class Plan(Slots):
    __slots__ = ("claims", "driver_data", "is_claim")


class Claim(Slots):
    __slots__ = ("marked", "passes")


class Mark(Slots):
    __slots__ = ("generation", "op_id", "shared")


class Known(Slots):
    __slots__ = ("run",)


class Run(Slots):
    __slots__ = ("cells", "is_running", "left", "mark", "produced", "scopes")

    def leave(self, results: Any) -> None:
        self.left.append(results)


class Counter(Slots):
    __slots__ = ("count",)


class Timer(Slots):
    __slots__ = ("executions", "log", "nanoseconds", "number")


class Log(Slots):
    __slots__ = ("due", "numbers")


class Values(Slots):
    """As VariableValues, but what C does not note is listed only."""

    __slots__ = ("handles", "known", "most", "noted")

    def note(self, kind: str, inputs: Any, result: Any) -> None:
        self.noted.append((kind, inputs, result))


class Source(Slots):
    __slots__ = ("handle",)


class Tensor:
    """What an operator gives; a handle."""


class Variable:
    """A variable, that is trainable."""

    def __init__(self) -> None:
        self.trainable: Any = True
        self.handle = Tensor()
        self.dtype = "float"


class Local(threading.local):
    tracker: Any = None


LOCAL = Local()
READ = Plan(claims=False, is_claim=False)
PLAIN = Plan(claims=False)
CLAIM = Plan(claims=True, is_claim=True)
MARK = "_mark"


@pytest.fixture(scope="session")
def fast_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = compiled(FAST_PATH, tmp_path_factory.mktemp("fast_path"))
    with pytest.raises(RuntimeError, match="configure"):
        module.gradient_function(None, None)
    tape, told = SimpleNamespace(is_empty=True), list[Any]()
    objects = {
        "tracker": Tracker,
        "any_scope": AnyScope,
        "slow_path": SlowPath,
        "inlined": Inlined,
        "plan": Plan,
        "claim": Claim,
        "mark": Mark,
        "known": Known,
        "run": Run,
        "counter": Counter,
        "timer": Timer,
        "log": Log,
        "variable": Variable,
        "numbers": array.array("q", [1, 2, 3]),
        "local": LOCAL,
        "read": READ,
        "reading": frozenset({"Identity", "ReadVariableOp"}),
        "plain": (float, int, str, type(None), Tensor),
        "no_tape_records": lambda: tape.is_empty,
        "values": Values,
        "source": Source,
        "parts": ("trainable", "handle", "dtype"),
        "told": (told.append, lambda variable: told.append(variable.handle)),
        "mark_name": MARK,
    }
    for name in objects:
        with pytest.raises(TypeError, match=name):
            module.configure({key: value for key, value in objects.items() if key != name})
    with pytest.raises(TypeError, match="no slot"):
        module.configure({**objects, "counter": type("Counter", (), {"count": 0})})
    with pytest.raises(AttributeError, match="count"):
        module.configure({**objects, "counter": Variable})
    module.configure(objects)
    return SimpleNamespace(module=module, tape=tape, told=told)


class Thread:
    """The current thread's tracker, and functions that note how they were called."""

    def __init__(self, fast_path: Any) -> None:
        self.tape = fast_path.tape
        self.ran: list[Any] = []
        self.asked: list[Any] = []
        self.noted: list[Any] = []
        self.values = Values(known={}, handles={}, most=64, noted=self.noted)
        self.told: list[Any] = fast_path.told
        self.ended: list[Any] = []
        self.read: list[Any] = []
        self.error: BaseException | None = None
        self.cells: dict[str, Any] = {"ReadVariableOp": [0, None, None]}
        self.local = SimpleNamespace(scope_name="", op_callbacks=[], is_eager=True)
        self.tracker = Tracker(
            thread={"paused": 0, "enabled": True, "held": False, "scopes": (1,)},
            local=self.local,
            cells=AnyScope(self.cells),
            stale=False,
            outdated=False,
            watches=True,
            native=5,
            generation=2,
            gradients={},
            sums={},
            owned=[],
            **dict.fromkeys(("muted", "depth", "passes"), 0),
        )
        self.module = fast_path.module
        self.call = self.fast_path(self.run)

    def fast_path(self, vanilla: Callable[..., Any]) -> Any:
        """What decides in place of `vanilla`."""
        return self.module.fast_path(vanilla, self.ask, self.value_of, self.end, self.values)

    def gradient_function(self, vanilla: Callable[..., Any]) -> Any:
        """What tapes call in place of `vanilla`."""
        return self.module.gradient_function(vanilla, self.ask)

    def run(self, *args: Any) -> Any:
        self.ran.append(args)
        if self.error is not None:
            raise self.error
        return [len(self.ran)]

    def ask(self, *args: Any, **kwargs: Any) -> str:
        self.asked.append((*args, *kwargs))
        return "asked"

    def value_of(self, tracker: Any, cell: Any, ctx: Any, variable: Any) -> float:
        self.read.append(cell)
        return 0.5

    def end(self, tracker: Any, entry: Any, start: int, end: int) -> None:
        self.ended.append((entry, end >= start))

    def op(self, kind: str, *args: Any) -> Any:
        """Call an operator; "asked" where Python decides."""
        return self.call("ctx", kind, "name", *args)


@pytest.fixture
def thread(fast_path: Any) -> Iterator[Thread]:
    found = Thread(fast_path)
    LOCAL.tracker = found.tracker
    yield found
    LOCAL.tracker = None
    fast_path.tape.is_empty = True


def test_the_header_of_both_extensions_is_the_same() -> None:
    """They are built apart, and neither may need the other."""
    beside = [source.with_name("cpython.h").read_text() for source in (GATE, FAST_PATH)]
    assert beside[0] == beside[1]


def test_operators_without_actions_are_counted(thread: Thread) -> None:
    """What is known to run vanilla runs with its arguments as they are, and is counted."""
    thread.cells["Add"] = [0, None, None]
    assert thread.op("Add", 1.0, [2.0, 3]) == [1]
    assert thread.op("Add", 1.0, (2.0, 3)) == [2]
    assert thread.cells["Add"][0] == 2
    assert thread.ran[0] == ("ctx", "Add", "name", 1.0, [2.0, 3])
    assert not thread.asked


def test_counts_are_those_after_the_operator(thread: Thread) -> None:
    """A count that changes while an operator runs, as by another one of its type, is added to."""
    cell = thread.cells["Add"] = [0, None]
    call = thread.fast_path(lambda *args: cell.__setitem__(0, 300))
    call("ctx", "Add", "name", 1.0)
    assert cell[0] == 301


def test_scopes_that_end_meanwhile(thread: Thread) -> None:
    """What an operator needs after it has run outlives the scope, if it ends in between."""
    thread.cells["Add"] = [0, Inlined(plan=PLAIN, counters=[Counter(count=0)], timers=[])]

    def vanilla(*args: Any) -> str:
        LOCAL.tracker = None
        thread.tracker.cells = None
        thread.cells.clear()
        del thread.tracker
        gc.collect()
        return "ran"

    assert thread.fast_path(vanilla)("ctx", "Add", "name", 1.0) == "ran"


def test_an_operator_that_raises_is_not_counted(thread: Thread) -> None:
    """Exceptions pass through as they are, and no count advances."""
    entry = Inlined(plan=PLAIN, counters=[Counter(count=0)], timers=[])
    thread.cells.update(
        Add=[0, None], Pass=[0, SlowPath(plan=PLAIN, may_pass=True)], Told=[0, entry]
    )
    thread.error = KeyError("fallback")
    for kind, args in ("Add", (1.0,)), ("Pass", (Variable(),)), ("Told", (1.0,)):
        with pytest.raises(KeyError) as raised:
            thread.op(kind, *args)
        assert raised.value is thread.error
    assert [cell[0] for cell in thread.cells.values()] == [0, 0, 0, 0]
    assert entry.counters[0].count == 0


UNKNOWN = {
    "no cell": ("Other", (1.0,)),
    "no entry": ("Done", (1.0,)),
    "another entry": ("Odd", (1.0,)),
    "a plan with actions": ("Acts", (1.0,)),
    "the slow path": ("Slow", (1.0,)),
    "the slow path, no variable": ("Pass", (1.0,)),
    "a variable": ("Add", (Variable(),)),
    "a variable in a list": ("Add", ([Variable()],)),
    "an object": ("Add", (object(),)),
    "a variable that is read": ("Read", (Variable(),)),
    "variables, and too few readings": ("Pass", (Variable(), Variable(), Variable())),
    "many arguments": ("Add", (1.0,) * 60),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_all_else_is_decided_by_python(thread: Thread, name: str) -> None:
    """Python gets what is not known with its arguments; nothing runs or counts before."""
    thread.cells.update(
        Done=[1, None],
        Odd=[0, "entry"],
        Acts=[0, PLAIN],
        Slow=[0, SlowPath(plan=PLAIN, may_pass=False)],
        Pass=[0, SlowPath(plan=PLAIN, may_pass=True)],
        Add=[0, None],
        Read=[0, READ],
    )
    kind, args = UNKNOWN[name]
    before = {key: list(cell) for key, cell in thread.cells.items()}
    assert thread.op(kind, *args) == "asked"
    assert thread.asked == [("ctx", kind, "name", *args)]
    assert before == thread.cells
    assert not thread.ran


def test_other_calls_are_pythons(thread: Thread) -> None:
    """Keywords, too few arguments, and a type of operators that is not text."""
    assert thread.call("ctx", "Add", name="x") == "asked"
    assert thread.call() == "asked"
    assert thread.call("ctx", 1, None) == "asked"


def test_name_scopes(thread: Thread) -> None:
    """Outside of layers the name scope chooses the cells; one that is not known is Python's."""
    thread.tracker.cells = {"a/": {"Add": [0, None, None]}}
    assert thread.op("Add", 1.0) == "asked"
    thread.local.scope_name = "a/"
    assert thread.op("Add", 1.0) == [1]
    assert thread.tracker.cells["a/"]["Add"][0] == 1


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, "counted"),
        ({"paused": 1}, "vanilla"),
        ({"paused": 1, "marking": "mark"}, "asked"),
        ({"stale": True}, "counted"),
        ({"stale": True, "muted": 1}, "vanilla"),
        ({"stale": True, "muted": 1, "marking": "mark"}, "asked"),
        ({"stale": True, "outdated": True}, "asked"),
        ({"stale": True, "depth": 1, "watches": False}, "vanilla"),
        ({"stale": True, "depth": 1, "watches": False, "outdated": True}, "asked"),
        ({"stale": True, "depth": 1, "watches": False, "run": "run"}, "counted"),
        ({"stale": True, "depth": 1}, "counted"),
    ],
)
def test_threads_that_do_not_listen(thread: Thread, state: dict[str, Any], expected: str) -> None:
    """Operators of tools' code, and of backward passes that nobody watches, run vanilla; the first
    one after a tool's code is counted as the others."""
    thread.cells["Add"] = [0, None]
    for name, value in state.items():
        if name == "paused":
            thread.tracker.thread[name] = value
        else:
            setattr(thread.tracker, name, value)
    result = thread.op("Add", 1.0)
    found = "asked" if result == "asked" else "counted" if thread.cells["Add"][0] else "vanilla"
    assert (found, bool(thread.ran)) == (expected, expected != "asked")
    assert expected != "counted" or not thread.tracker.stale


def test_threads_have_trackers_of_their_own(thread: Thread) -> None:
    """In a thread without a tracker everything runs vanilla."""
    thread.cells["Add"] = [0, None]
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(thread.op("Add", 1.0)))
    other.start()
    other.join()
    assert results == [[1]]
    assert thread.cells["Add"][0] == 0


def test_claims_are_marked_on_a_tape(thread: Thread) -> None:
    """Where a tape records, an operator whose executions share a mark carries it."""
    claim = Claim(marked=(MARK, "mark"), passes=0)
    plan = Plan(claims=True, is_claim=True, driver_data=claim)
    thread.cells["Add"] = [0, *[plan] * 9]
    thread.op("Add", 1.0)
    assert thread.ran[-1][3:] == (1.0,)
    thread.tape.is_empty = False
    assert thread.op("Add", 1.0) == "asked"
    thread.tracker.passes = 1
    thread.op("Add", 1.0)
    assert thread.ran[-1][3:] == (1.0, MARK, "mark")
    thread.local.op_callbacks = ["callback"]
    assert thread.op("Add", 1.0) == "asked"
    plan.driver_data = None
    assert thread.op("Add", 1.0) == "asked"
    assert thread.cells["Add"][0] == 2


def test_values_of_variables_are_noted(thread: Thread) -> None:
    """What may be the value of a variable is told of, and of what mark a marked Identity is."""
    claim = Claim(marked=(MARK, "mark"), passes=0)
    plan = Plan(claims=True, is_claim=True, driver_data=claim)
    thread.cells.update(Identity=[0, READ, READ, plan])
    thread.op("Identity", 1.0)
    assert thread.noted == [("Identity", (1.0,), [1])]
    thread.tracker.depth = 1
    thread.op("Identity", 1.0)
    thread.tracker.depth, thread.tracker.passes, thread.tape.is_empty = 0, 1, False
    thread.op("Identity", 1.0)
    assert len(thread.noted) == 2
    assert thread.tracker.owned == [([3], "mark")]


def test_readings_are_noted_in_c(thread: Thread) -> None:
    """The value of a variable that was read before is noted with its source; Python notes the first
    one, and drops those that have died where there are many."""
    thread.cells["ReadVariableOp"] = [0, *[READ] * 9]
    handle, other, outputs = Tensor(), Tensor(), []

    def vanilla(*args: Any) -> Any:
        outputs.append(Tensor())
        return outputs[-1]

    call = functools.partial(thread.fast_path(vanilla), "ctx", "ReadVariableOp", None)
    call(handle, "dtype", 1)
    assert thread.noted == [("ReadVariableOp", (handle, "dtype", 1), outputs[0])]
    source = Source(handle=weakref.ref(handle))
    thread.values.handles.update({id(handle): source, id(other): source})
    call(handle, "dtype", 1)
    assert len(thread.noted) == 1
    [[key, (reference, noted)]] = thread.values.known.items()
    assert (key, reference(), noted) == (id(outputs[1]), outputs[1], source)
    call(other, "dtype", 1)
    assert len(thread.noted) == 2
    thread.values.most = 3
    call(handle, "dtype", 1)
    assert len(thread.noted) == 3
    assert thread.cells["ReadVariableOp"][0] == 4


def test_readings_of_variables_are_counted(thread: Thread) -> None:
    """An operator that the runtime reads variables for is counted with its readings."""
    thread.cells["Pass"] = [0, *[SlowPath(plan=PLAIN, may_pass=True)] * 3]
    thread.cells["ReadVariableOp"] = [0, None, CLAIM, READ, PLAIN]
    assert thread.op("Pass", Variable(), 1.0, Variable()) == [1]
    assert thread.op("Pass", 1.0, Variable()) == [2]
    assert thread.cells["ReadVariableOp"][0] == 3
    assert thread.op("Pass", Variable()) == "asked"
    assert thread.cells["Pass"][0] == 2


@pytest.mark.parametrize("numbers", [array.array("q"), []], ids=["array", "list"])
def test_counters_and_timers(thread: Thread, numbers: Any) -> None:
    """They are told of each execution that has ended, and logs have its time and thread."""
    counters = [Counter(count=10**30), Counter(count=0)]
    timers = [
        (Timer(executions=0, nanoseconds=0, log=Log(numbers=numbers), number=7), "action"),
        (Timer(executions=0, nanoseconds=0, number=8), "action"),
    ]
    thread.cells["Add"] = [0, *[Inlined(plan=PLAIN, counters=counters, timers=timers)] * 2]
    thread.op("Add", 1.0)
    thread.op("Add", 1.0)
    assert [counter.count for counter in counters] == [10**30 + 2, 2]
    assert [timer.executions for timer, _ in timers] == [2, 2]
    assert list(numbers[::4]) == [7, 7]
    assert list(numbers[3::4]) == [5, 5]
    assert timers[0][0].nanoseconds == sum(numbers[2::4]) - sum(numbers[1::4])
    assert not thread.ended


@pytest.mark.parametrize("due", [0, 10**30, 2**62, None, 1.5])
def test_logs_that_are_due_are_pythons(thread: Thread, due: Any) -> None:
    """Where a tool has to look at its log, Python tells all counters and timers."""
    counter, log = Counter(count=0), Log(numbers=array.array("q"), due=due)
    timer = Timer(executions=0, nanoseconds=0, log=log, number=1)
    entry = Inlined(plan=PLAIN, counters=[counter], timers=[(timer, "action")])
    thread.cells["Add"] = [0, entry]
    assert thread.op("Add", 1.0) == [1]
    is_pythons = due in (0, 10**30, 1.5)
    assert thread.ended == ([(entry, True)] if is_pythons else [])
    assert (counter.count, timer.executions) == ((0, 0) if is_pythons else (1, 1))


def test_a_second_attempt_is_pythons(thread: Thread) -> None:
    """Where an exception is handled, Python finds out whether counters may count."""
    thread.cells["Add"] = [0, Inlined(plan=PLAIN, counters=[], timers=[])]
    try:
        raise ValueError
    except ValueError:
        assert thread.op("Add", 1.0) == "asked"
    assert thread.op("Add", 1.0) == [1]


def test_variables_are_read_before_what_is_told(thread: Thread) -> None:
    """Counters are told of the readings, one by one, and the operator gets the values; a reading
    without counters is Python's."""
    told, reading = (Inlined(plan=PLAIN, counters=[Counter(count=0)], timers=[]) for _ in range(2))
    thread.cells.update(Add=[0, told], ReadVariableOp=[0, reading, reading, None])
    first, second, third = Variable(), Variable(), Variable()
    second.trainable = False
    thread.told.clear()
    assert thread.op("Add", first, 1.0, second) == [3]
    assert thread.ran == [
        ("ctx", "ReadVariableOp", None, first.handle, "dtype", "float"),
        ("ctx", "ReadVariableOp", None, second.handle, "dtype", "float"),
        ("ctx", "Add", "name", [1], 1.0, [2]),
    ]
    assert [noted[:2] for noted in thread.noted] == [
        ("ReadVariableOp", (first.handle, "dtype", "float")),
        ("ReadVariableOp", (second.handle, "dtype", "float")),
    ]
    assert thread.told == [first, first.handle]
    assert (told.counters[0].count, reading.counters[0].count) == (1, 2)
    assert [cell[0] for cell in thread.cells.values()] == [2, 1]
    thread.cells["Add"][0] = 0
    assert thread.op("Add", third) == [4]
    assert thread.ran[-1] == ("ctx", "Add", "name", 0.5)
    assert thread.read == [thread.cells["ReadVariableOp"]]


def gradient(thread: Thread, **changed: Any) -> tuple[Run, tuple[Any, ...]]:
    """A run of a shared mark, and the arguments of its record's function."""
    mark = Mark(op_id="/Add:0", generation=2, shared=True)
    cells = {"Mul": [3, None], "Neg": [300]}
    values = {"is_running": False, "produced": {}, "left": [], **changed}
    run = Run(mark=mark, cells=cells, scopes=AnyScope(cells), **values)
    thread.tracker.gradients["/Add:0"] = Known(run=run)
    attributes = ("T", 1, MARK, mark, "N", 2)
    return run, ("Add", attributes, 2, (), (), (1.0,), (), "")


def test_gradient_functions_run_as_their_operators(thread: Thread) -> None:
    """The function runs without the mark; meanwhile operators count in the cells of its run."""
    run, args = gradient(thread)
    outer, during = thread.tracker.cells, []

    def vanilla(*given: Any) -> str:
        tracker = thread.tracker
        during.append((given[1], tracker.cells, tracker.run, tracker.stale, run.is_running))
        return "gradients"

    thread.tracker.stale = True
    thread.tracker.depth, thread.tracker.watches = 1, False
    assert thread.gradient_function(vanilla)(*args) == "gradients"
    assert during == [(("T", 1, "N", 2), run.scopes, run, False, True)]
    assert (thread.tracker.cells, thread.tracker.run, run.is_running) == (outer, None, False)
    # It is quiet outside of the function: nobody watches.
    assert thread.tracker.stale is True
    thread.tracker.watches = True
    assert thread.gradient_function(vanilla)(*args) == "gradients"
    assert thread.tracker.stale is False
    assert [cell[0] for cell in run.cells.values()] == [0, 0]
    assert (thread.asked, run.left) == ([], [])


@pytest.mark.parametrize("error", [None, KeyError("gradient")])
def test_gradient_functions_are_left(thread: Thread, error: Exception | None) -> None:
    """Also one that raises; its run is told of results where operators did not run vanilla."""
    run, args = gradient(thread, produced={("Mul", 0): ()})
    outer, thread.error = thread.tracker.cells, error
    function = thread.gradient_function(thread.run)
    if error is None:
        assert function(*args) == [1]
    else:
        with pytest.raises(KeyError) as raised:
            function(*args)
        assert raised.value is error
    assert (thread.tracker.cells, thread.tracker.run, run.is_running) == (outer, None, False)
    assert run.left == [[1] if error is None else None]


CHANGES: dict[str, Callable[[Thread, Run], Any]] = {
    "no tracker": lambda thread, run: setattr(LOCAL, "tracker", None),
    "muted": lambda thread, run: setattr(thread.tracker, "muted", 1),
    "outdated": lambda thread, run: setattr(thread.tracker, "outdated", True),
    "sums": lambda thread, run: thread.tracker.sums.update({1: 2}),
    "generation": lambda thread, run: setattr(thread.tracker, "generation", 3),
    "not shared": lambda thread, run: setattr(run.mark, "shared", False),
    "paused": lambda thread, run: thread.tracker.thread.update(paused=1),
    "disabled": lambda thread, run: thread.tracker.thread.update(enabled=False),
    "held": lambda thread, run: thread.tracker.thread.update(held=True),
    "no scopes": lambda thread, run: thread.tracker.thread.update(scopes=()),
    "a graph": lambda thread, run: setattr(thread.local, "is_eager", False),
    "unknown": lambda thread, run: thread.tracker.gradients.clear(),
    "no run": lambda thread, run: setattr(thread.tracker.gradients["/Add:0"], "run", None),
    "another run": lambda thread, run: setattr(run, "mark", Mark()),
    "running": lambda thread, run: setattr(run, "is_running", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_gradient_functions_are_pythons(thread: Thread, name: str) -> None:
    """Where anything else is to be done, Python gets the record with its mark."""
    run, args = gradient(thread)
    CHANGES[name](thread, run)
    assert thread.gradient_function(thread.run)(*args) == "asked"
    assert thread.asked == [args]
    assert not thread.ran


def test_records_without_marks_are_vanilla(thread: Thread) -> None:
    """A graph's mark, attributes in another form, and calls in another form are Python's."""
    _, args = gradient(thread)
    function = thread.gradient_function(thread.run)
    for attributes in (MARK, "a graph's"), (MARK,), [], ("".join(list(MARK)), 1), ("T", 1, b"N", 2):
        assert function(args[0], attributes, *args[2:]) == "asked"
    assert function(*args[:-1]) == "asked"
    assert function(*args[:-1], scope="") == "asked"
    assert not thread.ran
    for attributes in ("T", 1, "N", MARK), (), None:
        given = args[0], attributes, *args[2:]
        function(*given)
        assert thread.ran.pop() == given


# -- memory -------------------------------------------------------------------------


def everything(thread: Thread) -> None:
    """Operators and gradients of each kind, some of which raise."""
    log = Log(numbers=array.array("q"))
    timer = Timer(executions=0, nanoseconds=2**40, log=log, number=1)
    told = Inlined(plan=PLAIN, counters=[Counter(count=1000)], timers=[(timer, "action")])
    claim = Claim(marked=(MARK, "mark"), passes=0)
    plan = Plan(claims=True, is_claim=True, driver_data=claim)
    thread.tape.is_empty = False
    thread.tracker.passes = 1
    for error in None, KeyError("vanilla"):
        thread.error = error
        thread.cells.update(
            Add=[0, None],
            Identity=[0, plan],
            Pass=[0, SlowPath(plan=plan, may_pass=True)],
            Told=[0, told, told],
            ReadVariableOp=[0, None, told],
        )
        args = gradient(thread, produced={1: 2})[1]
        calls: list[Callable[[], Any]] = [
            lambda: thread.op("Add", [1.0]),
            lambda: thread.op("Unknown", 1.0),
            lambda: thread.op("Identity", 1.0),
            lambda: thread.op("Pass", Variable()),
            lambda: thread.op("Told", 1.0),
            lambda: thread.op("Told", Variable()),
            functools.partial(thread.gradient_function(thread.run), *args),
        ]
        for call in calls:
            try:
                call()
            except KeyError:
                assert error is not None


def test_nothing_is_kept(thread: Thread) -> None:
    """Operators leave no object behind, whether they run, are asked about, or raise."""
    blocks = []
    for _ in range(6):
        for _ in range(200):
            everything(thread)
            for found in thread.ran, thread.asked, thread.noted, thread.ended, thread.read:
                found.clear()
            thread.tracker.owned.clear()
            thread.told.clear()
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    # Caches of Python's, and threads of earlier tests, change the number now and then.
    growth = [after - before for before, after in itertools.pairwise(blocks)]
    assert statistics.median(growth) < 5


def test_cycles_are_collected(thread: Thread) -> None:
    """A function that refers to itself is freed."""

    class Owner:
        function: Any

    owner = Owner()
    values = Values(noted=[owner])
    owner.function = thread.module.fast_path(owner, owner, owner, owner, values)
    others = [thread.module.gradient_function(owner, owner)]
    owner.others = others  # type: ignore[attr-defined]
    references = [weakref.ref(owner), weakref.ref(owner.function), weakref.ref(others[0])]
    del owner, others, values
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_it_looks_like_the_function_in_python(thread: Thread) -> None:
    """Name, module and documentation are those of the function in Python."""

    def TFE_Py_FastPathExecute() -> None:
        """Documented."""

    for function in (
        thread.module.fast_path(None, TFE_Py_FastPathExecute, None, None, Values()),
        thread.module.gradient_function(None, TFE_Py_FastPathExecute),
    ):
        assert function.__name__ == "TFE_Py_FastPathExecute"
        assert (function.__doc__, function.__module__) == ("Documented.", __name__)
        with pytest.raises(AttributeError):
            function.other
        with pytest.raises(TypeError):
            type(function)()


def test_other_interpreters_are_refused(fast_path: Any) -> None:
    """It is loaded in the main interpreter only: what it is told belongs to the process."""
    pytest.importorskip("_xxsubinterpreters")
    loading = f"""
from importlib import util
spec = util.spec_from_file_location("fast_path", {fast_path.module.__file__!r})
try:
    spec.loader.exec_module(util.module_from_spec(spec))
except ImportError as error:
    print("refused:", error)
"""
    code = f"import _xxsubinterpreters as all; all.run_string(all.create(), {loading!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused:"), done


def test_what_was_found_is_found_anew(thread: Thread) -> None:
    """Where cells, name scopes or threads' trackers have changed, those of now are counted."""
    thread.tracker.cells = {"a/": {"Add": [0, None, None]}, "b/": {"Add": [0, None, None]}}
    for scope in "a/", "b/", "a/":
        thread.local.scope_name = scope
        thread.op("Add", 1.0)
    assert [cells["Add"][0] for cells in thread.tracker.cells.values()] == [2, 1]
    thread.tracker.cells["a/"] = {"Add": [0, None]}
    thread.op("Add", 1.0)
    thread.tracker.cells["a/"]["Add"] = [0, None]
    thread.op("Add", 1.0)
    assert thread.tracker.cells["a/"]["Add"][0] == 1
    LOCAL.tracker = None
    thread.op("Add", 1.0)
    assert thread.tracker.cells["a/"]["Add"][0] == 1


def test_switches_are_found_anew(thread: Thread) -> None:
    """A switch that has been looked at is looked at again after it has changed."""
    thread.cells["Add"] = [0, *[None] * 9]
    for paused in 0, 1, 0:
        thread.tracker.thread["paused"] = paused
        thread.op("Add", 1.0)
    assert thread.cells["Add"][0] == 2


def test_a_number_that_others_have_stays(thread: Thread) -> None:
    """A count that was read before an operator runs is the same afterwards."""
    counter = Counter(count=int("1000"))
    thread.cells["Add"] = [0, *[Inlined(plan=PLAIN, counters=[counter], timers=[])] * 5]
    thread.op("Add", 1.0)
    before = counter.count
    thread.op("Add", 1.0)
    assert (before, counter.count) == (1001, 1002)


def test_numbers_grow(thread: Thread) -> None:
    """A log gets each execution, as often as room has to be made in it and while others look."""
    log = Log(numbers=array.array("q"))
    timer = Timer(log=log, number=7, executions=0, nanoseconds=0)
    told = Inlined(plan=PLAIN, counters=[], timers=[(timer, "action")])
    thread.cells["Add"] = [0, *[told] * 3000]
    for _ in range(2500):
        thread.op("Add", 1.0)
    assert list(log.numbers[::4]) == [7] * 2500
    assert sum(log.numbers[2::4]) - sum(log.numbers[1::4]) == timer.nanoseconds
    with memoryview(log.numbers), pytest.raises(BufferError):
        thread.op("Add", 1.0)
    assert len(log.numbers) == 4 * 2500
