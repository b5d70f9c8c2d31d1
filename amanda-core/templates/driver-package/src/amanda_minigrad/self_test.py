"""A test of a second that ``amanda doctor`` runs where the driver is installed."""

from __future__ import annotations

import amanda

import minigrad


class Counting(amanda.Tool):
    """Counts the operators that it sees, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.add_inst_for_op(lambda context: self.seen.append(context.get_op_id()))
        self.add_inst_for_op(
            lambda context: self.seen.append(str(context.get_backward_op_id())), backward=True
        )


def problems(driver: type[amanda.Driver]) -> list[str]:
    """What the driver does wrong, one line each."""
    tool, x = Counting(), minigrad.Tensor([1.0, -2.0], requires_grad=True)
    vanilla = minigrad.execute
    with amanda.apply(tool, drivers=[driver]):
        y = minigrad.relu(x)
        minigrad.backward(y)
    found = []
    if tool.seen != ["/relu:0", "/relu:0/grad/relu_backward:0"]:
        found.append(f"relu was seen as {tool.seen}")
    if x.grad is None or x.grad.data.tolist() != [1.0, 0.0]:
        found.append("the gradient of relu is wrong")
    if minigrad.execute is not vanilla:
        found.append("minigrad.execute stays patched")
    return found
