"""Output shared by tools: units, charts, CSV and event files, the HTML page, notebooks."""
