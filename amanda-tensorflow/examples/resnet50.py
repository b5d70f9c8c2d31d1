"""Trains ResNet-50 for one step with Keras, and predicts once. It does not use Amanda itself.

    amanda run -t count,trace -o out -- examples/resnet50.py

The weights are random and the images noise, so that nothing has to be downloaded.
"""

import keras
import numpy as np

keras.utils.set_random_seed(0)

model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", jit_compile=False)

images = np.random.default_rng(0).random((2, 64, 64, 3), dtype=np.float32)
labels = np.array([0, 1])

history = model.fit(images, labels, batch_size=2, shuffle=False, verbose=0)
print(f"training: loss {history.history['loss'][0]:.4f}")
print(f"prediction: shape {model.predict(images, verbose=0).shape}")
