"""Amanda's drivers for TensorFlow: none yet, see :mod:`amanda_tensorflow.plugin`."""

__version__ = "0.1.0"
