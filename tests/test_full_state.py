"""State of model and optimizer with the experts of all ranks, for any number of ranks."""

import pytest
import torch
from torch import nn

from ultraep import BalancedMoE, Balancer, ConfigError, LocalGroup, reorder_experts
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
        self.balancer = Balancer(comm, experts=homes, slots=1)
        self.first = nn.Linear(8, 8).double()
        for parameter in self.first.parameters():  # ranks are threads and share a seed
            nn.init.constant_(parameter, seed / 10)
        self.moe = BalancedMoE.swiglu(
            8, 4, EXPERTS, 2, balancer=self.balancer, seed=seed, dtype=torch.float64
        )

    def forward(self, x):
        return self.moe(self.first(x))


def trained(comm):
    model = Model(comm, seed=3)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    optimizer.step()
    return model, optimizer


def states(model, optimizer, *, keep=True):
    optimizer_state = full_optimizer_state(model, optimizer, keep=keep)
    flat = {f"{n}/{k}": t for n, state in optimizer_state.items() for k, t in state.items()}
    return full_state_dict(model, keep=keep) | flat, optimizer_state


@pytest.fixture(scope="module")
def of_two():
    """Return the states of a model on two ranks."""
    return LocalGroup(2).run(lambda comm: states(*trained(comm)))[0]


def test_states_hold_all_experts_in_order(of_two):
    tensors, _ = of_two
    names = [name for name in tensors if ".experts." in name and not name.endswith("/step")]
    assert {name.rpartition("/")[2] for name in names} > {"exp_avg", "exp_avg_sq"}
    assert all(len(tensors[name]) == EXPERTS for name in names)
    (initial,) = LocalGroup(1).run(lambda comm: full_state_dict(Model(comm, seed=3)))
    # One step is small; experts in another order differ by more.
    assert all((tensors[name] - initial[name]).abs().max() < 0.01 for name in initial)


@pytest.mark.parametrize("ranks", [1, 3])
def test_states_load_on_another_number_of_ranks(of_two, ranks):
    expected, optimizer_state = of_two

    def body(comm):
        model = Model(comm, seed=4)
        optimizer = torch.optim.AdamW(model.parameters())
        load_full_state_dict(model, {n: t for n, t in expected.items() if "/" not in n})
        load_full_optimizer_state(model, optimizer, optimizer_state)
        return states(model, optimizer)

    for tensors, _ in LocalGroup(ranks).run(body):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_ranks_that_do_not_keep_the_state_take_part():
    (tensors, _), nothing = LocalGroup(2).run(
        lambda comm: states(*trained(comm), keep=comm.rank == 0)
    )
    assert nothing == ({}, {})
    assert {"first.weight", "moe.router.weight"} < tensors.keys()


def test_missing_optimizer_states_are_named(of_two):
    def body(comm):
        model, optimizer = trained(comm)
        state = {name: own for name, own in of_two[1].items() if name != "first.bias"}
        with pytest.raises(ConfigError, match=r"no parameter 'first\.bias'"):
            load_full_optimizer_state(model, optimizer, state)

    LocalGroup(1).run(body)


def test_reordered_experts_compute_the_same():
    x = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def work(comm):
        moe = Model(comm, seed=3).moe
        other = Model(comm, seed=4).moe
        other.load_full_state_dict(reorder_experts(moe.full_state_dict(), [3, 0, 4, 1, 2]))
        return moe(x), other(x)

    for before, after in LocalGroup(2).run(work):
        torch.testing.assert_close(before, after)


@pytest.mark.parametrize(
    ("order", "message"),
    [([0, 0, 1, 2, 3], "every expert once"), ([1, 0], "has 5 experts, but the order has 2")],
)
def test_a_wrong_order_is_refused(order, message):
    with pytest.raises(ConfigError, match=message):
        reorder_experts({"experts.down_proj": torch.zeros(5, 2)}, order)
