"""Instrumented copies of graphs, shared by the function and the session driver."""
