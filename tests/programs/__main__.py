"""Runs the programs of a framework, each in processes of its own, and prints a table.

    python -m tests.programs torch                       # all of them
    python -m tests.programs torch transformers_gpt2     # some
    python -m tests.programs tensorflow --write          # the lines go into the document, too

The exit status is 1 if a program failed, or a value was not bit-identical.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.programs import processes, table
from tests.programs.registry import collect


def main() -> int:
    """Run the programs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("framework", choices=["torch", "tensorflow"])
    parser.add_argument("names", nargs="*", help="programs; all, if none is named")
    parser.add_argument("--write", action="store_true", help=f"the lines go into {table.DOCUMENT}")
    parser.add_argument(
        "--together", action="store_true", help="all in this process, which is quicker"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        processes.report(options.framework, options.names[0])
        return 0
    if options.together:
        # No framework is imported yet: their threads sum in an order of their own otherwise.
        os.environ.update(processes.ENVIRONMENT)
    programs = collect(options.framework)
    failed = False
    for name in options.names or programs:
        program = programs[name]
        fits = program.environment.items() <= os.environ.items() and program.ranks == 1
        alone = not (options.together and fits)
        row = processes.compared(program) if alone else processes.compared_here(program)
        print(table.line(row), flush=True)
        for problem in row.problems():
            print(problem, flush=True)
            failed = True
        if options.write:
            table.write(row)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
