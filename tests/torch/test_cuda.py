"""Everything on a CUDA device; skipped without one."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.testing import DriverContract
from amanda.testing.framework import Values
from amanda_torch.plugin import TorchEagerDriver
from tests.torch import test_contract, test_opinfo
from tests.torch.support import TRANSPARENT, Counter, applied, fingerprint

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.usefixtures("interceptor"),
]

WATCHING = ("count", "flops", "summary", "trace", "profile")
"""Tools that look at no values."""


@pytest.fixture(autouse=True)
def _same_again() -> Iterator[None]:
    """Kernels give the same again."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(False)


def watching(name: str) -> amanda.Tool:
    """A tool of amanda-tools."""
    made: amanda.Tool = amanda.tools.load(name)()
    return made


class Program:
    """Steps of training a small network with dropout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2),
            nn.Flatten(), nn.Linear(288, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 10),
        ).cuda()  # fmt: skip
        self.x = torch.rand(4, 3, 8, 8, device="cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        torch.manual_seed(1)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def results(self) -> list[Any]:
        """What the steps have left."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        found = [*gradients, *self.model.state_dict().values(), torch.cuda.get_rng_state()]
        return [t.detach().cpu() for t in found if t is not None]


def run(scope: contextlib.AbstractContextManager[Any]) -> Any:
    """Losses, gradients, parameters, buffers and the random state after four steps."""
    program = Program()
    with scope:
        losses = [program.step() for _ in range(4)]
    return fingerprint([[loss.cpu() for loss in losses], program.results()])


@pytest.mark.parametrize("make", [*TRANSPARENT, *WATCHING])
def test_training_stays_bit_identical(make: Callable[[], amanda.Tool] | str) -> None:
    """Losses, gradients, buffers and random numbers on the device are those without a tool."""
    expected = run(contextlib.nullcontext())
    assert run(contextlib.nullcontext()) == expected
    assert run(applied(watching(make) if isinstance(make, str) else make())) == expected


@contextlib.contextmanager
def waits_refused() -> Iterator[None]:
    """What waits for the device raises an error."""
    with warnings.catch_warnings():
        # Not all that waits is found, of which PyTorch warns.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", [*TRANSPARENT, *WATCHING])
def test_a_tool_that_needs_no_values_does_not_wait(make: Callable[[], amanda.Tool] | str) -> None:
    """Nothing waits for the device, in the first step and in later ones."""
    program = Program()
    with applied(watching(make) if isinstance(make, str) else make()), waits_refused():
        for _ in range(4):
            program.step()


def allocations(program: Program) -> Sequence[int]:
    """Of one step: the peak beyond what was there, the number, and what is left."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, count = torch.cuda.memory_allocated(), "allocation.all.allocated"
    number = torch.cuda.memory_stats()[count]
    program.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return (peak, torch.cuda.memory_stats()[count] - number, torch.cuda.memory_allocated() - before)


@pytest.mark.parametrize("make", [TRANSPARENT[0], *WATCHING])
def test_a_watching_tool_needs_no_memory_of_the_device(
    make: Callable[[], amanda.Tool] | str,
) -> None:
    """A step allocates as much and as often as without a tool, and nothing is kept."""
    program = Program()
    for _ in range(3):
        program.step()
    expected = allocations(program)
    assert allocations(program) == expected
    gc.collect()
    before = torch.cuda.memory_allocated()
    with applied(watching(make) if isinstance(make, str) else make()):
        for _ in range(3):
            program.step()
        assert allocations(program) == expected
    assert torch.cuda.memory_allocated() == before


def replayed(scope: contextlib.AbstractContextManager[Any]) -> Any:
    """What replays of a CUDA graph leave that was captured in a scope."""
    program = Program()
    with scope:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                program.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = program.step()
        losses = []
        for _ in range(3):
            graph.replay()
            losses.append(loss.cpu())
    return fingerprint([losses, program.results()])


@pytest.mark.parametrize("make", [*TRANSPARENT, *WATCHING])
def test_a_cuda_graph_can_be_captured_in_a_scope(make: Callable[[], amanda.Tool] | str) -> None:
    """Its replays give what those of a graph give that was captured without a tool."""
    expected = replayed(contextlib.nullcontext())
    assert replayed(applied(watching(make) if isinstance(make, str) else make())) == expected


def test_ids_are_those_of_the_processor() -> None:
    """Forward operators have the same ids on every device."""
    program = Program()
    found = []
    for device in ("cuda", "cpu"):
        program.model.to(device)
        x = program.x.to(device)
        tool = Counter()
        with applied(tool):
            program.model(x).square().mean().backward()
        found.append((tool.ids, tool.backward_ops.total()))
    assert found[0] == found[1]


def test_kernels_are_assigned_to_operators() -> None:
    """The tool kernels lists what each operator, forward and backward, has run on the device."""
    program = Program()
    program.step()
    tool = amanda.tools.load("kernels")()
    with applied(tool):
        program.step()
        torch.cuda.synchronize()
    result = tool.result()
    assert result["summary"]["launches"] > 0
    assert result["summary"]["device_attributed"] > 0.9
    kernels = {
        row["type"]: [k for k in row["kernels"] if k["device"].startswith("cuda")]
        for row in result["ops"]
    }
    assert all(kernels[name] for name in ("conv2d", "linear", "linear_backward"))


OF_MODE = "the mode takes what user functions call in autograd's threads for forward operators"
LEFT_OUT = {
    "test_forked_child": "a forked child cannot use the device",
    "test_cache_disabled_backward": "cache_disabled() does not reach autograd's threads",
    "test_backward_ids": "cache_disabled() does not reach autograd's threads",
    "test_backward_ops_of_the_user_are_no_forward_ops": OF_MODE,
}
"""Tests of the kit that do not hold where backward operators run in threads of autograd."""


class CudaFramework(test_contract.TorchFramework):
    """PyTorch, eager, on a CUDA device."""

    def tensor(self, values: Values) -> Any:
        return torch.tensor(values, dtype=torch.float64, device="cuda")

    def model(self, weight: Values, calls: int = 1) -> Any:
        return test_contract.Model(weight, calls).cuda()

    def rng_state(self) -> Any:
        return super().rng_state(), torch.cuda.get_rng_state().tolist()


class TestTorchEagerDriverOnCuda(DriverContract):
    driver_cls = TorchEagerDriver
    framework_cls = CudaFramework

    @pytest.fixture(autouse=True)
    def _left_out(self, request: pytest.FixtureRequest, interceptor: str) -> None:
        reason = LEFT_OUT.get(request.node.originalname, "")
        if reason and (interceptor == "mode" or reason != OF_MODE):
            pytest.skip(reason)


@pytest.mark.parametrize("chunk", range(test_opinfo.CHUNKS))
def test_operators_stay_bit_identical(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, gradients, mutated inputs and random state stay the same, for every operator."""
    monkeypatch.setattr(test_opinfo, "DEVICE", "cuda")
    test_opinfo.check_chunk(chunk)
