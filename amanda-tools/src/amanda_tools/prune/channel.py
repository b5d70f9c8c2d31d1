"""Dynamic channel pruning: feature boosting and suppression (Gao et al., ICLR 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda import OpContext
from amanda_tools._operators.weights import Weight
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.prune.dynamic import Gate, GatedPruning, check_groups, new_gate


class ChannelPruning(GatedPruning):
    """For each sample, keeps the output channels with the highest saliency.

    The saliency of output channels is ``relu(s @ phi + rho)``, where ``s`` is the mean magnitude of
    each input channel; ``phi`` and ``rho`` can be trained. Channels that stay are multiplied by
    their saliency (boosting), without which nothing could train them.

    ``rho`` is initialized to ones, as in the paper, ``phi`` to the magnitudes of the weights
    between the channels, scaled so that the mean of each column is 1 over its length: a bound on
    what an output channel can be, so that untrained gates make sense.
    """

    def make_gate(self, context: OpContext, weight: Weight) -> Gate:
        check_groups(weight)
        gate = new_gate(context, weight)
        phi = initial_phi(arithmetic_of(weight.value).wide_numpy(weight.value), weight)
        gate.initial = {"phi": phi, "rho": np.ones(phi.shape[1])}
        gate.kept = phi.shape[1] - round(self.options.sparsity * phi.shape[1])
        return gate

    def run_gated(self, *inputs: Any, operator: Any, gate: Gate) -> Any:
        output = operator(*inputs)
        arithmetic = arithmetic_of(output)
        features = arithmetic.mean(abs(inputs[gate.source]), gate.positions)
        phi, rho = (gate.value(name, features) for name in ("phi", "rho"))
        saliency = arithmetic.relu(arithmetic.matmul(features, phi) + rho)
        assert gate.kept is not None
        kept = arithmetic.top_mask(saliency, gate.kept) * saliency
        shape = [1] * gate.rank
        shape[0], shape[gate.channels] = -1, rho.shape[0]
        return output * arithmetic.reshape(kept, shape)


def initial_phi(value: Array, weight: Weight) -> Array:
    """Return the magnitude of the weights from each input to each output channel, scaled."""
    groups = weight.groups
    if is_depthwise := set("CM") <= set(weight.layout):
        # Each input channel is a group, whose outputs stand together.
        axes = (weight.layout.index("C"), weight.layout.index("M"))
        groups = value.shape[axes[0]]
    else:
        axes = (weight.axis("I"), weight.axis("O"))
    matrix = np.moveaxis(np.abs(value), axes, (0, 1)).reshape(
        value.shape[axes[0]], value.shape[axes[1]], -1
    )
    strength = matrix.sum(2, dtype=np.float64)
    if is_depthwise:
        strength = strength.reshape(1, -1)
    per_group = strength.shape[1] // groups
    # The weights of a group reach the channels of that group only: phi is block-diagonal.
    phi = np.zeros((strength.shape[0] * groups, strength.shape[1]))
    for group in range(groups):
        rows = slice(group * strength.shape[0], (group + 1) * strength.shape[0])
        columns = slice(group * per_group, (group + 1) * per_group)
        phi[rows, columns] = strength[:, columns]
    return phi / (phi.sum() / phi.shape[1] or 1.0)
