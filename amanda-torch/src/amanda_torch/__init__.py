"""The drivers for PyTorch. Importing this package imports no torch."""
