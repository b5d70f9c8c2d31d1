"""The mapping rules: canonical types and attributes of JAX's operators."""

from __future__ import annotations

from typing import Any

import amanda
import jax
import jax.numpy as jnp
import pytest
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool

X = jnp.ones((2, 3, 4))
IMAGE, KERNEL = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 6))


def described(run: Any) -> list[tuple[str, dict[str, Any]]]:
    """Canonical type and attributes of each operator that a program runs."""
    found = []
    tool = amanda.Tool()
    tool.depends_on(MappingTool.standard())
    tool.add_inst_for_op(
        lambda context: found.append((context["op_type"], canonical.attributes(context))),
        require_outputs=True,
    )
    with amanda.apply(tool):
        run()
    return found


@pytest.mark.parametrize(
    ("run", "kind", "attributes"),
    [
        (lambda: X @ jnp.ones((4, 5)), "matmul", {"transpose_a": False, "transpose_b": False}),
        (lambda: jnp.ones((3, 4)) @ jnp.ones(4), "einsum", {"equation": "ab,b->a"}),
        (lambda: jnp.einsum("bij,bkj->bki", X, X), "einsum", {"equation": "abc,adc->adb"}),
        (lambda: jnp.vdot(X[0, 0], X[0, 1]), "einsum", {"equation": "a,a->"}),
        (
            lambda: jax.lax.dot_general(X, X, (((2,), (2,)), ((0,), (0,)))),
            "einsum", {"equation": "abc,adc->abd"},
        ),
        (lambda: jnp.mean(X, axis=-1), "mean", {"axis": (2,), "keepdim": False}),
        (lambda: jnp.sum(X, axis=(0, 1)), "sum", {"axis": (0, 1), "keepdim": False}),
        (lambda: jnp.max(X), "amax", {"axis": (0, 1, 2), "keepdim": False}),
        (lambda: jnp.var(X, axis=0), "var", {"axis": (0,), "keepdim": False, "correction": 0}),
        (lambda: jnp.concatenate([X, X], -1), "cat", {"axis": 2}),
        (lambda: X.reshape(6, 4), "reshape", {"shape": (6, 4)}),
        (lambda: jnp.broadcast_to(X, (5, 2, 3, 4)), "broadcast_to", {"shape": (5, 2, 3, 4)}),
        (lambda: jnp.transpose(X, (2, 0, 1)), "permute", {"perm": (2, 0, 1)}),
        (lambda: X.astype("int32"), "to", {"dtype": "int32"}),
        (lambda: X * X, "mul", {}),
        (lambda: X / X, "div", {}),
        (lambda: X**3, "pow", {}),
        (lambda: jnp.where(X > 0, X, X), "where", {}),
        (lambda: jax.nn.relu(X), "relu", {}),
        (lambda: jax.nn.sigmoid(X), "sigmoid", {}),
        (lambda: jnp.cumsum(X, axis=1), "cumsum", {"axis": 1}),
        (
            lambda: jax.lax.conv_general_dilated(
                IMAGE, KERNEL, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            "conv2d",
            {"kernel_size": (3, 3), "stride": (2, 1), "padding": ((0, 1), (1, 1)),
             "dilation": (1, 1), "groups": 1},
        ),
    ],
)  # fmt: skip
def test_types_and_attributes(run: Any, kind: str, attributes: Any) -> None:
    """PyTorch's names; axes are counted from the first one."""
    assert (kind, attributes) in described(run)


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: jnp.tensordot(X, X, ((1, 2), (1, 2))), 2 * 2 * 2 * 12),
        (lambda: jnp.inner(X, X), 2 * 6 * 6 * 4),
        (lambda: jnp.einsum("bij,bkj->bik", X, X), 2 * 2 * 3 * 3 * 4),
        (lambda: jax.vmap(jnp.matmul)(X, X.mT), 2 * 2 * 3 * 3 * 4),
        (
            lambda: jax.lax.conv_general_dilated(
                IMAGE, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            2 * (2 * 8 * 8 * 6) * 27,
        ),
        (lambda: jax.lax.conv_transpose(IMAGE, KERNEL, (2, 2), "SAME"), 2 * (2 * 8 * 8 * 3) * 54),
        (
            lambda: jax.lax.conv_general_dilated(
                jnp.ones((1, 6, 9)), jnp.ones((6, 1, 3)), (1,), "VALID", feature_group_count=6
            ),
            2 * (6 * 7) * 3,
        ),
    ],
    ids=["tensordot", "inner", "einsum", "vmap of matmul", "conv", "transposed", "depthwise"],
)
def test_flops(run: Any, flops: int) -> None:
    """Two operations for each product of two elements."""
    tool = amanda.tools.load("flops")()
    with amanda.apply(tool):
        run()
    summary = tool.result()["summary"]
    assert (summary["flops"], summary["unknown_ops"]) == (flops, {})


def test_operators_of_usual_programs_are_known() -> None:
    """None of them has unknown floating-point operations."""

    def run() -> None:
        key = jax.random.key(0)
        x = jax.random.normal(key, (4, 6))
        jax.nn.log_softmax(jax.nn.softmax(x)) + jax.nn.silu(x) * jax.nn.softplus(x)
        jax.nn.gelu(x, approximate=False) + jax.nn.elu(x) - jax.nn.leaky_relu(x)
        jax.nn.logsumexp(x) + jnp.linalg.norm(x) + jnp.std(x) + jnp.median(x)
        jnp.sort(x), jnp.argmax(x), jax.lax.top_k(x, 2), jnp.clip(x, 0, 1), x.at[0].set(1)
        x[:, ::2], x[jnp.array([0, 1])], jnp.take(x, 1), jnp.stack([x, x]), jnp.pad(x, 1)
        jnp.tril(x), jax.nn.one_hot(jnp.arange(3), 4), jnp.outer(x[0], x[1]), jnp.flip(x)
        jnp.isnan(x), jnp.isfinite(x), ~(x > 0), jnp.maximum(x, 0), jnp.sqrt(x), jnp.square(x)
        jax.random.bernoulli(key, 0.5, (3,)), jax.random.categorical(key, x), jnp.squeeze(x[None])
        jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID"), jnp.roll(x, 1)

    tool = amanda.tools.load("flops")()
    with amanda.apply(tool):
        run()
    assert tool.result()["summary"]["unknown_ops"] == {}
