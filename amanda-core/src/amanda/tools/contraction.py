"""The roles of a weight's axes in an Einstein summation, for mapping rules of any framework.

``weight_layout("bi,oi->bo", 1)`` is ``"OI"``: the weight has output rows and input columns.
"""

from __future__ import annotations


def weight_layout(equation: str, index: int) -> str | None:
    """The layout of a weight that is one of the two factors of an Einstein summation.

    Args:
        equation: as in ``numpy.einsum``, such as ``abc,cde->abde``; without an arrow the
            result has the letters that occur once.
        index: position of the weight among the factors, 0 or 1.

    Returns:
        A letter for each axis of the weight: I (input) for an axis that is summed over, O (output)
        for an axis of the result that only the weight has, B (batch) for an axis of the result
        that both factors have, along which each position has a matrix of its own. The axes of an
        ellipsis have no letters. None if there are not two factors.
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
