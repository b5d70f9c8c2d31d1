"""Keras layers: which of them makes or runs which operators.

:mod:`~amanda_tensorflow.keras_layers.recording` notes it while graphs are built.
"""
