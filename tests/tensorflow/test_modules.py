"""Modules of ``tf.Module``: their paths, their calls and their phases, in all modes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.interface.points import PointContext
from amanda.tools.op_filter import OpFilter

tf1 = tf.compat.v1
X = np.ones((2, 4), np.float32)


class Dense(tf.Module):
    """A plain method."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.w = tf.Variable(tf.eye(4, width), name="w")

    def __call__(self, x: Any) -> Any:
        return tf.nn.relu(x @ self.w)


class Scoped(Dense):
    """A method in the module's name scope, which calls that of its base class."""

    @tf.Module.with_name_scope
    def __call__(self, x: Any) -> Any:
        return super().__call__(x) + 1.0


class Compiled(Dense):
    """A method that is a function."""

    @tf.function
    def __call__(self, x: Any) -> Any:
        return tf.nn.relu(x @ self.w)


class CompiledScope(Dense):
    """The same in the module's name scope."""

    @tf.function
    @tf.Module.with_name_scope
    def __call__(self, x: Any) -> Any:
        return tf.nn.relu(x @ self.w)


def in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs in the name scope of its module."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.name_scope:
            return method(self, *args, **kwargs)

    return run


class ScopedMethods(type):
    """Lets methods run in the name scope of their module, as Sonnet's metaclass does."""

    def __new__(mcs, name: str, bases: tuple[type[Any], ...], body: dict[str, Any]) -> Any:
        cls = super().__new__(mcs, name, bases, body)
        for key in ("__call__", "multiply"):
            if key in body:
                setattr(cls, key, in_scope(getattr(cls, key)))
        return cls


class Sonnet(tf.Module, metaclass=ScopedMethods):
    """Its weight is made in its first call."""

    def __call__(self, x: Any) -> Any:
        if not hasattr(self, "w"):
            with tf.init_scope():
                self.w = tf.Variable(tf.eye(4), name="w")
        return self.multiply(x)

    def multiply(self, x: Any) -> Any:
        return tf.nn.relu(x @ self.w)


class Encoder(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Dense(), Scoped()]

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Net(tf.Module):
    """Modules of all kinds in attributes, lists and dictionaries, called through each other."""

    def __init__(self, functions: bool = True) -> None:
        super().__init__(name="net")
        self.encoder = Encoder()
        self.sonnet = Sonnet()
        parts = {"first": Compiled(), "second": CompiledScope()} if functions else {}
        self.parts = {**parts, "keras": keras.layers.Dense(3, name="fc")}

    def __call__(self, x: Any) -> Any:
        x = self.sonnet(self.encoder(x))
        # A part of a part, and a module that nothing holds.
        x = Dense()(self.encoder.blocks[0](x)) if tf.executing_eagerly() else x
        for part in self.parts.values():
            x = part(x)
        return x


CALLED = [
    "net", "net/encoder", "net/encoder/blocks.0", "net/encoder/blocks.1", "net/sonnet",
    "net/parts.first", "net/parts.second", "net/parts.keras",
]  # fmt: skip


