"""Alignment of models of Keras with SavedModels, ``.keras`` and LiteRT, and exports to them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import AmandaError, CoverageWarning, FileError, UnsupportedProgramError
from amanda_tools.export import Change, Function, Mask, Rounding, export_model
from amanda_tools.export.keras import Exporter
from tests.running import run_python
from tests.tools import keras_transformer
from tests.tools.optimization import exports_keras

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore")
EACH = pytest.mark.parametrize("suffix", [".keras", "", ".tflite"])
slow = partial(pytest.param, marks=pytest.mark.slow)


def images(size: int = 8) -> Any:
    return np.random.default_rng(1).random((2, size, size, 3), np.float32)


@pytest.fixture
def net() -> Any:
    """A model in a model, and a layer that is called twice, before one with its numbered name."""
    keras.utils.set_random_seed(0)
    parts = [
        layers.Conv2D(4, 3, name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.ReLU(),
    ]
    base = keras.Sequential(
        [keras.Input((8, 8, 3)), *parts, layers.DepthwiseConv2D(3)], name="base"
    )
    inputs, twice = keras.Input((8, 8, 3)), layers.Dense(4, "relu", name="d")
    x = twice(twice(layers.GlobalAveragePooling2D()(base(inputs))))
    return keras.Model(inputs, layers.Dense(3, name="d_1")(x), name="net")


def saved(model: Any, folder: Path, suffix: str) -> Path:
    """What Keras itself writes."""
    path = folder / f"net{suffix}"
    if suffix == ".keras":
        model.save(path)
    elif suffix == ".tflite":
        # Not from the model, on which the converter of 2.16 aborts with Keras 3.
        converter = tf.lite.TFLiteConverter.from_saved_model(str(saved(model, folder, "")))
        path.write_bytes(converter.convert())
    else:
        model.export(path, verbose=False)
    return path


def ran(model: Any, name: str = "quantize", x: Any = None, **options: Any) -> Any:
    """A tool that has run a model."""
    given = {"calibration": 1, "per_channel": False} if name == "quantize" else {}
    tool = amanda.tools.load(name)(**(given | options))
    with amanda.apply(tool):
        for _ in range(2):
            model(images() if x is None else x)
    return tool


@EACH
def test_operators_have_nodes_of_the_exported_model(net: Any, tmp_path: Path, suffix: str) -> None:
    """What LiteRT's converter joins or computes beforehand is told."""
    found = amanda.align(net, images(), saved(net, tmp_path, suffix))
    assert all(one.nodes for one in found.values() if one.weight)
    assert sum(bool(one.nodes or one.is_dropped) for one in found.values()) > 0.95 * len(found)
    assert found["net/d/MatMul:0"].nodes != found["net/d/MatMul:1"].nodes
    assert "d_1" in str(found["net/d_1/MatMul:0"].nodes) or suffix == ".tflite"
    norm = found["net/base/norm/Rsqrt:0"]
    assert ("beforehand" in norm.reason) == (suffix == ".tflite")


@pytest.mark.parametrize("suffix", [".keras", ""])
def test_functions_that_layers_call_have_their_nodes(tmp_path: Path, suffix: str) -> None:
    """Keras calls XLA for groups of channels; sizes are known when a graph is traced."""
    parts = [layers.Conv2D(8, 3, groups=4, name="g"), layers.SeparableConv2D(4, 3, dilation_rate=2)]
    model = keras.Sequential([keras.Input((8, 8, 4)), *parts], name="net")
    found = amanda.align(model, np.ones((2, 8, 8, 4), "f"), saved(model, tmp_path, suffix))
    # The function is given the value of the kernel, which is read twice.
    missing = [one for one in found.values() if not (one.nodes or one.is_dropped)]
    assert [one.op.id for one in missing] == ["net/g/ReadVariableOp:0"]
    assert found["net/g/Conv2D:0"].weight == "net/g/kernel"


def test_steps_of_a_loop_have_the_nodes_of_its_body() -> None:
    model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(4)], name="net")
    found = amanda.align(model, np.ones((2, 5, 3), "f"), model)
    products = [one.nodes for one in found.values() if one.op.type == "linear"]
    # Keras runs a step more, before the loop, for its shapes.
    assert len(products) == 12
    assert len({*products[2:]}) == 2
    assert all(products)
    assert sum(bool(one.nodes) for one in found.values()) > 0.95 * len(found)


