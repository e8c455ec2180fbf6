"""Fixtures of the commands that simulate."""

from dataclasses import replace

import pytest

from ultraep.tools.cli import scenario
from ultraep.tools.sim.model import load_model


@pytest.fixture(scope="module")
def few_layers():
    """Simulate models of eight layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario, "load_model", lambda name: replace(load_model(name), layers=8))
        yield
