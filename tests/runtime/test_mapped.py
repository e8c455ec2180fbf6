"""Mapped memory without a GPU: processes whose interpreted kernels pull from each other's memory.

For all plans, slots and relays, results must equal those of messages.
"""

import time
from contextlib import contextmanager

import cases  # noqa: F401  registers a policy, also in processes
import numpy as np
import pytest
import torch
from dense import Example, assert_close, gradients_of
from guard import watched
from microbatches import counted, planned
from ranks import PATIENCE, shared_pool
from shared_peers import SharedPeers
from triton.runtime.interpreter import GridExecutor

from ultraep import (
    BalancedMoE,
    Balancer,
    CommunicationError,
    ConfigError,
    LoadError,
    LocalGroup,
    PlanMismatch,
    SlotError,
    UltraEPError,
)
from ultraep.backends.triton import rerouter, streamer
from ultraep.backends.triton.device import interpreted
from ultraep.runtime.mapped import memory as mapped_memory
from ultraep.trace.schema import BACKWARD, FORWARD

pytestmark = pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
ROUNDING = 1e-5  # sums of single precision, in another order


@contextmanager
def small_tiles():
    """Split few tokens into several tiles, and small experts into several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rerouter, "ROWS", 16)
        patch.setattr(streamer, "WORDS", 256)
        patch.setattr(streamer, "SIGNAL_COST", 512)
        yield


def mapped_balancer(example, group=None, *, peers=None, **options):
    peers = peers or SharedPeers(group)
    tokens = max(len(x) for x in example.inputs)
    usual = {"experts": example.experts, "timeout": PATIENCE}
    usual |= {"capacity": example.ranks * tokens * example.top_k}
    return Balancer._with_settings(group, peers=peers, data_plane="mapped", **usual | options)


@contextmanager
def naps(seed):
    """Sleep some milliseconds before some kernels, so that ranks run at different speeds."""
    launch, rng = GridExecutor.__call__, np.random.default_rng(seed)

    def late(self, *args, **kwargs):
        time.sleep(rng.choice([0.0, 0.02], p=[0.9, 0.1]))
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", late)
        yield


def on_device(rank, group, body, example, options):
    with small_tiles(), naps(rank):
        balancer = mapped_balancer(example, group, **options)
        actual = body(balancer, example)
        balancer.check()
        balancer.close()
        return actual


def on_host(body, example, options):
    """Run it on the messages plane, one thread per rank."""

    def work(comm):
        return body(
            Balancer._with_settings(comm, **{"experts": example.experts} | options), example
        )

    return LocalGroup(example.ranks).run(work)


def assert_as_on_host(body, example, **options):
    """Check that both planes return the same tensors on every rank; return the mapped ones."""
    actual = shared_pool().run(example.ranks, on_device, body, example, options)
    for own, expected in zip(actual, on_host(body, example, options), strict=True):
        assert own.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_close(own[name], tensor, name, ROUNDING)
    return actual


def plan_tensors(layer):
    plan = layer.last_plan.to_host()
    return {
        "replicas": torch.tensor(plan.replicas.copy()),
        "split": torch.tensor(plan.split.copy()),
    }


def single(tokens, **options):
    return Example(tokens=tokens, dtype=torch.float32, **options)


# Forward and backward.


def one_pass(balancer, example, **options):
    layer = example.layer(balancer, **options)
    x = example.inputs[balancer.rank].clone().requires_grad_()
    y = layer(x)
    y.backward(example.gradients[balancer.rank])
    return {"y": y.detach(), **gradients_of(layer, x), **plan_tensors(layer)}


def hot_ids():
    """Route two in three rows to expert 4, a home expert of the middle rank."""
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.choice([4, 4, 4, 4, 0, 8], (n, 2))) for n in (9, 4, 7)]


def test_chains_agree_with_messages():
    """Random layers, in test_random_layers.py, draw all other settings."""
    example = single([9, 4, 7], experts=9, ids=hot_ids())
    replicas = assert_as_on_host(one_pass, example, slots=1, relay="chain")[0]["replicas"]
    assert replicas[:, 0].bincount().max() > 1


def fp8_passes(balancer, example):
    """A pass of FP8 experts, and outputs with and without replicas."""
    passed = one_pass(balancer, example, quantised="fp8")
    layer, x = example.layer(balancer, quantised="fp8"), example.inputs[balancer.rank]
    with torch.no_grad():
        return passed | {policy: layer(x, policy=policy) for policy in ("ultraep", "none")}


def test_balancing_fp8_experts_changes_no_bit_and_agrees_with_messages():
    example = single([9, 6], hidden=144, ffn=48, experts=4, bias=True)
    for actual in assert_as_on_host(fp8_passes, example, slots=1):
        assert len(actual["replicas"])
        assert torch.equal(actual["ultraep"], actual["none"])


def infer(balancer, example):
    """Run without gradients, with gradients of the tokens only, and of the weights only."""
    layer, x = example.layer(balancer), example.inputs[balancer.rank].clone()
    with torch.no_grad():
        actual = {"without gradients": layer(x)}
    with torch.inference_mode():
        actual["in inference mode"] = layer(x) + 0
    actual = {name: tensor.clone() for name, tensor in actual.items()}
    layer.experts.requires_grad_(False)
    layer.router.requires_grad_(False)
    x.requires_grad_()
    layer(x).backward(example.gradients[balancer.rank])
    actual["x"] = x.grad
    layer.experts.requires_grad_(True)
    layer(x.detach()).backward(example.gradients[balancer.rank])
    return actual | gradients_of(layer, x)


def test_only_required_gradients_are_computed():
    actual = assert_as_on_host(infer, single([5, 6], bias=True), slots=2)
    assert torch.equal(actual[0]["without gradients"], actual[0]["in inference mode"])
    assert "router.weight" not in actual[0]


def pass_with_other_programs(balancer, example):
    """One pass of ranks whose GPUs would have different numbers of multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_memory, "_programs", lambda *_: (2 - balancer.rank, 2, 1))
        return one_pass(balancer, example)


