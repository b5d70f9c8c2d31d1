"""``prune``: zeros in weights and activations, by six methods, on any model."""

from amanda_tools.prune.options import PruneOptions
from amanda_tools.prune.tool import PruneTool

__all__ = ["PruneOptions", "PruneTool"]
