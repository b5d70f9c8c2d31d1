"""Tools for Amanda: ``count``, ``trace``, ``flops``, ``profile``, ``nan`` and thirteen more.

``amanda.tools.load("flops")`` gives a tool by the name that ``amanda run -t flops`` uses. A module
or folder without a leading underscore is the tool of its name.
"""

__version__ = "0.1.0"
