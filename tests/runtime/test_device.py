"""DeviceBalancer without a GPU: the layer in processes whose kernels pull from each other's memory.

Whatever the plans, slots and relays, it gives what the layer of the host `Balancer` gives.
"""

import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from dense import Example, assert_close, gradients_of
from guard import watched
from ranks import PATIENCE, shared_pool
from shared_peers import SharedPeers
from torch import nn
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import GridExecutor

import ultraep
from ultraep import (
    BalanceConfig,
    BalancedMoE,
    Balancer,
    CommunicationError,
    ConfigError,
    LoadError,
    LocalGroup,
    PlanMismatch,
    SlotError,
)
from ultraep.backends.triton import counter, rerouter, streamer
from ultraep.backends.triton.device import interpreted
from ultraep.runtime.device import DeviceBalancer
from ultraep.runtime.mapped.peers import LocalPeers
from ultraep.runtime.mapped.symmetric import SymmetricPeers

pytestmark = pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
ROUNDING = 1e-5  # sums of single precision, in another order


@contextmanager
def small_tiles():
    """Few tokens in several tiles, small experts in several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (counter, rerouter):
            patch.setattr(module, "ROWS", 16)
            patch.setattr(module, "TOKENS", 16)
        patch.setattr(streamer, "WORDS", 256)
        patch.setattr(streamer, "SIGNAL_COST", 512)
        yield


def device_balancer(peers, example, **options):
    """With room for whatever the router likes."""
    tokens = max(len(x) for x in example.inputs)
    sizes = {"tokens": tokens, "top_k": example.top_k, "timeout": PATIENCE}
    sizes["capacity"] = example.ranks * tokens * example.top_k
    return DeviceBalancer(peers, experts=example.experts, **sizes | options)


@contextmanager
def naps(seed):
    """Some milliseconds before some kernels: no rank may count on another one's pace."""
    launch, rng = GridExecutor.__call__, np.random.default_rng(seed)

    def late(self, *args, **kwargs):
        time.sleep(rng.choice([0.0, 0.02], p=[0.9, 0.1]))
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", late)
        yield


def on_device(rank, group, body, example, options):
    """`body(balancer, example)` with kernels between processes."""
    with small_tiles(), naps(rank):
        balancer = device_balancer(SharedPeers(group), example, **options)
        found = body(balancer, example)
        balancer.check()
        balancer.close()
        return found


def on_host(body, example, options):
    """The same with the host between the stages."""

    def work(comm):
        return body(Balancer(experts=example.experts, communicator=comm, **options), example)

    return LocalGroup(example.ranks).run(work)


def assert_as_on_host(body, example, **options):
    """Every rank gets the same tensors by both; what the device found."""
    found = shared_pool().run(example.ranks, on_device, body, example, options)
    for own, wanted in zip(found, on_host(body, example, options), strict=True):
        assert own.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert_close(own[name], tensor, name, ROUNDING)
    return found


def plan_tensors(layer):
    """The last plan, wherever it was made."""
    plan = layer.last_plan
    plan = plan if isinstance(plan, ultraep.Plan) else plan.to_host()
    return {
        "replicas": torch.tensor(plan.replicas.copy()),
        "split": torch.tensor(plan.split.copy()),
    }


def single(tokens, **options):
    return Example(tokens=tokens, dtype=torch.float32, **options)


# Forward and backward.


def one_pass(balancer, example):
    layer = example.layer(balancer)
    x = example.inputs[balancer.rank].clone().requires_grad_()
    y = layer(x)
    y.backward(example.gradients[balancer.rank])
    return {"y": y.detach(), **gradients_of(layer, x), **plan_tensors(layer)}


def padded_ids():
    rng = np.random.default_rng(0)
    ids = [torch.from_numpy(rng.choice([-1, 0, 0, 0, 1, 4, 5], (n, 2))) for n in (7, 5)]
    ids[1][:] = ids[1].clamp(min=0)
    return ids


def hot_ids():
    """Two in three rows want expert 4, which lives in the middle."""
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.choice([4, 4, 4, 4, 0, 8], (n, 2))) for n in (9, 4, 7)]


