"""Every private symbol of TensorFlow that this package uses, in functions named by what they do.

Nothing outside of this folder names one (ruff's SLF001 and TID251 check that). What is expected of
them is in :mod:`amanda_tensorflow._internals.symbols`. Other modules read all names from here::

    from amanda_tensorflow import _internals

    _internals.count_operations(graph)
"""

import tensorflow as tf

from amanda.errors import CapabilityError
from amanda_tensorflow._internals.symbols import *

# The modules below read private symbols while they are imported.
try:
    from amanda_tensorflow._internals.graphs import *
    from amanda_tensorflow._internals.runtime import *
    from amanda_tensorflow._internals.sessions import *
except (AttributeError, ImportError) as error:
    raise CapabilityError(
        f"TensorFlow {tf.__version__} is not as amanda-tensorflow needs it: {error}; install a "
        "release of amanda-tensorflow for it"
    ) from error
