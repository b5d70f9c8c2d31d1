"""Instrumented copies of graphs, for the function and the session driver.

:mod:`~amanda_tensorflow.graphs.replay` makes a copy, operator by operator;
:mod:`~amanda_tensorflow.graphs.instrument` adds one operator with the routines around it.
"""
