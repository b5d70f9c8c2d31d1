"""Runs the ``.pt2`` parts that ``partition`` has exported, each in a process of its own.

::

    outputs = run_parts("parts", torch.rand(1, 3, 32, 32))      # the inputs in parts.json's order
"""

import contextlib
import io
import json
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch


def send(pipe: Connection, tensors: Sequence[torch.Tensor]) -> None:
    """Send tensors of any type."""
    # A view would be saved with all that its storage holds.
    torch.save([tensor.clone() for tensor in tensors], file := io.BytesIO())
    pipe.send_bytes(file.getvalue())


def receive(pipe: Connection) -> Sequence[torch.Tensor]:
    """Receive what :func:`send` has sent."""
    found: Sequence[torch.Tensor] = torch.load(io.BytesIO(pipe.recv_bytes()))
    return found


def serve(path: Path, pipe: Connection) -> None:
    """Answer inputs with the outputs of a part, until the other end is closed."""
    run = torch.export.load(path).module()
    with contextlib.suppress(EOFError), torch.no_grad():
        while True:
            send(pipe, run(*receive(pipe)))


def run_parts(folder: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs of the model.

    Raises:
        EOFError: a part has failed; its process has printed the reason.
    """
    about = json.loads(Path(folder, "parts.json").read_text())
    spawning = multiprocessing.get_context("spawn")
    values = dict(zip(about["inputs"], inputs, strict=True))
    with contextlib.ExitStack() as stack:
        pipes = []
        for part in about["parts"]:
            ours, theirs = spawning.Pipe()
            pipes.append(stack.enter_context(ours))
            with theirs:
                spawning.Process(target=serve, args=(Path(folder, part["file"]), theirs)).start()
        for part, pipe in zip(about["parts"], pipes, strict=True):
            send(pipe, [values[name] for name in part["inputs"]])
            values.update(zip(part["outputs"], receive(pipe), strict=True))
    return [values[name] for name in about["outputs"] if name is not None]
