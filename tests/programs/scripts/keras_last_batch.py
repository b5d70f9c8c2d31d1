"""Keras fits 40 samples in batches of 16, validates on 5 and predicts for 3."""

import keras
import numpy as np
from bits import digest

keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(32, activation="relu", name="a"), keras.layers.Dense(10, name="b")]
model = keras.Sequential([keras.Input((64,)), *layers], name="net")
model.compile("adam", "mse")
random = np.random.RandomState(0)
x, y = random.rand(40, 64), random.rand(40, 10)
print(model.fit(x, y, 16, 2, verbose=0, shuffle=False, validation_data=(x[:5], y[:5])).history)
print(model.count_params(), digest(model.predict(x[:3], verbose=0), model.get_weights()))
