"""Random layers on both data planes, in double precision, against a dense layer without ranks.

200 of each with `pytest -m long tests/runtime/test_random_layers.py`; some of them otherwise.
"""

from dataclasses import replace

import numpy as np
import pytest
from cases import draw_ids, with_padding
from dense import ACTIVATIONS, Example, Result, assert_same, dense, gradients_of
from mapped_ranks import mapped_rank
from ranks import shared_pool
from torch.utils.checkpoint import checkpoint

from ultraep import Balancer, LocalGroup, Topology
from ultraep.backends.triton.device import interpreted

pytestmark = pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")  # some have no slots
BLOCK = 20  # layers of one test
BLOCKS = 10


def seeds(some):
    """The first few seeds, or with `-m long` all of them, in blocks."""
    blocks = [pytest.param(b * BLOCK, BLOCK, marks=pytest.mark.long) for b in range(BLOCKS)]
    return pytest.mark.parametrize(("first", "count"), [pytest.param(0, some, id="some"), *blocks])


def drawn(seed, most_ranks):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, most_ranks + 1))
    experts = int(rng.integers(ranks, 9))
    top_k = int(rng.integers(1, min(4, experts) + 1))
    example = Example(
        [int(tokens) for tokens in rng.integers(0, 14, ranks)],
        experts=experts,
        top_k=top_k,
        hidden=8,
        ffn=int(rng.choice([4, 6])),
        skew=float(rng.uniform(0, 3)),
        scores=str(rng.choice(["softmax", "sigmoid"])),
        normalize_top_k=top_k > 1 and bool(rng.integers(2)),  # of one, nothing would be learnt
        bias=bool(rng.integers(2)),
        router_bias=bool(rng.integers(2)),
        shared_ffn=int(rng.choice([0, 4])) or None,
        activation=str(rng.choice(list(ACTIVATIONS))),
        seed=seed,
    )
    options = {
        "slots": int(rng.integers(0, min(experts, 2) + 1)),
        "experts": sorted(int(h) for h in rng.integers(0, ranks, experts)),
        "policy": str(rng.choice(["ultraep", "ultraep", "none", "registered"])),
        "relay": str(rng.choice(["auto", "chain", "direct"])),
        "in_flight": int(rng.integers(1, 3)),
    }
    more = np.random.default_rng([seed, 1])
    example = replace(example, hidden=int(more.choice([8, 8, 2, 33])))
    if more.random() < 0.4:  # fixed ids with repetition, some of them padding
        skew, padding = more.choice([0.0, 1.0, 3.0]), more.choice([0.0, 0.4])
        ids = [draw_ids(more, n, top_k, example, skew) for n in example.tokens]
        example = replace(example, ids=[with_padding(more, own, padding) for own in ids])
    return example, options, bool(rng.integers(4) == 0)


def one_pass(balancer, example, again):
    layer = example.layer(balancer)
    x = example.inputs[balancer.rank].clone().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    y.backward(example.gradients[balancer.rank])
    return Result(y.detach(), gradients_of(layer, x))


def over_messages(example, options, again):
    def work(comm):
        balancer = Balancer._with_settings(comm, **options)
        return one_pass(balancer, example, again)

    return LocalGroup(example.ranks).run(work)


def mapped(rank, group, example, options, again):
    capacity = max(1, sum(example.tokens) * example.top_k)
    with mapped_rank(group, capacity=capacity, **options) as balancer:
        return one_pass(balancer, example, again)


def over_memory(example, options, again):
    return shared_pool().run(example.ranks, mapped, example, options, again)


def assert_dense(example, options, actual):
    homes = Topology(ranks=example.ranks, experts=example.experts, homes=options["experts"])
    assert_same(actual, dense(example), homes, fixed_router=example.ids is not None)


@pytest.mark.usefixtures("one_thread")
@seeds(some=4 * BLOCK)
def test_over_messages(first, count):
    for seed in range(first, first + count):
        example, options, again = drawn(seed, most_ranks=4)
        assert_dense(example, options, over_messages(example, options, again))


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@seeds(some=6)
def test_over_mapped_memory(first, count):
    for seed in range(1000 + first, 1000 + first + count):
        example, options, again = drawn(seed, most_ranks=3)
        assert_dense(example, options, over_memory(example, options, again))
