"""The model and the queue, as one process."""

import time

import pytest
import torch

from ultraep import Balancer
from ultraep.layer import BalancedMoE
from ultraep.parallel.full_state import moe_layers
from ultraep.runtime.local import LocalGroup
from ultraep.tools.demo.measure import deal_evenly
from ultraep.tools.demo.train import train
from ultraep.tools.launch.group import process_group
from ultraep.tools.tiny.model import ModelConfig, TinyMoE
from ultraep.topology import even_homes

CONFIG = ModelConfig(hidden=16, ffn=16, experts=4, layers=2, heads=2)


@pytest.fixture
def tiny():
    return TinyMoE(CONFIG, Balancer("alone", experts=4)).double()


def test_texts_in_one_sequence_do_not_see_each_other(tiny):
    one, two = torch.arange(7), torch.arange(50, 55)
    alone = tiny(two[None])[0]
    positions = torch.cat([torch.arange(7), torch.arange(5)])
    together = tiny(torch.cat([one, two])[None], positions[None])[0, 7:]
    assert torch.allclose(alone, together, rtol=1e-12, atol=1e-12)


def test_unevenness_is_one_for_every_even_layer_and_more_for_others(tiny):
    tokens = torch.arange(64)[None]
    tiny(tokens)
    uneven = tiny.unevenness.item()
    for moe in moe_layers(tiny).values():
        torch.nn.init.zeros_(moe.router.weight)  # all experts equally probable
    tiny(tokens)
    assert tiny.unevenness.item() == pytest.approx(CONFIG.layers)
    assert uneven > CONFIG.layers


def test_unevenness_teaches_the_routers(tiny):
    tiny(torch.arange(64)[None])
    tiny.unevenness.backward()
    for moe in moe_layers(tiny).values():
        assert moe.router.weight.grad.abs().max() > 0
    with torch.no_grad():
        tiny(torch.arange(64)[None])
    assert tiny.unevenness == 0  # nobody learns from it


@pytest.mark.parametrize("ranks", [2, 3])
def test_even_routing_is_even_over_ranks_however_the_homes_are(ranks):
    homes = even_homes(experts=8, ranks=ranks)

    def body(comm):
        balancer = Balancer(experts=8, homes=homes, communicator=comm)
        moe = BalancedMoE.swiglu(4, 4, 8, 3, balancer=balancer)
        tokens = torch.zeros(24, 4)
        own, gates, _ = moe.router(tokens)
        with deal_evenly(moe):
            even, same_gates, _ = moe.router(tokens)
        assert torch.equal(gates, same_gates)
        assert torch.equal(own, moe.router(tokens)[0])
        assert all(len(set(row)) == 3 for row in even.tolist())
        return torch.tensor(homes)[even].flatten()

    chosen = torch.cat(LocalGroup(ranks).run(body))
    assert torch.bincount(chosen).tolist() == [24 * 3] * ranks


def test_training_ends_when_the_time_is_over():
    class Slow:
        done = 0

        def step(self):
            self.done += 1
            time.sleep(0.05)
            return self.done

    told = []
    with process_group():
        trainers = {"one": Slow(), "two": Slow()}
        found = train(trainers, 100, lambda *step: told.append(step), seconds=0.3)
        all_of_it = train({"one": Slow()}, 3, lambda *step: None)
    assert 1 <= len(found["one"]) == len(found["two"]) < 10
    assert told[:4] == [("one", 1, 1), ("two", 1, 1), ("two", 2, 2), ("one", 2, 2)]
    assert all_of_it == {"one": [1, 2, 3]}
