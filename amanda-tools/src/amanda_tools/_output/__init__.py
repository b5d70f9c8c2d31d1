"""Output shared by tools: units, tables, charts, CSV files, the page of a run."""
