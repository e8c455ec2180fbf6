"""Random life cycles on both data planes, in double precision, against a dense model.

Some on each plane; 1,000 more with `pytest -m long tests/runtime/test_life_cycles.py`.
"""

import pytest
from life_cycles import OnRank, Program, assert_agree
from ranks import PATIENCE, shared_pool
from shared_peers import SharedPeers

from ultraep import Balancer, LocalGroup
from ultraep.backends.triton.device import interpreted

BLOCK = 10  # programs of one test
BLOCKS = 100


def blocks(quick):
    """Return the numbers of blocks; all but the first few are marked slow or long."""
    marks = {0: [], **dict.fromkeys(range(1, quick), pytest.mark.slow)}
    return [pytest.param(b, marks=marks.get(b, pytest.mark.long)) for b in range(BLOCKS)]


def over_messages(program):
    def work(comm):
        balancer = Balancer(experts=program.experts, communicator=comm, **program.options)
        return OnRank(program, balancer).run()

    return LocalGroup(len(program.tokens), timeout=PATIENCE).run(work)


def mapped(_rank, group, program):
    balancer = Balancer(
        group,
        experts=program.experts,
        data_plane="mapped",
        peers=SharedPeers(group),
        timeout=PATIENCE,
        **program.options,
    )
    observed = OnRank(program, balancer).run()
    balancer.check()
    balancer.close()
    return observed


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("block", blocks(quick=10))
def test_over_messages(block):
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        program = Program.drawn(seed, most_ranks=3, most_actions=16)
        assert_agree(program, over_messages(program))


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@pytest.mark.parametrize("block", blocks(quick=3))
def test_over_mapped_memory(block):
    for seed in range(10_000 + block * BLOCK, 10_000 + (block + 1) * BLOCK):
        program = Program.drawn(seed, most_ranks=2, most_actions=12)
        assert_agree(program, shared_pool().run(len(program.tokens), mapped, program))
