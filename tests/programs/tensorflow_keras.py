"""Programs of TensorFlow: Keras, and the packages that are built on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.programs.registry import program
from tests.programs.tensorflow_parts import digits, fitted, normal

LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
"""For packages that were written for Keras 2, which lives on as tf-keras."""


@program("keras")
def keras_mobilenet() -> Any:
    """MobileNetV2 of keras.applications: fit with augmentation, evaluate, predict."""
    import keras

    base = keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, include_top=False, weights=None, pooling="avg"
    )
    inputs = keras.Input((32, 32, 3))
    augmented = keras.layers.RandomFlip()(keras.layers.RandomRotation(0.1)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(4, "softmax")(base(augmented)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, np.random.random((8, 32, 32, 3)), np.arange(8) % 4, batch_size=4)


@program("keras")
def keras_functional() -> Any:
    """Two inputs, shared layers, batch normalization, dropout, callbacks, a schedule, clipping."""
    import keras
    from keras import layers

    image, number = keras.Input((8, 8, 1)), keras.Input((3,))
    x = layers.BatchNormalization()(layers.Conv2D(6, 3, activation="relu")(image))
    x = layers.Dropout(0.2)(layers.Flatten()(layers.SeparableConv2D(4, 3)(x)))
    shared = layers.Dense(8, "gelu")
    y = layers.concatenate([shared(x[:, :3]), shared(number), x])
    model = keras.Model([image, number], [layers.Dense(10)(y), layers.Dense(1)(y)])
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    rate = keras.optimizers.schedules.CosineDecay(1e-2, 10)
    model.compile(keras.optimizers.AdamW(rate, clipnorm=1.0), losses, loss_weights=[1, 0.1])
    images, labels = digits()
    stop = keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)
    return fitted(model, [images, normal(48, 3)], [labels, normal(48, 1)], callbacks=[stop])


@program("keras")
def keras_transformer() -> Any:
    """A transformer of layers of ours with a custom train_step, saved, loaded and run again."""
    import tempfile

    import keras
    from keras import layers, ops

    class Classifier(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = layers.Embedding(50, 16, mask_zero=True)
            self.attend, self.norm = layers.MultiHeadAttention(2, 8), layers.LayerNormalization()
            self.drop, self.head = layers.Dropout(0.1), layers.Dense(3)

        def call(self, ids: Any, training: bool = False) -> Any:
            x = self.embed(ids)
            x = self.norm(x + self.attend(x, x, use_causal_mask=True))
            return self.head(self.drop(ops.mean(x, 1), training=training))

        def train_step(self, data: Any) -> Any:
            ids, labels = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=labels, y_pred=self(ids, training=True))
            found = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(found, self.trainable_weights)
            return {"loss": loss, "norm": tf.linalg.global_norm(found)}

    model = Classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Lion(1e-3), loss)
    ids, labels = np.random.randint(1, 50, (16, 7)), np.random.randint(0, 3, 16)
    results = fitted(model, ids, labels, batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/model.weights.h5")
        other = Classifier()
        other(ids)
        other.load_weights(f"{folder}/model.weights.h5")
    return results, other.predict(ids, verbose=0)


@program("keras")
def keras_recurrent() -> Any:
    """LSTM, bidirectional, GRU with dropout of the state, masks, layers for each time."""
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((6, 5)),
            layers.Masking(),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True, dropout=0.1)),
            layers.GRU(6, return_sequences=True, recurrent_dropout=0.1),
            layers.TimeDistributed(layers.Dense(4)),
        ]
    )
    model.compile("rmsprop", "mae")
    x = normal(8, 6, 5)
    x[:, 4:] = 0
    return fitted(model, x, normal(8, 6, 4), batch_size=4)


@program("keras-hub", "keras")
def keras_hub_gpt2() -> Any:
    """GPT-2 of KerasHub: fit on tokens, then generation, compiled and sampled."""
    import keras
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(60, 1, 2, 16, 32, max_sequence_length=16)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss=loss)
    ids = np.random.randint(1, 60, (4, 9))
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones((4, 8), "int32")}
    history = model.fit(x, ids[:, 1:], epochs=2, batch_size=2, verbose=0).history
    prompt = {"token_ids": ids[:2, :8], "padding_mask": np.arange(8) < np.array([[3], [4]])}
    model.compile(optimizer="sgd", loss=loss, sampler=keras_hub.samplers.TopKSampler(5, seed=1))
    return history, model.generate(dict(prompt), stop_token_ids=None), model.get_weights()


@program("tensorflow-model-optimization", "tf-keras", environment=LEGACY)
def model_optimization() -> Any:
    """Magnitude pruning by wrappers with callbacks, then quantization-aware training."""
    import tensorflow_model_optimization as tfmot

    tf.keras.utils.set_random_seed(0)
    images, labels = digits()
    keras = tf.keras
    layers = [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten()]
    network = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    results = []
    for wrap, callbacks in (
        (tfmot.sparsity.keras.prune_low_magnitude, [tfmot.sparsity.keras.UpdatePruningStep()]),
        (tfmot.quantization.keras.quantize_model, []),
    ):
        model = wrap(keras.models.clone_model(network))
        model.compile(keras.optimizers.legacy.SGD(0.1), loss)
        results.append(fitted(model, images, labels, callbacks=callbacks, epochs=1))
    return results
