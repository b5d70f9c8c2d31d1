"""Keras: compile, fit with validation data, evaluate, predict; a small convolutional network."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(0)
images = np.random.rand(256, 28, 28, 1).astype("float32")
labels = np.random.randint(0, 10, 256)
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(10, activation="softmax"),
    ],
    name="convnet",
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images, labels, batch_size=32, epochs=2, validation_split=0.25, verbose=2)
print("evaluate", len(model.evaluate(images, labels, verbose=0)))
print("predict", model.predict(images[:10], verbose=0).shape)
