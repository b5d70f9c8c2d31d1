from collections.abc import Callable
from typing import Any

class Tracker:
    cells: Any
    frame: Any
    root: Any
    generation: Any
    iteration: Any
    stale: Any
    thread: Any

class Frame:
    cells: Any
    names: Any
    children: Any
    generation: Any
    caller: Any

class Child:
    ref: Any
    transparent: Any
    is_fused: Any
    calls: Any
    frames: Any

class Known:
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
    def register(self, node: Any, before: bool, after: bool, /) -> None: ...

def add(builtin: Any, /) -> None: ...
def add_mapping(type: type, /) -> None: ...
def ask(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...
def claim(mode: Tracker, known: Known, result: Any, start: int, /) -> bool: ...
def configure(objects: dict[str, Any], builtins: tuple[Any, ...], /) -> None: ...
def forget() -> None: ...
def install() -> None: ...
def is_installed() -> bool: ...
def learn(
    result: Any,
    start: int,
    nodes: dict[Any, Any],
    leaves: dict[Any, tuple[Any, list[Any] | None]],
    owners: dict[int, Any],
    scopes: tuple[Any, ...],
    /,
) -> Any: ...
def module_call(vanilla: Callable[..., Any], function: Callable[..., Any], /) -> Any: ...
def note_report(func: Any, /) -> bool: ...
def places() -> list[tuple[Any, int, int]]: ...
def register(hooks: Any, node: Any, /) -> bool: ...
def restore() -> None: ...
