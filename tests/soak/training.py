"""A small training run on one rank, compared with a dense twin after every step.

Every rank trains its own router and its home experts, so gradients need no reduction beside stage
8. The twin holds the experts and routers of all ranks in one process. It knows nothing of slots,
plans or messages. Every rank computes it by itself, from the seed of the run.

Shapes: T tokens, K experts per token, R ranks, E experts, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from ultraep import BalancedMoE, Balancer, ExpertsFrom, Router, Routing, Topology
from ultraep.config import AUTO, BalanceConfig
from ultraep.errors import errors_at
from ultraep.runtime.capacity import Capacity

HIDDEN = 8
TOLERANCE = 1e-11  # of float64, relative to the largest value; a run has several steps
SMALLEST = 1.0  # values below it are compared with this scale: they are sums that cancel
RATE = 0.002  # of SGD: no run diverges in its few steps
RATES = "row=1000000,copy=1,each=0,layer=0"  # replicas cost next to nothing
Tensors = dict[str, torch.Tensor]


class WrongNumber(AssertionError):
    """A loss or gradient differs from the twin."""


@dataclass(frozen=True)
class Case:
    """The model, sizes and settings of one run."""

    ranks: int
    seed: int
    steps: int
    layers: int
    experts: int
    top_k: int
    ffn: int
    skew: float
    recompute: bool
    own_network: bool
    tokens: list[list[int]]  # [steps][ranks]
    homes: list[int]
    policy: str
    objective: str
    options: dict[str, Any]  # of the balancer

    @classmethod
    def drawn(cls, ranks: int, seed: int, steps: int = 4) -> Case:
        rng = np.random.default_rng([seed, ranks])
        experts = int(rng.integers(max(ranks, 2), 9))
        return cls(
            ranks,
            seed,
            steps,
            layers=int(rng.integers(1, 3)),
            experts=experts,
            top_k=int(rng.integers(1, min(3, experts) + 1)),
            ffn=int(rng.choice([4, 6])),
            skew=float(rng.uniform(0, 3)),
            recompute=bool(rng.integers(4) == 0),
            own_network=bool(rng.integers(3) == 0),
            tokens=rng.integers(0, 14, (steps, ranks)).tolist(),
            homes=np.sort(np.arange(experts) % ranks).tolist(),
            policy=str(rng.choice(["ultraep", "ultraep", "ultraep", "none"])),
            objective=str(rng.choice(["balance", "balance", "time"])),
            options={
                "slots": int(rng.integers(1, 3)),
                "relay": str(rng.choice(["auto", "chain", "direct"])),
                "in_flight": int(rng.integers(1, 3)),
            },
        )

    @property
    def config(self) -> BalanceConfig:
        return BalanceConfig(policy=self.policy, objective=self.objective)

    @property
    def capacity(self) -> int | str:
        """Rows for which mapped memory has room: all of them if a rank may get more than the mean.

        So few tokens may double the load of a rank from one step to the next, which "auto" refuses.
        """
        topology = self._topology(self.options["slots"])
        if Capacity(AUTO, topology, self.config).proven:
            return AUTO
        return max(1, *map(sum, self.tokens)) * self.top_k

    def home_experts(self, rank: int) -> list[int]:
        return [int(expert) for expert in self._topology().home_experts(rank)]

    def _topology(self, slots: int = 1) -> Topology:
        return Topology(ranks=self.ranks, experts=self.experts, homes=self.homes, slots=slots)

    def weights(self) -> list[Tensors]:
        """Return the weights of every layer: `routers` [R, E, D], and of all experts."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.mul_(shape[-1] ** -0.5)

        layers = []
        for _ in range(self.layers):
            routers = draw(self.ranks, self.experts, HIDDEN)
            routers[..., 0] = torch.linspace(self.skew, -self.skew, self.experts)
            layers.append(
                {
                    "routers": routers,
                    "gate_up_proj": draw(self.experts, 2 * self.ffn, HIDDEN),
                    "down_proj": draw(self.experts, HIDDEN, self.ffn),
                }
            )
        return layers

    def batch(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return inputs and targets of every rank, `[T, D]` each."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + step)
        batch = []
        for tokens in self.tokens[step]:
            x, target = torch.randn(2, tokens, HIDDEN, generator=generator, dtype=torch.float64)
            x[:, 0] = 1.0  # the skew of the router depends on it
            batch.append((x, target))
        return batch


def swiglu(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = linear(rows, gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, down)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - target) ** 2).sum() / 256


# -- the twin ------------------------------------------------------------------------------------


