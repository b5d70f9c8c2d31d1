"""A transformer of Keras in mixed_bfloat16 with a gelu and one scalar that scales its attention."""

import keras
import numpy as np
import tensorflow as tf
from bits import digest
from keras import layers


class Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


# Without the fusions that routines between operators cost, and the last bits with them.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
keras.utils.set_random_seed(0)
keras.mixed_precision.set_global_policy("mixed_bfloat16")
x = keras.Input((6, 8))
h = layers.LayerNormalization()(x + Scale()(layers.MultiHeadAttention(2, 4)(x, x)))
h = layers.Dense(16, activation="gelu", name="up")(h)
y = layers.Dense(2, dtype="float32", name="out")(layers.Flatten()(h))
model = keras.Model(x, y, name="net")
model.compile("sgd", "mse")
random = np.random.RandomState(0)
data = random.rand(8, 6, 8), random.rand(8, 2)
print(model.fit(*data, batch_size=4, epochs=2, verbose=0).history)
print(model.count_params(), digest(model.get_weights()))
