"""Output shared by tools: units, charts as data, CSV files, the HTML page."""
