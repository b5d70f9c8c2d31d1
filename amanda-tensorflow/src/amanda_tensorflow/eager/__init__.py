"""The driver ``tensorflow-eager``: intercepts operators as Python executes them."""
