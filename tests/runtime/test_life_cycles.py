"""Random life cycles on all data planes, in double precision, against a dense model.

Some on each plane; 1,000 more with `pytest -m long tests/runtime/test_life_cycles.py`.
"""

from dataclasses import replace

import numpy as np
import pytest
from life_cycles import OnRank, Program, assert_agree
from mapped_ranks import mapped_rank
from permuting import Shuffling
from ranks import PATIENCE, shared_pool

from ultraep import Balancer, LocalGroup
from ultraep.backends.triton.device import interpreted
from ultraep.runtime.connect import connect

BLOCK, FEW = 10, 5  # programs of one test; few: kernels are interpreted
BLOCKS = 100


def blocks(quick, number=BLOCKS):
    marks = {0: [], **dict.fromkeys(range(1, quick), pytest.mark.slow)}
    return [pytest.param(b, marks=marks.get(b, pytest.mark.long)) for b in range(number)]


def over_messages(program):
    def work(comm):
        options = dict(program.options)
        if program.dispatcher is not None:
            options["dispatcher"] = Shuffling(comm, **program.dispatcher)
        balancer = Balancer._with_settings(comm, **options)
        return OnRank(program, balancer).run()

    return LocalGroup(len(program.tokens), timeout=PATIENCE).run(work)


def in_two_domains(program):
    """Return the options with two domains of two ranks, each the home of every other expert."""
    homes = [2 * (expert % 2) + expert // 2 % 2 for expert in range(program.experts)]
    slots = min(program.options["slots"], program.experts // 2)
    return program.options | {"data_plane": "hybrid", "domain": 2, "experts": homes, "slots": slots}


def mapped(rank, group, program):
    plane = "hybrid" if "domain" in program.options else "mapped"
    options, comm = program.options | {"data_plane": plane}, connect(group, timeout=PATIENCE)
    if program.dispatcher is not None:
        options["dispatcher"] = Shuffling(comm, **program.dispatcher)
    with mapped_rank(group, **options) as balancer:
        observed = OnRank(program, balancer).run()
    comm.close()
    return observed


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("block", blocks(quick=4))
def test_over_messages(block):
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        program = Program.drawn(seed, most_ranks=3, most_actions=16)
        assert_agree(program, over_messages(program))


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@pytest.mark.parametrize("block", blocks(quick=2, number=2 * BLOCKS))
def test_over_mapped_memory(block):
    for seed in range(10_000 + block * FEW, 10_000 + (block + 1) * FEW):
        program = Program.drawn(seed, most_ranks=2, most_actions=12)
        assert_agree(program, shared_pool().run(len(program.tokens), mapped, program))


def drawn_in_domains(seed, most_actions):
    """Draw a program of four ranks in two domains."""
    program = Program.drawn(seed, most_ranks=4, most_actions=most_actions)
    tokens = np.random.default_rng(seed).integers(1, 12, 4).tolist()
    program = replace(program, tokens=tokens, experts=max(4, program.experts))
    program.options = in_two_domains(program)
    return program


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("block", blocks(quick=3))
def test_over_domains_of_messages(block):
    for seed in range(20_000 + block * BLOCK, 20_000 + (block + 1) * BLOCK):
        program = drawn_in_domains(seed, most_actions=12)
        assert_agree(program, over_messages(program))


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@pytest.mark.parametrize("block", blocks(quick=1))
def test_over_domains_of_mapped_memory(block):
    for seed in range(30_000 + 2 * block, 30_002 + 2 * block):
        program = drawn_in_domains(seed, most_actions=6)
        assert_agree(program, shared_pool().run(len(program.tokens), mapped, program))
