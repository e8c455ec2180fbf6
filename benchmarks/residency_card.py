"""Copies that stay, on eight ranks of one card: bytes that are streamed, and what they cost.

A model's layers, forward only, in a graph of each rank: prefill with weights that do not change.
The hot experts of a layer stay hot; which copies a plan makes of them changes with the tokens.

Shapes: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import Case, Line, Metric
from layer_card import LAUNCHING, Size, drawn_weights
from load_cases import HotRank, ids_with
from timing import device_us, free
from world import Card, Given, Partition, Rank, given_layer, split

from ultraep.arrays import IntArray
from ultraep.bundle import Layout, resolve

STEP = Metric("step_time_p50", "ms", "ms", ".2f")
SENT = Metric("weights_sent_in_a_step", "MB", "MB a step", ".1f")
COPIES = Metric("copies_in_a_step", "copies", "copies", ".1f")


@dataclass(frozen=True, kw_only=True)
class ServingSize(Size):
    """Layers of the same shape, and how often they are run of each kind."""

    layers: int = 4
    times: int = 6


FULL = ServingSize(
    model="Qwen3-235B", hidden=4096, ffn=1536, experts=128, tokens=2048, layers=4, times=8
)


class ServingRank(Rank):
    """A rank with several layers; a step is their forward pass, one after the other."""

    def __init__(self, number: int, partition: Partition, size: ServingSize) -> None:
        super().__init__(number, partition)
        self.size, self.aside = size, partition.stream()
        self.x = torch.randn(size.tokens, size.hidden, device="cuda", dtype=torch.bfloat16)
        gates = torch.full((size.tokens, size.top_k), 1 / size.top_k, device="cuda")
        ids = torch.zeros(size.tokens, size.top_k, dtype=torch.int32, device="cuda")
        self.routers = [Given(ids.clone(), gates) for _ in range(size.layers)]
        homes = range(
            number * size.experts // size.ranks, (number + 1) * size.experts // size.ranks
        )
        self.weights = [drawn_weights(size, list(homes)) for _ in range(size.layers)]
        self.layers: list[Any] = []

    def become(self, peers: Any, buffers: int) -> None:
        self.graph = None
        self.layers = []
        size = self.size
        options = {"experts": size.experts, "tokens": size.tokens, "in_flight": buffers}
        self.join(peers, self.aside, slots=1, timeout=20.0, **options)
        for router, weights in zip(self.routers, self.weights, strict=True):
            layer = given_layer(self.balancer, router, weights)
            self.balancer.prepare(router.ids, self.x, layer.experts.bundle)
            self.layers.append(layer)

    @torch.no_grad()
    def step(self) -> None:
        y = self.x
        for layer in self.layers:
            y = layer(y)

    @property
    def sent(self) -> int:
        """Copies that were sent so far."""
        plane: Any = self.balancer.plane("cuda")
        return int(plane.workspaces.last.memory.board.sent)


def drawn(rng: np.random.Generator, size: ServingSize, layer: int) -> IntArray:
    """[R, E] loads of a layer: its hot experts, and how many tokens like them this time."""
    loads = HotRank(2.0, inner=2.0).draw(size)[
        :, np.random.default_rng(layer).permutation(size.experts)
    ]
    likely = loads.sum(axis=0) / loads.sum()
    while True:
        found = rng.multinomial(size.rows, likely, size.ranks)
        if found.max() <= size.tokens:
            return found


class Serving(Card):
    """All ranks of the card."""

    def __init__(self, size: ServingSize) -> None:
        self.size, parts = size, split(size.ranks, size.sms)
        super().__init__([ServingRank(n, part, size) for n, part in enumerate(parts)])
        layout = Layout.of(resolve(self.ranks[0].weights[0]), size.experts // size.ranks)
        self.copy_bytes = layout.nbytes

    def regroup(self, buffers: int) -> None:
        from ultraep.runtime.mapped.peers import LocalPeers

        group = LocalPeers(self.size.ranks)
        for rank in self.ranks:
            rank.become(group.of(rank.number), buffers)
        torch.cuda.synchronize()
        free()
        self.route(0)
        self.capture()
        self.replay()
        self.check()

    def route(self, seed: int) -> None:
        """Other tokens."""
        rng = np.random.default_rng(seed)
        for layer in range(self.size.layers):
            loads = drawn(rng, self.size, layer)
            for rank, own in zip(self.ranks, loads, strict=True):
                rank.routers[layer].ids.copy_(ids_with(own, self.size, seed))
        torch.cuda.synchronize()

    def steps(self, seeds: list[int]) -> tuple[list[float], int]:
        """Milliseconds of each step, and the copies that were sent in all."""
        times, before = [], sum(rank.sent for rank in self.ranks)
        for seed in seeds:
            self.route(seed)
            times.append(device_us(self.replay, 1, cycles=LAUNCHING) / 1e3)
        self.check()
        return times, sum(rank.sent for rank in self.ranks) - before

    def compare(self, seeds: list[int]) -> dict[str, tuple[float, float]]:
        """Milliseconds and copies of a step, sent again and promised, which take turns."""
        found: dict[str, list[tuple[list[float], int]]] = {"sent again": [], "promised": []}
        for _ in range(2):
            found["sent again"].append(self.steps(seeds))
            with ExitStack() as stack:
                for rank in self.ranks:
                    stack.enter_context(rank.balancer.unchanged_weights())
                self.steps(seeds[-1:])  # the first one must send
                found["promised"].append(self.steps(seeds))
        return {
            kind: (
                median(ms for times, _ in runs for ms in times),
                sum(sent for _, sent in runs) / (2 * len(seeds)),
            )
            for kind, runs in found.items()
        }


def lines(size: ServingSize) -> Iterator[Line]:
    """Both kinds, for tokens that stay and change, and for one buffer and one of every layer."""
    world = Serving(size)
    for buffers in (1, size.layers):
        world.regroup(buffers)
        for tokens, seeds in (
            ("the same", [1] * size.times),
            ("others", list(range(1, size.times + 1))),
        ):
            for kind, (ms, copies) in world.compare(seeds).items():
                case: Case = {"buffers": buffers, "tokens of a step": tokens, "copies": kind}
                sent = copies * world.copy_bytes / 1e6
                yield Line(case, {STEP: ms, COPIES: copies, SENT: sent})
