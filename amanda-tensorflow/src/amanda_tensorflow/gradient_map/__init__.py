"""Which operator is the gradient of which.

:mod:`~amanda_tensorflow.gradient_map.recording` notes it while gradients are built;
:mod:`~amanda_tensorflow.gradient_map.recovery` finds it in graphs that are older.
"""