CASES = {
    "no slots": (single([5, 7], top_k=1, normalize_top_k=False), {"slots": 0, "relay": "direct"}),
    "chains": (single([9, 4, 7], experts=9, ids=hot_ids()), {"slots": 1, "relay": "chain"}),
    "two slots": (single([11, 3], top_k=3), {"slots": 2, "relay": "auto"}),
    "a rank without tokens": (
        single([0, 9, 4], experts=6, top_k=1, scores="sigmoid", normalize_top_k=False),
        {"slots": 2},
    ),
    "biases": (single([6, 8], bias=True, router_bias=True, shared_ffn=8), {"slots": 1}),
    "padding": (single([7, 5], ids=padded_ids()), {"slots": 1}),
    "a rank without homes": (
        single([6, 4, 5], experts=5),
        {"slots": 1, "homes": [0, 0, 0, 2, 2], "relay": "chain"},
    ),
    "nothing is balanced": (single([6, 8]), {"slots": 1, "policy": "none"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pass_gives_what_the_host_balancer_gives(name):
    example, options = CASES[name]
    replicas = assert_as_on_host(one_pass, example, **options)[0]["replicas"]
    assert bool(len(replicas)) == (name not in ("no slots", "nothing is balanced"))
    if name == "chains":
        assert replicas[:, 0].bincount().max() > 1


def train(balancer, example):
    """Two layers, one on the other; two microbatches are under way at once, their gradients added.

    Backward finds the slots of other layers and microbatches; then the weights change.
    """
    rank = balancer.rank
    model = nn.Sequential(example.layer(balancer), example.layer(balancer))
    inputs = [example.inputs[rank], 0.5 * example.inputs[rank].flip(0)]
    outputs = [model(x) for x in inputs]
    for y in outputs:
        y.backward(example.gradients[rank])
    found = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()
    outputs.append(model(inputs[0]))
    outputs[-1].backward(example.gradients[rank])
    found |= {f"next gradient of {name}": p.grad for name, p in model.named_parameters()}
    return found | {f"output {i}": y.detach() for i, y in enumerate(outputs)}


def test_layers_and_microbatches_restore_their_copies():
    assert_as_on_host(train, single([7, 6]), slots=1, relay="chain")


def infer(balancer, example):
    """Without gradients; then with gradients of the tokens only, then of the weights only."""
    layer, x = example.layer(balancer), example.inputs[balancer.rank].clone()
    with torch.no_grad():
        found = {"without gradients": layer(x)}
    with torch.inference_mode():
        found["in inference mode"] = layer(x) + 0
    found = {name: tensor.clone() for name, tensor in found.items()}
    layer.experts.requires_grad_(False)
    layer.router.requires_grad_(False)
    x.requires_grad_()
    layer(x).backward(example.gradients[balancer.rank])
    found["x"] = x.grad
    layer.experts.requires_grad_(True)
    layer(x.detach()).backward(example.gradients[balancer.rank])
    return found | gradients_of(layer, x)


def test_only_the_gradients_that_are_wanted():
    found = assert_as_on_host(infer, single([5, 6], bias=True), slots=2)
    assert torch.equal(found[0]["without gradients"], found[0]["in inference mode"])
    assert "router.weight" not in found[0]


def adopt(balancer, example):
    """One pass by a plan of another policy, and one by its own again; the host is told which."""
    layer, rank = example.layer(balancer), balancer.rank
    ids = [layer.router(x)[0] for x in example.inputs]
    loads = np.array([ultraep.count_loads(own, example.experts) for own in ids])
    other = ultraep.plan(loads, balancer.topology, BalanceConfig(policy="quota"))
    found = {}
    for policy in ("quota", None):
        x = example.inputs[rank].clone().requires_grad_()
        if isinstance(balancer, Balancer):
            y = layer(x, policy=policy)
        else:
            balancer.adopt(other if policy else None)
            y = layer(x)
        y.backward(example.gradients[rank])
        passed = {"y": y.detach(), **gradients_of(layer, x), **plan_tensors(layer)}
        found |= {f"{name} by {policy}": tensor.clone() for name, tensor in passed.items()}
    return found


def test_a_plan_of_another_policy_can_be_adopted():
    found = assert_as_on_host(adopt, single([9, 5], experts=12), slots=2)[0]
    assert not torch.equal(found["split by quota"], found["split by None"])
    assert torch.equal(found["y by quota"], found["y by None"])


def keep(rank, group, example):
    """Passes whose copies are sent once; and how often the slots were filled until then."""
    with small_tiles():
        balancer = device_balancer(SharedPeers(group), example, slots=2)
        found = [one_pass(balancer, example)]
        layer, words = example.layer(balancer), balancer.data.board.words
        layer(example.inputs[rank])
        balancer.adopt(layer.last_plan.to_host())
        balancer.keep(layer.experts.bundle)
        channel = balancer.data.board.channel_of_buffer(0)
        before = int(words[channel])
        for _ in range(2):
            x = example.inputs[rank].clone().requires_grad_()
            y = layer(x)
            y.backward(example.gradients[rank])
            found.append({"y": y.detach(), "x": x.grad})
        after = int(words[channel])
        balancer.check()
        return found, before, after


def test_copies_that_are_kept_are_sent_once():
    for (first, *kept), before, after in shared_pool().run(2, keep, single([8, 6])):
        assert after == before
        for passed in kept:
            assert all(torch.equal(tensor, first[name]) for name, tensor in passed.items())


class Noted(SharedPeers):
    """Peers that know all memory of the group."""

    def __init__(self, group):
        super().__init__(group)
        self.pieces = []

    def allocate(self, name, nbytes):
        region = super().allocate(name, nbytes)
        self.pieces += region.handle
        return region


def pass_under_watch(rank, group, example, alone):
    """One pass in which no kernel leaves the memory of the group; `alone`: rank 1 is gone.

    Then it waits for nobody a second time, whatever stands where the others should have written.
    """
    with small_tiles():
        peers = Noted(group)
        balancer = device_balancer(peers, example, slots=2, relay="chain")
        layer = example.layer(balancer)

        def one():
            layer(example.inputs[rank]).backward(example.gradients[rank])

        one()
        balancer.check()
        peers.gather_objects("all have come so far")
        if alone and rank == 1:
            return None
        if alone:
            forget_the_others(balancer)
        with watched(also=[*peers.pieces, *layer.parameters()]) as watch:
            one()
        if not alone:
            balancer.check()
            return watch.kernels
        with pytest.raises(CommunicationError) as caught:
            balancer.check()
        one()  # copies what was noted, without waiting
        with pytest.raises(CommunicationError, match="rank 1 did not come"):
            one()
        return str(caught.value)


def forget_the_others(balancer):
    """Rank 1 is waited for shortly; then its loads are whatever was in memory."""
    share, rng = balancer.data.share_loads, np.random.default_rng(0)
    balancer.data.board.patience = 20

    def share_loads(loads, kind):
        gathered = share(loads, kind)
        gathered[1] = torch.from_numpy(rng.integers(-(2**31), 2**31, gathered[1].shape))
        return gathered

    balancer.data.share_loads = share_loads


def prepare(rank, group, example):
    """How much memory the group has before and after the first pass."""
    with small_tiles():
        peers = Noted(group)
        balancer = device_balancer(peers, example, slots=2)
        layer = example.layer(balancer)
        balancer.prepare(layer.experts.bundle, example.hidden, example.dtype)
        before = len(peers.pieces)
        layer(example.inputs[rank]).backward(example.gradients[rank])
        balancer.check()
        return before, len(peers.pieces)


def test_memory_can_be_allocated_before_the_first_pass():
    for before, after in shared_pool().run(2, prepare, single([5, 4])):
        assert before == after


def test_a_pass_stays_in_the_memory_of_the_ranks():
    for kernels in shared_pool().run(2, pass_under_watch, single([7, 5]), False):
        assert {"share", "stream", "gather_rows", "sum_rows", "pull"} <= kernels


def test_a_pass_without_a_rank_ends_and_names_it():
    message, _ = shared_pool().run(2, pass_under_watch, single([7, 5]), True)
    assert message.startswith("rank 1 did not come within 60 s")
    assert "at stage 'loads' (seen on rank 0)" in message


# What cannot work.


def told(kind, act, *args, **options):
    """The message of that error."""
    with pytest.raises(kind) as caught:
        act(*args, **options)
    return str(caught.value)


def refusals(rank, group, example):
    """What all ranks are told when they do the same wrong thing, or different things."""
    with small_tiles():
        peers, x = SharedPeers(group), example.inputs[rank]
        messages = {
            "settings": told(PlanMismatch, device_balancer, peers, example, slots=1 + (rank == 1)),
            "capacities": told(PlanMismatch, device_balancer, peers, example, capacity=50 + rank),
        }
        balancer = device_balancer(peers, example, slots=1)
        layer = example.layer(balancer)
        other = BalancedMoE.swiglu(16, 12 + 4 * (rank == 1), 8, 2, balancer=balancer)
        messages |= {
            "weights": told(PlanMismatch, other, x),
            "tokens": told(LoadError, balancer.gather, torch.zeros(8, 2, dtype=torch.int64)),
            "choices": told(LoadError, balancer.gather, torch.zeros(4, 3, dtype=torch.int64)),
            "policy": told(ConfigError, layer, x, policy="none"),
            "types": told(ConfigError, layer, x.to(torch.bfloat16)),
            "lent": told(SlotError, lend_twice, balancer, layer, x),
        }
        layer(x)
        balancer.check()
        balancer.gather(torch.tensor([[8, 0], [-2, -1]]))
        messages["ids"] = told(LoadError, balancer.check)
        narrow = device_balancer(peers, example, capacity=5)
        example.layer(narrow)(x)
        messages["capacity"] = told(LoadError, narrow.check)
        narrow.check()
        layer(x.clone().requires_grad_(rank == 1))
        messages["inputs"] = told(PlanMismatch, balancer.check)
        return messages


def lend_twice(balancer, layer, x):
    bundle, (ids, _) = layer.experts.bundle, layer.router(x)
    gathered = balancer.gather(ids)
    plan = balancer.plan(gathered)
    with balancer.replicate(plan, gathered, bundle), balancer.replicate(plan, gathered, bundle):
        pass


@pytest.fixture(scope="module")
def refused():
    return shared_pool().run(2, refusals, single([7, 7]))


WORDS = {
    "settings": ["ranks disagree about the settings: rank 0 has", "slots=1,", "slots=2,"],
    "capacities": ["rank 0 has", " 50, 'auto'", "; rank 1 has", " 51, 'auto'"],
    "weights": ["about the weights or inputs: rank 0 has", "[24, 16]", "rank 1 has", "[32, 16]"],
    "inputs": ["ranks disagree about the weights or inputs: rank ", "has others than another"],
    "tokens": ["ids must be [up to 7 tokens, 2], got [8, 2]"],
    "choices": ["ids must be [up to 7 tokens, 2], got [4, 3]"],
    "policy": ["policy 'none' for one call", "keeps its own, 'ultraep'"],
    "types": ["rows are torch.bfloat16, 'gate_up_proj' is torch.float32"],
    "lent": ["layer 0 needs spare slots, all 1 are lent to layer 0", "in_flight="],
    "ids": ["2 ids must lie in 0..7"],
    "capacity": [" rows for rank ", "but its buffers are for 5: give a larger capacity="],
}


@pytest.mark.parametrize("what", WORDS)
def test_what_cannot_work_is_refused_on_every_rank(what, refused):
    for messages in refused:
        for words in WORDS[what]:
            assert words in messages[what]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": BalanceConfig(), "policy": "none"}, "give config or policy, not both"),
        ({"policy": "eplb"}, "policy 'eplb' cannot run on the GPU; known are ultraep, none"),
        ({"top_k": 0}, "top_k must be positive, got 0"),
        ({"capacity": 0}, "capacity must be positive, got 0"),
        ({"in_flight": 0}, "in_flight must be positive, got 0"),
        ({"timeout": 0}, "timeout must be a positive number .* got 0"),
        ({"relay": "zigzag"}, "unknown relay mode 'zigzag'; known are direct, chain, auto"),
    ],
)
def test_settings_that_cannot_work(options, words):
    with pytest.raises(ConfigError, match=words):
        device_balancer(LocalPeers(2, device="cpu").of(0), single([5, 5]), **options)


def test_symmetric_memory_needs_gpus():
    class Group:
        def rank(self):
            return 0

        def size(self):
            return 1

    with pytest.raises(ConfigError, match="symmetric memory needs GPUs, got device cpu"):
        SymmetricPeers(Group(), device="cpu")


# One rank alone needs no other process.


@pytest.fixture
def alone():
    """An example for one rank, and its layer."""
    with small_tiles():
        example = single([6], experts=4)
        balancer = device_balancer(LocalPeers(1, device="cpu").of(0), example)
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


def test_backward_may_run_twice(alone):
    example, layer = alone
    x = example.inputs[0].clone().requires_grad_()
    y = layer(x)
    first, second = (
        torch.autograd.grad(y, x, example.gradients[0], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_may_be_computed_again_in_backward(alone, reentrant):
    example, layer = alone
    wanted = gradient(example, layer)
    found = gradient(example, lambda x: checkpoint(layer, x, use_reentrant=reentrant))
    assert torch.equal(found, wanted)


def test_a_second_derivative_is_refused(alone):
    example, layer = alone
    x = example.inputs[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_the_full_state_can_be_saved(alone):
    example, layer = alone
    assert torch.equal(
        layer.full_state_dict()["experts.down_proj"], example.state["experts.down_proj"]
    )


def test_double_precision_is_refused():
    example = Example(tokens=[6], experts=4)
    balancer = device_balancer(LocalPeers(1, device="cpu").of(0), example)
    with pytest.raises(ConfigError, match="float64"):
        example.layer(balancer)(example.inputs[0])
