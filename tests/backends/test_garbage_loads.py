"""Planning and rerouting end, and stay in their memory, whatever loads the kernels read.

The loads of a rank that died are whatever its memory held. The other ranks must get past planning
and rerouting to report the rank that is missing.
"""

import signal

import numpy as np
import pytest
import torch
from guard import watched

from ultraep import BalanceConfig, Rates, Topology
from ultraep.backends.triton.device import default_device, interpreted
from ultraep.runtime.device_planner import DevicePlanner

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="a kernel cannot be interrupted"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
SECONDS = 120  # far more than a plan takes through the interpreter
CONFIGS = {
    "balance": BalanceConfig(objective="balance"),
    "tolerance": BalanceConfig(objective="balance", tolerance=0.05),
    "time": BalanceConfig(rates=Rates(row=1000, copy=100_000, each=10, layer=1000)),
    "time, cheap replicas": BalanceConfig(rates=Rates(row=1_000_000, copy=1)),
}
TOPOLOGIES = {
    "two ranks": Topology(ranks=2, experts=4, slots=1),
    "domains": Topology(ranks=4, experts=16, slots=1, domain=2),
    "two slots": Topology(ranks=4, experts=12, slots=2),
}


def garbage(kind, shape, rng):
    low, high = {
        "any": (-(2**31), 2**31),
        "64 bits": (-(2**62), 2**62),
        "small": (-5, 5),
        "negative": (-(2**20), 0),
        "huge": (2**30, 2**31),
    }[kind]
    return rng.integers(low, high, shape)


@pytest.fixture
def time_limit():
    def raise_timeout(*_):
        raise TimeoutError("a kernel did not end")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["any", "64 bits", "small", "negative", "huge"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "topology", ["two ranks", "two slots", pytest.param("domains", marks=pytest.mark.slow)]
)
def test_planning_ends(topology, config, kind, time_limit):
    shape = TOPOLOGIES[topology].ranks, TOPOLOGIES[topology].experts
    control = DevicePlanner(TOPOLOGIES[topology], CONFIGS[config], rows=9, device=default_device())
    ids = torch.zeros(9, 1, dtype=torch.int32, device=default_device())
    for seed in range(2):  # the sums of some seeds overflow
        rng = np.random.default_rng(seed)
        loads = rng.integers(0, 50, shape)
        loads[1:] = garbage(kind, loads[1:].shape, rng)
        with watched():
            control.plan(torch.tensor(loads, device=default_device()))
            control.reroute(ids)
