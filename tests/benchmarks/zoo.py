"""All optimization tools on published models of both frameworks, as a table in Markdown.

    python -m tests.benchmarks.zoo
    python -m tests.benchmarks.zoo --models resnet50,ResNet50 --tools nm,qat --function

A cell has the number of operators that a tool treats, and after a plus the number of those that it
skips; the reasons follow the table. Each cell takes two steps of training, the whole table half an
hour.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Sequence

from tests.tools.optimization import zoo


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the reasons."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.zoo", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--models", default=",".join([*zoo.TORCH, *zoo.KERAS]))
    parser.add_argument("--tools", default=",".join(zoo.TOOLS))
    parser.add_argument("--function", action="store_true", help="Keras in a tf.function")
    options = parser.parse_args(arguments)
    tools = options.tools.split(",")
    print("| | " + " | ".join(tools) + " |\n|---|" + "---|" * len(tools), flush=True)
    reasons: collections.Counter[str] = collections.Counter()
    for model in options.models.split(","):
        made = zoo.TORCH.get(model)
        step = made() if made else zoo.KERAS[model](options.function)
        cells = []
        for name in tools:
            count, skipped = zoo.treated(zoo.made(name), step)
            cells.append(f"{count} + {len(skipped)}" if skipped else str(count))
            reasons.update(f"{name}: {reason}" for reason in skipped)
        print(f"| {model} | " + " | ".join(cells) + " |", flush=True)
    print()
    for reason, count in reasons.most_common():
        print(f"- {count} x {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
