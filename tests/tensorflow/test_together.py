"""PyTorch and TensorFlow in one process, under one ``apply``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.mapping import MappingTool
from amanda_tensorflow import mapping_rules
from amanda_tools.count import CountTool
from tests.running import in_threads, run_python
from tests.tensorflow import support

torch = pytest.importorskip("torch", reason="needs both frameworks")


class Portable(amanda.Tool):
    """Doubles the weights of all convolutions and counts them, by framework."""

    def __init__(self) -> None:
        super().__init__()
        self.executed: dict[str, int] = {}
        self.gradients: dict[str, Any] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context["op_type"] == "conv2d":
            framework = context.namespace.tags[0]
            context.insert_before_op(self.double, inputs=["weight"], framework=framework)
            context.insert_after_backward_op(self.keep, grad_inputs=["weight"], framework=framework)

    def double(self, weight: Any, framework: str) -> Any:
        self.executed[framework] = self.executed.get(framework, 0) + 1
        return weight * 2

    def keep(self, gradient: Any, framework: str) -> None:
        self.gradients[framework] = np.array(gradient)


def in_torch(image: Any, kernel: Any) -> tuple[Any, Any]:
    """Output and weight gradient of a convolution, NHWC and HWIO."""
    weight = torch.tensor(kernel.transpose(3, 2, 0, 1).copy(), requires_grad=True)
    output = torch.nn.functional.conv2d(torch.tensor(image.transpose(0, 3, 1, 2).copy()), weight)
    output.square().sum().backward()
    gradient = weight.grad.numpy().transpose(2, 3, 1, 0)
    return output.detach().numpy().transpose(0, 2, 3, 1), gradient


def in_tensorflow(image: Any, kernel: Any) -> tuple[Any, Any]:
    """The same, eagerly."""
    weight = tf.Variable(kernel)
    with tf.GradientTape() as tape:
        output = tf.nn.conv2d(image, weight, 1, "VALID")
        loss = tf.reduce_sum(output**2)
    return output.numpy(), tape.gradient(loss, weight).numpy()


def in_a_function(image: Any, kernel: Any) -> tuple[Any, Any]:
    """The same, in a function."""
    weight = tf.Variable(kernel)

    @tf.function
    def run(image: Any) -> Any:
        with tf.GradientTape() as tape:
            output = tf.nn.conv2d(image, weight, 1, "VALID")
            loss = tf.reduce_sum(output**2)
        return output, tape.gradient(loss, weight)

    return tuple(tensor.numpy() for tensor in run(image))


@pytest.mark.parametrize("other", [in_tensorflow, in_a_function])
def test_one_tool_on_both(other: Any) -> None:
    """One tool, applied once, does the same to both frameworks at the same time."""
    random = np.random.default_rng(0)
    image, kernel = random.standard_normal((1, 5, 5, 2)), random.standard_normal((3, 3, 2, 4))
    tool = Portable()
    with amanda.apply(tool):
        mine = [run(image, kernel) for run in (in_torch, other)]
    assert tool.executed == {"pytorch": 1, "tensorflow": 1}
    support.assert_close(mine[0], mine[1])
    support.assert_close(mine[1][0], tf.nn.conv2d(image, 2 * kernel, 1, "VALID").numpy())
    support.assert_close(
        tool.gradients["pytorch"].transpose(2, 3, 1, 0), tool.gradients["tensorflow"]
    )
    assert [run(image, kernel)[0].tolist() for run in (in_torch, other)] != [
        output.tolist() for output, _ in mine
    ]


def test_frameworks_call_each_other() -> None:
    """A routine on PyTorch calls TensorFlow, and the other way round, both vanilla."""
    seen: list[str] = []

    class Calling(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.depends_on(MappingTool.standard())
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            seen.append(context.get_op_id())
            if context["op_type"] == "relu":
                is_torch = context.namespace.tags[0] == "pytorch"
                context.insert_after_op(self.by_tensorflow if is_torch else self.by_torch)

        def by_tensorflow(self, tensor: Any) -> Any:
            return torch.tensor(tf.square(tensor.numpy()).numpy())

        def by_torch(self, tensor: Any) -> Any:
            return tf.constant(torch.square(torch.tensor(tensor.numpy())).numpy())

    values = np.array([-2.0, 3.0])
    with amanda.apply(Calling()):
        one = torch.relu(torch.tensor(values)).tolist()
        two = tf.nn.relu(values).numpy().tolist()
        three = tf.function(tf.nn.relu)(tf.constant(values)).numpy().tolist()
    assert one == two == three == [0.0, 9.0]
    assert not [op_id for op_id in seen if "quare" in op_id]


@pytest.mark.parametrize("first", ["torch", "tensorflow"])
def test_either_order_of_imports(first: str) -> None:
    """Both drivers attach whichever framework is imported first, also inside of a scope, and the
    counts of both come under the same types."""
    second = {"torch": "tensorflow", "tensorflow": "torch"}[first]
    code = f"""
import amanda
import {first}
if "torch" == "{first}":
    import torch.distributed  # has objects that warn when they are looked at
from amanda_tools.count import CountTool
tool = CountTool()
with amanda.apply(tool):
    import {second}
    import torch, tensorflow as tf
    torch.relu(torch.ones(2))
    tf.nn.relu(tf.ones(2))
print(sorted(tool.result()["namespaces"]))
print(tool.result()["summary"]["by_type"]["forward"]["relu"])
"""
    done = run_python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    namespaces, counts = done.stdout.splitlines()
    assert "pytorch" in namespaces
    assert "tensorflow" in namespaces
    assert counts == "{'ops': 2, 'executions': 2}"


TENSORFLOW_ONLY = {
    "barrier_handle",  # a queue of tensors
    "bias_add",
    "getitem",  # Python's own spelling
    "stack_handle",  # a resource, not to be taken for torch.stack
    "to",
}
"""Canonical types that are no function of PyTorch's."""


