"""What each tool shows first belongs to the model, not to its building."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch

import amanda
from amanda.tools.reporting import ReportingTool
from tests import models
from tests.tools.test_step_figures import llama, train, vit
from tests.tools.test_step_figures_keras import fit

# isort: split
from torchvision.models import resnet

NEED_MORE = {"diff": "a recording", "inject": "a fault"}
"""Tools that do nothing without options."""


def small_resnet() -> models.Built:
    """Each block of ResNet-50 once."""
    model = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=4)
    return model, {"x": torch.rand(2, 3, 32, 32)}


class Phases(amanda.Tool):
    """Notes the operators that build and initialize the model."""

    def __init__(self) -> None:
        super().__init__()
        self.setup: set[str] = set()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_phase() == "setup":
            self.setup.add(context.get_op_id())


PROGRAMS: dict[str, Callable[[], None]] = {
    "vit": lambda: train(vit, 2),
    "llama": lambda: train(llama, 2),
    "resnet": lambda: train(small_resnet, 2),
    "keras": lambda: fit(2),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_first_table_of_a_tool_holds_no_operator_of_the_setup(program: str) -> None:
    """Of a script that builds and trains a model, first tables show what the model runs."""
    names = [name for name in amanda.tools.available() if name not in NEED_MORE]
    tools = {name: amanda.tools.load(name)() for name in names}
    phases = Phases()
    with amanda.apply(phases, *tools.values()):
        PROGRAMS[program]()
    assert phases.setup
    for name, tool in tools.items():
        assert isinstance(tool, ReportingTool)
        cells = [
            str(cell) for table in islice(tool.tables(), 1) for row in table.rows for cell in row
        ]
        assert not {cell.partition(" ")[0] for cell in cells} & phases.setup, name
