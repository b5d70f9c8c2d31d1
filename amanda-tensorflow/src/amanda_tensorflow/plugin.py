"""Amanda's plugin for TensorFlow. It imports no TensorFlow."""

from __future__ import annotations

import abc
import functools
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar

import amanda
from amanda.errors import CapabilityError
from amanda.interface.driver import Capability, Driver, ExportedNode
from amanda.interface.namespace import Namespace
from amanda_tensorflow import mapping_rules

MINIMUM = (2, 16)
"""The oldest TensorFlow that the drivers run on: the first with Keras 3."""

TESTED = ("2.16.2", "2.21.0")
"""The releases of TensorFlow that the tests run with (README.md)."""

DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-intel",
    "tensorflow-macos",
    "tensorflow-rocm",
    "tf-nightly",
    "tf-nightly-cpu",
)
"""Names under which TensorFlow is distributed; each installs the same module."""

_COMMON = frozenset(
    {
        Capability.BACKWARD,
        Capability.REPLACE_OP,
        Capability.REPLACE_BACKWARD_OP,
        Capability.AD_IN_ROUTINES,
        Capability.SECOND_ORDER,
        Capability.THREADS,
        Capability.MODULES,
        Capability.REPLAY,
        Capability.USER_OPS,
    }
)


class TensorFlowDriver(Driver, abc.ABC):
    """The base class of the drivers of all modes of TensorFlow; imports no TensorFlow.

    Attributes:
        patches: the patches that are in place while the driver is attached.
    """

    framework: ClassVar[str] = "tensorflow"
    # Keras walks through nested structures by optree, whose functions call those of Keras.
    packages: ClassVar[tuple[str, ...]] = ("keras", "tf_keras", "optree")
    interface_version: ClassVar[int] = 2
    # Eager operators check it one by one; for graphs the dispatcher does.
    follows_pauses: ClassVar[bool] = True

    @classmethod
    def reason_unusable(cls) -> str:
        """The reason that this TensorFlow cannot be instrumented; "" if it can."""
        found = installed()
        if not found:
            return "TensorFlow is not installed; try: pip install 'tensorflow>=2.16,<2.22'"
        name, version = found
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if release < MINIMUM:
            return f"it needs tensorflow>=2.16, and {name} {version} is installed"
        return ""

    def attach(self) -> None:
        """Put the patches in place; on an exception none of them stays.

        Raises:
            CapabilityError: this TensorFlow lacks a private symbol; it is named.
        """
        from amanda_tensorflow import _internals
        from amanda_tensorflow.labels import LABELS, PARAMETERS

        _internals.require(self.mode)
        _record()
        super().attach()
        LABELS.hold(self)
        PARAMETERS.hold(self)

    def detach(self) -> None:
        """Undo every patch."""
        from amanda_tensorflow.labels import LABELS, PARAMETERS

        LABELS.release(self)
        PARAMETERS.release(self)
        super().detach()

    def exported_nodes(
        self, target: Any, modules: Collection[str]
    ) -> Sequence[ExportedNode] | None:
        """The nodes of a model of Keras, a SavedModel or a file of LiteRT."""
        from amanda_tensorflow import exported

        return exported.nodes_of(target, modules)

    @functools.cached_property
    def namespace(self) -> Namespace:
        """``tensorflow/2.21/eager``: the version that runs, and the mode."""
        version = ".".join(sys.modules["tensorflow"].__version__.split(".")[:2])
        return Namespace(f"tensorflow/{version}/{self.mode}")

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """The private symbols of TensorFlow that are not as this mode expects them."""
        import tensorflow  # noqa: F401 - before our own modules, so that its gradients are noted

        try:
            from amanda_tensorflow import _internals
        except CapabilityError as error:
            return [str(error)]
        return [f"TensorFlow has {problem}" for problem in _internals.missing(cls.mode)]

    @classmethod
    def untested_version(cls) -> str:
        """This TensorFlow, unless it is one of the releases that are tested."""
        version = sys.modules["tensorflow"].__version__
        return "" if version in TESTED else f"TensorFlow {version}"


class TensorFlowEagerDriver(TensorFlowDriver):
    """Eager execution: operators that TensorFlow runs at once."""

    name = "tensorflow-eager"
    mode = "eager"
    target = "amanda_tensorflow.eager.driver:EagerModeDriver"
    capabilities = _COMMON


class TensorFlowFunctionDriver(TensorFlowDriver):
    """``tf.function``: graphs that TensorFlow traces and runs as functions."""

    name = "tensorflow-function"
    mode = "function"
    target = "amanda_tensorflow.function.driver:FunctionDriver"
    capabilities = _COMMON | {Capability.STATIC_GRAPH, Capability.COMPILED}


class TensorFlowGraphDriver(TensorFlowDriver):
    """``tf.compat.v1.Session``: graphs that the user builds and runs."""

    name = "tensorflow-graph"
    mode = "graph"
    target = "amanda_tensorflow.session.driver:SessionDriver"
    capabilities = _COMMON | {Capability.STATIC_GRAPH, Capability.COMPILED}


def installed() -> tuple[str, str] | None:
    """Name and version of the installed TensorFlow distribution; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def tensorflow_imported() -> None:
    """Note from the import of TensorFlow on what the drivers cannot find out later.

    The entry-point group ``amanda_imports`` names this function.
    """
    if TensorFlowDriver.reason_unusable():
        return
    if "amanda_tensorflow._internals" in sys.modules:
        # TensorFlow is imported by a module of this package, whose import has not ended yet.
        # A driver notes gradients when it attaches.
        return
    _record()


def _record() -> None:
    """Note from now on which operator of a graph is the gradient of which, which layer of Keras
    has made it, and where an optimizer of Keras steps."""
    from amanda_tensorflow.gradient_map import recording
    from amanda_tensorflow.keras_layers import module_calls, optimizers, saving
    from amanda_tensorflow.keras_layers import recording as layers

    recording.install()
    layers.install()
    module_calls.install()
    optimizers.install()
    saving.install()


@amanda.hookimpl
def amanda_register_drivers() -> Sequence[type[Driver]]:
    """The drivers of the three modes."""
    return [TensorFlowEagerDriver, TensorFlowFunctionDriver, TensorFlowGraphDriver]


@amanda.hookimpl
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Any]]:
    """Canonical types, roles and layouts for TensorFlow."""
    return {"tensorflow": [mapping_rules.standard]}
