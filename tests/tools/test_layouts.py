"""Tensors in their canonical layout, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amanda
from amanda.errors import MappingError
from amanda.interface.context import OpState
from amanda.tools import layouts


@pytest.mark.parametrize(
    ("layout", "shape", "canonical_layout", "expected"),
    [
        ("HWIO", (3, 2, 4, 8), "OIHW", (8, 4, 3, 2)),
        ("HWOI", (3, 2, 4, 8), "OIHW", (4, 8, 3, 2)),
        ("IOHW", (4, 8, 3, 2), "OIHW", (8, 4, 3, 2)),
        ("DHWIO", (1, 3, 2, 4, 8), "OIDHW", (8, 4, 1, 3, 2)),
        ("HWCM", (3, 2, 4, 5), "OIHW", (20, 1, 3, 2)),
        ("IO", (4, 8), "OI", (8, 4)),
        ("BIO", (2, 4, 8), "BOI", (2, 8, 4)),
        ("IOO", (6, 2, 3), "OI", (6, 6)),
        ("IIO", (2, 3, 5), "OI", (5, 6)),
        ("OIHW", (8, 4, 3, 3), "OIHW", (8, 4, 3, 3)),
    ],
)
def test_weights_have_one_layout_and_come_back(
    layout: str, shape: tuple[int, ...], canonical_layout: str, expected: tuple[int, ...]
) -> None:
    """To the canonical layout and back is the identity."""
    array = np.arange(np.prod(shape)).reshape(shape)
    converted = conversion(layout, "weight", shape)
    there = converted.to_canonical(array)
    assert (converted.canonical, there.shape) == (canonical_layout, expected)
    np.testing.assert_array_equal(converted.from_canonical(there), array)


class Context(amanda.OpContext):
    """The context of an operator whose weight has a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(OpState(None, "op"), "none")
        self._shape = shape

    def get_value(self, index: int) -> Any:
        return np.zeros(self._shape)


def conversion(layout: str, role: str, shape: tuple[int, ...]) -> layouts.Conversion:
    """The conversion of a tensor of an operator with this layout."""
    context = Context(shape)
    context[f"{role}_layout"], context["weight_index"] = layout, 0
    found = layouts.conversion(context, role)
    assert found is not None
    return found


@pytest.mark.parametrize("shape", [(2, 5, 6, 3), (5, 6, 3)])
def test_data_have_one_layout_with_or_without_a_batch(shape: tuple[int, ...]) -> None:
    """NHWC data become NCHW, HWC data CHW, and come back."""
    array = np.arange(np.prod(shape)).reshape(shape)
    converted = conversion("NHWC", "data", shape)
    there = converted.to_canonical(array)
    assert there.shape == (*shape[:-3], 3, 5, 6)
    np.testing.assert_array_equal(converted.from_canonical(there), array)


def test_a_tensor_with_other_axes_is_refused() -> None:
    """The error has the shape and the layout."""
    with pytest.raises(MappingError, match=r"shape \(2, 3\) does not have the layout NHWC"):
        conversion("NHWC", "data", (1, 1, 1, 1)).to_canonical(np.zeros((2, 3)))


def test_a_role_is_weight_or_data() -> None:
    """Any other one is refused."""
    with pytest.raises(ValueError, match="weight or data, got 'bias'"):
        conversion("NHWC", "bias", (1,))
