"""DeviceBalancer without a GPU: the layer in processes whose kernels pull from each other's memory.

Whatever the plans, slots and relays, it gives what the layer of the host `Balancer` gives.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from dense import Example, Result, assert_close, gradients_of
from guard import watched
from ranks import PATIENCE, shared_pool
from shared_peers import SharedPeers
from torch import nn

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
from ultraep.runtime.peers import LocalPeers
from ultraep.runtime.symmetric import SymmetricPeers

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


def on_device(rank, group, body, example, options):
    """`body(balancer, example)` with kernels between processes."""
    with small_tiles():
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
    return {"replicas": torch.tensor(plan.replicas.copy()), "split": torch.tensor(plan.split.copy())}


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


CASES = {
    "no slots": (single([5, 7], top_k=1, normalize_top_k=False), {"slots": 0, "relay": "direct"}),
    "chains": (single([9, 4, 7], experts=9, skew=6.0, top_k=1, normalize_top_k=False), {"slots": 1, "relay": "chain"}),
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
    found = assert_as_on_host(one_pass, example, **options)
    assert bool(len(found[0]["replicas"])) == (name not in ("no slots", "nothing is balanced"))


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


class Noted(SharedPeers):
    """Peers that know all memory of the group."""

    def __init__(self, group):
        super().__init__(group)
        self.pieces = []

    def allocate(self, name, nbytes):
        region = super().allocate(name, nbytes)
        self.pieces += region.handle
        return region


def pass_under_watch(rank, group, example, options):
    with small_tiles():
        peers = Noted(group)
        balancer = device_balancer(peers, example, **options)
        layer = example.layer(balancer)
        for _ in range(2):
            x = example.inputs[rank].clone().requires_grad_()
            with watched(also=[*peers.pieces, *layer.parameters()]) as watch:
                peers.watch = watch
                layer(x).backward(example.gradients[rank])
        balancer.check()
    return watch.kernels
