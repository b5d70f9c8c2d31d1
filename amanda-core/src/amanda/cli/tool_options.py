"""The options of a tool: arguments of its constructor, converted from text.

``options_of(cls)`` lists them; ``convert(cls, spec)`` makes the keyword arguments for a tool of the
command line. A type comes from the annotation, or else from the default.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from amanda.cli import grammar
from amanda.interface.tool import Tool
from amanda.python.signatures import signature_of
from amanda.tools.reporting import unknown_option

COMMON_OPTIONS = ("ops", "modules", "every", "skip", "driver", "html", "output")
"""Options of ``amanda run``, which concern all its tools."""

_REQUIRED = inspect.Parameter.empty
_SECTION = re.compile(
    r"^[ \t]*(Args|Arguments|Attributes|Returns|Raises|Yields):[ \t]*$", re.MULTILINE
)
_WITH_NAMES = frozenset({"Args", "Arguments", "Attributes"})
_ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)(?: \([^)]*\))?:\s*(.*)$")
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


class OptionError(ValueError):
    """An option that a tool does not have, or a value that it cannot take."""


@attrs.frozen
class Option:
    """One option of a tool.

    Attributes:
        name: name of the constructor's argument.
        annotation: its type; without an annotation the type of the default.
        default: value if it is not given; ``inspect.Parameter.empty`` if it has to be given.
        text: its description, from the tool's docstring.
    """

    name: str
    annotation: Any
    default: Any
    text: str

    @property
    def is_required(self) -> bool:
        """True if it has to be given."""
        return self.default is _REQUIRED

    def head(self) -> str:
        """The form of the value, and the default."""
        default = "" if self.is_required else f" (default: {_shown(self.default)})"
        return f"{self.name}={_form(self.annotation)}{default}"


def options_of(cls: type[Tool]) -> tuple[dict[str, Option], bool]:
    """The options of a tool by name, and whether it accepts further ones (``**kwargs``)."""
    texts = _documented(cls)
    found: dict[str, Option] = {}
    takes_any = False
    for parameter in _signature(cls).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            name = parameter.name
            found[name] = Option(
                name, _annotation(parameter), parameter.default, texts.get(name, "")
            )
    return found, takes_any


def convert(cls: type[Tool], spec: grammar.ToolSpec) -> dict[str, Any]:
    """Convert the options of `spec` into keyword arguments of the constructor.

    Raises:
        OptionError: an option is unknown or missing, or its value cannot be converted.
    """
    known, takes_any = options_of(cls)
    arguments = {}
    for name, text in spec.options.items():
        option = known.get(name)
        if option is None and not takes_any:
            raise OptionError(_unknown(spec.name, name, known))
        annotation = Any if option is None else option.annotation
        if (second := re.search(r":(\w+)=", text)) and second[1] in known:
            one = f"{name}={text[: second.start()]}"
            raise OptionError(
                f"the options of tool {spec.name} are separated by commas: "
                f"{one},{text[second.start() + 1 :]}"
            )
        try:
            arguments[name] = _convert(annotation, text)
        except ValueError as error:
            form = _form(annotation)
            raise OptionError(
                f"option {name}={text} of tool {spec.name} is not of the form {name}={form}"
            ) from error
    missing = [o for o in known.values() if o.is_required and o.name not in arguments]
    if missing:
        wanted = ", ".join(f"{o.name}={_form(o.annotation)}" for o in missing)
        raise OptionError(f"tool {spec.name} needs the option {wanted}")
    return arguments


def _unknown(tool: str, name: str, known: Collection[str]) -> str:
    """The message for an option that a tool does not have, but perhaps the run."""
    common = f"; --{name} is for all tools of a run" if name in COMMON_OPTIONS else ""
    return f"{unknown_option(tool, name, known)}{common}"


def _signature(cls: type[Tool]) -> inspect.Signature:
    try:
        return inspect.signature(cls, eval_str=True)
    except Exception:
        # An annotation names something that is imported under TYPE_CHECKING only.
        return signature_of(cls)


def _annotation(parameter: inspect.Parameter) -> Any:
    given, default = parameter.annotation, parameter.default
    if given is not _REQUIRED and not _is_unknown(given):
        # If the default is text, the value is text: 007 is a path like any other.
        return str if given in (Any, object) and isinstance(default, str) else given
    if default is _REQUIRED or default is None:
        return Any
    if isinstance(default, (list, tuple, set, frozenset)) and default:
        kinds = {type(item) for item in default}
        if len(kinds) == 1:
            return types.GenericAlias(type(default), (kinds.pop(), ...))
    return type(default)


def _is_unknown(annotation: Any) -> bool:
    """True if it names something that is not there: a text, or from Python 3.14 on a reference."""
    return isinstance(annotation, (str, typing.ForwardRef)) or (
        typing.get_origin(annotation) is not typing.Literal
        and any(map(_is_unknown, typing.get_args(annotation)))
    )


def _members(annotation: Any) -> list[Any]:
    """The types of a union, None aside; of any other annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return [annotation]


