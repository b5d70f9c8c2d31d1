"""Amanda's drivers for TensorFlow; :mod:`amanda_tensorflow.plugin` registers them.

Programming against this package is not needed: ``amanda.apply(tool)`` finds the drivers through an
entry point.
"""

__version__ = "0.1.0"
