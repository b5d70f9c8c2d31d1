"""Jinja's environment for the templates in ``templates/``: the page of a run, charts as SVG."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Any

from amanda.text import printable

if TYPE_CHECKING:
    import jinja2


@functools.cache
def source(name: str) -> str:
    """Return the text of a file in ``templates/``."""
    return (resources.files("amanda_tools._output") / "templates" / name).read_text("utf-8")


@functools.cache
def vendored(name: str) -> str:
    """Return the text of a library in ``vendor/`` with its licence before it: a page is a copy.

    VERSIONS.txt there tells its version and where it comes from.
    """
    folder = resources.files("amanda_tools._output") / "vendor"
    licence = (folder / f"{name.partition('.')[0]}.LICENSE").read_text("utf-8")
    return f"/*!\n{licence}*/\n{(folder / name).read_text('utf-8')}"


def _finalized(value: Any) -> Any:
    """Write control characters out, which XML lacks; texts that are marked as safe stay."""
    return printable(value, keep="\n\t") if type(value) is str else value


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment; it escapes all values, and refuses names that are not defined."""
    # Imported here: loading the tools, as `amanda tools` does, must not cost this import.
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "separators": (",", ":"), "default": str,
    }  # fmt: skip
    return found