def test_models_that_cannot_be_read_are_named(net: Any, tmp_path: Path) -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return net(x)

    with pytest.raises(UnsupportedProgramError, match="does not tell its inputs"):
        amanda.align(net, images(), Own())
    with pytest.raises(FileError, match=r"net\.keras cannot be read"):
        amanda.align(net, images(), tmp_path / "net.keras")


@EACH
@pytest.mark.parametrize("options", [{}, slow({"per_channel": True}), slow({"symmetric": True})])
def test_quantize_exports_what_it_simulates(
    net: Any, tmp_path: Path, suffix: str, options: Any
) -> None:
    """Without Python in the graph; the model itself is as it was."""
    before = net.get_weights()
    found = ran(net, **options).export_model(net, images(), tmp_path / f"net{suffix}")
    assert len(found.ops) == 5
    assert found.difference == 0 or suffix == ".tflite"
    assert all(map(np.array_equal, net.get_weights(), before))
    if suffix == "":
        assert "PyFunc" not in (found.path / "saved_model.pb").read_bytes().decode(errors="replace")
    if suffix == ".tflite":
        tensors = tf.lite.Interpreter(str(found.path)).get_tensor_details()
        assert any(one["dtype"] is np.int8 and len(one["shape"]) == 4 for one in tensors)


@EACH
def test_prune_exports_its_masks(net: Any, tmp_path: Path, suffix: str) -> None:
    found = ran(net, "prune", method="nm").export_model(net, images(), tmp_path / f"net{suffix}")
    assert found.difference == 0 or suffix == ".tflite"
    if suffix == ".keras":
        kernel = keras.saving.load_model(found.path).get_layer("d").kernel
        assert np.mean(kernel.numpy() == 0) == 0.5


@pytest.mark.parametrize(
    "options", [{"group": 2, "gptq": True}, {"smooth": 0.5, "method": "dynamic", "per_token": True}]
)
def test_methods_are_exported_or_refused_by_name(tmp_path: Path, options: Any) -> None:
    """Weights in groups or with integers of their own in all formats; in a SavedModel all."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(3)], name="net")
    x = images()[0, :, :2].reshape(8, 6)
    tool = ran(model, x=x, per_channel=True, **options)
    for suffix in (".keras", "", ".tflite"):
        path = tmp_path / f"net{suffix}"
        if "smooth" in options and suffix:
            with pytest.raises(UnsupportedProgramError, match=r"/MatMul:0: .* cannot express its"):
                tool.export_model(model, x, path)
            assert not path.exists()
            assert len(tool.export_model(model, x, path, fallback=True).in_floating_point) == 2
            continue
        found = tool.export_model(model, x, path)
        assert len(found.ops) == 2
        assert found.difference <= (1e-6 if suffix == ".tflite" else 0)


@pytest.mark.parametrize("suffix", [".keras", ""])
def test_half_precision(tmp_path: Path, suffix: str) -> None:
    """Layers cast what they get, and their weights, before the tool rounds them."""
    keras.utils.set_random_seed(1)
    inner = [layers.Conv2D(4, 3, dtype="mixed_float16"), layers.GlobalAveragePooling2D()]
    model = keras.Sequential([keras.Input((8, 8, 3)), *inner, layers.Dense(3)], name="net")
    found = ran(model, per_channel=True).export_model(model, images(), tmp_path / f"net{suffix}")
    assert found.difference == 0
    assert len(found.ops) == 2


@pytest.mark.parametrize("suffix", [".keras", slow("")])
def test_a_model_that_is_called_twice_rounds_in_each_call(tmp_path: Path, suffix: str) -> None:
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(3, name="d")], name="inner")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, inner(inner(inputs)), name="net")
    x = images()[0, 0]
    found = ran(model, x=x).export_model(model, x, tmp_path / f"net{suffix}")
    assert found.ops == ["net/inner/d/MatMul:0", "net/inner/d/MatMul:1"]
    assert found.difference == 0


def test_a_dictionary_is_the_only_argument_of_a_model_that_takes_one(tmp_path: Path) -> None:
    """No retracing is told of the functions that compare the exports of a program."""
    inputs = {name: keras.Input((3,)) for name in "ab"}
    model = keras.Model(inputs, layers.Add()([*inputs.values()]), name="net")
    given = dict.fromkeys("ab", images()[0, 0])
    with warned() as messages:
        for _ in range(6):
            assert export_model(None, model, given, tmp_path / "net").difference == 0
    assert not any("retracing" in message for message in messages)


@contextmanager
def warned() -> Iterator[list[str]]:
    """The messages of TensorFlow's log."""
    messages = list[str]()
    handler, log = logging.Handler(), tf.get_logger()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def test_a_model_that_is_a_program(net: Any, tmp_path: Path) -> None:
    """A subclass has a SavedModel, but no graph of layers that another program could load."""

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="own")
            self.inner = net

        def call(self, x: Any) -> Any:
            return self.inner(x)

    model = Own()
    tool = ran(model, activation_bits=0)
    assert len(tool.export_model(model, images(), tmp_path / "net").ops) == 5
    with pytest.raises(UnsupportedProgramError, match=r"\.keras refuses the model: ") as caught:
        tool.export_model(model, images(), tmp_path / "net.keras")
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["net"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".tflite"])
def test_operators_within_a_layer(tmp_path: Path, suffix: str) -> None:
    """A SavedModel and LiteRT have those of all layers, with a scale per channel of two axes;
    ``.keras`` refuses, or leaves, those within one."""
    model, tokens = keras_transformer.build(), keras_transformer.TOKENS.astype("f")
    tool = ran(model, x=tokens, per_channel=True)
    found = tool.export_model(model, tokens, tmp_path / f"net{suffix}")
    assert len(found.ops) == 13
    assert found.difference <= (1e-6 if suffix else 0)
    with pytest.raises(
        UnsupportedProgramError, match=r"query/.*: \.keras cannot .* within a Block"
    ):
        tool.export_model(model, tokens, tmp_path / "net.keras")


