"""A toy framework in pure Python, and its driver.

The framework knows nothing of Amanda: tensors and automatic differentiation
(`tape.py`), operators (`ops.py`) and modules (`nn.py`). The driver
(`driver.py`) is complete: modules, operators in place, gradients of gradients. Programs use
what is imported here.
"""

from amanda.testing.loopback import nn, ops
from amanda.testing.loopback.driver import LoopbackDriver
from amanda.testing.loopback.nn import Linear, Module, Sequential, sgd_step
from amanda.testing.loopback.ops import (
    LoopbackOp,
    add,
    add_,
    cat,
    detach,
    dropout,
    linear,
    manual_seed,
    matmul,
    mul,
    op,
    relu,
    rng_state,
    split,
    sum,
    transpose,
)
from amanda.testing.loopback.tape import (
    Buffer,
    Parameter,
    Tensor,
    buffer,
    grad,
    grad_enabled,
    no_grad,
    parameter,
    record,
    tensor,
)
