"""The numbers of TensorFlow's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from amanda_tools._values.numerics import Array, Numerics


class TensorFlowNumerics(Numerics):
    """TensorFlow's eager tensors, which routines get in every mode."""

    def is_floating(self, tensor: Any) -> bool:
        return bool(tensor.dtype.is_floating) and hasattr(tensor, "numpy")

    def is_finite(self, tensor: Any) -> bool:
        return bool(tf.reduce_all(tf.math.is_finite(tensor)))

    def has_nan(self, tensor: Any) -> bool:
        return bool(tf.reduce_any(tf.math.is_nan(tensor)))

    def is_readable(self, tensor: Any) -> bool:
        return hasattr(tensor, "numpy") and not self.is_opaque(tensor)

    def is_opaque(self, tensor: Any) -> bool:
        dtype = tensor.dtype
        return dtype in (tf.resource, tf.variant) or dtype.name.endswith("_ref")

    def numpy(self, tensor: Any) -> Array:
        array = np.array(tensor)
        # TensorFlow's own small types are none of numpy's.
        return array.astype(np.float32) if array.dtype.kind == "V" else array

    def stored(self, tensor: Any) -> Any:
        return np.array(tensor)

    def copy(self, tensor: Any) -> Any:
        return tf.stop_gradient(tf.identity(tensor))

    def dtype(self, tensor: Any) -> str:
        return str(tf.as_dtype(tensor.dtype).name)


NUMERICS = TensorFlowNumerics()
