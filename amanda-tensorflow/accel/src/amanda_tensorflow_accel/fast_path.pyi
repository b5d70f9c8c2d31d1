from collections.abc import Callable
from typing import Any

def configure(objects: dict[str, Any], /) -> None: ...
def configure_native(
    data: int, is_empty: int, context: Any, local: Any, execute: int, binding: Any, /
) -> bool: ...
def configure_readings(functions: tuple[int, ...], context_handle: str, /) -> bool: ...
def fast_path(
    vanilla: Callable[..., Any],
    python: Callable[..., Any],
    value_of: Callable[..., Any],
    ended: Callable[..., None],
    values: Any,
    /,
) -> Any: ...
def gradient_function(vanilla: Callable[..., Any], python: Callable[..., Any], /) -> Any: ...
