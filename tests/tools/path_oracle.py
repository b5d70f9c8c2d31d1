"""Effective paths by plain loops over neurons: what the tool ``path`` is compared with.

A layer lists, for each of its neurons, the products that make up its value. It shares no
code with the tool and works on one input without a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

import amanda
from amanda_tools.path import Mask, PathTool

Place = tuple[int, ...]


def applied(run: Callable[..., Any], *inputs: Any, **options: Any) -> PathTool:
    """The tool, applied to one call."""
    tool = PathTool(**{"synapses": True, **options})
    with torch.no_grad(), amanda.apply(tool):
        run(*inputs)
    return tool


def places(mask: Mask) -> set[Place]:
    """What is set in a mask."""
    return {tuple(int(i) for i in place) for place in np.argwhere(mask.array)}


@attrs.frozen
class Synapse:
    """A product: which tensor's neuron, which weight (None for one), and its value."""

    tensor: str
    place: Place
    weight: Place | None
    product: float


@attrs.define
class Layer:
    """The neurons of a layer.

    Attributes:
        values: what each neuron has to explain.
        synapses: neuron to products.
        takes_all: every synapse of a critical neuron is critical.
    """

    values: Any
    synapses: dict[Place, list[Synapse]]
    takes_all: bool = False


def greedy(synapses: Sequence[Synapse], value: float, theta: float) -> list[Synapse]:
    """The largest products of the value's sign until they reach the share."""
    sign = -1 if value < 0 else 1
    picked: list[Synapse] = []
    total = 0.0
    for synapse in sorted(synapses, key=lambda s: -sign * s.product):
        if total >= theta * abs(value) * (1 - 1e-9) or sign * synapse.product <= 0:
            break
        picked.append(synapse)
        total += sign * synapse.product
    return picked


@attrs.define
class Critical:
    """What the loops found: tensor to critical places, layer to weights and synapse counts."""

    neurons: dict[str, set[Place]]
    weights: dict[str, set[Place]]
    synapses: dict[str, int]


def extract(layers: dict[str, Layer], theta: float) -> Critical:
    """From the largest value of the last layer back."""
    found = Critical({}, {}, {})
    names = list(layers)
    last = layers[names[-1]].values
    best = np.unravel_index(int(np.argmax(last)), last.shape)
    found.neurons[names[-1]] = {tuple(int(i) for i in best)}
    for name in reversed(names):
        layer = layers[name]
        found.weights[name], found.synapses[name] = set(), 0
        for place in found.neurons.setdefault(name, set()):
            synapses = layer.synapses[place]
            if not layer.takes_all:
                synapses = greedy(synapses, float(layer.values[place]), theta)
            found.synapses[name] += len(synapses)
            for synapse in synapses:
                found.neurons.setdefault(synapse.tensor, set()).add(synapse.place)
                if synapse.weight is not None:
                    found.weights[name].add(synapse.weight)
    return found


def convolution(
    tensor: str, x: Any, weight: Any, value: Any, stride: int, padding: Sequence[int],
    dilation: int, groups: int, scale: Any = None,
) -> Layer:  # fmt: skip
    """Of any rank; `scale` is that of a batch norm folded in."""
    synapses: dict[Place, list[Synapse]] = {}
    outputs, per_group = weight.shape[:2]
    for place in itertools.product(*map(range, value.shape)):
        feature, *spatial = place
        group = feature // (outputs // groups)
        factor = 1.0 if scale is None else scale[feature]
        synapses[place] = []
        for channel in range(per_group):
            for inside in itertools.product(*map(range, weight.shape[2:])):
                source = tuple(
                    at * stride - pad + k * dilation
                    for at, k, pad in zip(spatial, inside, padding, strict=True)
                )
                within = zip(source, x.shape[1:], strict=True)
                if not all(0 <= at < size for at, size in within):
                    continue
                at_input = (group * per_group + channel, *source)
                at_weight = (feature, channel, *inside)
                product = float(x[at_input] * weight[at_weight] * factor)
                synapses[place].append(Synapse(tensor, at_input, at_weight, product))
    return Layer(value, synapses)


def linear(tensor: str, x: Any, weight: Any, value: Any) -> Layer:
    """Over the last axis."""
    return Layer(
        value,
        {
            place: [
                Synapse(tensor, (*place[:-1], i), (place[-1], i), float(x[(*place[:-1], i)] * w))
                for i, w in enumerate(weight[place[-1]])
            ]
            for place in itertools.product(*map(range, value.shape))
        },
    )


def pooling(
    tensor: str, x: Any, value: Any, size: int, stride: int, padding: int, *, largest: bool
) -> Layer:
    """Average or largest of each window."""
    synapses: dict[Place, list[Synapse]] = {}
    for place in itertools.product(*map(range, value.shape)):
        channel, *spatial = place
        window = []
        for inside in itertools.product(range(size), repeat=len(spatial)):
            pairs = zip(spatial, inside, strict=True)
            source = tuple(at * stride - padding + k for at, k in pairs)
            if all(0 <= at < n for at, n in zip(source, x.shape[1:], strict=True)):
                at_input = (channel, *source)
                product = float(x[at_input]) / size ** len(spatial)
                window.append(Synapse(tensor, at_input, None, product))
        if largest:
            window = [max(window, key=lambda s: s.product)]
        synapses[place] = window
    return Layer(value, synapses, takes_all=largest)


def moved(tensor: str, value: Any, source: Callable[[Place], Place]) -> Layer:
    """Each neuron is another one."""
    return Layer(
        value,
        {
            place: [Synapse(tensor, source(place), None, 1.0)]
            for place in itertools.product(*map(range, value.shape))
        },
        takes_all=True,
    )


def relu(tensor: str, value: Any) -> Layer:
    """Each neuron is another one, and nothing where it is silent."""
    return moved(tensor, value, lambda place: place)


def total(parts: dict[str, Any], value: Any, signs: Sequence[float]) -> Layer:
    """The sum of some tensors."""
    return Layer(
        value,
        {
            place: [
                Synapse(tensor, place, None, sign * float(x[place]))
                for (tensor, x), sign in zip(parts.items(), signs, strict=True)
            ]
            for place in itertools.product(*map(range, value.shape))
        },
    )


def matmul(left: str, a: Any, right: str, b: Any, value: Any) -> Layer:
    """The product of two activations: a synapse has a neuron of each."""
    synapses: dict[Place, list[Synapse]] = {}
    for i, j in itertools.product(*map(range, value.shape)):
        synapses[i, j] = [
            Synapse(left, (i, k), (k, j), float(a[i, k] * b[k, j])) for k in range(a.shape[1])
        ]
    return Layer(value, synapses)
