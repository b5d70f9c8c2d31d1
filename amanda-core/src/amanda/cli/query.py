"""``amanda query``: asks the results of a run, of all ranks, in SQL."""

from __future__ import annotations

from collections.abc import Sequence

from amanda.cli.messages import WRONG_USAGE, CommandParser, complain
from amanda.errors import AmandaError
from amanda.registry import plugins
from amanda.tools.reporting import plain_text


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0, or 2 if the query cannot be answered."""
    parser = CommandParser(
        prog="amanda query",
        description="Ask the results in DIR, a folder or its URL, in SQL. Each tool is a table.",
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("sql", metavar="SQL", nargs="?", default="", help="default: list tables")
    given = parser.parse_args(arguments)
    try:
        table, left_out = plugins.table_store("amanda query").query(given.folder, given.sql)
    except (AmandaError, OSError) as error:
        complain(f"error: {error}")
        return WRONG_USAGE
    for problem in left_out:
        complain(f"warning: {problem}")
    print(plain_text(table, full=True))
    return 0
