"""The axes of a weight in an Einstein sum, for mapping rules of any framework."""

from __future__ import annotations


def weight_layout(equation: str, index: int) -> str | None:
    """The layout of one of two factors that is a weight; None if there are not two.

    A letter for each axis: I for what is summed, O for what only the weight gives to the
    result, B for what the result has from both factors (there each position has a matrix of
    its own). The axes of an ellipsis have no letters.

    Args:
        equation: as in ``numpy.einsum``, such as ``abc,cde->abde``; without an arrow the
            result has the letters that occur once.
        index: which of the factors is the weight, 0 or 1.
    """
    left, arrow, result = equation.replace(" ", "").partition("->")
    factors = left.split(",")
    if len(factors) != 2:
        return None
    if not arrow:
        result = "".join(letter for letter in left if left.count(letter) == 1)
    other = factors[1 - index]
    return "".join(
        "I" if letter not in result else "B" if letter in other else "O"
        for letter in factors[index].replace("...", "")
    )
