"""The driver ``torch-graph``: writes routines into the graphs of ``torch.compile``."""
