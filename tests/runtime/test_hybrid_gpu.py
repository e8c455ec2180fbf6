"""The hybrid plane on a GPU: processes that share the device, in two domains.

Inside of a domain they map each other's memory; between domains messages travel through the host.
"""

import os
from functools import partial

import pytest
import torch
from dense import Example, assert_close, dense
from gpu_ranks import CUDA, PRECISION, assert_alike, hybrid, messages, one_pass
from torch.utils.checkpoint import checkpoint

from ultraep import CommunicationError

pytestmark = pytest.mark.gpu
LIMIT = 240.0  # seconds of one test


def example_of(tokens, dtype, **options):
    sizes = {"experts": 16, "hidden": 64, "ffn": 48, "top_k": 4, "skew": 2.0}
    return Example(tokens=tokens, dtype=dtype, **sizes | options)


def both_planes(rank, group, tokens, dtype):
    """Compare passes of both planes; return the output and the number of replicas."""
    example = example_of(tokens, dtype)
    options = {"experts": 16, "slots": 2, "domain": 2}
    by_messages = messages(group, **options)
    expected = one_pass(example.layer(by_messages, device=CUDA), example, rank)
    by_messages.close()
    balancer = hybrid(group, **options)
    layer = example.layer(balancer, device=CUDA)
    for again in (False, True):
        run = partial(checkpoint, layer, use_reentrant=False) if again else layer
        actual = one_pass(run, example, rank, owner=layer)
        assert_alike(actual, expected)
    replicas = layer.last_plan.to_host().num_replicas
    balancer.close()
    return actual["y"], replicas


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_two_domains_of_two(four, dtype):
    tokens = [60, 50, 0, 40]
    results = four.run(4, both_planes, tokens, dtype, timeout=LIMIT)
    expected = dense(example_of(tokens, dtype)).output
    assert_close(torch.cat([y for y, _ in results]), expected, tolerance=PRECISION[dtype])
    assert results[0][1] > 0


def grown(rank, group):
    """Compare both planes for microbatches of growing size, three of them in flight."""
    example = example_of([120] * 4, torch.float32)
    sizes = [(8, 5, 3, 1), (9, 30, 0, 40), (120, 0, 60, 120), (20, 20, 20, 20)]
    actual = []
    for of_plane in (hybrid, messages):
        balancer = of_plane(group, experts=16, slots=2, domain=2, in_flight=3)
        layer = example.layer(balancer, device=CUDA)
        xs = [example.inputs[rank][: size[rank]].to(CUDA).requires_grad_() for size in sizes]
        ys = [layer(x) for x in xs[:3]]
        for x, y in zip(xs[2::-1], ys[::-1], strict=True):
            y.backward(example.gradients[rank][: len(x)].to(CUDA))
        with torch.no_grad():
            ys.append(layer(xs[3]))
        balancer.check()
        passed = {f"y {n}": y.detach().cpu() for n, y in enumerate(ys)}
        passed |= {f"x {n}": x.grad.cpu() for n, x in enumerate(xs[:3])}
        actual.append(passed | {name: p.grad.cpu() for name, p in layer.named_parameters()})
        balancer.close()
    assert_alike(*actual)


def test_memory_grows_with_microbatches_in_flight(four):
    four.run(4, grown, timeout=LIMIT)


def leaves(rank, group, lost):
    example = example_of([20] * 4, torch.float32)
    layer = example.layer(hybrid(group, experts=16, slots=2, domain=2), device=CUDA)
    x = example.inputs[rank].to(CUDA)
    layer(x)
    if rank == lost:
        os._exit(1)
    try:
        layer(x)
    except CommunicationError as error:
        return str(error)
    return "not noticed"


def test_a_lost_rank_of_another_domain_is_named(mortal):
    outcomes = mortal.outcomes(4, leaves, 3, timeout=LIMIT)
    errors = [outcome.value for outcome in outcomes if outcome.rank != 3]
    assert all("rank 3" in error for error in errors), errors
