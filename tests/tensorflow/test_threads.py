"""Threads and replicas: nothing is counted twice and nothing is lost."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import amanda
from amanda.errors import CapabilityError
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool
from tests.running import in_threads, run_python
from tests.tensorflow.support import tf1

THREADS = 4
CALLS = 50


def often_in_threads(work: Callable[[], Any]) -> None:
    """Run the work often in several threads at once."""
    failures: list[BaseException] = []

    def repeat() -> None:
        try:
            for _ in range(CALLS):
                work()
        except BaseException as error:
            failures.append(error)

    in_threads(*[repeat] * THREADS)
    assert failures == []


def eager() -> Callable[[], Any]:
    x = tf.ones([2, 2])
    return lambda: tf.linalg.matmul(x, x).numpy()


def function() -> Callable[[], Any]:
    x = tf.ones([2, 2])
    run = tf.function(lambda x: tf.linalg.matmul(x, x))
    return lambda: run(x).numpy()


def session() -> Callable[[], Any]:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [2, 2])
        product = tf.linalg.matmul(x, x)
    running = tf1.Session(graph=graph)
    return lambda: running.run(product, {x: [[1.0, 1.0], [1.0, 1.0]]})


@pytest.mark.parametrize("placement", [eager, function, session])
def test_a_function_met_in_threads_is_analysed_once(
    placement: Callable[[], Callable[[], Any]],
) -> None:
    """However many threads meet an operator first, its analysis runs once per id."""
    seen: list[str] = []

    class Look(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op().type == "MatMul":
                seen.append(context.get_op_id())

    work = placement()
    with amanda.apply(Look()):
        often_in_threads(work)
    assert len(seen) == len(set(seen))
    assert seen


def test_replicas() -> None:
    """MirroredStrategy on two logical devices: what both replicas run is counted."""
    script = Path(__file__).with_name("replicas.py")
    done = run_python("-m", "tests.tensorflow.replicas", cwd=script.parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "function 2 2",
        "eager 2 2",
        "fit 8 8",
        "weights equal True",
    ]


@pytest.mark.parametrize("way", [lambda run: run, tf.function])
def test_collectives_are_operators(way: Callable[..., Any]) -> None:
    """They have types of their own, with group and bytes, and cannot be run by a process alone."""
    given = {"group_size": 1, "group_key": 7, "ordering_token": []}
    raw, found = tf.raw_ops, []

    def run() -> Any:
        x, last = tf.ones([3]), {"instance_key": 3, "merge_op": "Add", "final_op": "Id", **given}
        gathered = raw.CollectiveGatherV2(input=x, instance_key=2, **given)
        return gathered, raw.CollectiveReduceV2(input=x, **last)

    def look(context: amanda.OpContext) -> None:
        if context.get_op().type.startswith("Collective"):
            found.append((context["op_type"], canonical.attributes(context)))
            with pytest.raises(CapabilityError, match="is a collective"):
                context.get_function()

    tool = amanda.Tool()
    tool.depends_on(MappingTool.standard())
    tool.add_inst_for_op(look)
    with amanda.apply(tool):
        way(run)()
    group = {"group": "7", "bytes": 12}
    assert found == [("all_gather", group), ("all_reduce", {**group, "reduction": "sum"})]


@pytest.mark.slow
def test_workers() -> None:
    """MultiWorkerMirroredStrategy on two processes: under tools, weights and summed gradients are
    as without; what they exchange is an operator."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        places = [f"127.0.0.1:{place.getsockname()[1]}" for place in (one, other)]

    def work(index: int) -> Any:
        task = {"cluster": {"worker": places}, "task": {"type": "worker", "index": index}}
        environment = {"TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = run_python("-m", "tests.tensorflow.workers", env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second
    assert first["equal"] == [True, True, True]
    reduced = {"group": True, "bytes": 48, "reduction": "sum"}
    assert first["collectives"] == {"all_reduce": reduced}


def test_threads_count_while_others_begin_and_end_scopes() -> None:
    """A thread counts its own operators while scopes of other threads begin and end."""

    def work() -> None:
        counters: dict[str, amanda.inline.Counter] = {}

        def analyse(context: amanda.OpContext) -> None:
            counter = counters.setdefault(context.get_op_id(), amanda.inline.Counter())
            context.insert_after_op(counter, outputs=[])

        tool = amanda.Tool()
        tool.add_inst_for_op(analyse)
        with amanda.apply(tool, drivers=["tensorflow-eager"]):
            for _ in range(3):
                tf.exp(tf.exp(1.0))
                amanda.new_iteration()
        assert {key: counter.count for key, counter in counters.items()} == {
            "/Exp:0": 3,
            "/Exp:1": 3,
        }

    often_in_threads(work)


_VALUE_IN_AN_ANALYSIS = """
import threading, time
import tensorflow as tf
import amanda
tf1 = tf.compat.v1
running = threading.Event()

class Look(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        if context.get_op().type == "Tanh":
            context.insert_before_op(lambda x: None)
        if context.get_op().type == "Mul":
            time.sleep(1.0)
            print("read", context.get_value(1).numpy())

def begin(x):
    running.set()
    time.sleep(0.5)
    return x

with amanda.apply(Look()), tf.Graph().as_default():
    one = tf1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf1.Session(config=one) as session:
        v = tf1.get_variable("v", initializer=2.0, use_resource=True)
        x = tf1.placeholder(tf.float32, [])
        slow = tf.tanh(tf.numpy_function(begin, [x], tf.float32))
        product = x * v
        session.run(v.initializer)
        thread = threading.Thread(target=session.run, args=(slow, {x: 1.0}), daemon=True)
        thread.start()
        running.wait()
        print("ran", session.run(product, {x: 3.0}))
        thread.join()
"""


def test_an_analysis_reads_a_variable_while_the_pool_waits_for_it() -> None:
    """The value of a variable needs no thread of the session's pool: all may wait for the tool."""
    done = run_python("-c", _VALUE_IN_AN_ANALYSIS, seconds=60)
    assert done.stdout.split("\n")[:2] == ["read 2.0", "ran 6.0"], done.stderr


def pipeline() -> Any:
    numbers = tf.data.Dataset.range(4).map(lambda n: n * 2)
    return numbers.filter(lambda m: m > 0).map(tf.math.square, num_parallel_calls=2)


def read_by_keras() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(tf.ones([4, 3]).numpy(), tf.ones([4, 1]).numpy(), 2, epochs=2, verbose=0)
    batches = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.ones([4, 1])))
    model.fit(batches, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("read", "missed"),
    [
        (lambda given: [list(given), list(given)], [3]),
        (lambda given: list(pipeline()), [3]),
        (lambda given: given.reduce(tf.constant(0, tf.int64), lambda a, b: a + b), [1, 3]),
        (lambda given: read_by_keras(), []),
    ],
    ids=["before", "inside", "reduce", "keras"],
)
def test_functions_of_input_pipelines_are_counted(read: Any, missed: list[int]) -> None:
    """They run in the runtime's threads, where no operator of them is seen: each function of the
    program is counted once, and none of those by which Keras hands arrays on."""
    given = pipeline()
    with amanda.apply(amanda.Tool()) as scope:
        read(given)
    assert sorted(scope.statistics.not_seen.values()) == missed
