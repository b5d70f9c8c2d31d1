"""The registration of amanda-tensorflow, which costs nothing until it is used."""

from __future__ import annotations

from importlib import metadata

import pytest

from amanda.errors import CapabilityError
from amanda.interface.driver import Driver
from amanda.registry import drivers
from amanda_tensorflow import plugin
from tests.running import run_python

DRIVERS = (
    plugin.TensorFlowEagerDriver,
    plugin.TensorFlowFunctionDriver,
    plugin.TensorFlowGraphDriver,
)


def printed(code: str) -> str:
    """The output of a Python process of its own."""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_drivers_are_registered() -> None:
    """`amanda drivers` lists one driver for each mode, and they are usable."""
    entries = {entry.cls: entry for entry in drivers.drivers() if entry.cls in DRIVERS}
    assert [entry.distribution for entry in entries.values()] == ["amanda-tensorflow"] * 3
    assert [cls.mode for cls in DRIVERS] == ["eager", "function", "graph"]
    assert [cls.name for cls in DRIVERS] == [
        "tensorflow-eager",
        "tensorflow-function",
        "tensorflow-graph",
    ]
    assert [cls.reason_unusable() for cls in DRIVERS] == [""] * 3


@pytest.mark.parametrize("driver", DRIVERS)
def test_private_symbols(driver: type[Driver]) -> None:
    """The private symbols are as each mode expects them, in this version of TensorFlow."""
    assert list(driver.check_internals()) == []


@pytest.mark.parametrize("driver", DRIVERS)
def test_self_test(driver: type[Driver]) -> None:
    """`amanda doctor`'s look at a tiny model finds nothing wrong."""
    assert list(driver.self_test()) == []


def test_without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TensorFlow is not installed, the reason says what to install."""
    monkeypatch.setattr(plugin, "installed", lambda: None)
    for driver in DRIVERS:
        assert "pip install 'tensorflow>=2.16,<2.22'" in driver.reason_unusable()


def test_too_old_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the version that is needed and the one that is installed."""
    monkeypatch.setattr(plugin, "installed", lambda: ("tensorflow", "2.15.1"))
    for driver in DRIVERS:
        assert driver.reason_unusable() == (
            "it needs tensorflow>=2.16, and tensorflow 2.15.1 is installed"
        )


def test_any_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow is found under each of its distribution names."""
    for wanted in plugin.DISTRIBUTIONS:

        def version(name: str, wanted: str = wanted) -> str:
            if name != wanted:
                raise metadata.PackageNotFoundError(name)
            return "2.21.0"

        monkeypatch.setattr(plugin.metadata, "version", version)
        assert plugin.installed() == (wanted, "2.21.0")


def test_the_context_stays_uninitialised() -> None:
    """Neither the import of the drivers nor a scope without operators initialises TensorFlow:
    devices can be configured after them."""
    code = (
        "import amanda, tensorflow as tf\n"
        "from tensorflow.python.eager import context\n"
        "from amanda_tensorflow import eager, function, session\n"
        "with amanda.apply(amanda.Tool()):\n"
        "    assert not context.context()._initialized\n"
        "    tf.config.set_logical_device_configuration(\n"
        "        tf.config.list_physical_devices('CPU')[0],\n"
        "        [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        "print(len(tf.config.list_logical_devices('CPU')))"
    )
    assert printed(code) == "2"


@pytest.mark.parametrize(
    "removed",
    ["ops.gradients_util._GradientsHelper", "ops.custom_gradient._eager_mode_decorator"],
    ids=["read at import", "patched"],
)
def test_a_private_symbol_that_is_gone(removed: str) -> None:
    """A TensorFlow without a private symbol is an error that names it; nothing is patched."""
    module, _, name = removed.rpartition(".")
    code = (
        "import importlib, tensorflow as tf\n"
        f"module = importlib.import_module('tensorflow.python.{module}')\n"
        f"del module.{name}\n"
        "import amanda\n"
        "from tensorflow.python.eager import execute\n"
        "vanilla = execute.execute\n"
        "try:\n"
        "    with amanda.apply(amanda.Tool(), drivers=['tensorflow-eager']):\n"
        "        pass\n"
        "except amanda.errors.CapabilityError as error:\n"
        "    print(error)\n"
        "assert execute.execute is vanilla\n"
        "from amanda_tensorflow.plugin import TensorFlowEagerDriver\n"
        "print(*TensorFlowEagerDriver.check_internals())"
    )
    raised, _, listed = printed(code).partition("\n")
    for said in (raised, listed):
        assert f"tensorflow.python.{module}" in said
        assert name in said


def test_other_parameters() -> None:
    """A private function with other parameters is a difference that names both lists."""
    from amanda_tensorflow import _internals

    symbols = [_internals.Symbol("eager.execute", "record_gradient", "op_name outputs")]
    (problem,) = _internals.missing("eager", symbols)
    where = "tensorflow.python.eager.execute.record_gradient"
    assert problem == f"{where}(op_name, inputs, attrs, outputs) instead of (op_name, outputs)"


def test_a_missing_method_that_another_one_calls_is_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name in another method's code does not mean that instances are given it."""
    from tensorflow.python.eager.polymorphic_function import concrete_function

    from amanda_tensorflow import _internals

    name = "_get_gradient_function"
    monkeypatch.delattr(concrete_function.ConcreteFunction, name)
    assert _internals.missing("function") == [f"no ConcreteFunction.{name}"]


def test_the_methods_that_only_an_alignment_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.lite.python import interpreter

    from amanda_tensorflow import _internals

    assert _internals.missing("lite") == []
    monkeypatch.delattr(interpreter.Interpreter, "_get_ops_details")
    with pytest.raises(CapabilityError, match=r"no Interpreter\._get_ops_details, which the lite"):
        list(_internals.lite_operators(None))
    assert _internals.missing("eager") == []
