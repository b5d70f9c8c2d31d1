"""Operators of TensorFlow as tools see them: types, names, views of variables."""