class Own(amanda.Tool):
    """A tool of a third party: halves what enters an operator, and says so or something else."""

    def __init__(self, told: Sequence[Change]) -> None:
        super().__init__()
        self.told = told
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_id() == "net/d/MatMul:0":
            context.insert_before_op(lambda x: x / 2, inputs=[0])

    def changes(self) -> Sequence[Change]:
        return self.told


def half(x: Any) -> Any:
    return x / 2


def test_a_difference_is_an_error_that_names_the_operator(net: Any, tmp_path: Path) -> None:
    """An earlier folder is as it was."""
    path = tmp_path / "net"
    found = export_model(Own([Function("net/d/MatMul:0", 0, half)]), net, images(), path)
    assert found.ops == ["net/d/MatMul:0"]
    before = sorted(path.rglob("*"))
    wrong = Rounding("net/d/MatMul:0", 1, np.float32(0.5), np.float32(0), -8, 7)
    with pytest.raises(UnsupportedProgramError, match=r"first at op net/d/MatMul:0, by"):
        export_model(Own([HALF, wrong]), net, images(), path)
    assert sorted(path.rglob("*")) == before
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("suffix", [".keras", slow(".tflite")])
def test_a_difference_in_a_file_is_named(net: Any, tmp_path: Path, suffix: str) -> None:
    wrong = Rounding("net/d/MatMul:0", 0, np.float32(1e-3), np.float32(0), -128, 127)
    # LiteRT joins the product with the activation.
    with pytest.raises(UnsupportedProgramError, match=r"first at op net/d/(MatMul|Relu):0, by"):
        export_model(Own([wrong]), net, images(), tmp_path / f"net{suffix}")


def test_the_size_of_inputs_does_not_widen_the_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exporter, "_read_lite", lambda *_: ([np.full((2, 3), 0.5, "f")], dict))
    inner = [layers.GlobalAveragePooling2D(), layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((8, 8, 3)), *inner], name="net")
    x = images() * 255
    with pytest.raises(UnsupportedProgramError, match="another result"):
        ran(model, x=x).export_model(model, x, tmp_path / "net.tflite")


HALF, MASK = Function("net/d/MatMul:0", 0, half), Mask("net/d/MatMul:0", 1, np.ones((2, 2)))
WIDE = Rounding("net/d/MatMul:0", 0, np.float32(1), np.float32(0), -8, 7)
GONE = Rounding("net/e/MatMul:0", 0, np.float32(1), np.float32(0), -128, 127)


