"""Graph tracing, ``count`` and ``trace`` in all modes, and ``amanda run`` on a Keras script."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

import amanda
from amanda_tools.count import CountTool
from amanda_tools.trace import TraceTool
from tests.running import line_of
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


def test_the_line_of_the_program_is_not_one_of_a_library_of_keras() -> None:
    """Keras walks through nested structures by another package, which is not the program."""
    import keras

    tool = TraceTool()
    with amanda.apply(tool):
        keras.tree.map_structure(tf.tanh, {"one": [tf.ones(2)]})  # the line
    (op,) = [op for op in tool.result()["ops"] if op["type"] == "tanh"]
    assert op["source"].endswith(f"test_tools.py:{line_of(__file__, '# the line')}")
