"""The accelerator: operators that no tool acts on run past the driver without Python.

It is the extension in C of the distribution amanda-tensorflow-accel, which describes how. It
decides as :class:`~amanda_tensorflow.eager.interception.Interception` does where the answer is a
usual one, and calls that for everything else. A driver gives it to its interception where
:func:`choose` says so::

    found = extension() if choose() else None
    interception = Interception(dispatcher, vanilla, values, found)
"""

from __future__ import annotations

import array
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from amanda.engine.plan import ActionPlan
from amanda.extensions import Extension, chosen
from amanda.inline import Counter, Log, Timer
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.backward_ops import GradientRun
from amanda_tensorflow.eager.interception import Interception
from amanda_tensorflow.eager.op_request import Vanilla
from amanda_tensorflow.eager.plan_cache import READ, AnyScope, Inlined, SlowPath
from amanda_tensorflow.eager.tape_marks import Claim, Mark, OpGradients
from amanda_tensorflow.eager.thread import LOCAL, Tracker
from amanda_tensorflow.eager.variable_values import READING, Source, VariableValues
from amanda_tensorflow.gradient_map.recording import MARK
from amanda_tensorflow.plugin import TensorFlowEagerDriver

EXTENSION = Extension(
    "amanda-tensorflow", "amanda_tensorflow_accel", interface=3, newest_python=(3, 13)
)

# -- whether it is used -------------------------------------------------------


def is_asked_for() -> bool:
    """Whether the environment variable lets the accelerator be used."""
    driver = TensorFlowEagerDriver
    return chosen(driver.accelerator_variable, driver.accelerators) != "off"


def choose() -> bool:
    """Whether the accelerator decides on operators, by the environment and by what works here."""
    return is_asked_for() and not reason_unusable()


@functools.cache
def reason_unusable() -> str:
    """Why the accelerator cannot be used in this process; "" if it can. Made once."""
    for check in (refusal, configure, configure_native, self_test):
        reason = check()
        if reason:
            return reason
    return ""


def refusal() -> str:
    """The reason not to load the accelerator, as far as it is known without a try; "" for none."""
    return EXTENSION.refusal(TensorFlowEagerDriver.untested_version())


def extension() -> Any:
    """The C extension."""
    return EXTENSION.load()


def configure() -> str:
    """Tell the extension of our classes and of TensorFlow's functions."""
    try:
        extension().configure(
            {
                "tracker": Tracker,
                "any_scope": AnyScope,
                "slow_path": SlowPath,
                "inlined": Inlined,
                "plan": ActionPlan,
                "claim": Claim,
                "mark": Mark,
                "known": OpGradients,
                "run": GradientRun,
                "counter": Counter,
                "timer": Timer,
                "log": Log,
                "variable": _internals.VARIABLE,
                "numbers": array.array("q", [1, 2, 3]),
                "local": LOCAL,
                "read": READ,
                "reading": READING,
                # Those of tensors come first: they are most.
                "plain": (
                    _internals.EagerTensor,
                    *(_internals.NO_VARIABLES - {_internals.EagerTensor}),
                    np.ndarray,
                ),
                "no_tape_records": _internals.no_tape_records,
                "parts": _internals.READING_PARTS,
                "told": _internals.TOLD_OF_READINGS,
                "values": VariableValues,
                "source": Source,
                "mark_name": MARK,
            }
        )
    except (AttributeError, TypeError) as error:
        return f"the accelerator does not know the driver's classes: {error}"
    return ""


def configure_native() -> str:
    """Have functions in C++ called instead of their bindings, if they are found and tell the same.

    Without them the accelerator works, too.
    """
    found = _internals.native_functions()
    if found is not None and extension().configure_native(
        found.data,
        found.is_empty,
        _internals.context_of_process(),
        _internals.local_data(),
        found.execute,
        found.binding,
    ):
        extension().configure_readings(found.reading, _internals.CONTEXT_HANDLE)
    return ""


# -- the self-test ------------------------------------------------------------


class _Output:
    """A stand-in for a tensor that an operator makes."""


class _Trial:
    """Operators of all kinds of entries in a tracker of its own; TensorFlow runs none of them.

    Args:
        native: the extension that decides; None for Python.
    """

    def __init__(self, native: Any) -> None:
        self._ran: list[tuple[Any, ...]] = []
        self._raised = 0
        self._outputs: list[Any] = []
        vanilla = Vanilla(self._run, self._run, self._run)
        self._values = VariableValues()
        interception = Interception(None, vanilla, self._values, native)  # type: ignore[arg-type]
        self._call = interception.fast_path(self._run)
        self._counter, self._timer = Counter(), Timer(Log(), 7)
        self._tracker = Tracker(None)  # type: ignore[arg-type]
        self._tracker.stale = self._tracker.outdated = False

    def _run(self, *args: Any) -> Any:
        self._ran.append(args[1:])
        if args[3] is None:
            raise ValueError
        self._outputs.append(_Output())
        return self._outputs[-1]

    def noticed(self) -> list[Any]:
        """The outcomes of operators with entries of each kind."""
        plan = ActionPlan("trial", claims=True)
        variable = _internals.VARIABLE.__new__(_internals.VARIABLE)
        handle = np.zeros(())
        told = Inlined(ActionPlan("trial"), [self._counter], [(self._timer, None)])  # type: ignore[list-item]
        self._tracker.cells = AnyScope(
            {
                "Plain": [0, None, None, None],
                "Claimed": [0, plan],
                "Passed": [0, SlowPath(ActionPlan("trial"), may_pass=True)],
                "ReadVariableOp": [0, READ, READ, None, None],
                "Told": [0, told, told],
            }
        )
        LOCAL.tracker = self._tracker
        for kind, *args in (
            *(("Plain", 1.0), ("Plain", None), ("Plain", [1, 2], "T", None)),
            *(("Claimed", 1.0, 2), ("Told", 1.0), ("Told", 1.0)),
            *(("ReadVariableOp", handle), ("ReadVariableOp", handle)),
            ("Passed", variable, 1.0, variable),
        ):
            try:
                self._call(None, kind, None, *args)
            except ValueError:
                self._raised += 1
        self._tracker.muted, self._tracker.stale = 1, True
        self._call(None, "Plain", None, 1.0)
        LOCAL.tracker = None
        self._call(None, "Plain", None, 1.0)
        return list(self._outcome())

    def _outcome(self) -> Iterator[Any]:
        yield from ((kind, len(args)) for kind, *args in self._ran)
        yield from ((kind, cell[0]) for kind, cell in self._tracker.cells.cells.items())
        yield self._raised, self._values.noted
        log = self._timer.log
        assert log is not None
        yield self._counter.count, self._timer.executions, list(log.numbers[::4])
        yield self._timer.nanoseconds == sum(log.numbers[2::4]) - sum(log.numbers[1::4])
        yield set(log.numbers[3::4]) == {self._tracker.native}


def self_test() -> str:
    """Whether the extension decides as Python does."""
    # In this thread: TensorFlow may have been imported just now, by an import that others would
    # wait for. What a scope that another thread has ended has left here is put back.
    before = LOCAL.tracker
    try:
        wanted, got = (_Trial(native).noticed() for native in (None, extension()))
    except Exception as error:
        return f"the accelerator's self-test fails: {type(error).__name__}: {error}"
    finally:
        LOCAL.tracker = before
    for expected, actual in zip(wanted, got, strict=True):
        if expected != actual:
            return f"the accelerator's self-test fails: {actual} instead of {expected}"
    return ""
