"""The proof of the mechanism by which compiled functions are instrumented.

See :mod:`amanda.interface.proofs`. And the test of the interceptor ``capture``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import amanda
from amanda.inline import Counter
from amanda.interface.proofs import Proof
from amanda_torch.plugin import TorchEagerDriver, TorchGraphDriver


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


def reason_not_captured() -> str:
    """Why modules are not captured, where the interceptor ``capture`` is asked for; "" if they are.

    A small module is called in a scope of its own.
    """
    module, tool, counter = _Doubles(), amanda.Tool(), Counter()
    tool.add_inst_for_op(lambda context: context.insert_before_op(counter, inputs=[]))
    x = torch.ones(2, dtype=torch.float32, device="cpu")
    try:
        with torch.no_grad(), amanda.apply(tool, drivers=[TorchEagerDriver]) as scope:
            results = [module(x) for _ in range(_CALLS)]
    except Exception as error:
        return f"the self-test fails: {type(error).__name__}: {error}"
    way = scope.statistics.modules.get("_Doubles", "without being noticed")
    if way != "captured":
        return f"in the self-test modules run {way}"
    if counter.count != _CALLS:
        return f"in the self-test {_CALLS} operators run, and {counter.count} are counted"
    found = [result.tolist() for result in results if result.tolist() != [2.0, 2.0]]
    return f"in the self-test a module gives {found[0]} instead of [2.0, 2.0]" if found else ""


class _Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0


_CALLS = 5
"""The third call captures, and the fourth is the first one without an interceptor."""


@amanda.traceable
def _increased(y: torch.Tensor) -> torch.Tensor:
    return y + 1.0
