"""The driver ``tensorflow-function``: calls of ``tf.function``."""
