"""A trace for all tests of the viewer."""

import pytest

import ultraep
from view.runs import write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("view") / "run")


@pytest.fixture(scope="session")
def trace(run):
    return ultraep.read_trace(run)
