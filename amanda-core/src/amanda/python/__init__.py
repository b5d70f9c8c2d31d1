"""Modules about Python alone, which know neither tools nor frameworks.

Patches that are put back exactly, interrupts that wait, weak references, memos of a bounded size,
signatures, nested containers, text for a terminal, and the private symbols of CPython.
"""
