"""Proofs of the mechanisms by which the eager driver hooks into PyTorch.

Each is a program of a few operators on the CPU, vanilla and under a tool, which draws no random
numbers and gives its tensors their type and device.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.interface.proofs import Proof
from amanda_torch import _internals
from amanda_torch.plugin import TorchEagerDriver

MODULE_CALLS = "module calls"
BACKWARD_PASSES = "backward passes"
FUNCTIONS = "autograd.Function"
CHECKPOINTS = "checkpoints (use_reentrant=False)"
REENTRANT_CHECKPOINTS = "checkpoints (use_reentrant=True)"
TRANSFORMS = "functorch transforms"
COMPOSITES = "functions written in Python"
FAST_PATHS = "native fast paths"
SCRIPTS = "TorchScript"
TRACING = "torch.fx tracing"
COMPILED = "torch.compile"


def proofs() -> Sequence[Proof]:
    """A proof for each mechanism; two for transforms, one of which does not import PyTorch's
    compiler.

    PyTorch 2.13 imports its compiler at the first checkpoint, and at the first gradient of
    functorch, which takes three seconds.
    """
    again = "what a backward pass computes again gets ids of its own"
    vanilla = "operators under them run vanilla"
    compiler = _internals.COMPILER_MODULE
    return [
        Proof("operators", _operators),
        Proof(MODULE_CALLS, _module_calls, "op ids have no module paths"),
        Proof(BACKWARD_PASSES, _backward_passes, "no iteration ends with a backward pass"),
        Proof(FUNCTIONS, _functions, "the operators inside of one are seen instead of it"),
        Proof(CHECKPOINTS, partial(_checkpoints, False), again, compiler),
        Proof(REENTRANT_CHECKPOINTS, partial(_checkpoints, True), again, compiler),
        Proof(TRANSFORMS, _transforms, vanilla),
        Proof(TRANSFORMS, _gradient_transforms, vanilla, compiler),
        Proof(COMPOSITES, _composites, "they and what they call are not seen"),
        Proof(FAST_PATHS, _fast_paths, "modules that have one take their usual path"),
        Proof(SCRIPTS, _scripts, "calls of its functions are not counted as not seen"),
        Proof(TRACING, _tracing, "a model that is traced in a scope may hold the tool's operators"),
        Proof(COMPILED, _compiled, "what it compiles is not seen", compiler),
    ]


# -- the tool -----------------------------------------------------------------


class _Notes(amanda.Tool):
    """Notes the id of each execution, and acts on the operators of some types.

    Args:
        after: routines after forward operators, by type.
        backward: routines in place of backward operators, by type.
    """

    def __init__(
        self,
        after: dict[str, Callable[..., Any]] | None = None,
        backward: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self.ids: list[str] = []
        self._after = after or {}
        self._backward = backward or {}
        self.add_inst_for_op(self._forward_op)
        self.add_inst_for_op(self._backward_op, backward=True)

    def _forward_op(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        context.insert_before_op(lambda: self.ids.append(op_id), inputs=[])
        if action := self._after.get(context.get_op().__name__):
            context.insert_after_op(action)

    def _backward_op(self, context: amanda.OpContext) -> None:
        op_id = str(context.get_backward_op_id())
        context.insert_before_backward_op(lambda: self.ids.append(op_id), grad_outputs=[])
        if action := self._backward.get(context.get_backward_op().__name__):
            context.replace_backward_op(action)


def _under(tool: amanda.Tool, program: Callable[[], Any]) -> Any:
    with amanda.apply(tool, drivers=[TorchEagerDriver]):
        return program()


def _tensor(*values: float, requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu", requires_grad=requires_grad)


def _unlike(what: str, got: Any, expected: Any) -> Iterator[str]:
    """Yield a problem unless two values are equal; tensors become lists."""
    values = [v.tolist() if isinstance(v, torch.Tensor) else v for v in (got, expected)]
    if values[0] != values[1]:
        yield f"{what}: {values[0]} instead of {values[1]}"


# -- the proofs ---------------------------------------------------------------


def _operators() -> Iterator[str]:
    x = _tensor(1.0, -2.0)
    tool = _Notes(after={"mul": lambda y: y + 1.0})
    result = _under(tool, lambda: torch.relu(x * 2.0))
    yield from _unlike("operators seen", tool.ids, ["/mul:0", "/relu:0"])
    yield from _unlike("result of a value that a routine has changed", result, _tensor(3.0, 0.0))


class _Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0


def _module_calls() -> Iterator[str]:
    model, tool, x = nn.Sequential(_Double(), nn.ReLU()), _Notes(), _tensor(1.0)
    _under(tool, lambda: model(x))
    yield from _unlike("operators seen", tool.ids, ["Sequential.0/mul:0", "Sequential.1/relu:0"])


def _backward_passes() -> Iterator[str]:
    x = _tensor(1.0, 2.0, requires_grad=True)
    tool = _Notes(backward={"MulBackward0": lambda gradient, *_: gradient * 10.0})

    def program() -> None:
        for _ in range(2):
            (x * 2.0).sum().backward()

    _under(tool, program)
    expected = ["/mul:0", "/sum:0", "/ones_like:0", "/sum:0/grad/SumBackward0:0"]
    expected += [f"/mul:0/grad/{name}:0" for name in ("MulBackward0", "AccumulateGrad")]
    yield from _unlike("operators seen", sorted(tool.ids), sorted(2 * expected))
    yield from _unlike("replaced gradient", x.grad, _tensor(20.0, 20.0))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 3.0 * x * x


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 2.0 * x


# Programs bind these methods to names of their own, before any scope.
_cube, _square = _Cube.apply, _Square.apply


def _functions() -> Iterator[str]:
    for apply, name, gradient in (_cube, "_Cube", 12.0), (_square, "_Square", 4.0):
        x, watching = _tensor(2.0, requires_grad=True), _Notes()
        _under(watching, lambda: apply(x).backward())  # noqa: B023 - called at once
        ids = [f"/{name}:0", f"/{name}:0/grad/{name}Backward:0", f"/{name}:0/grad/AccumulateGrad:0"]
        seen = [op_id for op_id in watching.ids if not op_id.startswith("/ones_like")]
        yield from _unlike(f"operators seen of {name}", seen, ids)
        yield from _unlike(f"gradient of {name}", x.grad, _tensor(gradient))
        acting = _Notes({name: lambda y: y + 1.0}, {f"{name}Backward": lambda g, *_: g * 5.0})
        x = _tensor(2.0, requires_grad=True)
        y = _under(acting, lambda: _backward_of(apply(x)))  # noqa: B023
        yield from _unlike(f"changed result of {name}", y, apply(_tensor(2.0)) + 1.0)
        yield from _unlike(f"replaced gradient of {name}", x.grad, _tensor(5.0))


def _backward_of(y: torch.Tensor) -> torch.Tensor:
    y.backward()
    return y.detach()


def _checkpoints(reentrant: bool) -> Iterator[str]:
    def region(x: torch.Tensor) -> torch.Tensor:
        return (x * x).exp()

    def program() -> None:
        # Counters restart at the first operator that is recorded.
        x.neg()
        y = checkpoint(region, x, use_reentrant=reentrant, preserve_rng_state=False)
        y.backward()

    x = _tensor(0.5, requires_grad=True)
    tool = _Notes(after={"mul": lambda y: y * 2.0})
    _under(tool, program)
    forward = [op_id for op_id in tool.ids if "/grad/" not in op_id]
    seen = collections.Counter(i for i in forward if i.startswith(("/mul:", "/exp:")))
    yield from _unlike("operators seen", dict(seen), {"/mul:0": 2, "/exp:0": 2})
    # The gradient passes straight through the routine: 2 x exp(2 x^2).
    yield from _unlike("gradient of a changed value", x.grad, _tensor(0.5).exp())


def _transforms() -> Iterator[str]:
    x = _tensor(1.0, 2.0)
    yield from _transformed(lambda: torch.func.vmap(lambda x: x.cos().sum())(x), "cos", "sum")


def _gradient_transforms() -> Iterator[str]:
    x = _tensor(1.0, 2.0)
    differentiate = torch.func.grad(lambda x: (x.sin() * x).sum())
    yield from _transformed(lambda: differentiate(x), "sin", "mul", "sum")


def _transformed(program: Callable[[], torch.Tensor], *wanted: str) -> Iterator[str]:
    vanilla, tool = program(), _Notes()
    yield from _unlike("result", _under(tool, program), vanilla)
    missing = [name for name in wanted if f"/{name}:0" not in tool.ids]
    yield from (f"operator /{name}:0 was not seen" for name in missing)


def _composites() -> Iterator[str]:
    tool, x = _Notes(), _tensor(3.0, 4.0)
    result = _under(tool, lambda: nn.functional.normalize(x, dim=0))
    yield from _unlike("result", result, nn.functional.normalize(x, dim=0))
    # x.norm() is a method written in Python, and normalize() a function.
    missing = {"/linalg_vector_norm:0", "/div:0"} - set(tool.ids)
    yield from (f"operator {op_id} was not seen" for op_id in sorted(missing))


def _fast_paths() -> Iterator[str]:
    asked = _under(amanda.Tool(), lambda: torch.overrides.has_torch_function((_tensor(1.0),)))
    yield from _unlike("has_torch_function() of a tensor under a scope", bool(asked), False)


def _scripts() -> Iterator[str]:
    double = torch.jit.CompilationUnit("def double(x):\n    return x + x\n").double
    scope = amanda.apply(amanda.Tool(), drivers=[TorchEagerDriver])
    with scope:
        double(_tensor(1.0))
    if not any(reason.startswith(SCRIPTS) for reason in scope.statistics.not_seen):
        yield "a call was not counted as not seen"


def _tracing() -> Iterator[str]:
    def program() -> str:
        return str(torch.fx.symbolic_trace(_Double()).code)

    tool = _Notes()
    yield from _unlike("traced code", _under(tool, program), program())
    yield from _unlike("operators seen while tracing", tool.ids, [])


def _compiled() -> Iterator[str]:
    tool, double = _Notes(), torch.compile(lambda x: x * 2.0, backend="eager")
    _under(tool, lambda: double(_tensor(1.0)))
    if "/mul:0" not in tool.ids:
        yield "an operator of a compiled function was not seen"
