"""The model and even routing, in one process."""

import pytest
import torch

from ultraep import Balancer
from ultraep.layer import BalancedMoE
from ultraep.parallel.full_state import moe_layers
from ultraep.runtime.local import LocalGroup
from ultraep.tools.demo.ranks import route_evenly
from ultraep.tools.tiny.model import ModelConfig, TinyMoE
from ultraep.topology import even_homes

CONFIG = ModelConfig(hidden=16, ffn=16, experts=4, layers=2, heads=2)


@pytest.fixture
def tiny():
    return TinyMoE(CONFIG, Balancer("alone", experts=4)).double()


def test_texts_in_one_sequence_are_masked_from_each_other(tiny):
    first, second = torch.arange(7), torch.arange(50, 55)
    alone = tiny(second[None])[0]
    positions = torch.cat([torch.arange(7), torch.arange(5)])
    together = tiny(torch.cat([first, second])[None], positions[None])[0, 7:]
    assert torch.allclose(alone, together, rtol=1e-12, atol=1e-12)


def test_unevenness_is_one_per_even_layer_and_has_gradients_of_the_routers(tiny):
    tokens, routers = torch.arange(64)[None], [moe.router for moe in moe_layers(tiny).values()]
    tiny(tokens)
    tiny.unevenness.backward()
    assert tiny.unevenness > CONFIG.layers
    assert all(router.weight.grad.abs().max() > 0 for router in routers)
    for router in routers:
        torch.nn.init.zeros_(router.weight)  # all experts equally probable
    tiny(tokens)
    assert tiny.unevenness.item() == pytest.approx(CONFIG.layers)
    with torch.no_grad():
        tiny(tokens)
    assert tiny.unevenness == 0  # without gradients


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
