"""The accelerator of the eager driver: when it is used, and that it changes nothing but the time.

Its decisions are tested in tests/accel, and the tests of the driver in tests/tensorflow/eager run
with it and without.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

import amanda
from amanda.errors import CoverageWarning
from amanda_tensorflow import _internals
from amanda_tensorflow.eager import accelerator
from amanda_tensorflow.eager.driver import InterceptingDriver
from amanda_tensorflow.plugin import TensorFlowEagerDriver
from tests.tensorflow.support import Watcher

VARIABLE = TensorFlowEagerDriver.accelerator_variable

needs_accelerator = pytest.mark.skipif(
    bool(accelerator.reason_unusable()), reason=accelerator.reason_unusable()
)


def applied(*tools: amanda.Tool) -> amanda.apply:
    return amanda.apply(*tools, drivers=["tensorflow-eager"])


def is_used() -> bool:
    """Whether the accelerator decides now."""
    return not isinstance(_internals.PYWRAP.TFE_Py_FastPathExecute, types.FunctionType)


class Step:
    """A training step of a small model, with variables and sums of gradients."""

    def __init__(self) -> None:
        self.weight = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
        self.bias = tf.Variable([0.5, -0.5])
        self.x = tf.constant([[1.0, -2.0]])

    def __call__(self) -> list[Any]:
        with tf.GradientTape() as tape:
            y = tf.nn.bias_add(tf.matmul(self.x, self.weight), self.bias)
            y = tf.nn.relu(y) + tf.identity(self.weight)[0] * y
            loss = tf.reduce_sum(tf.concat([y, tf.cast(self.bias, tf.float32)[None]], 0))
        found = tape.gradient(loss, [self.weight, self.bias])
        self.bias.assign_sub(0.125 * found[1])
        return [loss.numpy().tolist(), *(tf.convert_to_tensor(g).numpy().tolist() for g in found)]


class Told(amanda.Tool):
    """Counts and times all operators, forward and backward, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[str, amanda.inline.Counter] = {}
        self.log = amanda.inline.Log()
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(self.look_backward, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        timer = amanda.inline.Timer(self.log, len(self.counters))
        context.insert_before_op(timer.start, inputs=[])
        context.insert_after_op(timer.stop, outputs=[])
        counter = self.counters.setdefault(context.get_op_id(), amanda.inline.Counter())
        context.insert_after_op(counter, outputs=[])

    def look_backward(self, context: amanda.OpContext) -> None:
        name = str(context.get_backward_op_id())
        counter = self.counters.setdefault(name, amanda.inline.Counter())
        context.insert_after_backward_op(counter, grad_inputs=[])


@pytest.mark.parametrize("asked", ["auto", "off", ""])
def test_the_environment_says_whether_it_is_used(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """`off` does without; the default takes it where it works. TensorFlow is left as found."""
    monkeypatch.setenv(VARIABLE, asked)
    vanilla = _internals.PYWRAP.TFE_Py_FastPathExecute
    usable = not accelerator.reason_unusable()
    with applied(Watcher()):
        assert is_used() is (usable and asked != "off")
        assert _internals.PYWRAP.TFE_Py_FastPathExecute.__name__ == "TFE_Py_FastPathExecute"
    assert _internals.PYWRAP.TFE_Py_FastPathExecute is vanilla
    said = InterceptingDriver.remarks()[0]
    if asked == "off":
        assert said.startswith("each operator is decided on in Python")
    elif usable:
        assert said == "operators that no tool acts on run without Python"


def test_an_unknown_value_counts_as_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of the environment that there is not is told of, also before a program starts."""
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.warns(CoverageWarning, match="not one of auto, off"):
        assert accelerator.is_asked_for()
    assert (
        TensorFlowEagerDriver.reason_against_settings()
        == f"{VARIABLE}=fast is not one of auto, off"
    )


def test_untested_versions_of_tensorflow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not used with a TensorFlow that it was not tested with, and the reason is given."""
    monkeypatch.setattr(TensorFlowEagerDriver, "untested_version", lambda: "TensorFlow 9")
    found = accelerator.refusal()
    assert found == "amanda-tensorflow-accel was not tested with TensorFlow 9"


def test_the_package_needs_no_extension() -> None:
    """amanda-tensorflow works where amanda-tensorflow-accel is not installed."""
    code = (
        "import sys; sys.modules['amanda_tensorflow_accel'] = None\n"
        "import tensorflow as tf, amanda\n"
        "from amanda_tensorflow.eager import accelerator\n"
        "tool = amanda.Tool(); seen = []\n"
        "tool.add_inst_for_op(lambda context: seen.append(context.get_op_id()))\n"
        "with amanda.apply(tool): tf.exp([1.0])\n"
        "print(seen, accelerator.reason_unusable())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("['/Exp:0'] amanda-tensorflow-accel is not installed")


@needs_accelerator
@pytest.mark.parametrize("wrong", ["count", "argument", "raises"])
def test_the_self_test_finds_what_differs(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """An extension that decides in another way is not used, and the reason says what it did."""

    def fast_path(vanilla: Any, python: Any, *_: Any) -> Any:
        def call(*args: Any) -> Any:
            if wrong == "raises":
                raise RuntimeError("broken")
            return vanilla(*args) if wrong == "count" else python(*args[:4])

        return call

    broken = types.SimpleNamespace(fast_path=fast_path)
    monkeypatch.setattr(accelerator, "extension", lambda: broken)
    assert accelerator.self_test().startswith("the accelerator's self-test fails: ")


@needs_accelerator
def test_a_class_without_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the extension does not find is a reason, and it works again afterwards."""
    monkeypatch.setattr(accelerator, "Claim", Step)
    try:
        assert "does not know the driver's classes" in accelerator.configure()
    finally:
        monkeypatch.undo()
        assert accelerator.configure() == ""


@needs_accelerator
@pytest.mark.parametrize("tool", [Watcher, Told])
def test_it_sees_and_counts_what_python_does(
    monkeypatch: pytest.MonkeyPatch, tool: Callable[[], Any]
) -> None:
    """Results, ids and counts are the same, and most operators take no way through Python."""
    found = []
    for asked in "off", "auto":
        monkeypatch.setenv(VARIABLE, asked)
        step, made = Step(), tool()
        with applied(made) as scope:
            results = [step() for _ in range(5)]
            counts = scope.statistics.not_seen
        seen = getattr(made, "seen", None)
        counters = {key: counter.count for key, counter in getattr(made, "counters", {}).items()}
        numbers = made.log.numbers[::4] if isinstance(made, Told) else None
        found.append((results, seen, counters, numbers, dict(counts)))
    assert found[0] == found[1]


def calls_of(function: Callable[[], Any]) -> Iterator[str]:
    """The names of Amanda's functions that are called."""
    names: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "amanda_tensorflow" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    yield from names


@needs_accelerator
@pytest.mark.parametrize("tool", [Watcher, Told])
def test_known_operators_take_no_python(
    monkeypatch: pytest.MonkeyPatch, tool: Callable[[], Any]
) -> None:
    """Watched, counted and timed operators of a perceptron, and what reads its variables, run
    without a function of the driver; the begin and the end of a backward pass do not."""
    monkeypatch.setenv(VARIABLE, "auto")
    weight, bias = tf.Variable([[1.0, 2.0], [3.0, 4.0]]), tf.Variable([0.5, -0.5])
    x = tf.constant([[1.0, -2.0]])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weight), bias)))
        tape.gradient(loss, [weight, bias])

    with applied(tool()):
        for _ in range(4):
            step()
        called = set(calls_of(step))
    operators = {"TFE_Py_FastPathExecute", "way_of", "execute", "reading_of", "note"}
    assert not called & operators
    assert not called & {"_gradient_function", "begin", "enter", "leave"}


