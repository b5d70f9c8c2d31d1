"""Execution of an instrumented operator: action plans, analyses, routines, backward operators."""
