"""Amanda's driver for PyTorch. Importing it imports no torch."""
