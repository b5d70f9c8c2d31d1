"""Runs the parts that ``partition`` has exported, each in a process of its own.

::

    outputs = run_parts("parts", torch.rand(1, 3, 32, 32))      # the inputs in parts.json's order
"""

import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import torch


def serve(path: Path, pipe: Connection) -> None:
    """Answer inputs with the outputs of a part, until the other end is closed."""
    run = torch.export.load(path).module()
    while (arrays := pipe.recv()) is not None:
        pipe.send([output.detach().numpy() for output in run(*map(torch.from_numpy, arrays))])


def run_parts(folder: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs of the model."""
    about = json.loads(Path(folder, "parts.json").read_text())
    spawning, pipes = multiprocessing.get_context("spawn"), []
    for part in about["parts"]:
        ours, theirs = spawning.Pipe()
        spawning.Process(target=serve, args=(Path(folder, part["file"]), theirs)).start()
        theirs.close()
        pipes.append(ours)
    values = dict(zip(about["inputs"], (value.numpy() for value in inputs), strict=True))
    for part, pipe in zip(about["parts"], pipes, strict=True):
        pipe.send([values[name] for name in part["inputs"]])
        values.update(zip(part["outputs"], pipe.recv(), strict=True))
        pipe.send(None)
    return [torch.from_numpy(values[name]) for name in about["outputs"] if name is not None]
