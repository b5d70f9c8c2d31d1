"""Lines of programs, as ``trace`` has them."""

from __future__ import annotations

import tensorflow as tf

import amanda
from amanda_tools.trace import TraceTool
from tests.running import line_of


def test_the_line_of_the_program_is_not_one_of_a_library_of_keras() -> None:
    """Keras walks through nested structures by another package, which is not the program."""
    import keras

    tool = TraceTool()
    with amanda.apply(tool):
        keras.tree.map_structure(tf.tanh, {"one": [tf.ones(2)]})  # the line
    (op,) = [op for op in tool.result()["ops"] if op["type"] == "tanh"]
    assert op["source"].endswith(f"test_tools.py:{line_of(__file__, '# the line')}")