def _is_list(annotation: Any) -> bool:
    origin = typing.get_origin(annotation) or annotation
    return (
        isinstance(origin, type)
        and issubclass(origin, Collection)
        and not issubclass(origin, (str, bytes, Mapping, enum.Enum))
    )


def _item(annotation: Any) -> Any:
    arguments = [kind for kind in typing.get_args(annotation) if kind is not Ellipsis]
    return arguments[0] if arguments else Any


def _convert(annotation: Any, text: str) -> Any:
    """Convert text to the type of an annotation.

    Raises:
        ValueError: the text has not the form of such a value.
    """
    kinds = _members(annotation)
    for kind in kinds:
        if _is_list(kind):
            items = [_convert(_item(kind), item) for item in grammar.split_list(text)]
            origin = typing.get_origin(kind) or kind
            return origin(items) if origin in (list, set, frozenset) else tuple(items)
    errors: list[Exception] = []
    for kind in sorted(kinds, key=_rank):
        try:
            if str in kinds and kind in (int, float):
                return _parse_number(kind, grammar.unescape(text))
            return _convert_scalar(kind, grammar.unescape(text))
        except Exception as error:
            # A type may be any function of a text, and raise any exception.
            errors.append(error)
    raise ValueError(text) from errors[0]


def _rank(kind: Any) -> int:
    """The order in which the types of a union are tried: types that accept less come first."""
    # int before float, which accepts 3, and before bool, which accepts 1; str accepts every text.
    return {float: 1, bool: 2, str: 3}.get(kind, 0)


def _convert_scalar(kind: Any, text: str) -> Any:
    if kind is Any or kind is object:
        return _guess(text)
    if kind is bool:
        return _BOOLEANS[text.lower()]
    if typing.get_origin(kind) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}[text]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[text] if text in kind.__members__ else kind(text)
    return kind(text)


def _parse_number(kind: type[int] | type[float], text: str) -> int | float:
    """Convert a number where text may be meant: 007, 1_000, inf and nan are not numbers there.

    Raises:
        ValueError: it is not written as numbers are.
    """
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return kind(text)


def _guess(text: str) -> Any:
    """Convert text for an argument without annotation and default, by its look."""
    for kind in (int, float):
        try:
            return _parse_number(kind, text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _form(annotation: Any) -> str:
    """The form in which a value of a type is written, for messages."""
    forms = []
    for kind in _members(annotation):
        if _is_list(kind):
            item = _form(_item(kind))
            forms.append(f"{item}+{item}+...")
        elif kind is bool:
            forms.append("true|false")
        elif typing.get_origin(kind) is typing.Literal:
            forms.append("|".join(str(choice) for choice in typing.get_args(kind)))
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            forms.append("|".join(kind.__members__))
        else:
            forms.append(_NAMES.get(kind) or getattr(kind, "__name__", str(kind)).lower())
    return "|".join(forms)


_NAMES = {str: "text", int: "integer", float: "number", Any: "value", object: "value"}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple, set, frozenset)):
        return "+".join(map(str, value)) or "none"
    return "none" if value is None else str(value) or "none"


def _documented(cls: type[Tool]) -> dict[str, str]:
    """The descriptions in the sections "Args" and "Attributes" of a tool's docstrings, by name.

    The docstrings of the class, of its constructor and of its class of options, after that
    one's bases, are read in this order; a later description replaces an earlier one.
    """
    texts: dict[str, str] = {}
    for owner in (cls, cls.__init__, *reversed(getattr(cls, "Options", object).__mro__)):
        texts.update(_entries(inspect.getdoc(owner) or ""))
    return texts


def prose(docstring: str | None) -> str:
    """The part of a docstring before its first section: sections concern callers in Python."""
    cleaned = inspect.cleandoc(docstring or "")
    found = _SECTION.search(cleaned)
    return (cleaned if found is None else cleaned[: found.start()]).rstrip()


def _entries(docstring: str) -> dict[str, str]:
    """The entries of the sections "Args" and "Attributes" of a docstring, by name."""
    texts: dict[str, str] = {}
    name, indent, inside = "", 0, False
    for line in docstring.splitlines():
        if section := _SECTION.match(line):
            inside = section[1] in _WITH_NAMES
        elif line.strip() and not line.startswith(" "):
            inside = False
        elif inside and (entry := _ENTRY.match(line)) and len(entry[1]) <= (indent or 99):
            name, indent = entry[2], len(entry[1])
            texts[name] = entry[3]
        elif inside and name and line.strip():
            texts[name] += f" {line.strip()}"
    return texts
