"""The proof of the mechanism by which compiled functions are instrumented.

See :mod:`amanda.interface.proofs`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import amanda
from amanda.interface.proofs import Proof
from amanda_torch.plugin import TorchGraphDriver


def proof() -> Proof:
    """The proof that routines run in what Dynamo has captured of a compiled function."""
    return Proof("graphs of torch.compile", _graph)


def _graph() -> Iterator[str]:
    seen: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        seen.append(context.get_op_id())
        if context.get_op().__name__ == "relu":
            context.insert_after_op(_increased)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    compiled = torch.compile(lambda x: torch.relu(x * 2.0), backend="eager")
    x = torch.tensor([1.0, -2.0], dtype=torch.float32, device="cpu")
    with amanda.apply(tool, drivers=[TorchGraphDriver]):
        results = {"a value that a routine changes": (compiled(x), [3.0, 1.0])}
    results["the function after the scope"] = compiled(x), [2.0, 0.0]
    if seen != ["/mul:0", "/relu:0"]:
        yield f"operators seen: {seen} instead of ['/mul:0', '/relu:0']"
    for what, (result, expected) in results.items():
        if result.tolist() != expected:
            yield f"{what}: {result.tolist()} instead of {expected}"


@amanda.traceable
def _increased(y: torch.Tensor) -> torch.Tensor:
    return y + 1.0
