"""A small training run on one rank, compared with a dense twin after every step.

Every rank trains its own router and its home experts, so gradients need no reduction beside stage
8. The twin holds the experts and routers of all ranks in one process. It knows nothing of slots,
plans or messages. Every rank computes it by itself, from the seed of the run.

Shapes: T tokens, D model width.
"""

from typing import Any

import numpy as np
import torch
from dense import Example, network, with_network
from torch import nn
from torch.utils.checkpoint import checkpoint

from ultraep import BalancedMoE, Balancer, Topology
from ultraep.config import BalanceConfig
from ultraep.errors import errors_at

HIDDEN = 8
TOLERANCE = 1e-11  # of float64, relative to the largest value; a run has several steps
SMALLEST = 1.0  # values below it are compared with this scale: they are sums that cancel
RATE = 0.002  # of SGD: no run diverges in its few steps
TRAINED = ("router.weight", "experts.gate_up_proj", "experts.down_proj")
Tensors = dict[str, torch.Tensor]


class WrongNumber(AssertionError):
    """A loss or gradient differs from the twin."""


class Case:
    """The model, sizes and settings of one run, drawn from its seed."""

    def __init__(self, ranks: int, seed: int, steps: int = 4) -> None:
        rng = np.random.default_rng([seed, ranks])
        self.ranks, self.seed, self.steps = ranks, seed, steps
        self.experts = int(rng.integers(max(ranks, 2), 9))
        self.layers = int(rng.integers(1, 3))
        self.top_k = int(rng.integers(1, min(3, self.experts) + 1))
        self.ffn = int(rng.choice([4, 6]))
        self.skew = float(rng.uniform(0, 3))
        self.recompute = bool(rng.integers(4) == 0)
        self.own_network = bool(rng.integers(3) == 0)
        self.tokens = rng.integers(0, 14, (steps, ranks)).tolist()
        self.homes = np.sort(np.arange(self.experts) % ranks).tolist()
        self.policy = str(rng.choice(["ultraep", "ultraep", "ultraep", "none"]))
        self.objective = str(rng.choice(["balance", "balance", "time"]))
        self.options = {  # of the balancer
            "experts": self.homes,
            "slots": int(rng.integers(1, 3)),
            "relay": str(rng.choice(["auto", "chain", "direct"])),
            "in_flight": int(rng.integers(1, 3)),
        }

    @property
    def config(self) -> BalanceConfig:
        return BalanceConfig(policy=self.policy, objective=self.objective)

    @property
    def capacity(self) -> int:
        """Rows for which mapped memory has room: those of all ranks."""
        return max(1, *map(sum, self.tokens)) * self.top_k

    def home_experts(self, rank: int) -> list[int]:
        topology = Topology(ranks=self.ranks, experts=self.experts, homes=self.homes)
        return topology.home_experts(rank).tolist()

    def examples(self) -> list[Example]:
        """Return the weights of every layer."""
        return [
            Example(
                [0] * self.ranks,
                experts=self.experts,
                top_k=self.top_k,
                hidden=HIDDEN,
                ffn=self.ffn,
                skew=self.skew,
                normalize_top_k=self.top_k > 1,  # of one choice, the router would learn nothing
                seed=self.seed + layer,
            )
            for layer in range(self.layers)
        ]

    def batch(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return inputs and targets of every rank, `[T, D]` each."""
        drawn = Example(self.tokens[step], hidden=HIDDEN, seed=self.seed * 1009 + step)
        return list(zip(drawn.inputs, drawn.gradients, strict=True))


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - target) ** 2).sum() / 256


class Twin:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.layers = nn.ModuleList()
        for example in case.examples():
            twins = nn.ModuleList(example.twin() for _ in range(case.ranks))
            for twin in twins:
                twin.weights.update({n: w for n, w in twins[0].weights.items() if "experts" in n})
            self.layers.append(twins)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), RATE)

    def step(self, step: int, rank: int) -> Tensors:
        self.optimizer.zero_grad()
        losses = []
        for source, (x, target) in enumerate(self.case.batch(step)):
            for twins in self.layers:
                x = x + twins[source](x)
            losses.append(loss_of(x, target))
        torch.stack(losses).sum().backward()
        expected = {"loss": losses[rank].detach()}
        for index, twins in enumerate(self.layers):
            for name in TRAINED:
                gradient = gradient_of(twins[rank].get(name))
                homes = ... if name == "router.weight" else self.case.home_experts(rank)
                expected[f"{index}.{name}"] = gradient[homes]
        self.optimizer.step()
        return expected


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Watch:
    """Hooks on the user's side of a run; an injector overrides them."""

    def router(self, ids: torch.Tensor) -> torch.Tensor:
        """Called with the ids of every microbatch, which it may replace."""
        return ids

    def network(self, outputs: torch.Tensor) -> torch.Tensor:
        """Called with the outputs of every expert network of the user."""
        return outputs


class Training:
    def __init__(self, case: Case, balancer: Balancer, watch: Watch, device: str = "cpu") -> None:
        self.case, self.balancer, self.watch = case, balancer, watch
        self.rank, self.device = balancer.rank, torch.device(device)
        self.layers = nn.ModuleList(map(self._layer, case.examples())).to(self.device)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), RATE)

    def _layer(self, example: Example) -> BalancedMoE:
        layer = example.layer(self.balancer)
        if self.case.own_network:
            tensors = {name: getattr(layer.experts, name) for name in ("gate_up_proj", "down_proj")}
            layer = with_network(layer, self._network, tensors)
            layer.trained = nn.ParameterDict(tensors)  # the layer does not own them
        layer.router.register_forward_hook(
            lambda _, __, routing: routing._replace(ids=self.watch.router(routing.ids))
        )
        return layer

    def _network(
        self, rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]
    ) -> torch.Tensor:
        return self.watch.network(network(rows, counts, tensors))

    def step(self, step: int) -> Tensors:
        """Train one step; return loss and gradients."""
        x, target = (tensor.to(self.device) for tensor in self.case.batch(step)[self.rank])
        self.balancer.record_step(step)
        self.optimizer.zero_grad()
        for layer in self.layers:
            recomputed = self.case.recompute
            x = x + (checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x))
        loss = loss_of(x, target)
        # A rank without tokens takes part in backward as well.
        loss.backward()
        self._confirm(step)
        actual = {"loss": loss.detach()}
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                own = name if name == "router.weight" else f"experts.{name.rpartition('.')[2]}"
                actual[f"{index}.{own}"] = gradient_of(parameter)
        self.optimizer.step()
        return actual

    def _confirm(self, step: int) -> None:
        """Raise errors that a device has noted on any rank: they reach its host late."""
        self.balancer.check()
        if self.balancer.settings.data_plane == "mapped":
            with errors_at(f"stage 'check' of step {step}"):
                self.balancer.comm.gather_objects(None)

    def run(self) -> None:
        """Train all steps; raise `WrongNumber` where the twin differs."""
        twin = Twin(self.case)
        for step in range(self.case.steps):
            expected = twin.step(step, self.rank)
            compare(step, self.rank, self.step(step), expected)


def compare(step: int, rank: int, actual: Tensors, expected: Tensors) -> None:
    """Raise unless all tensors are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if not tensor.numel():
            continue
        error = (actual[name].cpu() - tensor).abs().max().item()
        scale = max(tensor.abs().max().item(), SMALLEST)
        if not error <= TOLERANCE * scale:  # also if it is not a number
            raise WrongNumber(
                f"rank {rank}, step {step}: {name} is off by {error:.3g}, largest value {scale:.3g}"
            )
