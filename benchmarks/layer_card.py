"""Eight ranks on one card with one layer each: what `bench_layer_gpu.py` and others measure.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width, F hidden width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from load_cases import Shape, ids_with
from timing import device_us, free
from world import Card, Given, Partition, Rank, StageClock, given_layer, split

from ultraep import Plan
from ultraep.arrays import IntArray

LAUNCHING = 30_000_000  # cycles: longer than it takes to launch all ranks
CUDA, BF16 = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """What is measured."""

    model: str
    top_k: int = 8
    ranks: int = 8
    sms: int = 16
    rounds: int = 7
    loads: int = 5  # of those that are measured


class LayerRank(Rank):
    """A rank with one layer; a step is its forward and backward pass."""

    def __init__(self, number: int, partition: Partition, size: Size) -> None:
        super().__init__(number, partition)
        self.size, self.aside = size, partition.stream()
        generator = torch.Generator(device=CUDA).manual_seed(number)
        drawn = partial(torch.randn, generator=generator, device=CUDA, dtype=BF16)
        self.x = drawn(size.tokens, size.hidden).requires_grad_()
        self.dy = drawn(size.tokens, size.hidden)
        gates = torch.rand(size.tokens, size.top_k, generator=torch.Generator().manual_seed(1))
        self.router = Given(
            torch.zeros(size.tokens, size.top_k, dtype=torch.int32, device=CUDA),
            (gates / gates.sum(dim=1, keepdim=True)).cuda().requires_grad_(),
        )
        self.layer: Any = None
        self.record: str | None = None  # the folder of a trace
        self.y: Any = None
        self.clock: StageClock | None = None

    def become(self, peers: Any, plan: Plan, capacity: int | str) -> None:
        """A rank of a new group, with the experts that have their home here by the plan."""
        size, topology = self.size, plan.topology
        self.join(
            peers,
            self.aside,
            experts=size.experts,
            tokens=size.tokens,
            slots=topology.slots,
            homes=topology.home_of_expert.tolist(),
            policy="ultraep" if plan.config.policy == "ultraep" else "none",
            capacity=capacity,
            timeout=20.0,
            record=self.record,
        )
        home = topology.home_experts(self.number).tolist()
        self.layer = given_layer(self.balancer, self.router, drawn_weights(size, home))
        assert self.router.ids is not None
        self.balancer.prepare(self.router.ids, self.x, self.layer.experts.bundle)

    def step(self) -> None:
        if self.clock is not None:
            self.clock.mark("begin")
        self.y = self.layer(self.x)
        self.y.backward(self.dy)
        if self.clock is not None:
            self.clock.mark("backward end")

    def capture(self, clock: StageClock | None = None) -> None:
        """A graph of one step; with stamps of the clock between its stages, if there is one."""
        self.clock = clock
        if clock is not None:
            self.balancer.observe(clock)
        self.graph = self.y = None
        for tensor in (self.x, self.router.gates, *self.layer.parameters()):
            tensor.grad = None
        super().capture()

    def leave(self) -> None:
        self.graph = self.layer = self.balancer = self.y = self.x.grad = None
        assert self.router.gates is not None
        self.router.gates.grad = None


def drawn_weights(size: Size, home_experts: list[int]) -> dict[str, torch.Tensor]:
    """Weights by the number of the expert, drawn on the card: quicker than those of training."""
    homes, widths = len(home_experts), (2 * size.ffn, size.hidden)
    weights = {
        "gate_up_proj": torch.empty(homes, *widths, device=CUDA, dtype=BF16),
        "down_proj": torch.empty(homes, size.hidden, size.ffn, device=CUDA, dtype=BF16),
    }
    for index, expert in enumerate(home_experts):
        generator = torch.Generator(device=CUDA).manual_seed(1_000_003 + expert)
        for stack in weights.values():
            bound = stack.shape[-1] ** -0.5
            stack[index].uniform_(-bound, bound, generator=generator)
    return weights


class World(Card):
    """All ranks of the card, each with one layer; two of them may share its parts in turn."""

    def __init__(
        self,
        size: Size,
        kind: type[LayerRank] = LayerRank,
        parts: Sequence[Partition] | None = None,
    ) -> None:
        self.parts = parts or split(size.ranks, size.sms)
        super().__init__([kind(rank, part, size) for rank, part in enumerate(self.parts)])
        self.size = size

    def regroup(self, plan: Plan, capacity: int | str) -> None:
        """Shared memory, balancers and weights anew."""
        from ultraep.runtime.mapped.peers import LocalPeers

        for rank in self.ranks:
            rank.leave()
        free()
        group = LocalPeers(self.size.ranks)
        for rank in self.ranks:
            rank.become(group.of(rank.number), plan, capacity)
        torch.cuda.synchronize()

    def route(self, loads: IntArray) -> None:
        """Give every rank ids with these loads."""
        ids = (ids_with(own, self.size, seed=rank) for rank, own in enumerate(loads))
        self.choose(list(ids))

    def choose(self, ids: Sequence[torch.Tensor]) -> None:
        """Give every rank these ids `[T, K]`."""
        for rank, own in zip(self.ranks, ids, strict=True):
            rank.router.ids.copy_(own)
        torch.cuda.synchronize()

    def adopt(self, plan: Plan) -> None:
        """Work by a plan that was made before, with copies that were sent before."""
        for rank in self.ranks:
            rank.balancer.plane(CUDA).adopt(plan)
        torch.cuda.synchronize()
        for rank in self.ranks:
            with torch.cuda.stream(rank.stream):
                rank.balancer.plane(CUDA).keep(rank.layer.experts.bundle)
        self.check()

    def time(self, rounds: int | None = None) -> float:
        """Milliseconds of a step, the median of so many.

        The card waits until all ranks are launched: one host launches them here one after the
        other, where eight would do it at the same time.
        """
        wait = torch.cuda.synchronize
        rounds = rounds or self.size.rounds
        us = device_us(self.replay, rounds, warmup=2, before=wait, cycles=LAUNCHING)
        return us / 1e3

    def breakdown(self) -> dict[str, tuple[float, float]]:
        """Milliseconds of every stage of a step: mean of the ranks, and the slowest."""
        clocks = [StageClock.on_device() for _ in self.ranks]
        for rank, clock in zip(self.ranks, clocks, strict=True):
            rank.capture(clock)
        torch.cuda.synchronize()
        for _ in range(3):
            self.replay()
            self.check()
        found: dict[str, list[float]] = defaultdict(list)
        for clock in clocks:
            for stage, ms in clock.times().items():
                found[stage].append(ms)
        return {stage: (sum(times) / len(times), max(times)) for stage, times in found.items()}
