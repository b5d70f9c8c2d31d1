"""An Amanda tool: the output shapes of operators."""
