"""Ranks at different places of the program: every rank raises an error that names them."""

import re

import pytest
import torch
from dense import Example
from ranks import TIMED_OUT, TRANSPORTS, everywhere
from torch.utils.checkpoint import checkpoint

from ultraep import Balancer, CommunicationError, PlanMismatch

RANKS = 3


class Program:
    """Layers of one rank, after two steps of two layers that all ranks ran together."""

    def __init__(self, comm, **options):
        example = Example([20] * RANKS, experts=9)
        self.comm = comm
        self.balancer = Balancer._with_settings(comm, experts=9, **options)
        self.layers = [example.layer(self.balancer) for _ in range(3)]
        self.x = example.inputs[comm.rank].clone().requires_grad_()
        for _ in range(2):
            self.forward().sum().backward()

    def forward(self, layers=2):
        y = self.x
        for layer in self.layers[:layers]:
            y = layer(y)
        return y


# What rank 1 (`odd`) does differently.


def skip_a_backward(program, odd):
    y = program.forward()
    if not odd:
        y.sum().backward()
    program.forward()


def run_a_layer_more(program, odd):
    program.forward(layers=3 if odd else 2).sum().backward()


def go_back_through_another_microbatch(program, odd):
    outputs = [program.forward() for _ in range(2)]
    for y in outputs[::-1] if odd else outputs:
        y.sum().backward()


def compute_again(program, odd):
    layer = program.layers[0]
    y = checkpoint(layer, program.x, use_reentrant=False) if odd else layer(program.x)
    y.sum().backward()


def evaluate(program, odd):
    with torch.set_grad_enabled(not odd):
        program.forward()


def take_another_policy(program, odd):
    program.layers[0](program.x, policy="none" if odd else None)


def take_another_balancer(program, odd):
    twin = Program(program.comm)  # with the same settings, and as far as the first
    (twin if odd else program).forward()


def save_alone(program, odd):
    if odd:
        program.layers[0].full_state_dict()
    program.forward()


PLACES = "ranks are at different places of the program: "
SCENARIOS = {
    skip_a_backward: PLACES
    + "ranks [0, 2] are at the backward pass of layer 1 (step 2); "
    + "ranks [1] are at the loads of layer 0 (step 3)",
    run_a_layer_more: PLACES
    + "ranks [0, 2] are at the backward pass of layer 1 (step 2); "
    + "ranks [1] are at the loads of layer 2 (step 0)",
    go_back_through_another_microbatch: PLACES
    + "ranks [0, 2] are at the backward pass of layer 1 (step 2); "
    + "ranks [1] are at the backward pass of layer 1 (step 3)",
    compute_again: PLACES
    + "ranks [0, 2] are at the backward pass of layer 0 (step 2); "
    + "ranks [1] are at the loads, recomputed in backward, of layer 0 (step 2)",
    save_alone: PLACES
    + "ranks [0, 2] are at the loads of layer 0 (step 2); "
    + "ranks [1] are at the full state of layer 0 (step 1)",
    evaluate: r"ranks disagree about the weights or inputs at the loads of layer 0 \(step 2\): "
    r"ranks \[0, 2\] have .* with gradient.*; "
    r"ranks \[1\] have ((?!gradient).)*",
    take_another_policy: r"ranks disagree about the plan of layer 0 \(step 2\): "
    r"ranks \[0, 2\] have [1-9] replicas by policy 'ultraep'; "
    r"ranks \[1\] have 0 replicas by policy 'none'",
    take_another_balancer: r"ranks disagree about the balancer: ranks \[0, 2\] have \(Topology.*; "
    r"ranks \[1\] have \(Topology.*",
}


def error_of(comm, scenario):
    with pytest.raises(PlanMismatch) as caught:
        scenario(Program(comm), comm.rank == 1)
    # The ranks can still exchange messages.
    assert comm.gather_objects(comm.rank) == list(range(RANKS))
    assert caught.value.ranks == (1,)
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_rank_raises_the_same_error(scenario, transport):
    expected = SCENARIOS[scenario]
    pattern = re.escape(expected) if expected.startswith(PLACES) else expected
    messages = everywhere(transport, RANKS, error_of, scenario)
    assert len(set(messages)) == 1
    assert re.fullmatch(pattern, messages[0]), messages[0]


def leave_early(comm):
    program = Program(comm)
    if comm.rank == 1:
        return program.balancer.close()
    with pytest.raises(CommunicationError) as caught:
        program.forward()
    return str(caught.value)


def test_a_rank_that_left_is_noticed_before_the_timeout():
    """Its process leaves the group."""
    for message in everywhere("gloo", RANKS, leave_early)[::2]:
        assert not TIMED_OUT.search(message)
        assert message.startswith("at the loads of layer 0 (step 2): all_gather: ")
        assert "rank 1" in message
