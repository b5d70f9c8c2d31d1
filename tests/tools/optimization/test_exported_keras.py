"""Alignment of models of Keras with SavedModels, ``.keras`` and LiteRT, and exports to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import AmandaError, CoverageWarning, FileError, UnsupportedProgramError
from amanda_tools.export import Change, Function, Mask, Rounding, export_model
from tests.tools import keras_transformer

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore")
EACH = pytest.mark.parametrize("suffix", [".keras", "", ".tflite"])


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
        path.write_bytes(tf.lite.TFLiteConverter.from_keras_model(model).convert())
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


def test_steps_of_a_loop_have_the_nodes_of_its_body() -> None:
    model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(4)], name="net")
    found = amanda.align(model, np.ones((2, 5, 3), "f"), model)
    products = [one.nodes for one in found.values() if one.op.type == "linear"]
    # Keras runs a step more, before the loop, for its shapes.
    assert len(products) == 12
    assert len({*products[2:]}) == 2
    assert all(products)


def test_models_that_cannot_be_read_are_named(net: Any, tmp_path: Path) -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return net(x)

    with pytest.raises(UnsupportedProgramError, match="does not tell its inputs"):
        amanda.align(net, images(), Own())
    with pytest.raises(FileError, match=r"net\.keras cannot be read"):
        amanda.align(net, images(), tmp_path / "net.keras")


@EACH
@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"symmetric": True}])
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


def test_operators_within_a_layer(tmp_path: Path) -> None:
    """A SavedModel has those of all layers; ``.keras`` refuses, or leaves, those within one."""
    model, tokens = keras_transformer.build(), keras_transformer.TOKENS.astype("f")
    tool = ran(model, x=tokens)
    assert len(tool.export_model(model, tokens, tmp_path / "net").ops) == 13
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
    wrong = Function("net/d/MatMul:0", 0, lambda x: x / 3)
    with pytest.raises(UnsupportedProgramError, match=r"first at op net/d/MatMul:0, by"):
        export_model(Own([wrong]), net, images(), path)
    assert sorted(path.rglob("*")) == before
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("suffix", [".keras", ".tflite"])
def test_a_difference_in_a_file_is_named(net: Any, tmp_path: Path, suffix: str) -> None:
    wrong = Rounding("net/d/MatMul:0", 0, np.float32(1e-3), np.float32(0), -128, 127)
    # LiteRT joins the product with the activation.
    with pytest.raises(UnsupportedProgramError, match=r"first at op net/d/(MatMul|Relu):0, by"):
        export_model(Own([wrong]), net, images(), tmp_path / f"net{suffix}")


HALF, MASK = Function("net/d/MatMul:0", 0, half), Mask("net/d/MatMul:0", 1, np.ones((2, 2)))
WIDE = Rounding("net/d/MatMul:0", 0, np.float32(1), np.float32(0), -8, 7)
GONE = Rounding("net/e/MatMul:0", 0, np.float32(1), np.float32(0), -128, 127)


@pytest.mark.parametrize(
    ("change", "inputs", "name", "message"),
    [
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


@pytest.mark.parametrize("suffix", [".keras", ""])
def test_saving_under_a_tool_that_changes_warns_once(net: Any, tmp_path: Path, suffix: str) -> None:
    def save() -> None:
        with amanda.apply(ran(net)):
            for _ in range(2):
                saved(net, tmp_path, suffix)

    with pytest.warns(CoverageWarning, match="export_model") as caught:
        save()
    assert sum("export_model" in str(one.message) for one in caught) == 1


APPLICATIONS = {
    "MobileNetV2": 32, "ResNet50": 32, "EfficientNetB0": 32, "DenseNet121": 32, "VGG16": 32,
    "Xception": 71, "InceptionV3": 75, "ConvNeXtTiny": 32, "MobileNetV3Small": 32,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications(tmp_path: Path, name: str) -> None:
    size = APPLICATIONS[name]
    options = {"weights": None, "input_shape": (size, size, 3), "classes": 10}
    model = getattr(keras.applications, name)(**options)
    for suffix in (".keras", "", ".tflite"):
        found = amanda.align(model, images(size), saved(model, tmp_path, suffix)).values()
        weighted = [one for one in found if one.weight]
        assert sum(bool(one.nodes) for one in weighted) >= 0.99 * len(weighted)
        assert sum(bool(one.nodes or one.is_dropped) for one in found) >= 0.95 * len(found)
