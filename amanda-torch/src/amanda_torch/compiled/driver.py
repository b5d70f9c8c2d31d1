"""The driver for functions compiled with ``torch.compile``, which stay compiled.

It is used only when it is asked for::

    with amanda.apply(tool, drivers=["torch-graph"]):
        compiled(x)

Dynamo captures the functions and modules, and what it has captured runs operator by operator, with
the ids, the actions and the backward operators that the eager driver knows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from amanda.errors import CapabilityError
from amanda.interface.proofs import Proof
from amanda.namespace import Namespace
from amanda.state import ATTACHED
from amanda_torch.compiled import proofs
from amanda_torch.compiled.capture import callback_for
from amanda_torch.compiled.captured import COMPILER_VARIABLE
from amanda_torch.eager.driver import InterceptingDriver
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.plugin import TorchGraphDriver


class GraphDriver(TorchGraphDriver, InterceptingDriver):
    """Instruments compiled functions in what Dynamo has captured, and all other code eagerly."""

    captures = True

    @property
    def namespace(self) -> Namespace:
        """That of eager mode where operators run one by one; ``graph`` with a compiler."""
        mode = "eager" if os.environ.get(COMPILER_VARIABLE, "eager") == "eager" else self.mode
        return Namespace(super().namespace.rpartition("/")[0] + "/" + mode)

    def attach(self) -> None:
        """As the eager driver is, whose place it takes.

        Raises:
            CapabilityError: the eager driver is attached.
        """
        for driver in tuple(ATTACHED.values()):
            if isinstance(driver, InterceptingDriver):
                raise CapabilityError(
                    f"torch-graph sees all that {driver.name} sees, which is in use already: "
                    "apply all tools with one of the two drivers"
                )
        super().attach()

    def capture_compiled(self, callback: Any, interceptor: Interceptor) -> Any:
        """See :mod:`amanda_torch.compiled.capture`."""
        if not interceptor.is_alone():
            # Dynamo would write another function mode into the graph, and it would act twice.
            return None
        return callback_for(callback, self._tracers.suspended)

    @classmethod
    def remarks(cls) -> Sequence[str]:
        """Nothing: the interceptor cannot be chosen."""
        return []

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """See :mod:`amanda_torch.compiled.proofs`."""
        return [proofs.proof()]
