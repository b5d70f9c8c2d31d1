"""The installed plugins with their tools, drivers and hooks, and the choice among the drivers."""
