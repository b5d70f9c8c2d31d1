"""Programs of Keras where PyTorch is its backend: steps, samples, phases and parameters.

The backend is chosen when Keras is imported: programs run in another process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.keras_process import run_on_pytorch

FORWARD = 2 * 4 * (8 * 16 + 16 * 3)
"""Floating-point operations of the two dense layers on a batch of four."""
BACKWARD = FORWARD + 2 * 4 * 16 * 3
"""Those of the gradients of both weights, and of the second layer's input."""
PARAMETERS = 8 * 16 + 16 + 16 * 3 + 3

BUILD = """
import keras, numpy as np, torch
layers = [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu", name="first"),
          keras.layers.Dense(3, name="second")]
model = keras.Sequential(layers, name="net")
x, y = np.ones((12, 8), "float32"), np.zeros((12, 3), "float32")
model.compile("sgd", "mse", metrics=["mae"])
"""
PROGRAMS = {
    "fit": "model.fit(x, y, batch_size=4, epochs=1, verbose=0)",
    "fit after a call": "model(x[:2]); model.fit(x, y, batch_size=4, epochs=1, verbose=0)",
    "evaluate": "model.evaluate(x, y, batch_size=4, verbose=0)",
    "predict": "model.predict(x, batch_size=4, verbose=0)",
    "loop": """
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
for start in (0, 4, 8):
    model.zero_grad()
    keras.ops.mean(model(x[start:start + 4]) ** 2).backward()
    with torch.no_grad():
        gradients = [variable.value.grad for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
""",
    "loop with PyTorch's optimizer": """
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for start in (0, 4, 8):
    optimizer.zero_grad()
    (model(x[start:start + 4]) ** 2).mean().backward()
    optimizer.step()
""",
}
TRAINING = ("fit", "fit after a call", "loop", "loop with PyTorch's optimizer")


RUN = """
import json, sys
import amanda

for program in sys.argv[1:]:
    tools = [amanda.tools.load(name)() for name in ("flops", "summary")]
    with amanda.apply(*tools):
        exec(program, {})
    print(json.dumps([tool.result() for tool in tools]))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What ``flops`` and ``summary`` find in each program, one after the other in a process."""
    programs = [BUILD + program for program in PROGRAMS.values()]
    printed = run_on_pytorch("-c", RUN, *programs).splitlines()
    return dict(zip(PROGRAMS, map(json.loads, printed), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_of_keras_on_pytorch_is_that_of_the_program(
    name: str, results: dict[str, Any]
) -> None:
    """Three steps of four samples: what Keras runs to learn shapes is setup and no pass."""
    flops, tree = results[name]
    summary = flops["summary"]
    assert summary["steps"] == 3
    step = summary["per_step"]
    assert (step["flops"], step["samples"]) == (FORWARD, 4)
    assert step["flops_backward"] == (BACKWARD if name in TRAINING else 0)
    assert summary["per_sample"]["flops"] == FORWARD / 4
    assert list(tree["summary"]["models"]) == ["net"]
    before = FORWARD // 2 if name == "fit after a call" else 0
    model = [row for row in flops["ops"] if row["phase"] == "forward"]
    assert sum(row["flops"] for row in model) == 3 * FORWARD + before
    assert (summary["params"], summary["weight_bytes"]) == (PARAMETERS, 4 * PARAMETERS)
    rows = {row["path"]: row for row in tree["modules"]}
    assert {row["calls"] for row in rows.values()} <= {1, 4}
    assert [rows[path]["parameters"] for path in rows] == [PARAMETERS, 144, 51]


OWN_LAYER = """
import json, sys
import amanda, keras, numpy as np
from amanda.tools.mapping import MappingTool

class Product(keras.layers.Layer):
    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1], 16))
        self.shift = self.add_weight(shape=(16,))

    def call(self, x):
        return x @ self.weight + self.shift

class Inputs(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.found = []
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        if context.get_module() == "own":
            context.insert_before_op(self.note, inputs=[1], kind=context["op_type"])

    def note(self, tensor, kind):
        self.found.append((kind, list(tensor.shape), type(tensor).__name__))

def train():
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8,)), Product(name="own")])
    net.compile("sgd", "mse")
    net.fit(np.ones((12, 8)), np.zeros((12, 16)), batch_size=4, verbose=0)
    return net.get_weights()

expected = train()
flops = amanda.tools.load("flops")()
with amanda.apply(tool := Inputs(), flops):
    found = train()
same = all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
print(json.dumps([same, tool.found, flops.summary()["by_module"]["own"]["flops"]]))
"""


def test_variables_of_keras_are_inputs_of_operators(tmp_path: Path) -> None:
    """A variable of Keras that PyTorch's operators are given is their input, as its tensor is: for
    routines, at each execution, and for formulas."""
    script = tmp_path / "program.py"
    script.write_text(OWN_LAYER)
    same, inputs, flops = json.loads(run_on_pytorch(str(script)).splitlines()[-1])
    assert same
    assert inputs == 3 * [["matmul", [8, 16], "Parameter"], ["add", [16], "Parameter"]]
    assert flops == 3 * 2 * 4 * 8 * 16


NESTED = """
import json, sys
import amanda, keras, numpy as np

inner = keras.Sequential([keras.layers.Dense(2, name="a"), keras.layers.Dense(3, name="b")])

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)

with amanda.apply(tool := amanda.tools.load("summary")()):
    Net()(np.ones((4, 8), "float32"))
print(json.dumps([row["calls"] for row in tool.modules()]))
"""


def test_a_layer_that_is_built_in_a_call_is_called_once() -> None:
    """What Keras calls to build a model is no call of the program, also within one."""
    assert json.loads(run_on_pytorch("-c", NESTED).splitlines()[-1]) == [1, 1, 1, 1]
