"""Random layers whose weights change between steps in any way, against the dense twin.

Every step runs one way (training, recomputed, without gradients, in inference mode, with weights of
its own, or inside of a promise) after one change of the weights (counted by torch or behind its
back, on the spot or in another place). Output and gradients must be those of the weights as they
are. `pytest -m long` runs a thousand of them.
"""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from dense import DenseMoE, Example, assert_close
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ultraep import Balancer, LocalGroup
from ultraep.runtime.messages.replicate import MODES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance"),  # some have no slots
]

EXPERT_TENSORS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


# Changes: each multiplies weights of experts by a factor, and gives the layer to go on with


def counted(layer, factor):
    with torch.no_grad():
        layer.experts.down_proj.mul_(factor)
    return layer


def in_inference_mode(layer, factor):
    with torch.inference_mode():
        layer.experts.gate_up_proj.mul_(factor)
    return layer


def through_data(layer, factor):
    layer.experts.down_proj.data.mul_(factor)
    return layer


def uncounted(layer, factor):
    """As collectives write, and other libraries."""
    for parameter in layer.experts.parameters():
        parameter.detach().numpy()[:] *= factor
    return layer


def by_an_optimizer(layer, factor):
    for parameter in layer.experts.parameters():
        parameter.grad = (1 - factor) * parameter.detach()
    torch.optim.SGD(layer.experts.parameters(), lr=1.0).step()
    return layer


def other_memory(layer, factor):
    layer.experts.down_proj.data = factor * layer.experts.down_proj.data
    return layer


def other_parameter(layer, factor):
    layer.experts.down_proj = nn.Parameter(factor * layer.experts.down_proj.detach())
    return layer


def reloaded(layer, factor):
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    state["experts.gate_up_proj"] *= factor
    layer.load_state_dict(state, assign=factor > 1)
    return layer


def cast_there_and_back(layer, factor):
    dtype = layer.experts.down_proj.dtype
    layer.to(torch.bfloat16).to(dtype)
    return through_data(layer, factor)


def copied(layer, factor):
    return counted(copy.deepcopy(layer), factor)


def nothing(layer, _):
    return layer


CHANGES = (
    counted,
    in_inference_mode,
    through_data,
    uncounted,
    by_an_optimizer,
    other_memory,
    other_parameter,
    reloaded,
    cast_there_and_back,
    copied,
    nothing,
)
SEEN_BY_TORCH = (counted, by_an_optimizer, other_memory, other_parameter, copied, nothing)


# Calls: each gives the output, and says whether it learns


def trained(layer, x, _):
    return layer(x)


def recomputed(layer, x, _):
    return checkpoint(layer, x, use_reentrant=False)


def without_gradients(layer, x, _):
    with torch.no_grad():
        return layer(x)


def inferred(layer, x, _):
    with torch.inference_mode():
        return layer(x)


def with_its_own_weights(layer, x, factor):
    names = [name for name in EXPERT_TENSORS if getattr(layer.experts, name) is not None]
    own = {f"experts.{n}": factor * getattr(layer.experts, n).detach() for n in names}
    with torch.no_grad():
        return functional_call(layer, own, (x,))


CALLS = (trained, recomputed, without_gradients, inferred, with_its_own_weights)