class Seen(amanda.Tool):
    """Calls of modules, and the operators of products with their phases."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []
        self.open: list[str] = []
        self.types: list[str] = []
        self.products: dict[str, str] = {}
        self.phases: dict[str, set[Any]] = {}
        self.add_inst_for_module(self.enter)
        self.add_inst_for_module(self.leave, exit=True)
        self.add_inst_for_op(self.analyse)

    def enter(self, point: PointContext) -> None:
        self.entered.append(point.id)
        self.open.append(point.id)
        self.types.append(type(point.target).__name__)
        assert point.module == point.id.partition("/")[2]

    def leave(self, point: PointContext) -> None:
        assert self.open.pop() == point.id
        assert len(point.inputs) == len(point.outputs) == 1

    def analyse(self, context: amanda.OpContext) -> None:
        kind = context.get_op().type
        self.phases.setdefault(kind, set()).add(context.get_phase())
        if kind == "MatMul":
            self.products[context.get_op_id()] = context.get_module()


def seen(run: Callable[[], object]) -> Seen:
    with amanda.apply(tool := Seen()):
        run()
    assert tool.open == []
    return tool


def test_modules_have_the_same_paths_in_eager_execution_and_functions() -> None:
    """The attribute path from the module that was called first, in the order of the calls."""
    net = Net()
    functions = tf.function(net), tf.function(lambda x: net(x))
    x = tf.constant(X)
    net(x)
    for function in functions:
        function(x)
        found = seen(functools.partial(function, x))
        assert found.entered == CALLED
        assert list(found.products) == [f"{path}/MatMul:0" for path in CALLED[2:]]
        assert list(found.products.values()) == CALLED[2:]
        assert found.phases["MatMul"] == {"forward"}
    eager = seen(lambda: net(x))
    # The calls that it makes in eager execution alone: a part of a part, and one that is not part.
    extra = {"net/encoder/blocks.0", "net/dense"}
    assert [path for path in eager.entered if path not in extra] == [
        path for path in CALLED if path not in extra
    ]
    assert eager.entered[5:7] == ["net/encoder/blocks.0", "net/dense"]
    assert eager.products["net/encoder/blocks.0/MatMul:1"] == "net/encoder/blocks.0"
    assert eager.types[:3] == ["Net", "Encoder", "Dense"]


def test_modules_have_these_paths_in_a_session() -> None:
    """In a graph of TensorFlow 1, whose functions are operators of it."""
    with tf.Graph().as_default() as graph:
        fed = tf1.placeholder(tf.float32, (None, 4))
        result = Net(functions=False)(fed)
        start = tf1.global_variables_initializer()
    with tf1.Session(graph=graph) as session:
        session.run(start)
        found = seen(lambda: session.run(result, {fed: X}))
    expected = [path for path in CALLED if path[-5:] not in ("first", "econd")]
    assert found.entered == expected
    assert list(found.products) == [f"{path}/MatMul:0" for path in expected[2:]]


def test_a_module_that_is_called_by_itself_is_the_outermost_one() -> None:
    """A function that a module is keeps its graph, and its path is that of the call."""
    net = Net()
    x = tf.constant(X)
    net(x)
    for module, name in ((net.parts["first"], "compiled"), (net.parts["second"], "compiled_scope")):
        found = seen(functools.partial(module, x))
        assert found.entered == [name]
        assert list(found.products) == [f"{name}/MatMul:0"]


class Branching(tf.Module):
    """Control flow that AutoGraph converts."""

    def __call__(self, x: Any) -> Any:
        for _ in tf.range(2):
            x = x * 2.0 if tf.reduce_sum(x) > 0.0 else -x
        return x


class Outer(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branching()

    def __call__(self, x: Any) -> Any:
        return self.inner(x) if tf.reduce_sum(x) < 100.0 else x


def test_methods_are_converted_as_they_would_be() -> None:
    """AutoGraph converts the program's methods, called by each other or by a function."""
    x, module = tf.constant(X), Outer()
    for function in (tf.function(module), tf.function(lambda x: module(x))):
        np.testing.assert_array_equal(function(x), 4 * X)
    unconverted = tf.function(Outer(), autograph=False)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        unconverted(x)


class Trainer(tf.Module):
    """A module that trains another one."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.optimizer = Encoder(), keras.optimizers.Adam()
        self.optimizer.build(self.model.trainable_variables)

    def __call__(self, x: Any) -> Any:
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model(x) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss


@pytest.mark.parametrize("compiled", [True, False])
def test_a_module_that_trains_has_steps_and_an_optimizer(compiled: bool) -> None:
    """Operators of the optimizer are none of the forward phase."""
    trainer = Trainer()
    run = tf.function(trainer) if compiled else trainer
    run(tf.constant(X))
    tool = Seen()
    with amanda.apply(tool) as scope:
        for _ in range(3):
            run(tf.constant(X))
    assert scope.statistics.steps == 3
    assert tool.entered[:3] == ["trainer", "trainer/model", "trainer/model/blocks.0"]
    assert tool.phases["AssignSubVariableOp"] == {"optimizer"}
    assert tool.phases["Sqrt"] == {"optimizer"}
    assert tool.phases["MatMul"] == {"forward"}


def test_calls_of_modules_change_nothing(tmp_path: Path) -> None:
    """Checkpoints, signatures and functions of the program are as without following."""
    net = Net()
    net(tf.constant(X))
    assert isinstance(vars(Compiled)["__call__"], type(tf.function(lambda: None)))
    assert net.parts["first"].__call__.get_concrete_function(tf.constant(X)) is not None
    exported = tf.Module()
    exported.net = net
    exported.run = tf.function(net.__call__, input_signature=[tf.TensorSpec((None, 4))])
    tf.saved_model.save(exported, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(loaded.run(tf.constant(X)), exported.run(tf.constant(X)))
    names = {name for name, _ in tf.train.list_variables(str(tmp_path / "variables/variables"))}
    assert "net/encoder/blocks/0/w/.ATTRIBUTES/VARIABLE_VALUE" in names


def test_graphs_that_are_loaded_have_the_name_scopes_of_their_operators(tmp_path: Path) -> None:
    """Of a SavedModel the modules are not known, and their names in the graph are."""

    class Saved(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Scoped()

        @tf.function(input_signature=[tf.TensorSpec((None, 4))])
        @tf.Module.with_name_scope
        def __call__(self, x: Any) -> Any:
            return self.part(x)

    saved = Saved()
    tf.saved_model.save(saved, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    found = seen(lambda: loaded(tf.constant(X)))
    assert found.entered == []
    assert list(found.products.values()) == ["scoped"]


class Coder(tf.Module):
    """Has no ``__call__``: methods in the module's name scope, one of which is a function."""

    def __init__(self) -> None:
        super().__init__(name="coder")
        self.blocks = [Dense(), Methods(), Methods()]

    @tf.Module.with_name_scope
    def build(self) -> None:
        self.scale = tf.Variable(tf.ones(4))

    @tf.Module.with_name_scope
    def encode(self, x: Any) -> Any:
        return self.blocks[1].project(self.blocks[0](x), 1)

    @tf.function
    @tf.Module.with_name_scope
    def decode(self, x: Any) -> Any:
        return self.blocks[2].project(x, 2)

    def reconstruct(self, x: Any) -> Any:
        return self.decode(self.encode(x))


