"""The driver ``tensorflow-graph``: runs of ``tf.compat.v1.Session``."""
