"""Options that apply to some values of other options only."""

from __future__ import annotations

import io
from typing import Any

import attrs
import pytest

import amanda
from amanda.results import Table
from amanda_tools.printing import PrintingTool


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("prune", {"method": "nm", "sparsity": 0.9}),
        ("prune", {"n": 1}),
        ("prune", {"m": 8}),
        ("prune", {"tile": 4}),
        ("prune", {"block": 4}),
        ("prune", {"every": 4}),
        ("prune", {"masks": "masks.safetensors", "sparsity": 0.9}),
        ("prune", {"masks": "masks.safetensors", "end": 9}),
        ("inject", {"fault": "value", "bit": 3}),
        ("inject", {"value": 3.0}),
        ("inject", {"std": 3.0}),
        ("inject", {"low": -3.0}),
        ("inject", {"fault": "normal", "high": 3.0}),
        ("inject", {"rate": 0.1, "count": 3}),
        ("quantize", {"percentile": 99.0}),
        ("quantize", {"method": "dynamic", "calibration": 3}),
        ("quantize", {"weight_bits": 0, "per_channel": True}),
        ("quantize", {"activation_bits": 0, "symmetric": True}),
        ("diff", {"tolerance": 0.1}),
        ("diff", {"align": "id"}),
        ("sparsity", {"tensors": "activations", "pattern": "1:2"}),
    ],
)
def test_an_option_without_effect_is_refused(tool: str, options: dict[str, Any]) -> None:
    """Whoever gives an option expects something of it; the message says what it is for."""
    with pytest.raises(ValueError, match=f"tool {tool}: .* has no effect: it is for "):
        amanda.tools.load(tool)(**options)


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("prune", {"method": "nm", "n": 1, "m": 4}),
        ("prune", {"method": "tile", "tile": 4, "end": 9, "every": 3}),
        ("inject", {"fault": "uniform", "low": -3.0, "count": 3}),
        ("quantize", {"observer": "percentile", "percentile": 99.0}),
    ],
)
def test_options_that_belong_together_are_taken(tool: str, options: dict[str, Any]) -> None:
    """No error is raised for options that apply together."""
    amanda.tools.load(tool)(**options)


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("inject", {"fault": "normal", "std": float("inf")}),
        ("inject", {"fault": "normal", "std": float("nan")}),
        ("inject", {"fault": "uniform", "high": float("inf")}),
        ("inject", {"fault": "uniform", "low": float("nan")}),
        ("quantize", {"method": "qat", "learning_rate": float("inf")}),
        ("prune", {"sparsity": float("nan")}),
        ("path", {"theta": float("nan")}),
    ],
)
def test_an_option_that_is_no_number_is_refused(tool: str, options: dict[str, Any]) -> None:
    """Infinities and NaN where a tool computes with the value."""
    with pytest.raises(ValueError, match=r"nan|inf"):
        amanda.tools.load(tool)(**options)


def test_the_base_class_that_prints_tables_has_a_public_name() -> None:
    """Tables of tools of others look like ours, and send no commands to a terminal."""

    @attrs.frozen
    class NoOptions:
        pass

    class Own(PrintingTool[NoOptions]):
        """A tool."""

        name = "own"
        Options = NoOptions

        def tables(self) -> Any:
            """One."""
            return [Table("own: \x1b[2J", ("op\x1b",), [("a\x1b[31m",)])]

    out = io.StringIO()
    Own().print_summary(out)
    assert "\x1b" not in out.getvalue()
    assert "a\\x1b[31m" in out.getvalue()
