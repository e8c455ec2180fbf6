"""State with the experts of all ranks: of model and optimizer, for another number of ranks."""

import pytest
import torch
from torch import nn

from ultraep import BalancedMoE, Balancer, ConfigError, LocalGroup
from ultraep.parallel.full_state import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from ultraep.topology import even_homes

EXPERTS = 5


class Model(nn.Module):
    def __init__(self, comm, seed):
        super().__init__()
        homes = even_homes(EXPERTS, comm.size)
        self.balancer = Balancer(experts=EXPERTS, slots=1, homes=homes, communicator=comm)
        self.first = nn.Linear(8, 8).double()
        for parameter in self.first.parameters():  # ranks are threads: no seed of all of them
            nn.init.constant_(parameter, seed / 10)
        self.moe = BalancedMoE.swiglu(
            8, 4, EXPERTS, 2, balancer=self.balancer, seed=seed, dtype=torch.float64
        )

    def forward(self, x):
        return self.moe(self.first(x))


def trained(comm):
    """A model that has learnt something of its own, and its optimizer."""
    model = Model(comm, seed=3)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    optimizer.step()
    return model, optimizer


def states(model, optimizer, *, keep=True):
    kept = {"keep": keep}
    return full_state_dict(model, **kept), full_optimizer_state(model, optimizer, **kept)


def flat(found):
    model, optimizer = found
    return model | {f"{n}/{k}": t for n, of in optimizer.items() for k, t in of.items()}


@pytest.fixture(scope="module")
def of_two():
    return LocalGroup(2).run(lambda comm: states(*trained(comm)))[0]


def test_all_experts_are_there_in_their_order(of_two):
    weights = [name for name in flat(of_two) if ".experts." in name and not name.endswith("/step")]
    assert {name.rpartition("/")[2] for name in weights} > {"exp_avg", "exp_avg_sq"}
    assert all(len(flat(of_two)[name]) == EXPERTS for name in weights)
    fresh = LocalGroup(1).run(lambda comm: full_state_dict(Model(comm, seed=3)))[0]
    moved = {name: (of_two[0][name] - fresh[name]).abs().max() for name in fresh}
    assert all(0 <= step < 0.01 for step in moved.values())  # the experts of another order: more


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on(of_two, ranks):
    def body(comm):
        model = Model(comm, seed=4)
        optimizer = torch.optim.AdamW(model.parameters())
        load_full_state_dict(model, of_two[0])
        load_full_optimizer_state(model, optimizer, of_two[1])
        return states(model, optimizer)

    for found in LocalGroup(ranks).run(body):
        assert flat(found).keys() == flat(of_two).keys()
        assert all(torch.equal(flat(found)[name], flat(of_two)[name]) for name in flat(found))


def test_who_does_not_keep_it_takes_part():
    def body(comm):
        return states(*trained(comm), keep=comm.rank == 0)

    kept, not_kept = LocalGroup(2).run(body)
    assert not_kept == ({}, {})
    assert {"first.weight", "moe.router.weight"} < kept[0].keys()


def test_a_parameter_that_is_missing_is_named(of_two):
    def body(comm):
        model, optimizer = trained(comm)
        state = {name: known for name, known in of_two[1].items() if name != "first.bias"}
        with pytest.raises(ConfigError, match=r"no parameter 'first\.bias'"):
            load_full_optimizer_state(model, optimizer, state)

    LocalGroup(1).run(body)
