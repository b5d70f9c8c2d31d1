"""What ``quantize`` exports on TensorFlow computes what it has simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from safetensors import safe_open

import amanda
from amanda_tools.quantize import QuantizeTool
from tests.tools.optimization.test_prune_tensorflow import images, net, weights


@pytest.mark.parametrize("is_function", [False, True])
def test_safetensors(is_function: bool, tmp_path: Path) -> None:
    """A net whose weights are rebuilt from the file gives the simulation's output."""
    tf.random.set_seed(0)
    values, x = weights(), images()
    run: Any = (lambda: net(x, values)) if not is_function else tf.function(lambda: net(x, values))
    tool = QuantizeTool(weight_bits=4, activation_bits=0)
    with amanda.apply(tool):
        output = run()
    path = tool.export(tmp_path / "net.safetensors", run)
    rebuilt = []
    with safe_open(path, "numpy") as file:
        for op_id, (about,) in json.loads(file.metadata()["amanda"])["ops"].items():
            whole = file.get_tensor(f"{op_id}|{about['input']}|integers")
            scale = file.get_tensor(f"{op_id}|{about['input']}|scale")
            shape = [-1 if axis == about["axis"] else 1 for axis in range(whole.ndim)]
            rebuilt.append(whole.astype(np.float32) * scale.reshape(shape))
    for variable, value in zip(values.values(), rebuilt, strict=True):
        variable.assign(value)
    assert np.array_equal(run(), output)
