"""Signatures whose annotations may name things that do not exist at run time."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, as ``inspect.signature`` finds it.

    From Python 3.14 on, annotations are computed when they are read (PEP 649), and a name that is
    imported for type checkers only is an error then. Here it stays a ``ForwardRef``.

    Raises:
        TypeError, ValueError: it has no signature, as some functions of C.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def annotations_of(cls: type) -> Mapping[str, Any]:
    """The annotations that a class itself declares, by name.

    Reading ``__annotations__`` may add entries to the class; this function does not.
    """
    own: Mapping[str, Any] | None = vars(cls).get("__annotations__")
    if own is None and sys.version_info >= (3, 14):
        from annotationlib import Format, call_annotate_function, get_annotate_from_class_namespace

        annotate = get_annotate_from_class_namespace(vars(cls))
        own = annotate and call_annotate_function(annotate, Format.FORWARDREF, owner=cls)
    return own or {}