@needs_accelerator
def test_scopes_that_come_and_go_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads count on their own while others begin and end scopes."""
    monkeypatch.setenv(VARIABLE, "auto")
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(20):
            told = Told()
            with applied(told):
                for _ in range(3):
                    tf.exp(tf.exp(1.0))
                    amanda.new_iteration()
            counts = {key: counter.count for key, counter in told.counters.items()}
            if counts != {"/Exp:0": 3, "/Exp:1": 3}:
                wrong.append(counts)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_accelerator
@pytest.mark.parametrize("tool", [Watcher, Told])
def test_nothing_is_kept_of_steps_and_scopes(
    monkeypatch: pytest.MonkeyPatch, tool: Callable[[], Any]
) -> None:
    """Steps within a scope, and scopes, leave no more objects behind than without it: TensorFlow
    2.16 leaves some of its own at each step."""
    step, growth = Step(), []
    for asked in "off", "auto":
        monkeypatch.setenv(VARIABLE, asked)
        blocks = []
        for _ in range(6):
            for _ in range(10):
                made = tool()
                with applied(made):
                    for _ in range(5):
                        step()
                del made
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        # Caches of TensorFlow's grow now and then, and what earlier tests left is freed at times.
        differences = [after - before for before, after in itertools.pairwise(blocks)]
        growth.append(statistics.median(differences))
    # Fifty steps have run between two figures.
    assert growth[1] - growth[0] < 50


@needs_accelerator
def test_errors_are_those_of_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that is run without TensorFlow's binding raises what it raises with it."""
    found = []
    for asked in "off", "auto":
        monkeypatch.setenv(VARIABLE, asked)
        with applied(Watcher()):
            for value in [2, 3], [2, 2], [2, 2], [2, 3]:
                try:
                    found.append(tf.matmul(tf.ones([2, 2]), tf.ones(value)).shape.as_list())
                    tf.raw_ops.AddN(inputs=value[0])
                except (tf.errors.OpError, TypeError) as error:
                    found.append((type(error), str(error)))
                amanda.new_iteration()
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.fixture
def readings() -> Iterator[Callable[[bool], bool]]:
    """Switches the functions in C on and off by which the accelerator reads variables."""
    found = _internals.native_functions()
    assert found is not None

    def switch(is_on: bool) -> bool:
        functions = found.reading if is_on else ()
        used: bool = accelerator.extension().configure_readings(
            functions, _internals.CONTEXT_HANDLE
        )
        return used

    yield switch
    switch(True)


