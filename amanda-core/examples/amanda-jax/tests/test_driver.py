"""What the driver does with transformations, jitted functions, control flow and modules."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import amanda
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from amanda.driver import Dispatcher
from amanda.errors import CoverageWarning
from amanda.testing import watched
from flax import linen, nnx

from amanda_jax import _internals
from amanda_jax.plugin import JaxDriver
from models import Mlp, equal, loss, rows

W = jax.random.normal(jax.random.key(4), (4, 4))
X = jax.random.normal(jax.random.key(5), (3, 4))
ONE = 2 * 3 * 4 * 4
"""Operations of the product of X and W."""

OF_BATCH, TWICE = (5, 10) if jax.__version_info__ < (0, 11) else (3, 6)
"""Operators that differentiate a product and its ``tanh`` for each example, or a second time."""

RUNS_ALONE = pytest.mark.filterwarnings("ignore:jitted functions and control flow")


def flops_of(run: Callable[[], Any]) -> tuple[Any, int, int, dict[str, int]]:
    """The result of a program under ``flops``, its operations, and what was not seen."""
    tool = amanda.tools.load("flops")()
    with amanda.apply(tool) as scope:
        result = run()
    summary = tool.result()["summary"]
    assert summary["unknown_ops"] == {}
    return (
        result, summary["flops"], summary["flops_backward"], dict(scope.statistics.not_seen)
    )  # fmt: skip


def ids_of(run: Callable[[], Any], **where: Any) -> list[str]:
    """The ids of a program's operators, in the order of their analyses."""
    found: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: found.append(context.get_backward_op_id() or context.get_op_id()), **where
    )
    with amanda.apply(tool):
        run()
    return found


