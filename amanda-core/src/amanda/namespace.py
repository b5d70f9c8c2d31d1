"""Namespaces: the framework, its version and the execution mode in which an operator runs."""

from __future__ import annotations


class Namespace(str):
    """Tags separated by slashes, such as ``"pytorch/2.13/eager"`` (paper, section 5.2).

    It is a string: it compares, hashes and prints like one.
    """

    __slots__ = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags: framework, version, execution mode."""
        return tuple(tag for tag in self.split("/") if tag)

    def matches(self, pattern: str) -> bool:
        """Whether `pattern` is a prefix of this namespace, tag by tag.

        ``"pytorch"`` and ``"pytorch/2.13"`` match ``"pytorch/2.13/eager"``;
        ``"*"`` stands for any one tag, so ``"pytorch/*/eager"`` matches too.
        """
        wanted = Namespace(pattern).tags
        own = self.tags
        return len(wanted) <= len(own) and all(
            tag in ("*", mine) for tag, mine in zip(wanted, own, strict=False)
        )
