"""Graph tracing, ``count`` and ``trace`` in all modes, and ``amanda run`` on a Keras script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_tools.count import CountTool
from amanda_tools.trace import TraceTool
from tests.tensorflow import support
from tests.tensorflow.support import Training

STEPS = 2


def trained(placement: type[Training], *tools: amanda.Tool) -> None:
    """Some steps of training under the tools."""
    x, weights = support.data()
    training = placement(support.network, x, weights)
    with amanda.apply(*tools):
        training.steps(STEPS)


@pytest.mark.parametrize("placement", support.PLACEMENTS)
def test_the_same_form(placement: type[Training]) -> None:
    """The rows of both tools have the keys that they have on every framework."""
    counts, trace = CountTool(), TraceTool()
    trained(placement, counts, trace)
    common = {"id", "type", "name", "direction", "module", "namespace"}
    for tool in (counts, trace):
        result = json.loads(json.dumps(tool.result()))
        assert result["schema"] == tool.schema
        assert all(common <= row.keys() for row in result["ops"])
        assert {row["direction"] for row in result["ops"]} == {"forward", "backward"}
        assert all(name.startswith("tensorflow/2.") for name in result["namespaces"])
    rows = {row["type"]: row for row in trace.result()["ops"] if row["direction"] == "forward"}
    assert rows["conv2d"]["input_names"] == ["input", "filter"]
    assert rows["conv2d"]["attributes"]["data_format"] == "NHWC"


SCRIPT = '''
"""Plain Keras."""
import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((8, 8, 1)), keras.layers.Conv2D(2, 3, name="c1"),
                          keras.layers.Flatten(), keras.layers.Dense(1, name="fc")])
model.compile("adam", "mse")
x = np.ones((4, 8, 8, 1), "float32")
model.fit(x, np.zeros(4), epochs=3, batch_size=2, verbose=0)
print(model.predict(x, verbose=0).shape)
'''


def test_the_command_on_a_keras_script(tmp_path: Path) -> None:
    """``amanda run -t count,trace -- keras_script.py`` counts every step, and writes both."""
    (tmp_path / "keras_script.py").write_text(SCRIPT)
    command = ["run", "-t", "count,trace", "-o", "out", "--", "keras_script.py"]
    done = subprocess.run(
        [sys.executable, "-m", "amanda", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(4, 1)\n")
    assert done.stdout.splitlines()[-1].startswith("amanda: ")
    by_type = read(tmp_path / "out" / "count.json")["summary"]["by_type"]
    # Three epochs of two steps, and one step of predict.
    assert by_type["forward"]["conv2d"]["executions"] == 3 * 2 + 1
    filters = [
        row
        for row in read(tmp_path / "out" / "count.json")["ops"]
        if row["name"] == "Conv2DBackpropFilter"
    ]
    assert sum(row["executions"] for row in filters) == 3 * 2
    modules = {row["module"] for row in read(tmp_path / "out" / "trace.json")["ops"]}
    assert any("c1" in module for module in modules)


def read(path: Path) -> Any:
    """A result that a tool has written."""
    return json.loads(path.read_text())


def test_the_line_of_the_program_is_not_one_of_a_library_of_keras() -> None:
    """Keras walks through nested structures by another package, which is not the program."""
    import keras

    tool = TraceTool()
    with amanda.apply(tool):
        keras.tree.map_structure(tf.tanh, {"one": [tf.ones(2)]})  # the line
    place = Path(__file__)
    line = next(
        i for i, text in enumerate(place.read_text().splitlines(), 1) if text.endswith("# the line")
    )
    (op,) = [op for op in tool.result()["ops"] if op["type"] == "tanh"]
    assert op["source"].endswith(f"{place.name}:{line}")
