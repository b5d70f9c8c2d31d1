"""What amanda-tensorflow registers. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import amanda_tensorflow
from amanda import Driver, hookimpl
from amanda.driver import INTERFACE_VERSION, Capability


class TensorFlowDriver(Driver):
    """Holds the place of the TensorFlow drivers, so that Amanda can say they are missing."""

    name: ClassVar[str] = "tensorflow"
    framework: ClassVar[str] = "tensorflow"
    interface_version: ClassVar[int] = INTERFACE_VERSION
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    @classmethod
    def reason_unusable(cls) -> str:
        """Always the same: there is nothing here that could instrument TensorFlow."""
        return (
            f"amanda-tensorflow {amanda_tensorflow.__version__} holds no TensorFlow driver yet, "
            "so that TensorFlow runs uninstrumented"
        )


@hookimpl
def amanda_register_drivers() -> Sequence[type[Driver]]:
    """The driver that stands for those to come."""
    return [TensorFlowDriver]
