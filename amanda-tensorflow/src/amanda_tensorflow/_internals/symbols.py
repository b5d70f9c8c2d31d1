"""The private symbols of TensorFlow that the drivers need, and what they expect of each.

They are compared with the installed TensorFlow when a driver attaches (:func:`require`), so that a
TensorFlow in which one has changed gives one error that names it. Of those that this folder reads
while it is imported only some are listed, with their parameters. The expectations hold in 2.16 and
2.21.
"""

from __future__ import annotations

import importlib
import inspect
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import tensorflow as tf

from amanda.errors import CapabilityError
from amanda.python.signatures import signature_of

RECORDS = "records"
"""Stands among the modes for the noting of gradients, which is in place outside of scopes."""

_MODES = {
    "all": (RECORDS, "eager", "function", "graph"),
    "eager": ("eager",),
    "graphs": ("function", "graph"),
    "function": ("function",),
    "session": ("graph",),
    "lite": ("lite",),
}


@attrs.frozen
class Symbol:
    """A private symbol, and the expectation of it.

    Attributes:
        where: the module, below ``tensorflow.python`` unless it begins with ``tensorflow.``, and
            after a colon the class, if any.
        name: the attribute.
        parameters: the names of its parameters, ``self`` included, separated by spaces; None to
            expect its presence only.
        modes: the modes that need it.
    """

    where: str
    name: str
    parameters: str | None = None
    modes: Sequence[str] = _MODES["all"]

    @property
    def module(self) -> str:
        """The path of the module."""
        module = self.where.partition(":")[0]
        return module if module.startswith("tensorflow.") else f"tensorflow.python.{module}"

    @property
    def owner(self) -> str:
        """The module or the class, as a message gives it."""
        return self.where.partition(":")[2] or self.module

    def problem(self) -> str:
        """The difference from the expectation in this TensorFlow; "" if there is none."""
        cls = self.where.partition(":")[2]
        try:
            owner: Any = importlib.import_module(self.module)
        except ImportError:
            return f"no module {self.module}"
        if cls:
            owner = getattr(owner, cls, None)
        found = inspect.getattr_static(owner, self.name, None)
        if found is None:
            # Modules of the runtime in C have their names by other means.
            found = getattr(owner, self.name, None)
        # A method is in its class; any other name may be given to its instances only.
        is_method = self.parameters is not None
        if found is None and (is_method or not _is_given_to_instances(owner, self.name)):
            return f"no {self.owner}.{self.name}"
        if self.parameters is None:
            return ""
        actual = list(signature_of(getattr(found, "__func__", found)).parameters)
        expected = self.parameters.split()
        if actual == expected:
            return ""
        return f"{self.owner}.{self.name}({', '.join(actual)}) instead of ({', '.join(expected)})"


def _is_given_to_instances(owner: Any, name: str) -> bool:
    """True if some method of a class mentions an attribute, as ``__init__`` does that sets it."""
    if not inspect.isclass(owner):
        return False
    members = (getattr(member, "__func__", member) for member in vars(owner).values())
    codes = (getattr(member, "__code__", None) for member in members)
    return any(code is not None and name in code.co_names for code in codes)


def _read() -> Iterator[Symbol]:
    for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["symbols"]:
        for name in row["names"].split():
            yield Symbol(row["in"], name, row.get("parameters"), _MODES[row.get("modes", "all")])


SYMBOLS = tuple(_read())
"""The content of symbols.toml."""


def missing(mode: str = "", symbols: Sequence[Symbol] = SYMBOLS) -> list[str]:
    """The differences of this TensorFlow from the expectations of a mode ("" for all modes)."""
    wanted = [symbol for symbol in symbols if mode in symbol.modes or not mode]
    return [problem for problem in (symbol.problem() for symbol in wanted) if problem]


def require(mode: str, symbols: Sequence[Symbol] = SYMBOLS) -> None:
    """Refuse a mode whose private symbols are not as expected.

    Raises:
        CapabilityError: it names the symbols.
    """
    problems = missing(mode, symbols)
    if problems:
        raise CapabilityError(
            f"TensorFlow {tf.__version__} has {'; '.join(problems)}, which the {mode} mode of "
            "amanda-tensorflow needs as it was; install a release of amanda-tensorflow for it"
        )
