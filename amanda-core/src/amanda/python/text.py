r"""Text of programs in messages and tables: names of modules and operators may hold anything.

``printable("a\x1b[2J")`` is ``a\x1b[2J`` written out, which a terminal shows and does not obey.
"""

from __future__ import annotations

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, keep: str = "") -> str:
    """Escape the characters of a text that a terminal would obey, and those no encoding has.

    Control characters, which terminals take for commands, marks that change the direction of
    writing, and lone surrogates are written as in a Python string. All others stay.

    Args:
        text: the text.
        keep: characters that stay, such as a line break.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else _ESCAPES.get(c) or ascii(c)[1:-1] for c in text
    )
