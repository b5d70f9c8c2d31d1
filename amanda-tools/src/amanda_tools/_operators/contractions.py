"""Einstein sums: the multiply-accumulates of a contraction, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amanda_tools._operators.signature import Call


def einsum(call: Call) -> int:
    """The contraction, in the order that the operator was given, else from the left.

    A pair costs the product of the sizes of all its letters. Letters of one
    factor alone that nobody else needs are summed before, which costs no MAC;
    a single factor costs none.
    """
    attributes = call.signature.attributes
    factors, result = parsed(str(attributes["equation"]), [len(s) for s in call.given])
    sizes: dict[str, int] = {}
    for letters, shape in zip(factors, call.given, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            # One of them may be broadcast.
            sizes[letter] = max(size, sizes.get(letter, 1))
    path = list(attributes.get("path") or ())
    return _contracted(factors, result, sizes, path)


def parsed(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each factor and of the result; an ellipsis becomes capital numbers.

    Raises:
        LookupError: the equation does not fit the factors.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    factors = left.split(",")
    if len(factors) != len(ranks):
        raise LookupError(f"{equation} does not fit {len(ranks)} factors")
    wide = max(
        (rank - len(f.replace("...", "")) for f, rank in zip(factors, ranks, strict=True)),
        default=0,
    )
    # Letters of a private range stand for the axes of the ellipsis, the last ones first.
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
    terms = [set(letters) for letters in factors]
    total, step = 0, 0
    while len(terms) > 1:
        pair = sorted(path[step : step + 2]) if len(path) >= step + 2 else [0, 1]
        step += 2
        right, left = terms.pop(pair[1]), terms.pop(pair[0])
        needed = set(result).union(*terms)
        left &= needed | right
        right &= needed | left
        total += math.prod(sizes[letter] for letter in left | right)
        if path:
            terms.append((left | right) & needed)
        else:
            terms.insert(0, (left | right) & needed)
    return total
