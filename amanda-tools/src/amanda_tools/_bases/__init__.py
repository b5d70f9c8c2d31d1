"""Base classes shared by tools."""
