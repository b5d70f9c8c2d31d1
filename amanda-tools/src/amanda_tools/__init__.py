"""Tools for Amanda: ``count`` and ``trace``."""

__version__ = "0.1.0"