@pytest.mark.parametrize(
    ("change", "inputs", "name", "message"),
    [
        (HALF, None, "net", "needs example inputs"),
        (HALF, images(), "other", "a file is there"),
        (HALF, images(), "net.pt2", "a model of Keras is written"),
        (HALF, images(), "net.keras", r"\.keras cannot express .* not rounded by one scale"),
        (HALF, images(), "net.tflite", "LiteRT cannot express .* not rounded by one scale"),
        (WIDE, images(), "net.tflite", "integers of 8 bits"),
        (GONE, images(), "net", "the model has changed"),
        (MASK, images(), "net", r"has the shape \(2, 2\)"),
        (HALF, images(), "missing/net", "No such file"),
        (HALF, images(), "", "another folder is there"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    net: Any, tmp_path: Path, change: Change, inputs: Any, name: str, message: str
) -> None:
    (tmp_path / "other").touch()
    with pytest.raises((AmandaError, OSError), match=message) as caught:
        export_model(Own([change]), net, inputs, tmp_path / name)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("suffix", [".keras", slow("")])
def test_saving_under_a_tool_that_changes_warns_once(net: Any, tmp_path: Path, suffix: str) -> None:
    def save() -> None:
        with amanda.apply(ran(net)):
            for _ in range(2):
                saved(net, tmp_path, suffix)

    with pytest.warns(CoverageWarning, match="export_model") as caught:
        save()
    assert sum("export_model" in str(one.message) for one in caught) == 1


PROGRAM = """
import keras
import numpy as np
parts = {name: keras.Input((8,), name=name) for name in "ab"}
x = keras.layers.Dense(4, name="d")(keras.layers.Add()([*parts.values()]))
net = keras.Model(parts, keras.layers.Dense(2, name="e")(x), name="net")
given = {name: np.random.rand(8, 8) for name in parts}
net.compile("sgd", "mse")
for _ in range(2): RUN
print("done")
"""


@pytest.mark.parametrize(
    ("run", "tool", "message"),
    [
        ("net.fit(given, np.ones((8, 2)), 4, verbose=0)", "quantize:export=net.keras", ""),
        slow("net.predict(given, 3, verbose=0)", "prune:method=nm,bake=net", ""),
        slow("net(given)", "quantize:export=net.tflite", ""),
        slow("(given['a'] @ given['b'].T)", "quantize:export=net", "of no module"),
    ],
)
def test_amanda_run_exports_the_model_of_the_program(
    tmp_path: Path, run: str, tool: str, message: str
) -> None:
    """Called, or in the graphs of Keras, of whose inputs the shapes are known at least."""
    program = PROGRAM.replace("RUN", run)
    done = run_python("-m", "amanda", "run", "-t", tool, "-c", program, cwd=tmp_path)
    assert done.stdout.startswith("done\n"), done.stderr
    assert done.returncode == (2 if message else 0), done.stderr
    assert message in done.stderr
    assert message or "exported 2 ops to" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == [tool.rpartition("=")[2]][bool(message) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", exports_keras.APPLICATIONS)
def test_applications_align(tmp_path: Path, name: str) -> None:
    """99 % of the operators with weights, and 95 % of all."""
    model, inputs = exports_keras.build(name)
    # LiteRT's converter forgets the layers of convolutions in groups (2.21).
    for suffix in (".keras", "", ".tflite")[: 2 if name == "ConvNeXtTiny" else 3]:
        found = amanda.align(model, inputs, saved(model, tmp_path, suffix)).values()
        weighted = [one for one in found if one.weight]
        assert sum(bool(one.nodes) for one in weighted) >= 0.99 * len(weighted)
        assert sum(bool(one.nodes or one.is_dropped) for one in found) >= 0.95 * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", exports_keras.MODELS)
def test_models_are_exported(name: str) -> None:
    """Bit by bit; within a step in LiteRT. The graph of layers lacks operators of own layers."""
    found = [exports_keras.difference(name, format) for format in exports_keras.SUFFIXES]
    assert found[:2] == [0, 0] or (name == "Keras transformer" and np.isnan(found[0]))
    assert found[1] == 0
    assert found[2] < 0.05
