"""Experts in eight bits on the mapped plane: interpreted kernels, beside messages."""

import pytest
import torch
from dense import gradients_of
from test_mapped import assert_as_on_host, plan_tensors, single

from ultraep.ops.formats import FORMATS


def one_pass(balancer, example, form):
    layer = example.layer(balancer, quantised=form)
    x = example.inputs[balancer.rank].clone().requires_grad_()
    y = layer(x)
    y.backward(example.gradients[balancer.rank])
    return {"y": y.detach(), **gradients_of(layer, x), **plan_tensors(layer)}


def in_blocks(balancer, example):
    return one_pass(balancer, example, "fp8")


def by_rows(balancer, example):
    return one_pass(balancer, example, "fp8_rows")


def in_mx(balancer, example):
    return one_pass(balancer, example, "mxfp8")


BODIES = {"fp8": in_blocks, "fp8_rows": by_rows, "mxfp8": in_mx}


@pytest.mark.parametrize("form", FORMATS)
def test_a_pass_agrees_with_messages(form):
    example = single([9, 6], hidden=144, ffn=48, experts=4, bias=form == "fp8")
    found = assert_as_on_host(BODIES[form], example, slots=1)
    assert len(found[0]["replicas"])


def balanced_or_not(balancer, example):
    """The same pass with and without copies."""
    layer = example.layer(balancer, quantised="fp8")
    x = example.inputs[balancer.rank]
    with torch.no_grad():
        return {policy: layer(x, policy=policy) for policy in ("ultraep", "none")}


def test_balancing_changes_no_bit():
    example = single([9, 6], hidden=144, ffn=48, experts=4)
    for found in assert_as_on_host(balanced_or_not, example, slots=1):
        assert torch.equal(found["ultraep"], found["none"])
