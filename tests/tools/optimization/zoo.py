"""Published models in both frameworks, and the tools that have to treat all of them alike.

Images are small and weights are random: what matters is which operators there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import amanda

EVERY = ("conv2d", "linear", "matmul", "attention")

TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "magnitude": ("prune", {"method": "magnitude"}),
    "nm": ("prune", {"method": "nm"}),
    "tile": ("prune", {"method": "tile", "tile": 4}),
    "channel": ("prune", {"method": "channel", "sparsity": 0.25}),
    "activation": ("prune", {"method": "activation", "sparsity": 0.25}),
    "attention": ("prune", {"method": "attention", "sparsity": 0.25}),
    "static": ("quantize", {"method": "static"}),
    "dynamic": ("quantize", {"method": "dynamic", "ops": EVERY}),
    "qat": ("quantize", {"method": "qat", "learning_rate": 1e-3, "ops": EVERY}),
    "inject": ("inject", {"fault": "value", "value": 1.0, "ops": EVERY}),
}
"""Name to short name of a tool and its options; no model has a line of its own."""

Step = Callable[[], list[Any]]
"""One step of training; the gradients, with numpy."""


def made(name: str) -> Any:
    """A new tool."""
    short, options = TOOLS[name]
    return amanda.tools.load(short)(**options)


# -- PyTorch ---------------------------------------------------------------------


def _torch_step(model: Any, inputs: Mapping[str, Any]) -> Step:
    from tests import models

    def step() -> list[Any]:
        model.zero_grad()
        models.loss(model(**inputs)).backward()
        return [p.grad.numpy() for p in model.parameters() if p.grad is not None]

    return step


def _torchvision(name: str, size: int = 64) -> Step:
    import torch

    from tests import models

    torch.manual_seed(0)
    build = getattr(models.torchvision.models, name)
    model = build(num_classes=10, **{"init_weights": False} if "inception" in name else {})
    if name == "vgg19":  # its head has six times as many weights as all of its convolutions
        model.classifier, model.avgpool = torch.nn.Linear(512, 10), torch.nn.AdaptiveAvgPool2d(1)
    if name == "inception_v3":
        model.AuxLogits, model.aux_logits = None, False
    return _torch_step(model.train(), {"x": torch.rand(2, 3, size, size)})


def _transformers(name: str) -> Step:
    from tests import models

    return _torch_step(*models.build(name))


TORCH: Mapping[str, Callable[[], Step]] = {
    "resnet50": lambda: _torchvision("resnet50"),
    "vgg19": lambda: _torchvision("vgg19"),
    "mobilenet_v2": lambda: _torchvision("mobilenet_v2"),
    "inception_v3": lambda: _torchvision("inception_v3", 96),
    "densenet121": lambda: _torchvision("densenet121"),
    "bert": lambda: _transformers("bert"),
    "gpt2": lambda: _transformers("gpt2"),
    "llama": lambda: _transformers("llama"),
}


# -- Keras -----------------------------------------------------------------------


def _keras_step(model: Any, shape: Sequence[int], *, function: bool) -> Step:
    import tensorflow as tf

    x = tf.constant(np.random.default_rng(0).random((2, *shape), np.float32))

    def step() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.sin(model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables)  # type: ignore[no-any-return]

    run = tf.function(step) if function else step
    return lambda: [np.asarray(g) for g in run() if g is not None]


def _application(name: str, size: int = 32) -> Callable[[bool], Step]:
    def build(function: bool) -> Step:
        import keras

        keras.utils.set_random_seed(0)
        shape = (size, size, 3)
        model = getattr(keras.applications, name)(weights=None, classes=10, input_shape=shape)
        return _keras_step(model, shape, function=function)

    return build


def _transformer(function: bool) -> Step:
    """An encoder's layer of Keras: attention of projections, and two products."""
    import keras

    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((6, 16))
    h = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
    h = keras.layers.LayerNormalization()(h + inputs)
    h = keras.layers.Dense(32, activation="relu")(h)
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(h))
    return _keras_step(keras.Model(inputs, outputs), (6, 16), function=function)


KERAS: Mapping[str, Callable[[bool], Step]] = {
    "transformer": _transformer,
    "ResNet50": _application("ResNet50"),
    "VGG19": _application("VGG19"),
    "MobileNetV2": _application("MobileNetV2"),
    "InceptionV3": _application("InceptionV3", 75),
    "DenseNet121": _application("DenseNet121"),
    "EfficientNetB0": _application("EfficientNetB0"),
}
"""Name to what makes a step, as a function or eagerly."""


# -- what is looked at -----------------------------------------------------------


def treated(tool: Any, step: Step, steps: int = 2) -> tuple[int, list[str]]:
    """Run some steps under a tool; how many operators it treats, and why not the others.

    The tool may have treated other models before.

    Raises:
        AssertionError: an operator of the tool's types is neither treated nor listed, or a
            gradient is not finite.
    """
    known = {row["id"] for row in _rows(tool)}
    count = amanda.tools.load("count")(ops=getattr(tool.options, "types", tool.options.ops))
    with amanda.apply(tool, count):
        for _ in range(steps):
            gradients = step()
            amanda.new_iteration()
    assert gradients
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    new = [row for row in _rows(tool) if row["id"] not in known]
    met = {row["id"] for row in count.result()["ops"] if row["direction"] == "forward"}
    assert {row["id"] for row in new} == met
    skipped = [row["reason"] for row in new if row.get("reason")]
    return len(new) - len(skipped), skipped


def _rows(tool: Any) -> list[dict[str, Any]]:
    result = tool.result()
    return [*result["ops"], *result["summary"]["skipped"]]
