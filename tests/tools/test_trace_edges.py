"""Edges of traced graphs, producer to consumer, beside those that PyTorch's own graph has."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda
from amanda.tools.graph_tracing import GraphTracingTool
from tests import torchvision_ops  # noqa: F401 - transformers imports torchvision

Pair = tuple[str, str]
"""The ids of an operator and of one that reads a result of it."""


class Recorded(amanda.Tool):
    """Keeps the outputs of operators, whose nodes of the backward graph lead to their producers."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[str, Any]] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        context.insert_after_op(lambda *outputs: self.keep(op_id, outputs))

    def keep(self, op_id: str, outputs: Any) -> None:
        self.outputs += [(op_id, tensor) for tensor in outputs if isinstance(tensor, torch.Tensor)]

    def owners(self) -> dict[Any, str]:
        """By node of the backward graph, the first operator that has a result of it."""
        found: dict[Any, str] = {}
        for op_id, tensor in self.outputs:
            if tensor.grad_fn is not None:
                found.setdefault(tensor.grad_fn, op_id)
        return found

    def sources(self) -> dict[str, str]:
        """By operator with a gradient, the one whose node it has: itself, unless it returns what it
        is given, as dropout does in evaluation."""
        owners = self.owners()
        return {op: owners[t.grad_fn] for op, t in self.outputs if t.grad_fn is not None}

    def pairs(self) -> set[Pair]:
        """The pairs by the nodes of the backward graph: of each operator those nodes that are
        reached without passing those of another one."""
        owners, found = self.owners(), set[Pair]()
        for node, op_id in owners.items():
            waiting, seen = [before for before, _ in node.next_functions], set[Any]()
            while waiting:
                before = waiting.pop()
                if before is None or before in seen:
                    continue
                seen.add(before)
                owner = owners.get(before, op_id)
                if owner == op_id:
                    waiting += [further for further, _ in before.next_functions]
                else:
                    found.add((owner, op_id))
        return found


class Cloning(amanda.Tool):
    """Puts another tensor into the place of each output."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: list[weakref.ref[Any]] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ in ("linear", "layer_norm", "softmax", "addmm"):
            context.insert_after_op(self.clone)

    def clone(self, output: Any) -> Any:
        self.replaced.append(weakref.ref(output))
        return output.clone()


def vit() -> Callable[[], object]:
    from transformers import ViTConfig, ViTModel

    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    config = ViTConfig(
        **sizes, image_size=8, patch_size=4, num_hidden_layers=2, num_attention_heads=2
    )
    model = ViTModel(config).eval()
    images = torch.rand(2, 3, 8, 8, requires_grad=True)
    return lambda: model(images).pooler_output


def gpt2() -> Callable[[], object]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager"
    )
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.arange(6)[None]
    return lambda: model(tokens, use_cache=False).logits


MODELS = {"vit": vit, "gpt2": gpt2}


def traced(run: Callable[[], object], *others: amanda.Tool) -> GraphTracingTool:
    tool = GraphTracingTool()
    with amanda.apply(tool, *others):
        run()
    return tool


def pairs_of(tool: GraphTracingTool) -> set[Pair]:
    return {(edge.producer, edge.consumer) for edge in tool.graph.edges}


@pytest.mark.parametrize("name", MODELS)
def test_edges_are_those_of_the_backward_graph(name: str) -> None:
    """Between operators with gradients: no edge is missing, and none is there beside."""
    torch.manual_seed(0)
    run, recorded = MODELS[name](), Recorded()
    tool = traced(run, recorded)
    expected = recorded.pairs()
    sources = recorded.sources()
    edges = {pair for pair in pairs_of(tool) if sources.keys() >= set(pair)}
    found = {(sources[producer], sources[consumer]) for producer, consumer in edges}
    assert {(one, other) for one, other in found if one != other} == expected
    assert len(found) > 40


@pytest.mark.parametrize("name", MODELS)
def test_edges_lead_through_tensors_that_tools_have_put_in_place(name: str) -> None:
    """What reads the result of a routine reads the operator that it stands for."""
    torch.manual_seed(0)
    run, cloning = MODELS[name](), Cloning()
    expected = pairs_of(traced(run))
    for tools in ((cloning,), (Cloning(), Cloning())):
        assert pairs_of(traced(run, *tools)) == expected
    assert len(cloning.replaced) > 10
