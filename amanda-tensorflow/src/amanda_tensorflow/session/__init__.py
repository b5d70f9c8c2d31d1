"""The driver ``tensorflow-session``: runs of ``tf.compat.v1.Session``."""
