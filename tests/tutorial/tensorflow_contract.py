"""The contract tests that the TensorFlow drivers skip, as amanda-tensorflow's README shows them.

    python -m tests.tutorial.tensorflow_contract --write

They are found by running them: those that need a capability which a driver does not
state, and those that say in their body where they do not apply. The table of the
capabilities themselves is made by ``tests/tensorflow/test_capabilities.py``.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from amanda.interface.driver import Driver
from amanda_tensorflow.plugin import (
    TensorFlowEagerDriver,
    TensorFlowFunctionDriver,
    TensorFlowGraphDriver,
)

ROOT = Path(__file__).parents[2]
README = ROOT / "amanda-tensorflow/README.md"
BEGIN, END = "<!-- skipped -->\n", "<!-- end -->"

DRIVERS: Sequence[type[Driver]] = (
    TensorFlowEagerDriver,
    TensorFlowFunctionDriver,
    TensorFlowGraphDriver,
)
CONTRACT = "tests/tensorflow/test_contract.py"
CLASSES = {
    "TestEager": TensorFlowEagerDriver,
    "TestTapeInside": TensorFlowFunctionDriver,
    "TestTapeOutside": TensorFlowFunctionDriver,
    "TestSession": TensorFlowGraphDriver,
}

Skips = dict[str, dict[str, set[type[Driver]]]]
"""Reason, to test, to the drivers that skip it for that."""


def skips() -> Skips:
    """The contract tests that are skipped, by the reason that they give."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:xdist"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", f"--junitxml={report}", *_candidates()],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the contract is not kept:\n{done.stdout}{done.stderr}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: Skips = collections.defaultdict(lambda: collections.defaultdict(set))
    for case in cases:
        skipped = case.find("skipped")
        if skipped is not None:
            driver = CLASSES[case.attrib["classname"].rpartition(".")[2]]
            reason = _reason(skipped.attrib["message"])
            found[reason][case.attrib["name"].partition("[")[0]].add(driver)
    return found


def _candidates() -> list[str]:
    """The contract tests that may be skipped: running all of them takes minutes."""
    from amanda.testing import DriverContract

    names = []
    for name, function in inspect.getmembers(DriverContract, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        needed = getattr(function, "requires", ())
        is_lacked = any(c not in driver.capabilities for c in needed for driver in DRIVERS)
        source = inspect.getsource(function)
        if is_lacked or "self.needs_" in source or "pytest.skip(" in source:
            names.append(name)
    return [f"{CONTRACT}::{cls}::{name}" for cls in CLASSES for name in names]


def _reason(message: str) -> str:
    """What a skip says, the same for all drivers."""
    for driver in DRIVERS:
        message = message.replace(f"{driver.name} lacks", "without")
    return message


def _drivers(drivers: set[type[Driver]]) -> str:
    return ", ".join(driver.mode for driver in DRIVERS if driver in drivers)


def rows(found: Skips) -> Iterator[str]:
    """The lines of the table."""
    yield "| contract tests that do not apply | because | modes |"
    yield "|---|---|---|"
    for reason, tests in sorted(found.items()):
        by_drivers = collections.defaultdict(list)
        for test, drivers in sorted(tests.items()):
            by_drivers[_drivers(drivers)].append(f"`{test}`")
        for drivers, names in by_drivers.items():
            yield f"| {', '.join(names)} | {reason} | {drivers} |"


def generated() -> str:
    """What stands in the README between its marks."""
    return "\n".join([*rows(skips()), ""])


def in_readme() -> str:
    """What stands there now."""
    return README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it into the README."""
    parser = argparse.ArgumentParser(prog="python -m tests.tutorial.tensorflow_capabilities")
    parser.add_argument("--write", action="store_true", help="into amanda-tensorflow/README.md")
    text = generated()
    if parser.parse_args(arguments).write:
        before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        README.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
