"""Tests of torchtitan. They use the model and the CUDA stand-ins of the example."""

import sys
from pathlib import Path

import pytest
import warm

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("torchtitan")
warm.preload("titan_runs")


@pytest.fixture(scope="session")
def passes(tmp_path_factory):
    """Return a function that runs one pass; unmodified passes are computed once."""
    from ranks import shared_pool
    from titan_runs import one_pass

    cache = {}

    def run(family, size, overrides=(), **settings):
        key = family, size, repr(settings)
        if overrides or key not in cache:
            settings["folder"] = tmp_path_factory.mktemp("pass")
            results = shared_pool().run(size, one_pass, family, overrides, settings)
            if overrides:
                return results
            cache[key] = results
        return cache[key]

    return run
