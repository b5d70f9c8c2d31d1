"""Keras models whose first training step is measured (first_steps.py)."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.benchmarks.timing import Step

BATCH = 2
"""Images of a batch: few, so that the share of the operators' own cost is small."""


def mobilenet() -> Step:
    """A training step of MobileNetV2 on images of 64 pixels."""
    return _training("MobileNetV2", 64, 1)


def resnet() -> Step:
    """The same of ResNet50."""
    return _training("ResNet50", 64, 1)


def densenet() -> Step:
    """The same of DenseNet201, the largest graph of the three."""
    return _training("DenseNet201", 64, 1)


def mobilenet_fit() -> Step:
    """A ``fit`` of twenty batches with MobileNetV2 on images of 32 pixels."""
    return _training("MobileNetV2", 32, 20)


def resnet_fit() -> Step:
    """A ``fit`` of twenty batches with ResNet50 on images of 64 pixels."""
    return _training("ResNet50", 64, 20)


def _training(name: str, size: int, batches: int) -> Step:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    model.compile("sgd", "sparse_categorical_crossentropy")
    images = np.random.default_rng(0).random((BATCH, size, size, 3), dtype=np.float32)
    labels = np.zeros(BATCH, dtype=np.int32)
    if batches == 1:
        return lambda: model.train_on_batch(images, labels)
    images, labels = np.tile(images, (batches, 1, 1, 1)), np.tile(labels, batches)
    return lambda: model.fit(images, labels, batch_size=BATCH, verbose=0)