class Case:
    """Everything that is drawn for one layer and its steps."""

    def __init__(self, seed):
        draw = self.draw = random.Random(seed)
        ranks, experts = draw.randint(1, 4), draw.randint(2, 10)
        self.homes = [draw.randrange(ranks) for _ in range(experts)]
        self.layers = draw.choice([1, 1, 2, 3])
        layer = {
            "experts": experts,
            "top_k": draw.randint(1, min(3, experts)),
            "dtype": draw.choice([torch.float64, torch.float32]),
            "skew": draw.choice([0.0, 1.5, 4.0]),
            "scores": draw.choice(["softmax", "sigmoid"]),
            "normalize_top_k": draw.random() < 0.7,
            "bias": draw.random() < 0.3,
            "router_bias": draw.random() < 0.3,
            "shared_ffn": draw.choice([None, None, 4]),
        }
        tokens = [draw.choice([0, 1, 7, 20, 40]) for _ in range(ranks)]
        seeds = [draw.randrange(10**6) for _ in range(self.layers)]
        self.examples = [Example(tokens, seed=seed, **layer) for seed in seeds]
        self.balancing = {
            "slots": draw.randint(0, 2),
            "policy": draw.choice(["ultraep", "ultraep", "ultraep", "none", "echo", "quota"]),
            "relay": draw.choice(MODES),
            "in_flight": draw.randint(1, 3),
            "verify": draw.random() < 0.7,
        }
        self.bitwise = draw.random() < 0.3
        self.steps = [self._step() for _ in range(draw.randint(3, 5))]
        self.promised = draw.random() < 0.3

    def _step(self):
        factors = [self.draw.uniform(0.5, 1.5) for _ in range(5)]  # of 4 ranks, and of a call
        return self.draw.choice(CHANGES), self.draw.choice(CALLS), factors

    def change_of(self, step):
        """Inside of a promise, only what torch sees, or what is told."""
        change = self.steps[step][0]
        return change, self.promised and change not in SEEN_BY_TORCH

    def on_rank(self, comm):
        """For each step: what this rank got, and the state of all ranks."""
        balancer = Balancer(
            experts=len(self.homes), homes=self.homes, communicator=comm, **self.balancing
        )
        layers = [example.layer(balancer, bitwise=self.bitwise) for example in self.examples]
        found = []
        with balancer.unchanged_weights() if self.promised else nullcontext():
            for step, (_, call, factors) in enumerate(self.steps):
                change, told = self.change_of(step)
                layers = [change(layer, factors[comm.rank]) for layer in layers]
                if told:
                    balancer.weights_changed()
                factor = factors[-1] if call is with_its_own_weights else 1.0
                result = self._run(call, layers, comm.rank, factor)
                found.append((result, self._state(layers, factor)))
        return found

    def _run(self, call, layers, rank, factor):
        x = self.examples[0].inputs[rank].clone().requires_grad_(call in (trained, recomputed))
        y = x
        for layer in layers:
            layer.zero_grad(set_to_none=True)
            y = call(layer, y, factor)
        if not x.requires_grad:
            return y.clone(), None
        y.backward(self.examples[0].gradients[rank])
        # Clones: a module that is cast casts its gradients, too.
        experts = [
            {name: p.grad.clone() for name, p in layer.experts.named_parameters()}
            for layer in layers
        ]
        return y.detach(), (x.grad, experts)

    def _state(self, layers, factor):
        states = [layer.full_state_dict() for layer in layers]
        for state in states:
            for name in (name for name in state if name.startswith("experts.")):
                state[name] = factor * state[name].detach().clone()
        return states

    def check(self):
        """The ranks against the twin, step by step."""
        results = LocalGroup(self.examples[0].ranks).run(self.on_rank)
        for step, found in enumerate(zip(*results, strict=True)):
            change, call, _ = self.steps[step]
            where = f"step {step}, {change.__name__}, {call.__name__}"
            self._compare([result for result, _ in found], found[0][1], where)

    def _compare(self, results, states, where):
        example = self.examples[0]
        options = {"scores": example.scores, "normalize_top_k": example.normalize_top_k}
        twins = [DenseMoE(state, example.top_k, **options) for state in states]
        x = torch.cat(example.inputs).requires_grad_()
        y = nn.Sequential(*twins)(x)
        tolerance = {torch.float64: 1e-11, torch.float32: 3e-5}[example.dtype]
        assert_close(torch.cat([out for out, _ in results]), y.detach(), where, tolerance)
        if results[0][1] is None:
            return
        y.backward(torch.cat(example.gradients))
        assert_close(torch.cat([g for _, (g, _) in results]), x.grad, f"{where}: x", tolerance)
        by_rank = sorted(range(len(self.homes)), key=lambda expert: self.homes[expert])
        for index, twin in enumerate(twins):
            for name in results[0][1][1][index]:
                parts = torch.cat([experts[index][name] for _, (_, experts) in results])
                wanted = twin.gradient(f"experts.{name}")[by_rank]
                assert_close(parts, wanted, f"{where}: {name} of layer {index}", 10 * tolerance)


def check_many(seeds):
    for seed in seeds:
        try:
            Case(seed).check()
        except Exception as error:
            error.add_note(f"case of seed {seed}")
            raise


def test_some_random_layers():
    check_many(range(60))


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_layers(block):
    check_many(range(1000 + 100 * block, 1100 + 100 * block))
