"""The hybrid plane: several domains of ranks, against a dense layer without ranks."""

import numpy as np
import pytest
import torch.distributed as dist
from dense import assert_same, dense
from ranks import PATIENCE, shared_pool
from shared_peers import SharedPeers
from test_random_layers import drawn, one_pass

from ultraep import Balancer, LocalGroup, Topology
from ultraep.backends.triton.device import interpreted

pytestmark = pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")  # some have no slots
BLOCK = 20


def in_domains(seed, ranks):
    """Draw a layer over this many ranks, in two or more domains."""
    rng = np.random.default_rng(seed)
    while True:
        example, options, again = drawn(int(rng.integers(1 << 30)), most_ranks=ranks)
        sizes = [size for size in (1, 2, 3) if example.ranks % size == 0 and size < example.ranks]
        if not sizes:
            continue
        domain = int(rng.choice(sizes))
        homes = np.bincount(np.array(options["homes"]) // domain, minlength=example.ranks // domain)
        if homes.min() >= max(1, options["slots"]):
            return example, options | {"domain": domain}, again


def over_messages(example, options, again):
    def work(comm):
        balancer = Balancer(
            experts=example.experts, communicator=comm, data_plane="hybrid", **options
        )
        return one_pass(balancer, example, again)

    return LocalGroup(example.ranks).run(work)


def mapped_inside(rank, group, example, options, again):
    first = rank - rank % options["domain"]
    inside = dist.new_group(range(first, first + options["domain"]), use_local_synchronization=True)
    balancer = Balancer(
        group,
        experts=example.experts,
        data_plane="hybrid",
        peers=SharedPeers(inside),
        timeout=PATIENCE,
        **options,
    )
    actual = one_pass(balancer, example, again)
    balancer.check()
    balancer.close()
    return actual


@pytest.mark.usefixtures("one_thread")
def test_random_layers_with_messages_inside():
    for seed in range(10):
        example, options, again = in_domains(seed, ranks=6)
        actual = over_messages(example, options, again)
        assert_same(actual, dense(example), topology(example, options))


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
def test_random_layers_with_mapped_memory_inside():
    for seed in range(4):
        example, options, again = in_domains(100 + seed, ranks=4)
        actual = shared_pool().run(example.ranks, mapped_inside, example, options, again)
        assert_same(actual, dense(example), topology(example, options))


def topology(example, options):
    return Topology(ranks=example.ranks, experts=example.experts, homes=options["homes"])
