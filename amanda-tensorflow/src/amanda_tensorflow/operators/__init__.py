"""Operators of TensorFlow as tools see them: their types, names and attributes."""
