"""Einstein sums: the letters of an equation, and the FLOPs of a contraction.

``parse_equation("...ij,jk->...ik", [3, 2])`` gives the letters of each factor and of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from amanda_tools._operators.signature import CallShapes


def einsum(call: CallShapes) -> int:
    """FLOPs of a contraction, pair by pair in the order of attribute ``path``, else from the left.

    A pair costs twice the product of the sizes of all of its letters. A letter that stands in one
    factor only, and in nothing that follows, is summed first, which costs nothing; a single factor
    costs nothing either.
    """
    attributes = call.attributes
    factors, result = parse_equation(str(attributes["equation"]), [len(s) for s in call.given])
    sizes: dict[str, int] = {}
    for letters, shape in zip(factors, call.given, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            # A size of 1 is broadcast.
            sizes[letter] = max(size, sizes.get(letter, 1))
    path = list(attributes.get("path") or ())
    return _contracted(factors, result, sizes, path)


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Split an equation into the letters of each factor and of the result.

    The axes of an ellipsis get letters of their own, from a private range of Unicode.

    Raises:
        LookupError: the equation does not fit factors of these ranks.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    factors = left.split(",")
    if len(factors) != len(ranks):
        raise LookupError(f"{equation} does not fit {len(ranks)} factors")
    wide = max(
        (rank - len(f.replace("...", "")) for f, rank in zip(factors, ranks, strict=True)),
        default=0,
    )
    # Aligned at the right, as broadcasting is: the last axis of every ellipsis has the same letter.
    dots = "".join(chr(0xE000 + i) for i in range(wide))
    expanded = [
        factor.replace("...", dots[wide - (rank - len(factor.replace("...", ""))) :])
        for factor, rank in zip(factors, ranks, strict=True)
    ]
    if arrow:
        return expanded, right.replace("...", dots)
    named = "".join(factors).replace("...", "")
    return expanded, dots + "".join(sorted(c for c in set(named) if named.count(c) == 1))


def _contracted(
    factors: Sequence[str], result: str, sizes: dict[str, int], path: Sequence[int]
) -> int:
    """FLOPs of a contraction; `path` gives two positions per step, as ``torch.einsum`` takes it."""
    terms = [set(letters) for letters in factors]
    total, step = 0, 0
    while len(terms) > 1:
        pair = sorted(path[step : step + 2]) if len(path) >= step + 2 else [0, 1]
        step += 2
        # The larger position first: removing it does not shift the other.
        right, left = terms.pop(pair[1]), terms.pop(pair[0])
        needed = set(result).union(*terms)
        # Letters of one factor that nothing else needs are summed before the product.
        left &= needed | right
        right &= needed | left
        total += 2 * math.prod(sizes[letter] for letter in left | right)
        # With a path the result is the last term, as torch.einsum counts; else it is the first
        # factor.
        if path:
            terms.append((left | right) & needed)
        else:
            terms.insert(0, (left | right) & needed)
    return total
