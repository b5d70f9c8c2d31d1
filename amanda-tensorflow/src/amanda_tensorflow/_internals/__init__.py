"""Every private symbol of TensorFlow that this package uses, in functions named by what they do.

Nothing outside of this folder names one (ruff's SLF001 and TID251 check that). What is expected of
them is in :mod:`amanda_tensorflow._internals.symbols`. Other modules read all names from here::

    from amanda_tensorflow import _internals

    _internals.count_operations(graph)
"""

from amanda_tensorflow._internals.symbols import *
from amanda_tensorflow._internals.symbols import require_importable

# The modules below read private symbols while they are imported: without this check a missing one
# would be an AttributeError somewhere in them.
require_importable()

from amanda_tensorflow._internals.gradients import *  # noqa: E402
from amanda_tensorflow._internals.graphs import *  # noqa: E402
from amanda_tensorflow._internals.runtime import *  # noqa: E402
from amanda_tensorflow._internals.sessions import *  # noqa: E402
