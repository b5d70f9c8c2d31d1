"""The names that drivers are written with, in one place (docs/writing-a-driver.md).

``EagerDriver`` is the base class for a framework that runs operators at once; ``Driver`` the
interface for all others, on a ``Dispatcher``, or on a ``StaticGraphDispatcher`` where a graph is
rewritten before it runs. The state of the current thread is ``STATE``, and ``unwind`` restores what
a context of the driver's has changed in it.
"""

from amanda.engine.backward import (
    BackwardExecution,
    OperatorGradients,
    OpHandle,
    PastTensor,
    run_backward,
)
from amanda.engine.dispatch import Dispatcher
from amanda.engine.eager import EagerDriver, OperatorRun
from amanda.engine.op_ids import OpIds
from amanda.engine.plan import ActionPlan
from amanda.engine.static_graph import StaticGraphDispatcher
from amanda.interface.action import Action, ActionKind, InstPoint
from amanda.interface.binding import Arguments, Signature
from amanda.interface.calls import (
    BackwardCall,
    BoundCall,
    KnownTensor,
    NamedOp,
    OpCall,
    ParameterName,
)
from amanda.interface.driver import (
    INTERFACE_VERSION,
    Capability,
    Driver,
    ExportedNode,
    ThreadSwitches,
)
from amanda.interface.namespace import Namespace
from amanda.interface.proofs import Proof
from amanda.interface.settings import chosen, mistake
from amanda.python.patching import PatchSet
from amanda.state import STATE, unwind

__all__ = [
    "INTERFACE_VERSION",
    "STATE",
    "Action",
    "ActionKind",
    "ActionPlan",
    "Arguments",
    "BackwardCall",
    "BackwardExecution",
    "BoundCall",
    "Capability",
    "Dispatcher",
    "Driver",
    "EagerDriver",
    "ExportedNode",
    "InstPoint",
    "KnownTensor",
    "NamedOp",
    "Namespace",
    "OpCall",
    "OpHandle",
    "OpIds",
    "OperatorGradients",
    "OperatorRun",
    "ParameterName",
    "PastTensor",
    "PatchSet",
    "Proof",
    "Signature",
    "StaticGraphDispatcher",
    "ThreadSwitches",
    "chosen",
    "mistake",
    "run_backward",
    "unwind",
]
