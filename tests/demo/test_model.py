"""The model and even routing, in one process."""

import pytest
import torch

from ultraep import Balancer
from ultraep.layer import BalancedMoE
from ultraep.runtime.local import LocalGroup
from ultraep.tools.demo.ranks import route_evenly
from ultraep.tools.tiny.model import ModelConfig, TinyMoE
from ultraep.topology import even_homes

CONFIG = ModelConfig(hidden=16, ffn=16, experts=4, layers=2, heads=2)


@pytest.fixture
def tiny():
    return TinyMoE(CONFIG, Balancer("alone", experts=4)).double()


@pytest.mark.parametrize("ranks", [2, 3])
def test_even_routing_is_even_over_ranks_however_the_homes_are(ranks):
    homes = even_homes(experts=8, ranks=ranks)

    def body(comm):
        balancer = Balancer(comm, experts=homes)
        moe = BalancedMoE.swiglu(4, 4, 8, 3, balancer=balancer)
        tokens = torch.zeros(24, 4)
        own, gates, _ = moe.router(tokens)
        with route_evenly(moe):
            even, same_gates, _ = moe.router(tokens)
        assert torch.equal(gates, same_gates)
        assert torch.equal(own, moe.router(tokens)[0])
        assert all(len(set(row)) == 3 for row in even.tolist())
        return torch.tensor(homes)[even].flatten()

    chosen = torch.cat(LocalGroup(ranks).run(body))
    assert torch.bincount(chosen).tolist() == [24 * 3] * ranks
