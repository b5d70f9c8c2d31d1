"""The base class for tools whose tables are printed with rich, as those of this package are.

::

    from amanda_tools.printing import PrintingTool


    class ZerosTool(PrintingTool[ZerosOptions]): ...

It is ``amanda.tools.reporting.ReportingTool`` with another ``print_summary()``.
"""

from amanda_tools._bases.printing import PrintingTool

__all__ = ["PrintingTool"]
