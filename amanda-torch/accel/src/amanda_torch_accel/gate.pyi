"""What the extension module offers; the classes are described where their twins in Python are."""

from collections.abc import Callable
from typing import Any

class TrackerFields:
    cells: Any
    frame: Any
    root: Any
    generation: Any
    iteration: Any
    stale: Any
    thread: Any

class FrameFields:
    cells: Any
    names: Any
    children: Any
    generation: Any
    caller: Any

class ChildFields:
    ref: Any
    transparent: Any
    is_fused: Any
    calls: Any
    frames: Any

class KnownFields:
    executor: Any
    claims: Any
    steps_before: Any
    steps_after: Any
    gradients: Any
    form: Any
    iterations: Any
    op_id: Any
    name: Any

class Accumulation:
    def __init__(self, find: Callable[[], Any], /) -> None: ...
    def note_pass(self, task: int, makes_graph: bool, /) -> None: ...
    def register(self, node: Any, before: bool, after: bool, /) -> bool: ...

def add(builtin: Any, /) -> None:
    """Notice calls of a method, a function or a property.

    Raises:
        ValueError: it is called in a form that is not known, or there are too many.
    """

def add_mapping(type: type, /) -> None:
    """Notice ``a[i]`` and ``a[i] = b`` of a builtin type and its subclasses."""

def ask(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
    """Call a function in Python that reports itself to modes: it always does, if there is a
    virtual one."""

def claim(mode: TrackerFields, known: KnownFields, result: Any, start: int, /) -> bool:
    """Hook the backward operators of an operator that has run; False where Python is to do it."""

def configure(objects: dict[str, Any], builtins: tuple[Any, ...], /) -> None:
    """Name what the extension needs, once per process.

    Args:
        objects: of amanda, amanda-torch and PyTorch, by name; see ``amanda_torch.eager.gate``.
        builtins: push, pop, length and at of the stack of modes; ``__enter__`` and ``__exit__`` of
            what turns it off, and of what pushes and pops a mode in C++.

    Raises:
        ValueError: a builtin is called in a form that is not known.
    """

def forget() -> None:
    """The routines of all backward operators are out of date."""

def install() -> None:
    """Notice calls from now on."""

def is_installed() -> bool:
    """True if calls are noticed."""

def learn(
    result: Any,
    start: int,
    nodes: dict[Any, Any],
    leaves: dict[Any, tuple[Any, list[Any] | None]],
    owners: dict[int, Any],
    scopes: tuple[Any, ...],
    /,
) -> Any:
    """What :func:`claim` needs of a graph of which everything is known.

    Args:
        result, start: of an execution that has this graph.
        nodes: by the node, its ``NodeHooks``.
        leaves: by the accumulation of a leaf, its owner, and, if the operator is that, a list of
            the ``NodeHooks`` in each scope, empty for nothing; otherwise None.
        owners, scopes: ``LeafClaimer.leaf_owners``, and the scopes of the operator.

    Returns:
        An item of ``KnownGradients.natives``; None where nodes are not as C++ finds them.
    """

def module_call(vanilla: Callable[..., Any], function: Callable[..., Any], /) -> Any:
    """Have a function for ``__call__`` of modules run in C++ where that can be; return it.

    Args:
        vanilla: calls the module.
        function: enters it, calls it and leaves it.
    """

def note_report(func: Any, /) -> bool:
    """PyTorch has reported a function to a mode of Amanda's; True if nothing is to be done for
    it."""

def places() -> list[tuple[Any, int, int]]:
    """What is written to: tuples of the builtin, the address, and what stands there now."""

def register(hooks: Any, node: Any, /) -> bool:
    """Hook a node, as ``NodeHooks.register()`` does; False for that of a function of the program's
    own."""

def restore() -> None:
    """Put back what is still the gate's. No mode is virtual from then on."""
