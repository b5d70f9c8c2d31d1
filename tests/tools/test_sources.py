"""The user's line of an operator in TensorFlow's graph modes, and what ``nan`` does there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from amanda_tools.nan import NanTool, NonFiniteError, NonFiniteWarning
from amanda_tools.profile import ProfileTool
from amanda_tools.trace import TraceTool
from tests.running import applied, line_of

tf1 = tf.compat.v1
Run = Callable[[], Any]


class Root(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer of the user."""

    def call(self, x: Any) -> Any:
        return tf.sqrt(x)  # the user's layer


def traced() -> Run:
    """A function with a loop."""

    @tf.function
    def function(x: Any) -> Any:
        for _ in tf.range(2):
            x = tf.sqrt(x)  # in a loop
        return x

    return lambda: function(-tf.ones(3))


def fitted() -> Run:
    """Keras, which traces the training step itself."""
    model = tf.keras.Sequential([Root(), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return lambda: model.fit(-np.ones((2, 3)), np.ones((2, 1)), verbose=0)


def of_keras() -> Run:
    """A layer of Keras's own: the nearest line of the user is that which has it traced."""
    model = tf.keras.Sequential([tf.keras.layers.Lambda(tf.sqrt)])
    function = tf.function(lambda x: model(x))  # calls a layer of Keras
    return lambda: function(-tf.ones(3))


def session() -> Run:
    """A graph and a session."""
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [3])
        root = tf.sqrt(x)  # in a graph
        running = tf1.Session()
    return lambda: running.run(root, {x: -np.ones(3)})


GRAPHS = {
    "function": (traced, "# in a loop"),
    "fit": (fitted, "# the user's layer"),
    "keras": (of_keras, "# calls a layer of Keras"),
    "session": (session, "# in a graph"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_an_operator_of_a_graph_has_the_line_that_made_it(name: str) -> None:
    """Not the line that runs the graph; ``nan``, ``trace`` and ``profile`` agree."""
    build, text = GRAPHS[name]
    expected = f"test_sources.py:{line_of(__file__, text)}"
    first = applied(NanTool(action="record"), build()).summary()["first"]
    assert (first["type"], first["kind"], first["direction"]) == ("sqrt", "nan", "forward")
    assert first["source"].endswith(expected)
    for tool in (TraceTool(), ProfileTool()):
        rows = applied(tool, build()).op_rows()
        sources = {r["source"] for r in rows if r["type"] == "sqrt"}
        assert {Path(source).name for source in sources} == {expected}


def test_a_backward_operator_has_the_line_of_its_forward_operator() -> None:
    """Where ``tf.gradients`` was called says nothing of it."""
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [3])
        root = tf.sqrt(x)  # is differentiated
        slope = tf1.gradients(root, x)
        with tf1.Session() as running:
            tool = applied(NanTool(action="record"), lambda: running.run(slope, {x: np.zeros(3)}))
    first = tool.summary()["first"]
    assert (first["direction"], first["type"]) == ("backward", "sqrt_backward")
    assert first["source"].endswith(f"test_sources.py:{line_of(__file__, '# is differentiated')}")


@pytest.mark.parametrize("name", GRAPHS)
def test_it_warns_at_that_line_or_aborts(name: str) -> None:
    """The warning has the line as its place; the error names it."""
    build, text = GRAPHS[name]
    with pytest.warns(NonFiniteWarning, match="sqrt produced NaN") as caught:
        applied(NanTool(), build())
    [place] = [(w.filename, w.lineno) for w in caught if w.category is NonFiniteWarning]
    assert place[0].endswith("test_sources.py")
    assert place[1] == line_of(__file__, text)
    with pytest.raises(NonFiniteError, match=rf"test_sources.py:{line_of(__file__, text)}"):
        applied(NanTool(action="abort"), build())


@pytest.mark.parametrize("name", GRAPHS)
def test_its_inputs_are_written_for_replay(name: str, tmp_path: Path) -> None:
    """As numpy arrays, and the operator runs again on them."""
    build, _ = GRAPHS[name]
    tool = applied(NanTool(action="record"), build())
    [path] = tool.write_files(tmp_path, "nan")
    with np.load(path) as arrays:
        assert (arrays["0.x"] == -1).all()
    assert np.isnan(np.asarray(tool.replay.run())).all()


def test_what_is_taken_out_of_a_container_was_put_there() -> None:
    """An iterator over data with NaN produces none: the operator that reads it is named."""

    def run() -> None:
        for x in tf.data.Dataset.from_tensors([1.0, float("nan")]):
            tf.exp(x)

    summary = applied(NanTool(action="record"), run).summary()
    assert summary["first"] is None
    assert summary["received"]["type"] == "exp"