def test_types_are_called_as_in_torch() -> None:
    """Where the rules rename a type, PyTorch has an operator of the new name."""
    from torch.nn import functional

    public = (
        *(torch, functional, torch.Tensor, torch.special, torch.ops.aten),
        torch.distributed,
    )

    def exists(name: str) -> bool:
        group, _, rest = name.partition("_")
        nested = getattr(getattr(torch, group, None), rest, None) if rest else None
        return nested is not None or any(hasattr(m, name) for m in public)

    renamed = set(mapping_rules.TYPES) - TENSORFLOW_ONLY
    assert {name for name in renamed if not exists(name)} == set()


# -- tool code ----------------------------------------------------------------

VALUES = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)


def eager_operators() -> Any:
    """Two operators, and a variable."""
    return tf.reduce_sum(tf.square(tf.Variable(VALUES)))


def gradients() -> Any:
    """A backward pass."""
    x = tf.constant(VALUES)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.relu(x)
    return tape.gradient(y, x)


KNOWN = tf.function(lambda x: tf.sqrt(tf.abs(x)))
KNOWN(tf.constant(VALUES))


def functions() -> Any:
    """A function that is traced now, and one that was traced before."""
    return tf.function(lambda x: tf.exp(x) + KNOWN(x))(tf.constant(VALUES))


def in_a_session() -> Any:
    """A graph of TensorFlow 1."""
    with tf.Graph().as_default() as graph:
        y = tf.tanh(tf.constant(VALUES))
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run(y)


def layers() -> Any:
    """A layer of Keras."""
    return tf.keras.layers.Dense(2)(tf.constant(VALUES))


PROGRAMS = (eager_operators, gradients, functions, in_a_session, layers)


class CallingOther(amanda.Tool):
    """Calls TensorFlow in analyses and routines of PyTorch's operators, at each kind of action."""

    def __init__(self, program: Callable[[], Any], differentiable: bool = False) -> None:
        super().__init__()
        self.program = program
        self.called = 0
        self.seen: list[str] = []
        self._switch = amanda.ad_enabled if differentiable else contextlib.nullcontext
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(self.look_backward, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        self.seen.append(f"{context.namespace.tags[0]} {context.get_op_id()}")
        if context.namespace.tags[0] != "pytorch":
            return
        self.call()
        with self._switch():
            context.insert_before_op(self.call)
            context.insert_before_op(self.call, inputs=[])
            context.insert_after_op(self.call)

    def look_backward(self, context: amanda.OpContext) -> None:
        self.seen.append(f"{context.namespace.tags[0]} {context.get_backward_op_id()}")
        if context.namespace.tags[0] != "pytorch":
            return
        with self._switch():
            context.insert_before_backward_op(self.call, grad_outputs=[])
            context.insert_after_backward_op(self.call)

    def call(self, *_: Any) -> None:
        self.called += 1
        self.program()


def train() -> None:
    """A forward and a backward pass in PyTorch."""
    module = torch.nn.Linear(2, 2)
    torch.relu(module(torch.tensor(VALUES))).sum().backward()


@pytest.mark.parametrize("differentiable", [False, True], ids=["isolated", "differentiable"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_tool_code_is_vanilla_in_the_other_framework(
    program: Callable[[], Any], differentiable: bool
) -> None:
    """No operator of TensorFlow within analyses and routines of PyTorch's operators is seen: in
    nested scopes, in threads, and when the operators are known."""
    tool, outer = CallingOther(program, differentiable), CountTool()
    with amanda.apply(outer), amanda.apply(tool):
        for _ in range(3):
            train()
            amanda.new_iteration()
        in_threads(train)
        met = len(tool.seen)
        program()
    assert tool.called > 100
    assert {seen.split()[0] for seen in tool.seen[:met]} == {"pytorch"}
    assert any(seen.startswith("tensorflow") for seen in tool.seen[met:])
    assert {row["namespace"].split("/")[0] for row in outer.op_rows()[:met]} == {"pytorch"}


def raising(seen: list[str]) -> amanda.Tool:
    """A tool that notes ids, and whose routine raises at operators of PyTorch."""

    def fail(*_: Any) -> None:
        tf.square(VALUES)
        raise LookupError("in a routine")

    def look(context: amanda.OpContext) -> None:
        seen.append(context.get_op_id())
        if context.namespace.tags[0] == "pytorch":
            context.insert_before_op(fail)

    tool = amanda.Tool()
    tool.add_inst_for_op(look)
    return tool


def test_tool_code_that_raises_leaves_the_other_framework_instrumented() -> None:
    """After a routine has raised within operators of TensorFlow, these are vanilla no longer."""
    seen: list[str] = []
    x = torch.tensor(VALUES)
    with amanda.apply(raising(seen)):
        for _ in range(3):
            with pytest.raises(LookupError, match="in a routine"):
                torch.relu(x)
            amanda.new_iteration()
        assert seen == ["/relu:0"]
        tf.square(VALUES)
    assert seen == ["/relu:0", "/Square:0"]


@pytest.mark.parametrize("call", [tf.py_function, tf.numpy_function])
def test_an_exception_of_a_tool_keeps_its_type(call: Any) -> None:
    """What a tool raises at an operator of PyTorch that a function of TensorFlow calls reaches the
    user as it is."""
    with amanda.apply(raising([])):
        for _ in range(3):
            with pytest.raises(LookupError, match="in a routine"):
                call(lambda x: torch.relu(torch.tensor(np.array(x))).numpy(), [VALUES], tf.float32)
            amanda.new_iteration()
