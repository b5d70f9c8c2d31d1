"""The extension by itself: its records, how it is built, and what it does without memory."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import amanda_torch_accel
from amanda_torch import accel
from tests.running import run_python

ROOT = Path(__file__).parents[2]

needs_extension = pytest.mark.skipif(
    bool(accel.refusal()), reason=f"it is not used here: {accel.refusal()}"
)


@needs_extension
def test_records_have_the_fields_of_their_twins() -> None:
    """Each record of the extension has the fields that its class in Python has, and no others."""
    source = (ROOT / "amanda-torch/src/amanda_torch/eager/records.py").read_text()
    head = source.partition("if TYPE_CHECKING")[0]
    twins: dict[str, Any] = {}
    body = source.partition("accel.refusal():\n")[2].partition("\nelse:")[0]
    exec(head + "if True:\n" + body, twins)
    for name in ("TrackerFields", "FrameFields", "ChildFields", "KnownFields"):
        record = getattr(accel.load(), name)
        members = {k for k, v in vars(record).items() if isinstance(v, types.MemberDescriptorType)}
        assert members == set(twins[name].__slots__)


@needs_extension
def test_fields_of_records_are_those_of_slots() -> None:
    """A field is missing until it is set, can be deleted, and is freed in a cycle."""

    class Frame(accel.load().FrameFields):  # type: ignore[misc]
        __slots__ = ()

    frame = Frame()
    with pytest.raises(AttributeError, match="cells"):
        _ = frame.cells
    frame.cells = frame.caller = frame
    del frame.cells
    assert not hasattr(frame, "cells")


def test_another_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension that was built for another minor version of PyTorch is not loaded, and the
    reason is one line."""
    found = types.ModuleType("amanda_torch_accel.built_for")
    found.TORCH = "1.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "amanda_torch_accel.built_for", found)
    minor = amanda_torch_accel.minor_version(torch.__version__)
    with pytest.raises(ImportError, match=f"built for PyTorch 1.0, and this is {minor}"):
        amanda_torch_accel.load()
    assert "\n" not in accel.refusal()
    assert "built for PyTorch 1.0" in accel.refusal()
    assert "compiler" not in accel.refusal()
    # None in sys.modules: as without the file, which is written when the extension is built.
    monkeypatch.setitem(sys.modules, "amanda_torch_accel.built_for", None)
    with pytest.raises(ImportError, match="not built, as without a compiler: install"):
        amanda_torch_accel.load()


@pytest.mark.parametrize("mode", ["attempt", "skip", "require"])
def test_without_a_compiler(mode: str, tmp_path: Path) -> None:
    """Without a compiler the package is installed without its extension; `require` fails."""
    pytest.importorskip("setuptools")
    source = shutil.copytree(ROOT / "amanda-torch" / "accel", tmp_path / "source")
    (source / "src/amanda_torch_accel/built_for.py").unlink(missing_ok=True)
    for old in source.rglob("*.so"):
        old.unlink()
    none = {"CC": "/bin/false", "CXX": "/bin/false", "AMANDA_TORCH_ACCEL_BUILD": mode}
    words = ["setup.py", "-q", "build", "--build-lib", str(tmp_path / "built")]
    run = run_python(*words, cwd=source, env=none)
    assert (run.returncode == 0) == (mode != "require"), run.stderr
    if mode != "require":
        built = {path.name for path in (tmp_path / "built").rglob("*.*")}
        assert built == {"__init__.py", "gate.pyi", "py.typed"}


@needs_extension
@pytest.mark.parametrize("kind", ["legacy", "isolated"])
def test_other_interpreters_are_refused(kind: str) -> None:
    """It is loaded in the main interpreter only: what it writes to belongs to the process."""
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    argument = repr(kind) if sys.version_info >= (3, 13) else f"isolated={kind == 'isolated'}"
    loading = f"""
from importlib import util
spec = util.spec_from_file_location("gate", {accel.load().__file__!r})
try:
    spec.loader.exec_module(util.module_from_spec(spec))
except ImportError as error:
    print("refused:", error)
"""
    code = f"import torch, {name} as all; all.run_string(all.create({argument}), {loading!r})"
    done = run_python("-c", code, check=True)
    assert done.stdout.startswith("refused:"), done


STEPS = """
import contextlib, sys, torch, amanda
from torch import nn
import _testcapi

class Inline(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.count, self.backward = amanda.inline.Counter(), amanda.inline.Counter()
        self.timer = amanda.inline.Timer()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context):
        context.insert_before_op(self.count, inputs=[])
        context.insert_before_op(self.timer.start, inputs=[])
        context.insert_after_op(self.timer.stop, outputs=[])

    def analyse_backward(self, context):
        context.insert_before_backward_op(self.backward, grad_outputs=[])

class Call(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        context.insert_before_op(self.look)
        context.insert_after_op(self.look)

    def look(self, *tensors):
        pass

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
x = torch.rand(2, 8)

def step():
    model(x).pow(2).sum().backward()

tool = {"inline": Inline, "call": Call}[sys.argv[1]]()
outcomes = set()
with amanda.apply(tool):
    for _ in range(6):
        step()
    for number in range(300):
        try:
            _testcapi.set_nomemory(number, number + 1)
            try:
                step()
            finally:
                _testcapi.remove_mem_hooks()
            outcomes.add("done")
        except (MemoryError, torch.OutOfMemoryError):
            outcomes.add("no memory")
        model.zero_grad()
    if sys.argv[1] == "inline":
        before = tool.count.count, tool.backward.count, tool.timer.executions
        step()
        after = tool.count.count, tool.backward.count, tool.timer.executions
        print([b - a for a, b in zip(before, after)])
print(sorted(outcomes))
"""


@needs_extension
@pytest.mark.parametrize("tool", ["inline", "call"])
def test_each_allocation_that_fails_is_an_error(tool: str) -> None:
    """Where an allocation of a step fails, the step raises MemoryError or does without; the process
    goes on, and the next step is counted as every step is."""
    pytest.importorskip("_testcapi")
    if sys.version_info >= (3, 12):
        pytest.skip("PyTorch 2.13 alone crashes in these steps on CPython 3.12 and 3.13")
    run = run_python("-c", STEPS, tool, env={"AMANDA_TORCH_INTERCEPTOR": "gate"})
    assert run.returncode == 0, run.stderr[-2000:]
    *counts, outcomes = run.stdout.splitlines()
    assert outcomes == "['done', 'no memory']"
    assert counts == (["[6, 11, 6]"] if tool == "inline" else [])


@needs_extension
@pytest.mark.parametrize("builtin", [vars(str)["split"], len, object()])
def test_unknown_builtins_are_refused(builtin: Any) -> None:
    """What is no function of PyTorch's is refused by name."""
    with pytest.raises(ValueError, match=r"split|len|object"):
        accel.load().add(builtin)
