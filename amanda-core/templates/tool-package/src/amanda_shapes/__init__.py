"""An Amanda tool: the shapes of what operators give."""
