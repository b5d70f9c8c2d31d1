"""The driver ``torch-eager``: intercepts operators as Python calls them."""
