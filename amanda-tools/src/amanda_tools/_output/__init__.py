"""Output shared by tools: units, charts, graphs, CSV files, the HTML page."""