def test_ranks_with_different_multiprocessors_move_weights_together():
    actual = assert_as_on_host(pass_with_other_programs, single([20, 20], experts=4, skew=0.3))
    assert len(actual[0]["replicas"])


def memory_of(balancer):
    return balancer.plane("cpu").memory


class Noted(SharedPeers):
    """Peers that list all memory of the group."""

    def __init__(self, group):
        super().__init__(group)
        self.pieces = []

    def allocate(self, name, nbytes):
        region = super().allocate(name, nbytes)
        self.pieces += region.handle
        return region


def pass_under_watch(rank, group, example, alone):
    """Run one pass in which no kernel leaves the memory of the group; `alone`: rank 1 is gone."""
    with small_tiles():
        peers = Noted(group)
        balancer = mapped_balancer(example, group, peers=peers, slots=2, relay="chain")
        layer = example.layer(balancer)

        def one():
            layer(example.inputs[rank]).backward(example.gradients[rank])

        one()
        balancer.check()
        peers.gather_objects("all ranks have passed")
        if alone and rank == 1:
            return None
        if alone:
            memory_of(balancer).signals.poll_limit = 20
            with pytest.raises(CommunicationError) as caught:
                one()
            return str(caught.value)
        with watched(also=[*peers.pieces, *layer.parameters()]) as watch:
            one()
        balancer.check()
        return watch.kernels


def test_a_pass_stays_in_the_memory_of_the_ranks():
    for kernels in shared_pool().run(2, pass_under_watch, single([7, 5]), False):
        assert {"share", "stream", "gather_rows", "sum_rows", "pull"} <= kernels


def test_a_missing_rank_is_named():
    message, _ = shared_pool().run(2, pass_under_watch, single([7, 5]), True)
    assert "rank 1 did not arrive within 60 s" in message
    assert "at stage 'loads' (detected by rank 0)" in message


# Errors.


