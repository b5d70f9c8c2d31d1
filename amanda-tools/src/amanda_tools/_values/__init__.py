"""Tensor values: figures read from them, arithmetic on them, files of them."""
