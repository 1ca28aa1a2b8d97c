"""Second moments of a matrix's inputs: what an error in its weights costs, and how columns make it good.

For y = W x an error E = W - Q costs the mean of |E x|^2 = sum over rows e of e H e^T, with H the second
moments `[cols, cols]` of x. With H = U diag(c) U^T, U unit upper triangular, that is the sum over columns k
of c_k (w_k + sum_{j<k} e_j U_jk - q_k)^2: rounding column after column to the nearest of what stands left of
the minus takes each term's least. This is GPTQ (Frantar et al. 2022) in the form of LDLQ (Chee et al. 2023),
which needs no inverse of H.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import WeightValueError

Floats = NDArray[np.float32]

DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal: few tokens leave H without full rank."""

_MORE_DAMPING = (1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Feedback:
    """How errors of columns rounded earlier are made good by later ones.

    order: i64 `[cols]`, the columns as they are rounded; runs: for each group of columns its part
    `(start, stop)` of `order`; upper: f32 `[cols, cols]`, U in that order; costs: f32 `[cols]`, c.
    """

    order: NDArray[np.int64]
    runs: tuple[tuple[int, int], ...]
    upper: Floats
    costs: Floats


def feedback(moments: Floats, group: int, act_order: bool, name: str, damping: float = DAMPING) -> Feedback:
    """The factors of second moments `[cols, cols]` for a format with `group` columns per scale (0: one).

    act_order: groups with the largest inputs first, and likewise the columns inside a group; groups stay
    together, so that the store's layout is the same. Columns whose input was always 0 neither give nor take.
    Raises WeightValueError for moments that are not finite or are no second moments; `name` is for errors.
    """
    check_moments(moments, name)
    order, runs = _order(np.diagonal(moments), group, act_order)
    upper, costs = _upper(moments[np.ix_(order, order)].astype(np.float64), damping, name)
    return Feedback(order, runs, upper, costs)


def check_moments(moments: Floats, name: str) -> None:
    """Raises WeightValueError unless finite, square and with no negative diagonal."""
    if moments.ndim != 2 or moments.shape[0] != moments.shape[1]:
        raise _bad(name, f"their shape is {list(moments.shape)}, not square")
    bad = int(moments.size - np.isfinite(moments).sum())
    if bad:
        raise _bad(name, f"{bad} of {moments.size} are NaN or Inf")
    low = float(np.diagonal(moments).min(initial=0.0))
    if low < 0:
        raise _bad(name, f"a mean square is {low:g}, below 0")


def weighted_error(error: Floats, moments: Floats) -> float:
    """The cost of an error `[rows, cols]` of weights: the sum of e H e^T over its rows."""
    return float(np.einsum("rc,rc->", error @ moments, error, dtype=np.float64))


def _order(
    squares: NDArray[Any], group: int, act_order: bool
) -> tuple[NDArray[np.int64], tuple[tuple[int, int], ...]]:
    cols = len(squares)
    width = group or cols
    groups = [np.arange(start, min(start + width, cols)) for start in range(0, cols, width)]
    if act_order:
        groups = [part[np.argsort(-squares[part], kind="stable")] for part in groups]
        groups.sort(key=lambda part: -float(squares[part].mean()))  # sort is stable: the same every time
    ends = np.cumsum([0, *map(len, groups)]).tolist()
    return np.concatenate(groups), tuple(itertools.pairwise(ends))


def _upper(moments: NDArray[np.float64], damping: float, name: str) -> tuple[Floats, Floats]:
    """U and c of the damped moments; damped more where rounding made them indefinite."""
    squares = np.diagonal(moments)
    dead = squares == 0
    mean = float(squares[~dead].mean()) if not dead.all() else 1.0
    for more in _MORE_DAMPING:
        damped = moments.copy()
        np.fill_diagonal(damped, np.where(dead, mean, squares) + more * damping * mean)
        try:
            # The reversal of a lower factor of the reversal is an upper one.
            factor = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            continue
        ends = np.diagonal(factor)
        return (factor / ends).astype(np.float32), np.square(ends).astype(np.float32)
    raise _bad(name, f"they are not positive definite, not even with {more * damping:g} of their mean added")


def _bad(name: str, what: str) -> WeightValueError:
    return WeightValueError(
        f"{name}: second moments of its inputs cannot be used: {what}",
        remedy="make the statistics again with `strata calibrate`, or convert with --method plain",
    )
