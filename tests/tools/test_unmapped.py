"""``unmapped``: operators that no mapping rule describes."""

from __future__ import annotations

import io
from typing import Any

import torch

import amanda
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool
from tests.running import applied


def program() -> None:
    """Three operators with a rule, and one without."""
    torch.ones(2, 8).relu().sum(1).kthvalue(1)


def test_operators_without_a_type_are_listed() -> None:
    """By type, with the number of operators, and in rows of their own."""
    tool = applied(amanda.tools.load("unmapped")(), program)
    found = tool.result()
    assert (found["summary"]["ops"], found["summary"]["unmapped"]) == (3, 1)
    assert found["summary"]["by_type"] == {
        "kthvalue": {"name": "kthvalue", "ops": 1, "missing": "type"}
    }
    assert [(row["id"], row["missing"]) for row in found["ops"]] == [("/kthvalue:0", "type")]
    text = io.StringIO()
    tool.print_summary(text)
    assert "unmapped: 1 of 3 forward operators" in text.getvalue()


def test_a_rule_of_the_user_describes_an_operator() -> None:
    """What a rule gives attributes is described, whatever its type is called."""
    tool = amanda.tools.load("unmapped")()
    tool.depends_on(
        MappingTool([["pytorch", canonical.attribute_rules({"kthvalue": {"axis": None}})]])
    )
    with amanda.apply(tool):
        program()
    assert tool.result()["ops"] == []


def test_rows_of_tools_have_canonical_attributes() -> None:
    """In types that JSON has; where no rule is, those of the framework."""
    tool = applied(amanda.tools.load("count")(), program)
    found = {row["type"]: row["attributes"] for row in tool.result()["ops"]}
    assert found["sum"] == {"axis": [1], "keepdim": False}
    assert found["kthvalue"]["k"] == 1


def test_operators_of_common_models_are_described() -> None:
    """Of Swin, Mixtral, Whisper, Gemma and wav2vec: what moves, fills, makes, groups tensors."""
    x, factors = torch.randn(2, 6, 4), (torch.randn(6, 16), torch.randn(2, 16, 8))
    left, right = (factor.to(torch.bfloat16) for factor in factors)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    gru = torch.nn.GRU(4, 3, num_layers=2, bidirectional=True)
    found: list[tuple[str, dict[str, Any]]] = []
    collector = amanda.Tool()
    collector.depends_on(MappingTool.standard())
    collector.add_inst_for_op(lambda c: found.append((c["op_type"], canonical.attributes(c))))
    tool = amanda.tools.load("unmapped")()
    with amanda.apply(tool, collector):
        x.unflatten(1, (2, -1))
        x.roll((1, -2), (0, -1))
        x.type_as(torch.ones(1, dtype=torch.float64))
        x.histc(5, 0, 1)
        x.clone().bernoulli_(0.5)[0, 1:3] = 0
        for made in (x.new_zeros(3), x.new_ones(3), x.new_empty(3), x.new_full((3,), 1.0)):
            made.detach()
        layer(x)
        gru(x)
        torch._grouped_mm(left, right, offs=ends)  # noqa: SLF001 - as transformers calls it
    assert [row["name"] for row in tool.result()["ops"]] == []
    attributes = dict(found)
    assert attributes["unflatten"] == {"shape": (2, 2, 3, 4)}
    assert attributes["roll"] == {"shifts": (1, -2), "axis": (0, 2)}
    assert attributes["type_as"] == {"dtype": "float64"}
    assert attributes["histc"] == {"bins": 5, "min": 0, "max": 1}
    assert attributes["weight_norm"] == {"axis": 0}
    recurrent = {"num_layers": 2, "bidirectional": True, "p": 0.0, "batch_first": False}
    assert attributes["gru"] == recurrent
    assert {"grouped_mm", "setitem", "bernoulli"} <= set(attributes)