def error_of(kind, act, *args, **options):
    """Return the message of the error."""
    with pytest.raises(kind) as caught:
        act(*args, **options)
    return str(caught.value)


def refusals(rank, group, example):
    """Return the errors of ranks that make the same mistake, or that differ."""
    with small_tiles():
        x = example.inputs[rank]
        messages = {
            "settings": error_of(
                PlanMismatch, mapped_balancer, example, group, slots=1 + (rank == 1)
            ),
            "capacities": error_of(
                PlanMismatch, mapped_balancer, example, group, capacity=50 + rank
            ),
        }
        balancer = mapped_balancer(example, group, slots=1)
        layer = example.layer(balancer)
        other = BalancedMoE.swiglu(16, 12 + 4 * (rank == 1), 8, 2, balancer=balancer)
        floats = torch.zeros(4, 2) if rank == 1 else torch.zeros(4, 2, dtype=torch.int64)
        refused_input(balancer, floats)
        messages |= {
            "weights": error_of(PlanMismatch, other, x),
            "inputs": error_of(PlanMismatch, layer, x.clone().requires_grad_(rank == 1)),
            "lent": error_of(SlotError, lend_twice, balancer, layer, x),
            "turn": error_of(ConfigError, plan_twice, balancer, layer, x),
            "order": error_of(ConfigError, reroute_twice, layer, x),
        }
        layer(x)
        balancer.check()
        counted(balancer, torch.tensor([[8, 0], [-2, -1]]))
        messages["ids"] = error_of(LoadError, balancer.check)
        narrow = mapped_balancer(example, group, capacity=5)
        messages["capacity"] = error_of(LoadError, example.layer(narrow), x)
        layer(x.clone().requires_grad_()).sum().backward()  # allocates all memory
        y = layer(x.clone().requires_grad_())
        if rank:
            y.sum().backward()
        strayed = error_of(PlanMismatch, balancer.check if rank else layer, *([] if rank else [x]))
        return messages | {"strayed": strayed}


def refused_input(balancer, ids):
    """Check that this rank names its invalid ids, and that the other names the rank."""
    words = "ids must be integers, got torch.float32" if ids.is_floating_point() else "ranks [1]"
    assert words in error_of(UltraEPError, planned, balancer, ids)


def lend_twice(balancer, layer, x):
    bundle, ids = layer.experts.bundle, layer.router(x).ids
    microbatch, _ = planned(balancer, ids, bundle)
    with microbatch.replicate(), microbatch.replicate():
        pass


def plan_twice(balancer, layer, x):
    ids = layer.router(x).ids
    first = counted(balancer, ids)
    counted(balancer, ids)
    first.plan()


def rerouted(layer, x):
    """Return a microbatch after stage 4."""
    ids, gates, _ = layer.router(x)
    microbatch = layer.balancer.begin(layer._layer(x), ids, gates, x)
    microbatch.count()
    microbatch.plan()
    microbatch.reroute()
    return microbatch


def reroute_twice(layer, x):
    first, _ = (rerouted(layer, x) for _ in range(2))
    first.dispatch()


@pytest.fixture(scope="module")
def refused():
    return shared_pool().run(2, refusals, single([7, 7]))


WORDS = {
    "settings": ["ranks disagree about the settings: ranks [0] have", "slots=1,", "slots=2,"],
    "capacities": ["ranks [0] have", "capacity=50", "; ranks [1] have", "capacity=51"],
    "weights": ["weights or inputs at the loads", "ranks [0] have", "[24, 16]", "[32, 16]"],
    "inputs": ["weights or inputs at the loads", "rows [16] torch.float32 with grad"],
    "lent": [
        "layer 0 (step ",
        "needs spare slots, but all 1 buffers are lent to layer 0",
        "in_flight=",
    ],
    "turn": ["cannot be planned or rerouted after microbatch", "before count of the next"],
    "order": ["cannot be dispatched after microbatch", "before reroute of the next"],
    "ids": ["2 ids must lie in 0..7"],
    "capacity": ["a plan with ", "but the buffers are for 5: pass a larger capacity="],
    "strayed": ["ranks are at different places of the program", "the backward pass of layer"],
}


