"""What is installed: plugins, their tools, drivers and hooks, and the choice among them."""