def product(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


# -- differentiation and vmap ---------------------------------------------------


@pytest.mark.parametrize(
    ("run", "forward", "backward", "not_seen"),
    [
        (lambda: product(X, W), ONE, 0, 0),
        (lambda: jax.grad(lambda w: product(X, w).sum())(W), ONE, ONE, 0),
        (lambda: jax.value_and_grad(lambda x, w: product(x, w).sum(), (0, 1))(X, W), ONE, 2 * ONE, 0),
        (lambda: jax.vjp(product, X, W)[1](X), ONE, 2 * ONE, 0),
        (lambda: jax.vmap(product, (0, None))(X, W), ONE, 0, 0),
        (lambda: jax.grad(lambda w: jax.vmap(product, (0, None))(X, w).sum())(W), ONE, ONE, 0),
        (lambda: jax.vmap(jax.vmap(product, (0, None)), (0, None))(X[None], W), ONE, 0, 0),
        # What depends on no gradient has no backward operator.
        (lambda: jax.grad(lambda x: (jax.lax.stop_gradient(x) @ W * x).sum())(X), ONE, 0, 0),
        (lambda: jax.grad(lambda x: (jnp.floor(x) @ W * x).sum())(X), ONE, 0, 0),
        (lambda: jax.grad(lambda x: ((x > 0).astype("float32") @ W * x).sum())(X), ONE, 0, 0),
        # Gradients of single examples, and of gradients: their products are not seen.
        (lambda: jax.vmap(jax.grad(lambda w, x: product(x, w).sum()), (None, 0))(W, X), ONE, 0, OF_BATCH),
        (
            lambda: jax.grad(lambda w: (jax.grad(lambda v: product(X, v).sum())(w) ** 2).sum())(W),
            ONE, ONE, TWICE,
        ),
        (lambda: jax.jvp(product, (X, W), (X, W)), ONE, 0, 2),
        (lambda: jax.linearize(product, X, W)[0], ONE, 0, 2),
    ],
    ids=["eager", "grad", "value_and_grad", "vjp", "vmap", "grad of vmap", "nested vmap",
         "stop_gradient", "floor", "mask", "vmap of grad", "grad of grad", "jvp", "linearize"],
)  # fmt: skip
def test_transformations(run: Any, forward: int, backward: int, not_seen: int) -> None:
    """Bits are those of the program; figures are those of the whole batch, or not seen."""
    expected = run()
    result, flops, flops_backward, missing = flops_of(run)
    assert equal(result, expected)
    assert (flops, flops_backward, sum(missing.values())) == (forward, backward, not_seen)


def test_ids_of_backward_operators() -> None:
    """Each operator has one, which begins with its id; a change of a gradient arrives."""
    run = functools.partial(jax.grad(lambda w: product(X, w).sum()), W)
    assert ids_of(run, backward=True) == [
        "/reduce_sum:0/grad/reduce_sum_backward:0", "/tanh:0/grad/tanh_backward:0",
        "/matmul:0/grad/matmul_backward:0",
    ]  # fmt: skip
    tool = amanda.Tool()

    def doubling(context: Any) -> None:
        if context.get_op().__name__ == "matmul":
            context.insert_after_backward_op(lambda g: 2 * g, grad_inputs=["b"])

    tool.add_inst_for_op(doubling, backward=True)
    with amanda.apply(tool):
        found = run()
    assert equal(found, 2 * run())


def test_keys_of_random_numbers() -> None:
    """The same numbers and keys, in single calls and in jitted functions."""

    def run() -> Any:
        key, one, two, three = jax.random.split(jax.random.key(3), 4)
        drawn = jax.random.normal(one, (5,)), jax.random.uniform(two, (5,))
        more = jax.random.permutation(three, 9), jax.random.categorical(one, jnp.ones(4))
        return jax.random.key_data(key), *drawn, *more

    expected = run()
    assert equal(flops_of(run)[0], expected)


# -- jitted functions and control flow ------------------------------------------


def test_a_jitted_function_runs_operator_by_operator() -> None:
    """With one warning; also one that was compiled before; afterwards it is compiled again."""
    traced = []

    @jax.jit
    def step(w: Any) -> Any:
        traced.append(1)
        return w - 0.1 * jax.grad(lambda w: product(X, w).sum())(w)

    expected = step(W)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, flops, backward, _ = flops_of(lambda: step(step(W)))
    assert [w.category for w in caught] == [CoverageWarning]
    assert "jitted functions" in str(caught[0].message)
    assert (flops, backward) == (2 * ONE, 2 * ONE)
    assert np.allclose(result, step(expected), rtol=1e-6)
    count = len(traced)
    assert equal(step(W), expected)
    assert len(traced) == count


@RUNS_ALONE
def test_arguments_of_a_jitted_function() -> None:
    """It gets arrays, but for static arguments; numbers and arrays of NumPy, too."""

    @functools.partial(jax.jit, static_argnums=(1,), static_argnames=("mode",), donate_argnums=0)
    def run(x: Any, times: int, rate: Any, mode: str = "") -> Any:
        assert isinstance(times, int)
        assert isinstance(mode, str)
        return {"x": x.at[0].set(rate.astype(x.dtype)) * times, "n": 3, "none": None}

    given = np.ones((3, 4), np.float32)
    expected = run(given, 2, 0.5, mode="a")
    found = flops_of(lambda: run(given, 2, 0.5, mode="a"))[0]
    assert equal(found, expected)
    assert jax.tree.map(type, found) == jax.tree.map(type, expected)


def test_errors_are_those_of_jax() -> None:
    """Wrong calls raise what they raise without a tool."""
    for wrong in (lambda: jax.jit(lambda x: x)("text"), lambda: X @ X, lambda: jnp.reshape(X, 5)):
        with pytest.raises(TypeError) as expected:
            wrong()
        with amanda.apply(amanda.tools.load("count")()), pytest.raises(TypeError) as found:
            wrong()
        assert str(found.value).split(" at 0x")[0] == str(expected.value).split(" at 0x")[0]


def test_functions_compiled_ahead_of_time_are_counted() -> None:
    """They cannot be seen."""
    compiled = jax.jit(product).lower(X, W).compile()
    result, flops, _, missing = flops_of(lambda: compiled(X, W))
    assert equal(result, compiled(X, W))
    assert flops == 0
    assert missing == {"calls of functions that were compiled ahead of time": 1}


def test_shard_map_is_counted() -> None:
    """It runs as without a tool; what is inside is not seen."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    mapped = jax.shard_map(lambda x: product(x, W), mesh=mesh, in_specs=spec, out_specs=spec)
    result, flops, _, missing = flops_of(lambda: mapped(X))
    assert equal(result, mapped(X))
    assert (flops, missing) == (0, {"operators inside of shard_map": 1})


WS = jnp.stack([W, W / 2, W / 4])


def _scan(ws: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda c, w: (product(c, w), c.sum()), X, ws, **options)


@RUNS_ALONE
@pytest.mark.parametrize(
    ("run", "forward", "backward"),
    [
        (lambda: _scan(WS), 3 * ONE, 0),
        (lambda: _scan(WS, reverse=True), 3 * ONE, 0),
        (lambda: _scan(WS[:0]), 0, 0),
        (lambda: jax.grad(lambda ws: _scan(ws)[0].sum())(WS), 3 * ONE, 5 * ONE),
        (lambda: jax.lax.map(lambda x: x @ W, X), ONE, 0),
        (lambda: jax.lax.fori_loop(0, 3, lambda i, c: product(c, W), X), 3 * ONE, 0),
        (
            lambda: jax.lax.while_loop(
                lambda c: c[0] < 2, lambda c: (c[0] + 1, product(c[1], W)), (0, X)
            ),
            2 * ONE, 0,
        ),
        (lambda: jax.lax.cond(X.sum() > 1e9, lambda x: x, lambda x: product(x, W), X), ONE, 0),
        (lambda: jax.lax.switch(1, [lambda x: x, lambda x: product(x, W)], X), ONE, 0),
        (lambda: jax.grad(lambda w: jax.checkpoint(product)(X, w).sum())(W), ONE, ONE),
        (lambda: jax.vmap(lambda x: jax.lax.cond(x[0] > 0, lambda: x @ W, lambda: x))(X), ONE, 0),
    ],
    ids=["scan", "reverse", "empty", "grad of scan", "map", "fori_loop", "while_loop", "cond",
         "switch", "checkpoint", "vmap of cond"],
)  # fmt: skip
def test_control_flow_is_seen_inside(run: Any, forward: int, backward: int) -> None:
    """Every step that runs, and its gradient; results are equal within rounding."""
    expected = run()
    result, flops, flops_backward, missing = flops_of(run)
    assert (flops, flops_backward, missing) == (forward, backward, {})
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_loop_with_a_condition_for_each_example_is_counted() -> None:
    """It is one operator; what runs inside is not seen."""

    def run() -> Any:
        def one(n: Any, x: Any) -> Any:
            return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ W), (0, x))

        return jax.vmap(one)(jnp.arange(3), X)

    result, flops, _, missing = flops_of(run)
    assert equal(result, run())
    assert (flops, missing) == (0, {"operators inside of while": 1})


def test_functions_with_a_derivative_of_their_own() -> None:
    """They are operators, also under vmap; a replacement of one takes its place."""

    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))

    def run() -> Any:
        return jax.grad(lambda x: jax.vmap(lambda r: clipped(2 * r))(x).sum())(X)

    expected = run()
    assert ids_of(run)[1] == "/clipped:0"
    assert ids_of(run, backward=True)[1] == "/clipped:0/grad/clipped_backward:0"
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.replace_op(lambda x: 3 * x) if c.get_op().__name__ == "clipped" else None
    )
    with amanda.apply(tool):
        assert equal(run(), 3 * expected)


# -- modules, parameters, phases --------------------------------------------------


def test_named_scopes_are_modules() -> None:
    """Also as decorators; not those that JAX and Equinox make for themselves."""

    @jax.named_scope("Net")
    def net(x: Any) -> Any:
        with jax.named_scope("first"):
            x = product(x, W)
        for _ in range(2):
            with jax.named_scope("second"):
                x = jnp.einsum("ij,jk", x, W)
        return x

    assert ids_of(lambda: net(X)) == [
        "Net.first/matmul:0", "Net.first/tanh:0", "Net.second/einsum:0", "Net.second#1/einsum:0",
    ]  # fmt: skip


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(5, name="head")(linen.relu(linen.Dense(8)(x)))


class Nnx(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(4, 8, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.norm(nnx.relu(self.blocks[0](x))))


def _train_linen() -> tuple[Any, Callable[[], Any]]:
    model, optimizer = Linen(), optax.adam(0.1)
    held = [model.init(jax.random.key(0), X)]
    held.append(optimizer.init(held[0]))

    @jax.jit
    def step(variables: Any, state: Any) -> Any:
        gradients = jax.grad(lambda v: (model.apply(v, X) ** 2).mean())(variables)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state

    def run() -> Any:
        held[:] = step(*held)
        return held[0]

    return None, run


def _train_nnx() -> tuple[Any, Callable[[], Any]]:
    model = Nnx()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        gradients = nnx.grad(lambda m: (m(X) ** 2).mean())(model)
        optimizer.update(model, gradients)

    def run() -> Any:
        step(model, optimizer)
        return nnx.state(model, nnx.Param)

    return model, run


@RUNS_ALONE
@pytest.mark.parametrize(
    ("make", "name", "first", "weight"),
    [
        (_train_linen, "Linen", "Dense_0", "kernel"),
        (_train_nnx, "Nnx", "blocks.0", "kernel"),
    ],
    ids=["linen", "nnx"],
)
def test_training_with_flax(make: Any, name: str, first: str, weight: str) -> None:
    """Paths, parameters and phases; the ids and figures of each step are the same."""
    (_, vanilla), (_, run) = make(), make()
    expected = [vanilla() for _ in range(3)][-1]
    seen: dict[str, str] = {}
    parameters, steps = set(), []

    def analyse(context: Any) -> None:
        seen[context.get_op_id()] = context.get_phase()
        for number in range(len(context.get_inputs())):
            parameters.add(context.get_parameter_name(number))

    tool, flops = amanda.Tool(), amanda.tools.load("flops")()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool, flops):
        for _ in range(3):
            result = run()
            steps.append(len(seen))
    assert steps[0] == steps[1] == steps[2]
    assert {f"{name}.{first}/dot_general:0", f"{name}.head/dot_general:0"} <= seen.keys()
    assert {f"{first}.{weight}", "head.bias"} <= parameters
    phases = {op_id: phase for op_id, phase in seen.items() if not op_id.startswith(name)}
    assert {phases[op_id] for op_id in phases if "/optimizer/" in op_id} == {"optimizer"}
    assert [i for i in phases if "optimizer" not in i and i[1:4] not in ("int", "mea", "squ")] == []
    summary = flops.result()["summary"]
    assert summary["flops"] == 3 * 2 * 3 * (4 * 8 + 8 * 5)
    assert summary["flops_backward"] == 3 * 2 * 3 * (4 * 8 + 2 * 8 * 5)
    assert (summary["steps"], summary["not_seen"]) == (3, {})
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert np.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_building_is_setup() -> None:
    """The operators that initialise parameters are no part of the model."""
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_phase()))
    with amanda.apply(tool):
        Mlp()
        Nnx()
        Linen().init(jax.random.PRNGKey(0), X)
    assert set(seen[1:]) <= {"setup", "forward"}
    assert seen.count("setup") > len(seen) / 2


def test_a_model_is_known_by_its_parameters() -> None:
    """Two models of a class have ids of their own, also once an optimizer has changed them."""
    one, other, x = Mlp(), Mlp(), rows()
    other = jax.tree.map(lambda v: v + 1, other)

    def run() -> Any:
        nonlocal one
        gradients = eqx.filter_grad(loss)(one, x)
        one = eqx.apply_updates(one, jax.tree.map(lambda g: -0.1 * g, gradients))
        jax.vmap(other)(x)

    def twice() -> None:
        run()
        run()

    found = {op_id.partition("/")[0].partition(".")[0] for op_id in ids_of(twice)}
    assert found == {"Mlp", "Mlp@1", ""}


def test_a_part_of_a_model_that_is_called_by_itself() -> None:
    """It is a model of its own, the same one at each call."""
    model, x = Mlp(), rows()

    def run() -> None:
        jax.vmap(model)(x)
        for _ in range(2):
            jax.vmap(model.layers[0])(x)

    assert ids_of(run)[-2:] == ["Linear/matmul:0", "Linear/add:0"]


def test_classes_of_modules_that_are_defined_in_the_scope() -> None:
    """They are seen; afterwards every class is as it was."""
    before = watched.snapshot((eqx.nn.Linear, type(eqx.Module), linen.Module, type(nnx.Module)))

    def run() -> None:
        class Late(eqx.Module):
            layer: eqx.nn.Linear

            def __call__(self, x: Any) -> Any:
                return self.layer(x)

        late = Late(eqx.nn.Linear(4, 4, key=jax.random.key(0)))
        late(X[0])
        made.append(Late)

    made: list[Any] = []
    assert ids_of(run)[-1] == "Late.layer/add:0"
    owners = (eqx.nn.Linear, type(eqx.Module), linen.Module, type(nnx.Module))
    assert watched.differences(owners, before, watched.snapshot(owners)) == []
    assert "amanda" not in repr(made[0].__call__)


# -- the rest -----------------------------------------------------------------


def test_other_threads_are_as_without_amanda() -> None:
    """A thread from before the scope runs its jitted function compiled."""
    begin, results = threading.Event(), []
    function = jax.jit(product)
    expected = function(X, W)
    thread = threading.Thread(target=lambda: (begin.wait(), results.append(function(X, W))))
    thread.start()
    tool = amanda.tools.load("count")()
    with amanda.apply(tool):
        begin.set()
        thread.join()
    assert equal(results[0], expected)
    assert tool.result()["summary"]["forward"] == 0


def test_a_jax_without_a_private_symbol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``amanda doctor`` names it; the driver does not attach, and changes nothing."""
    monkeypatch.setitem(_internals.NEEDED, _internals.ad, ("no_such_name",))
    assert JaxDriver.check_internals() == ["jax._src.interpreters.ad has no no_such_name"]
    driver = JaxDriver.loaded()(Dispatcher())
    with pytest.raises(ImportError, match="no_such_name"):
        driver.attach()
    assert len(driver.patches) == 0
    assert not _internals.IS_OPEN.value


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another JAX than those that were tested is refused by its version."""
    assert JaxDriver.reason_unusable() == ""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.2")
    assert JaxDriver.reason_unusable() == "jax 0.9.2 is not supported, only 0.10 and 0.11"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert JaxDriver.reason_unusable() == "jax is not installed"