@needs_accelerator
@pytest.mark.parametrize("device", [None, "/CPU:0", ""])
def test_variables_are_read_as_by_their_operator(
    monkeypatch: pytest.MonkeyPatch, readings: Callable[[bool], bool], device: str | None
) -> None:
    """Where a variable that a timed operator is passed is read by the functions in C that
    TensorFlow reads it by, results, gradients, ids and counts are those of calls of
    ReadVariableOp, and tapes watch the same variables."""
    monkeypatch.setenv(VARIABLE, "auto")
    found = []
    for is_on in False, True:
        assert readings(is_on) is is_on
        step, told = Step(), Told()
        with applied(told), tf.device(device):
            results = [step() for _ in range(5)]
            with tf.GradientTape() as tape:
                tf.nn.relu(step.weight)
            watched = [variable is step.weight for variable in tape.watched_variables()]
        counters = {key: counter.count for key, counter in told.counters.items()}
        found.append((results, watched, counters, told.log.numbers[::4]))
    assert found[0] == found[1]
    assert found[0][1] == [True]


@needs_accelerator
def test_variables_that_cannot_be_read_raise_as_by_their_operator(
    monkeypatch: pytest.MonkeyPatch, readings: Callable[[bool], bool]
) -> None:
    """The error at a variable without a value is the same, and nothing is counted."""
    monkeypatch.setenv(VARIABLE, "auto")
    found = []
    for is_on in False, True:
        readings(is_on)
        weight, told = tf.Variable([[2.0]]), Told()
        with applied(told):
            for _ in range(4):
                tf.nn.relu(weight)
                amanda.new_iteration()
            counts = {key: counter.count for key, counter in told.counters.items()}
            gone = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[1, 1], shared_name="gone")
            setattr(weight, _internals.READING_PARTS[1], gone)
            with pytest.raises(tf.errors.OpError) as raised:
                tf.nn.relu(weight)
        after = {key: told.counters[key].count for key in counts}
        found.append((type(raised.value), str(raised.value)))
        assert after == counts
    assert found[0] == found[1]


@needs_accelerator
def test_callbacks_see_no_more_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow's callbacks are told of the operators that they are told of without a scope: not
    of readings of variables that an operator is passed."""
    monkeypatch.setenv(VARIABLE, "auto")
    weight = tf.Variable([[2.0]])
    seen: list[Any] = []

    def note(op_type: Any, *_: Any, **__: Any) -> None:
        seen.append(op_type.decode() if isinstance(op_type, bytes) else op_type)

    def types() -> list[Any]:
        seen.clear()
        op_callbacks.add_op_callback(note)
        try:
            tf.nn.relu(weight)
        finally:
            op_callbacks.remove_op_callback(note)
        return list(seen)

    vanilla = types()
    with applied(Told()):
        for _ in range(4):
            tf.nn.relu(weight)
            amanda.new_iteration()
        assert types() == vanilla == ["Relu"]
