"""Devices of tensors, which graphs leave to the runtime."""

from __future__ import annotations

import pytest

import amanda
from amanda.interface.specs import OpTensors
from tests.tensorflow.support import PLACEMENTS, Training, data, network


class Descriptions(amanda.Tool):
    """The descriptions of the tensors of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, OpTensors] = {}
        for backward in (False, True):
            self.add_inst_for_op(self.note, backward=backward)

    def note(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id() if context.is_forward() else context.get_backward_op_id()
        self.found[op_id] = context.get_tensor_specs()

    def devices(self) -> dict[str, set[str]]:
        """The devices of each operator's tensors."""
        found = self.found.items()
        tensors = {op_id: (*(all_.inputs or ()), *(all_.outputs or ())) for op_id, all_ in found}
        return {op_id: {t.device for t in ts if t is not None} for op_id, ts in tensors.items()}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tensors_have_a_device_in_every_mode(placement: type[Training]) -> None:
    """Where there are CPUs only, it is known of the tensors of a graph before the graph runs."""
    training = placement(network, *data())
    tool = Descriptions()
    with amanda.apply(tool):
        training.step()
    devices = {op_id: found for op_id, found in tool.devices().items() if found}
    assert len(devices) > 10
    assert {op_id: found for op_id, found in devices.items() if found != {"cpu"}} == {}
