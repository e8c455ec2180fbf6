"""Processes that share one GPU.

Every test has new processes: torch's symmetric memory remembers groups by their names.
"""

import shutil

import pytest


@pytest.fixture(scope="session")
def mps():
    """Start CUDA MPS; yields its directories, empty if it is not installed."""
    from mps import CONTROL, daemon

    if shutil.which(CONTROL) is None:
        yield {}
        return
    with daemon() as directories:
        yield directories


def sharing(size, directories):
    from gpu_ranks import processes

    with processes(size, directories) as pool:
        yield pool


@pytest.fixture
def two(mps):
    """With half of the multiprocessors each, enough to sum gradients beside a product."""
    yield from sharing(2, mps)


@pytest.fixture
def four(mps):
    yield from sharing(4, mps)


@pytest.fixture
def mortal():
    """Up to four processes that may die: they take turns on the GPU, without CUDA MPS."""
    yield from sharing(4, {})
