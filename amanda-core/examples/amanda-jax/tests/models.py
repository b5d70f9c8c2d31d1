"""Models of the tests: an MLP and a transformer block of Equinox, with their products by hand."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

BATCH, TOKENS, WIDTH, HEADS, INNER = 2, 6, 8, 2, 16

MLP = 2 * 4 * (3 * 8 + 8 * 5)
"""Operations of a forward pass of the MLP: a batch of 4."""

BLOCK = 2 * BATCH * TOKENS * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER + 2 * TOKENS * WIDTH)
"""Of the transformer block: four projections, two layers, scores and their sum."""


class Mlp(eqx.Module):
    layers: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self) -> None:
        first, second = jax.random.split(jax.random.key(0))
        self.layers = [eqx.nn.Linear(3, 8, key=first)]
        self.head = eqx.nn.Linear(8, 5, key=second)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(x)


class Block(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self) -> None:
        keys = iter(jax.random.split(jax.random.key(1), 6))
        square = [eqx.nn.Linear(WIDTH, WIDTH, key=next(keys)) for _ in range(4)]
        self.q, self.k, self.v, self.out = square
        self.up = eqx.nn.Linear(WIDTH, INNER, key=next(keys))
        self.down = eqx.nn.Linear(INNER, WIDTH, key=next(keys))
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: Any) -> Any:
        shown = jax.vmap(self.norm)(x)
        heads = (TOKENS, HEADS, WIDTH // HEADS)
        q, k, v = (jax.vmap(part)(shown).reshape(heads) for part in (self.q, self.k, self.v))
        scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 2.0)
        seen = jnp.einsum("hqk,khd->qhd", scores, v).reshape(TOKENS, WIDTH)
        x = x + jax.vmap(self.out)(seen)
        return x + jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(row))))(x)


def rows() -> Any:
    """The inputs of the MLP."""
    return jax.random.normal(jax.random.key(2), (4, 3))


def texts() -> Any:
    """The inputs of the transformer block."""
    return jax.random.normal(jax.random.key(3), (BATCH, TOKENS, WIDTH))


def loss(model: Any, x: Any) -> Any:
    """A loss over a batch."""
    return jnp.mean(jax.vmap(model)(x) ** 2)


def equal(one: Any, other: Any) -> bool:
    """True if two trees have the same bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a is b or bool(jnp.array_equal(a, b)) for a, b in pairs)