@pytest.mark.parametrize("what", WORDS)
def test_every_rank_raises_the_error(what, refused):
    for messages in refused:
        for words in WORDS[what]:
            assert words in messages[what]


# One rank alone.


@pytest.fixture
def alone():
    with small_tiles():
        example = single([6], experts=4)
        balancer = Balancer("alone", experts=4, data_plane="mapped")
        yield example, example.layer(balancer)
        balancer.check()


def gradient(example, run):
    x = example.inputs[0].clone().requires_grad_()
    run(x).backward(example.gradients[0])
    return x.grad


def test_the_first_pass_may_be_in_inference_mode(alone):
    example, layer = alone
    with torch.inference_mode():
        layer(example.inputs[0])
    assert gradient(example, layer).any()


def test_a_rank_alone_dispatches_in_any_order(alone):
    example, layer = alone
    x, expected = example.inputs[0], layer(example.inputs[0])
    first, second = (rerouted(layer, x) for _ in range(2))
    for microbatch in (second, first):
        with microbatch.replicate() as replicas:
            rows = microbatch.dispatch()
            outputs = layer.experts(rows, replicas)
        assert torch.equal(microbatch.combine(outputs), expected)


# Stats.

COUNTED = ("microbatches", "imbalance_before", "imbalance_after", "copies", "remote_share")


def counters(balancer, example):
    """Return the stats of two passes, and the bytes sent by all ranks."""
    for _ in range(2):
        one_pass(balancer, example)
    stats = balancer.stats()
    assert stats["seconds"].keys() == {*FORWARD, *BACKWARD} - {"recompute"}
    assert min(stats["seconds"].values()) > 0
    sent = [
        f"{what}_{unit}_sent" for what in ("weights", "gradients") for unit in ("bytes", "copies")
    ]
    summed = torch.tensor([float(stats[name]) for name in sent])
    counted_ = torch.tensor([stats[name] for name in COUNTED])
    return {"counted": counted_, "sent": balancer.comm.all_gather(summed).sum(dim=0)}


def test_statistics_agree_with_messages():
    actual = assert_as_on_host(counters, single([9, 7]), slots=1, relay="direct")
    assert actual[0]["sent"].min() > 0


# Choice and growth of the plane.


def test_an_impossible_data_plane_is_refused():
    def work(comm):
        balancer = Balancer(comm, experts=4, data_plane="mapped")
        with pytest.raises(ConfigError, match="'mapped' is not possible: rank 0: 2 threads of one"):
            counted(balancer, torch.zeros(4, 1, dtype=torch.int64))

    LocalGroup(2).run(work)


def test_repr_shows_the_data_plane_and_the_reason():
    balancer = Balancer("alone", experts=4, data_plane="mapped")
    assert "not chosen before the first microbatch" in repr(balancer)
    counted(balancer, torch.zeros(4, 1, dtype=torch.int64))
    assert "data plane mapped on cpu: all 1 ranks map each other's memory" in repr(balancer)
    balancer = Balancer("alone", experts=4)
    counted(balancer, torch.zeros(4, 1, dtype=torch.int64))
    assert "data plane messages on cpu: tokens are on the CPU" in repr(balancer)


def grow(balancer, example):
    """Run microbatches of growing size; backward of the first comes after the growth."""
    layer, rank = example.layer(balancer), balancer.rank
    xs = [example.inputs[rank][:n].clone().requires_grad_() for n in (3 + rank, 9, 5)]
    ys = [layer(x) for x in xs]
    for x, y in zip(reversed(xs), reversed(ys), strict=True):
        y.backward(example.gradients[rank][: len(x)])
    actual = {f"x {n}": x.grad for n, x in enumerate(xs)}
    return actual | {f"y {n}": y.detach() for n, y in enumerate(ys)} | gradients_of(layer, xs[0])


def test_memory_grows_with_the_largest_microbatch():
    assert_as_on_host(grow, single([9, 9]), slots=1, capacity=60, in_flight=2)
