"""Keras: compile, fit, evaluate; the training step is a tf.function."""

import keras
import numpy as np

keras.utils.set_random_seed(0)
x = np.random.rand(64, 8).astype("float32")
y = (x.sum(axis=1) > 4).astype("int32")
model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="sgd", loss=loss, metrics=["accuracy"], jit_compile=False)
history = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history
print(history, model.evaluate(x, y, verbose=0))
