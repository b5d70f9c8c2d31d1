"""How the cost of instrumentation grows with operators, tools and actions: linearly.

A part of the page of ``speed``. Each figure is processor time per operator in excess of vanilla,
the fastest of several steps. Where growth is linear, a line's figures are equal but for what a
scope costs once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch

import amanda
from tests.benchmarks.timing import Step

OPERATORS = (100, 1_000, 10_000, 100_000)
TOOLS = (1, 4, 16)
ACTIONS = (1, 4, 16)

REPEATS = 5
"""Timed steps of each figure; fewer with very many operators, which take seconds."""


class Actions(amanda.Tool):
    """Inserts some empty routines before every operator, and takes its tensors."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the routines."""
        for _ in range(self.actions):
            context.insert_before_op(self.nothing)

    def nothing(self, *tensors: object) -> None:
        """Do nothing."""


def program(operators: int) -> Step:
    """A step that runs that many operators on one small tensor."""
    x = torch.ones(1)

    def step() -> None:
        y = x
        for _ in range(operators):
            y = torch.neg(y)
        # Without modules and gradients nothing else tells that the same operators come again.
        amanda.new_iteration()

    return step


def microseconds(operators: int, tools: Sequence[amanda.Tool], repeats: int) -> tuple[float, float]:
    """Of one operator above vanilla: in the first step of a scope, and in later ones."""
    step = program(operators)
    step()
    gc.collect()
    vanilla = min(_timed(step) for _ in range(repeats))
    with amanda.apply(*tools):
        first = _timed(step)
        later = min(_timed(step) for _ in range(repeats))
    return tuple(1e6 * (seconds - vanilla) / operators for seconds in (first, later))  # type: ignore[return-value]


def _timed(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def growth(*, quick: bool = False) -> str:
    """The table, as Markdown; `quick` with few operators."""
    lines = [
        "Microseconds of processor time per operator above vanilla, under empty Python routines:",
        "",
        "| operators | tools | routines of a tool | first step | later steps |",
        "|---|---|---|---|---|",
    ]
    base = 100 if quick else 1_000
    settings = [(count, 1, 1) for count in (OPERATORS[:2] if quick else OPERATORS)]
    settings += [(base, tools, 1) for tools in TOOLS[1:]]
    settings += [(base, 1, actions) for actions in ACTIONS[1:]]
    for operators, tools, actions in settings:
        made = [Actions(actions) for _ in range(tools)]
        repeats = 2 if operators > 10_000 else REPEATS
        first, later = microseconds(operators, made, repeats)
        lines.append(f"| {operators:,} | {tools} | {actions} | {first:.2f} | {later:.2f} |")
    return "\n".join(lines)