class Methods(Dense):
    @tf.Module.with_name_scope
    def project(self, x: Any, times: int) -> Any:
        return self.often(x, times)

    @tf.Module.with_name_scope
    def limit(self, x: Any) -> Any:
        if tf.reduce_sum(x) > 0.0:
            x = x * 0.0
        return x

    def limited(self, x: Any) -> Any:
        return self.limit(x)

    @tf.Module.with_name_scope
    def __call__(self, x: Any) -> Any:
        if tf.reduce_sum(x) > 0.0:
            x = x * 0.0
        return x

    @tf.Module.with_name_scope
    def often(self, x: Any, times: int) -> Any:
        """Part of the call that is running."""
        for _ in range(times):
            x = self.other(x)
        return x

    def other(self, x: Any) -> Any:
        """No call: of the module that is running."""
        return x @ self.w


METHODS = ["coder", "coder/blocks.0", "coder/blocks.1", "coder", "coder/blocks.2"]


def test_methods_in_the_name_scope_of_their_module_are_calls() -> None:
    """In eager execution and functions; others, and those within a call of the module, are none."""
    coder, x = Coder(), tf.constant(X)
    expected = coder.reconstruct(x)
    eager = seen(lambda: np.testing.assert_array_equal(coder.reconstruct(x), expected))
    run = tf.function(coder.reconstruct)
    run(x)
    compiled = seen(lambda: np.testing.assert_array_equal(run(x), expected))
    assert eager.entered == compiled.entered == METHODS
    assert eager.types == compiled.types
    modules = ["coder/blocks.0", "coder/blocks.1", *2 * ["coder/blocks.2"]]
    assert list(eager.products.values()) == list(compiled.products.values()) == modules
    ids = [*(f"{path}/MatMul:0" for path in modules[:3]), "coder/blocks.2/MatMul:1"]
    assert list(eager.products) == list(compiled.products) == ids


def test_methods_that_are_called_in_turn_are_of_one_iteration() -> None:
    """What encodes and then decodes has ids of its own each; the next time they come round."""
    coder, x = Coder(), tf.constant(X)
    found = seen(lambda: [coder.reconstruct(x) for _ in range(3)])
    assert len(found.products) == 4
    assert found.entered == 3 * METHODS


def test_a_method_that_makes_variables_is_no_call() -> None:
    coder = Coder()
    found = seen(coder.build)
    assert found.entered == []
    assert not any("forward" in phases for kind, phases in found.phases.items() if kind == "Fill")


def test_methods_in_a_name_scope_are_converted_as_they_would_be() -> None:
    """AutoGraph converts them where converted code calls them."""
    x = tf.constant(X)
    for function in (tf.function(Methods()), tf.function(Methods().limited)):
        np.testing.assert_array_equal(function(x), 0 * X)


def test_a_pattern_that_fits_nothing_is_told_the_layers_and_no_name_scopes() -> None:
    """What optimizers and initializers have in place of a module is named after all that is one."""
    model = keras.Sequential(
        [keras.layers.Dense(2, name=name) for name in ("enc", "mid")], name="net"
    )
    model.compile("adam", "mse")
    chosen = OpFilter(modules=["nobody.*"])
    with amanda.apply(amanda.tools.load("count")(), op_filter=chosen):
        model.fit(X, X[:, :2], verbose=0)
    (line,) = chosen.unmatched()
    assert line.partition("; ")[2] == "there are net/enc, net/mid, loss/mse"