class Twin:
    """The same training in one process, without ranks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.weights = [
            {name: tensor.requires_grad_() for name, tensor in layer.items()}
            for layer in case.weights()
        ]

    def step(self, step: int, rank: int) -> Tensors:
        """Train one step; return the loss and the gradients of one rank."""
        losses = []
        for source, (x, target) in enumerate(self.case.batch(step)):
            for layer in self.weights:
                x = x + self._layer(layer, x, source)
            losses.append(loss_of(x, target))
        torch.stack(losses).sum().backward()
        expected = {"loss": losses[rank].detach()}
        homes = self.case.home_experts(rank)
        for index, layer in enumerate(self.weights):
            for name, tensor in layer.items():
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                expected[f"{index}.{name}"] = gradient[rank if name == "routers" else homes].clone()
                with torch.no_grad():
                    tensor -= RATE * gradient
                tensor.grad = None
        return expected

    def _layer(self, layer: Tensors, tokens: torch.Tensor, source: int) -> torch.Tensor:
        scores = linear(tokens, layer["routers"][source]).softmax(-1)
        ids = scores.topk(self.case.top_k).indices
        gates = torch.take_along_dim(scores, ids, -1)
        if self.case.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        outputs = tokens.new_zeros(*ids.shape, HIDDEN)
        for expert in range(self.case.experts):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            rows = swiglu(tokens[token], layer["gate_up_proj"][expert], layer["down_proj"][expert])
            outputs = outputs.index_put((token, choice), rows)
        return (gates.unsqueeze(-1) * outputs).sum(dim=1)


# -- the balanced run ----------------------------------------------------------------------------


class WatchedRouter(nn.Module):
    """A router that calls `watch(ids)` for every microbatch, which may replace the ids or raise."""

    def __init__(self, router: Router, watch: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.router, self._watch = router, watch

    def forward(self, tokens: torch.Tensor) -> Routing:
        ids, gates, logits = self.router(tokens)
        return Routing(self._watch(ids), gates, logits)


class Watch:
    """Hooks on the user's side of a run; an injector overrides them."""

    def router(self, ids: torch.Tensor) -> torch.Tensor:
        """Called with the ids of every microbatch."""
        return ids

    def network(self, outputs: torch.Tensor) -> torch.Tensor:
        """Called with the outputs of every expert network of the user."""
        return outputs

    def after_step(self, step: int, training: Training) -> None:
        """Called after every step."""


class Training:
    """The balanced model of one rank."""

    def __init__(self, case: Case, balancer: Balancer, watch: Watch, device: str = "cpu") -> None:
        self.case, self.balancer, self.watch = case, balancer, watch
        self.rank, self.device = balancer.rank, torch.device(device)
        self.confirms = balancer.settings.data_plane == "mapped"
        self.layers = nn.ModuleList(self._layer(weights) for weights in case.weights())
        self.layers.to(self.device)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), RATE)

    def _layer(self, weights: Tensors) -> BalancedMoE:
        case, balancer = self.case, self.balancer
        layer = BalancedMoE.swiglu(
            HIDDEN,
            case.ffn,
            case.experts,
            case.top_k,
            balancer=balancer,
            normalize_top_k=case.top_k > 1,  # of one choice, the router would learn nothing
            dtype=torch.float64,
        )
        names = ("gate_up_proj", "down_proj")
        state = {f"experts.{name}": weights[name] for name in names}
        layer.load_full_state_dict(state | {"router.weight": weights["routers"][self.rank]})
        layer.router = WatchedRouter(layer.router, self.watch.router)  # type: ignore[arg-type]
        if not case.own_network:
            return layer
        tensors = {name: getattr(layer.experts, name) for name in names}
        experts = ExpertsFrom(self._network, tensors, case.home_experts(self.rank))
        balanced = BalancedMoE(layer.router, experts, balancer=balancer)
        balanced.trained = nn.ParameterDict(tensors)  # the layer does not own them
        return balanced

    def _network(
        self, rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]
    ) -> torch.Tensor:
        """Run the experts one after the other."""
        stacks = tensors["gate_up_proj"], tensors["down_proj"]
        parts = zip(rows.split(counts), *stacks, strict=True)
        outputs = torch.cat([swiglu(part, up, down) for part, up, down in parts])
        return self.watch.network(outputs)

    def gradients(self) -> Tensors:
        """Return the gradients of this rank by the names of the twin."""
        gradients = {}
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                own = "routers" if name.startswith("router.") else name.rpartition(".")[2]
                gradient = parameter.grad
                gradients[f"{index}.{own}"] = (
                    torch.zeros_like(parameter) if gradient is None else gradient
                )
        return gradients

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
        found = {"loss": loss.detach(), **self.gradients()}
        found = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
        self.optimizer.step()
        return found

    def _confirm(self, step: int) -> None:
        """Raise errors that a device has noted on any rank: they reach its host late."""
        self.balancer.check()
        if self.confirms:
            with errors_at(f"stage 'check' of step {step}"):
                self.balancer.comm.gather_objects(None)

    def run(self) -> None:
        """Train all steps; raise `WrongNumber` where the twin differs."""
        twin = Twin(self.case)
        for step in range(self.case.steps):
            expected = twin.step(step, self.rank)
            compare(step, self.rank, self.step(step), expected)
            self.watch.after_step(step, self)


def compare(step: int, rank: int, actual: Tensors, expected: Tensors) -> None:
    """Raise unless all tensors are equal up to rounding."""
    for name, tensor in expected.items():
        if not tensor.numel():
            continue
        error = (actual[name] - tensor).abs().max().item()
        scale = max(tensor.abs().max().item(), SMALLEST)
        if not error <= TOLERANCE * scale:  # also if it is not a number
            raise WrongNumber(
                f"rank {rank}, step {step}: {name} is off by {error:.3g}, largest value {scale:.3g}"
            )
