"""Amanda's driver for minigrad."""
