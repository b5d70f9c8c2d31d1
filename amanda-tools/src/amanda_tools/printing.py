"""The base class of the tools of this package, for other packages' tools.

::

    from amanda_tools.printing import PrintingTool


    class ZerosTool(PrintingTool[ZerosOptions]): ...

It is ``amanda.tools.reporting.ReportingTool`` with CSV files (option ``csv``).
"""

from amanda_tools._bases.printing import PrintingTool

__all__ = ["PrintingTool"]
