"""``inject``: faults and noise in activations, weights and gradients, and campaigns of them."""

from amanda_tools.inject.campaign import Campaign, Trial
from amanda_tools.inject.options import InjectOptions
from amanda_tools.inject.tool import InjectTool

__all__ = ["Campaign", "InjectOptions", "InjectTool", "Trial"]
