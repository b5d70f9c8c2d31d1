"""The options of ``summary``."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class SummaryOptions:
    """The options of ``summary``.

    Attributes:
        depth: levels of modules below the model that tables show; 0 for all.
        repeated: show modules that are alike one by one, such as the blocks of a transformer.
        shapes: also show the kernel size of each module, and shape and element type of its first
            input and output.
        csv: also write the rows of all modules as a table.
    """

    depth: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    repeated: bool = False
    shapes: bool = False
    csv: bool = False
