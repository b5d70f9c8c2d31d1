"""Namespaces: the framework, its version and the execution mode in which an operator runs.

::

    Namespace("pytorch/2.13/eager").tags                 # ("pytorch", "2.13", "eager")
    Namespace("pytorch/2.13/eager").matches("pytorch")   # True
"""

from __future__ import annotations

import functools


class Namespace(str):
    """Tags separated by slashes, such as ``"pytorch/2.13/eager"`` (paper, section 5.2).

    It is a string: it compares, hashes and prints like one.
    """

    __slots__ = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags: framework, version, execution mode."""
        return _tags(self)

    def matches(self, pattern: str) -> bool:
        """True if `pattern` is a prefix of this namespace, tag by tag.

        ``"pytorch"`` and ``"pytorch/2.13"`` match ``"pytorch/2.13/eager"``;
        ``"*"`` stands for any one tag, so ``"pytorch/*/eager"`` matches too.
        """
        return _matches(self, pattern)


# There are few namespaces, and each analysis of an operator asks one.


@functools.lru_cache(maxsize=256)
def _tags(namespace: str) -> tuple[str, ...]:
    return tuple(tag for tag in namespace.split("/") if tag)


@functools.lru_cache(maxsize=256)
def _matches(namespace: str, pattern: str) -> bool:
    wanted, own = _tags(pattern), _tags(namespace)
    return len(wanted) <= len(own) and all(
        tag in ("*", mine) for tag, mine in zip(wanted, own, strict=False)
    )
