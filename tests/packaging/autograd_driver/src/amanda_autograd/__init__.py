"""Amanda's driver for autograd."""
