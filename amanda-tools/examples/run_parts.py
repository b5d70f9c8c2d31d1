"""Runs the parts that ``partition`` has exported, each in a process of its own.

::

    outputs = run_parts("parts", torch.rand(1, 3, 32, 32))      # the inputs in parts.json's order
"""

import json
import multiprocessing
from pathlib import Path

import torch


def serve(path, pipe):
    """Answer tensors with the outputs of a part, until the other end is closed."""
    run = torch.export.load(path).module()
    while (arrays := pipe.recv()) is not None:
        outputs = run(*map(torch.from_numpy, arrays))
        pipe.send([output.detach().numpy() for output in outputs])


def run_parts(folder, *inputs):
    """Return the outputs of the model."""
    about = json.loads(Path(folder, "parts.json").read_text())
    values = dict(zip(about["inputs"], (value.numpy() for value in inputs), strict=True))
    spawning = multiprocessing.get_context("spawn")
    for part in about["parts"]:  # one after the other, here: each could be on another machine
        ours, theirs = spawning.Pipe()
        process = spawning.Process(target=serve, args=(Path(folder, part["file"]), theirs))
        process.start()
        ours.send([values[name] for name in part["inputs"]])
        values.update(zip(part["outputs"], ours.recv(), strict=True))
        ours.send(None)
        process.join()
    return [torch.from_numpy(values[name]) for name in about["outputs"] if name]
