"""Base classes of tools: printed tables, watched tensors; checks of options."""
