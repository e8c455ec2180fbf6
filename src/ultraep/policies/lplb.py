"""LPLB: experts placed by their past load, and the current load split by a linear program.

Source: DeepSeek's LPLB (2025). The placement is fixed by past loads. For every batch a linear
program divides the exact load over the instances so that the fullest rank gets as little as
possible.

Ours differs: the published one gives each expert at most one copy, along the edges of a fixed
graph; here the instances are those of `eplb`, which gives the program more freedom. The program is
solved by HiGHS (SciPy) instead of an interior-point kernel, and its solution is rounded to whole
tokens, which can lift a rank by less than one token for every replicated expert that it holds. The
fullest rank is the same with every version of HiGHS up to that rounding; which of several equally
good splits is found may differ. The same settings are refused as by `eplb`.

Shapes: R ranks, E experts, X instances of replicated experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import BackendUnavailable
from ultraep.policies import Problem, register_policy
from ultraep.policies.eplb import BoolArray, as_copies, place_by_history, split_equally

FloatArray = NDArray[np.float64]
DECIMALS = 6  # the solver's own noise is below this, and must not decide who is rounded up


@register_policy("lplb", within_limits=False, needs_history=True)
def lplb(problem: Problem) -> IntArray:
    """DeepSeek LPLB: placed by past loads, split by a linear program."""
    quota_ER = split_by_program(problem.expert_loads, place_by_history(problem))
    return as_copies(quota_ER, problem.topology.home_of_expert)


def split_by_program(loads_E: IntArray, held_ER: BoolArray) -> IntArray:
    """[E, R] tokens of every instance, such that the fullest rank has as little as possible."""
    optimize, sparse = _scipy()
    replicated_E = (held_ER.sum(axis=1) > 1) & (loads_E > 0)
    quota_ER = split_equally(np.where(replicated_E, 0, loads_E), held_ER)
    expert_X, rank_X = np.nonzero(held_ER & replicated_E[:, None])
    if not len(expert_X):
        return quota_ER
    index_X, ones_X = np.arange(len(expert_X)), np.ones(len(expert_X))
    ranks = held_ER.shape[1]
    instance_at_rank = sparse.coo_array((ones_X, (rank_X, index_X)), (ranks, len(index_X)))
    row_X = np.cumsum(replicated_E)[expert_X] - 1
    instance_of_expert = sparse.coo_array((ones_X, (row_X, index_X)))
    # Unknowns: the tokens of every instance, then the fullest rank, which is made small.
    found = optimize.linprog(
        c=np.append(np.zeros(len(index_X)), 1.0),
        A_ub=sparse.hstack([instance_at_rank, -np.ones((ranks, 1))], format="csr"),
        b_ub=-quota_ER.sum(axis=0),
        A_eq=sparse.hstack([instance_of_expert, np.zeros((row_X[-1] + 1, 1))], format="csr"),
        b_eq=loads_E[replicated_E],
        method="highs",
    )
    assert found.success, found.message
    tokens_ER = np.zeros(held_ER.shape)
    tokens_ER[expert_X, rank_X] = found.x[:-1]
    quota_ER[replicated_E] = round_rows(tokens_ER[replicated_E], loads_E[replicated_E])
    return quota_ER


def round_rows(values: FloatArray, sums: IntArray) -> IntArray:
    """Whole numbers with these row sums: rounded down, then up by the largest fractions.

    >>> round_rows(np.array([[1.5, 0.0, 0.7, 2.8]]), np.array([5]))
    array([[1, 0, 1, 3]])
    """
    values = np.round(values, DECIMALS)
    whole = np.floor(values).astype(np.int64)
    place = np.argsort(np.argsort(whole - values, axis=1, kind="stable"), axis=1)
    missing = sums - whole.sum(axis=1)
    rounded: IntArray = whole + (place < missing[:, None])
    return rounded


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise BackendUnavailable(
            "policy 'lplb' solves a linear program with SciPy: pip install 'ultraep[lp]'"
        ) from error
    return optimize, sparse
