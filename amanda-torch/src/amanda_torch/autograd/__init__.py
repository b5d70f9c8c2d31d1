"""Additions to the autograd graph: functions, node hooks, substituted tensors."""
