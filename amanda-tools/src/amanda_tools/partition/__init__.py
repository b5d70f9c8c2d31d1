"""``partition``: cuts the graph of a model into parts that run one after the other."""

from amanda_tools.partition.options import PartitionOptions
from amanda_tools.partition.tool import PartitionTool

__all__ = ["PartitionOptions", "PartitionTool"]
