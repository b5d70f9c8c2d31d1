"""Everything that runs is seen, exactly once."""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amanda
from tests import models
from tests.torch.reference import nodes_before, reference
from tests.torch.support import Counter, applied

TRAINED = ("resnet50", "bert", "gpt2", "llama", "vit", "lstm")
EVALUATED = ("vit", "encoder", "attention")


@pytest.mark.parametrize("name", TRAINED)
def test_training_step_is_seen_once(name: str) -> None:
    """Each leaf operator of a training step's forward pass is seen exactly once."""
    model, inputs = models.build(name)
    with reference() as wanted:
        models.loss(model(**inputs))
    counter = Counter()
    with applied(counter):
        models.loss(model(**inputs))
    assert counter.ops == wanted.ops


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_is_seen_once(name: str) -> None:
    """Each leaf operator of an inference is seen exactly once, native fast paths included."""
    model, inputs = models.build(name, training=False)
    counter = Counter()
    with torch.no_grad():
        with reference() as wanted:
            model(**inputs)
        with applied(counter):
            model(**inputs)
    assert counter.ops == wanted.ops
    fused = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd"}
    assert fused & set(counter.ops)


@pytest.mark.parametrize("name", TRAINED)
def test_second_step_is_seen_as_the_first(name: str) -> None:
    """In the second iteration the same ids run again, each once, and no new one."""
    model, inputs = models.build(name)
    counter = Counter()
    steps = []
    with applied(counter):
        for _ in range(2):
            counter.ids.clear()
            models.loss(model(**inputs)).backward()
            steps.append(list(counter.ids))
    assert steps[0] == steps[1]
    assert len(set(steps[0])) == len(steps[0])


@pytest.mark.parametrize("name", TRAINED)
def test_backward_operators_are_the_autograd_nodes(name: str) -> None:
    """The backward operators of a training step are the graph's nodes, accumulations included."""
    model, inputs = models.build(name)
    wanted = nodes_before(models.loss(model(**inputs)))
    counter = Counter()
    with applied(counter):
        for _ in range(2):
            counter.backward_ops.clear()
            counter.backward_ids.clear()
            models.loss(model(**inputs)).backward()
            assert counter.backward_ops == wanted
            assert len(set(counter.backward_ids)) == len(counter.backward_ids)
    parameters = sum(p.requires_grad for p in model.parameters())
    assert wanted["AccumulateGrad"] <= parameters


def test_tied_weights_are_accumulated_once() -> None:
    """A weight that two operators share has one accumulation, the first consumer's."""
    model, inputs = models.build("gpt2")
    counter = Counter()
    with applied(counter):
        models.loss(model(**inputs)).backward()
    tied = [
        i for i in counter.backward_ids if "AccumulateGrad" in i and ("wte" in i or "lm_head" in i)
    ]
    assert tied == ["GPT2LMHeadModel.transformer.wte/embedding:0/grad/AccumulateGrad:0"]


def test_shared_module_is_accumulated_once() -> None:
    """A module that is called twice in an iteration accumulates under its first call."""
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    counter = Counter()
    with applied(counter):
        model(torch.rand(2, 3)).sum().backward()
    names = collections.Counter(i for i in counter.backward_ids if "AccumulateGrad" in i)
    assert names == {
        "Sequential.0/linear:0/grad/AccumulateGrad:0": 1,
        "Sequential.0/linear:0/grad/AccumulateGrad:1": 1,
    }


def _higher_order(x: torch.Tensor) -> torch.Tensor:
    taken = torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return torch.ops.aten.relu.default(taken) + torch.ops.aten.exp(taken)


def _recurrent(x: torch.Tensor) -> torch.Tensor:
    return nn.RNN(4, 3, num_layers=4)(x.expand(5, 2, 4))[0]


def _composites(x: torch.Tensor) -> torch.Tensor:
    a, b = x.split(2)
    spectrum = torch.stft(x.repeat(8), 4, window=torch.ones(4), return_complex=True)
    c = torch.einsum("i,j->ij", a, b).norm() + spectrum.abs()
    d = nn.functional.gumbel_softmax(c.T, hard=True)[:, 0] @ c.mT[..., 0:1]
    e = torch.cdist(c, c).unflatten(0, (1, -1)).sum().clamp_(0, 1) ** 2 - 1 + (1 - d) / 2
    return nn.functional.cross_entropy(torch.stack([e.flatten()] * 2), torch.zeros(2).long())


@pytest.mark.parametrize("run", [_higher_order, _recurrent, _composites])
def test_operators_of_all_kinds_are_seen_once(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """``torch.ops``, higher-order operators, methods, operators, composites: each leaf once."""
    x = torch.rand(4)
    with reference() as wanted:
        run(x)
    counter = Counter()
    with applied(counter):
        run(x)
    assert counter.ops == wanted.ops


def test_a_model_is_moved() -> None:
    """``model.to()`` works under a tool, and what it asks PyTorch for is not an operator."""
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op().__name__))
    model = torch.nn.Linear(2, 2)
    with amanda.apply(tool):
        model.to("cpu")
        model.to(torch.float64)
        model.to(device="cpu", dtype=torch.float32)
        model.half()
    assert model.weight.dtype is torch.float16
    assert set(seen) <= {"to", "half"}
