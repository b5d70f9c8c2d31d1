"""FLOPs of solvers and decompositions of dense matrices, by published counts.

The counts are the terms of the highest order that Golub & Van Loan, *Matrix Computations* (4th
edition, 2013), state for the usual algorithms: 3.2 (LU), 4.2 (Cholesky), 5.2 and 5.3 (Householder
QR, least squares). For those of LAPACK they are the terms of the highest order of LAPACK Working
Note 41, appendix C. They are rounded to multiplications with an addition each; libraries may choose
other algorithms. Numbers are counted as real ones::

    COUNTS["linalg_qr"](call)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from amanda_tools._operators.signature import CallShapes, Shape, broadcast, by_name

Count = Callable[[CallShapes], int]


def lu(rows: int, columns: int) -> Fraction:
    """Gaussian elimination with row exchanges."""
    small, large = sorted((rows, columns))
    return small**2 * (large - Fraction(small, 3))


def cholesky(rows: int) -> Fraction:
    """Half of the elimination."""
    return Fraction(rows**3, 3)


def householder(rows: int, columns: int) -> Fraction:
    """The triangular factor, and reflectors for the orthogonal one."""
    return 2 * lu(rows, columns)


def orthogonal(rows: int, columns: int, reflectors: int) -> Fraction:
    """The orthogonal factor from its reflectors."""
    k = reflectors
    return 4 * rows * columns * k - 2 * (rows + columns) * k**2 + Fraction(4 * k**3, 3)


def _rounded(flops: Fraction | int) -> int:
    """Round to multiplications with an addition each."""
    return 2 * round(Fraction(flops) / 2)


def _of_matrix(flops: Callable[[CallShapes, int, int], Fraction | int]) -> Count:
    """The count for each matrix of the first input, from its rows and columns."""

    def formula(call: CallShapes) -> int:
        *batch, rows, columns = call.given[0]
        return math.prod(batch) * _rounded(flops(call, rows, columns))

    return formula


def _qr(call: CallShapes, rows: int, columns: int) -> Fraction:
    attributes, count = call.attributes, min(rows, columns)
    mode = attributes.get("mode", "complete" if attributes.get("full_matrices") else "reduced")
    made = {"r": 0, "complete": rows}.get(str(mode), count)
    factor = orthogonal(rows, made, count) if made else Fraction(0)
    return householder(rows, columns) + factor


def _old_qr(call: CallShapes, rows: int, columns: int) -> Fraction:
    count = min(rows, columns)
    made = count if call.attributes.get("some", True) else rows
    return householder(rows, columns) + orthogonal(rows, made, count)


def _householder_product(call: CallShapes, rows: int, columns: int) -> Fraction:
    return orthogonal(rows, columns, call.given[1][-1])


def _solver(
    flops: Callable[[int, int, int], Fraction | int], matrix: int = 0, right: int = 1
) -> Count:
    """The count for each system, from the rows and columns of its matrix, and its right sides.

    Args:
        matrix, right: positions of the matrices and of the right sides among the inputs.
    """

    def formula(call: CallShapes) -> int:
        *batch, rows, columns = call.given[matrix]
        size, count = _right_sides(call, batch, call.given[right], rows)
        return size * _rounded(flops(rows, columns, count))

    return formula


def _right_sides(
    call: CallShapes, batch: Sequence[int], right: Shape, rows: int
) -> tuple[int, int]:
    """How many systems there are, and the right sides of each."""
    if len(right) == 1 or (len(right) == len(batch) + 1 and right == (*batch, rows)):
        others, count = right[:-1], 1
    else:
        is_left = call.attributes.get("left", True)
        others, count = right[:-2], right[-1] if is_left else right[-2]
    return math.prod(broadcast(batch, others)), count


def _least_squares(rows: int, columns: int, count: int) -> Fraction:
    small, large = sorted((rows, columns))
    applied = count * (4 * large * small - 2 * small**2)
    return householder(rows, columns) + applied + count * small**2


COUNTS = by_name({
    _of_matrix(lambda _, rows, columns: lu(rows, columns)): """
        linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_det det linalg_slogdet slogdet logdet
    """,
    _of_matrix(lambda _, rows, __: cholesky(rows)): "linalg_cholesky linalg_cholesky_ex cholesky",
    _of_matrix(lambda _, rows, __: 2 * rows**3): "linalg_inv linalg_inv_ex inverse",
    _of_matrix(lambda _, rows, __: Fraction(2 * rows**3, 3)): "cholesky_inverse",
    _solver(lambda rows, columns, count: lu(rows, columns) + 2 * rows**2 * count):
        "linalg_solve linalg_solve_ex",
    # The triangular factors come behind the right sides, or before them.
    _solver(lambda rows, _, count: 2 * rows**2 * count, right=2): "linalg_lu_solve",
    _solver(lambda rows, _, count: 2 * rows**2 * count, matrix=1, right=0):
        "lu_solve cholesky_solve",
    _solver(lambda rows, _, count: rows**2 * count): "linalg_solve_triangular",
    _solver(lambda rows, _, count: rows**2 * count, matrix=1, right=0): "triangular_solve",
    _solver(_least_squares): "linalg_lstsq",
    _of_matrix(_qr): "linalg_qr",
    _of_matrix(_old_qr): "qr",
    _of_matrix(lambda _, rows, columns: householder(rows, columns)): "geqrf",
    _of_matrix(_householder_product): "linalg_householder_product orgqr",
})  # fmt: skip
"""Counts by canonical type. Eigenvalues, singular values and ``linalg_matrix_exp`` have none: how
many iterations or products they take depends on the values."""
