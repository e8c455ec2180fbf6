"""Variants of the engine: policies that can run, and forced even choices."""

import numpy as np
import pytest
import torch

from ultraep import Topology
from ultraep.errors import ConfigError
from ultraep.tools.serving.engine import EvenTurns, ForcedChoices, check_variants


def test_even_choices_load_all_ranks_and_experts_equally():
    topology = Topology(ranks=2, experts=8)
    loads = np.zeros((2, 8), dtype=int)
    for rank in range(2):
        hook = ForcedChoices(EvenTurns(topology, rank).chosen)
        assert hook(None, (), {}) is None
        hook.on = True
        ids = torch.zeros(64, 2, dtype=torch.int64)
        _, named = hook(None, (torch.ones(64, 4), ids), {"top_k_weights": None})
        loads[rank] = np.bincount(named["top_k_index"].flatten(), minlength=8)
        assert (named["top_k_index"].diff(dim=1) != 0).all()  # different experts per token
    assert loads.sum(axis=0).tolist() == [32] * 8


def test_policies_that_cannot_run_are_refused():
    check_variants(["none", "ultraep", "even", "registered"])
    with pytest.raises(ConfigError, match="lplb is an offline baseline"):
        check_variants(["none", "lplb"])
    with pytest.raises(ConfigError, match="unknown policy 'missing'"):
        check_variants(["missing"])
