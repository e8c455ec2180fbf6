"""A block of experts of transformers as several ranks of one card, through the seam, in graphs.

The library's own products serve the rows, so the host must know how many rows each expert has, and
waits for its GPU in every step. Here one host drives all ranks and could only wait for one of them:
the numbers are taken from the plan, which is known since routing is given. A real rank waits once
in a layer, for a copy of some numbers from its GPU. Without a card, ranks are threads that send
each other messages.

Shapes: T tokens of a rank, K experts per token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from card import LAUNCHING, Partition, capacity_of, graph_on, split, together
from layers import FORCED
from load_cases import HotRank, Shape, even, ids_with
from timing import device_us, free, tell, time_call

import ultraep
from ultraep import BalanceConfig, LocalGroup, Plan, Topology
from ultraep.integrations.transformers import balance
from ultraep.reroute import rows_received
from ultraep.runtime.mapped.peers import LocalPeers
from ultraep.runtime.mapped.plane import MappedRows
from ultraep.runtime.settings import DeviceShare

MakeBlock = Callable[[], Any]  # with all experts; only those of a rank are kept


@dataclass(frozen=True)
class CardStep:
    """Milliseconds of a step of all ranks, its plan and its outputs."""

    ms: float
    plan: Plan
    outputs: list[torch.Tensor]


class BlockRank:
    """One rank: its part of the card, and the block of which it keeps its home experts."""

    def __init__(self, number: int, partition: Partition | None) -> None:
        self.number = number
        self.stream: Any = None
        self.share: DeviceShare | None = None
        if partition is not None:
            self.stream = partition.stream()
            self.share = DeviceShare(sms=partition.sms, stream=partition.stream())
        self.block: Any = None
        self.balancer: Any = None
        self.x: Any = None
        self.y: Any = None
        self.dy: Any = None
        self.graph: Any = None

    def leave(self) -> None:
        self.block = self.balancer = self.x = self.y = self.dy = self.graph = None

    def receive(self, block: Any, ids: torch.Tensor, shape: Shape) -> None:
        """A block with all experts, and tokens with these choices."""
        dtype = next(block.parameters()).dtype
        draw = torch.Generator(device=ids.device).manual_seed(self.number)
        drawn = torch.randn(
            2, 1, shape.tokens, shape.hidden, generator=draw, device=ids.device, dtype=dtype
        )
        x, self.dy = drawn
        self.x = x.requires_grad_()
        self.block = block
        self.block.gate = GivenChoices(ids, dtype)

    def join(self, **options: Any) -> None:
        """Keep the home experts only; collective."""
        self.balancer = balance(self.block, **options)
        if self.stream is not None:
            self.balancer.prepare(self.block.gate.ids, self.x[0], self.block.experts.bundle)

    def step(self) -> None:
        """Forward and backward."""
        self.block.zero_grad(set_to_none=True)
        self.x.grad = self.block.gate.gates.grad = None
        self.y = self.block(self.x)
        self.y.backward(self.dy)


class GivenChoices(torch.nn.Module):
    """A router of the library whose choices are given."""

    def __init__(self, ids: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.ids = ids.long()
        self.gates = torch.full(ids.shape, 1 / ids.shape[1], dtype=dtype, device=ids.device)
        self.gates.requires_grad_()

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tokens, self.gates, self.ids


class Blocks:
    """All ranks, each with the same block of which it keeps its home experts."""

    def __init__(self, shape: Shape, make: MakeBlock, device: torch.device, sms: int) -> None:
        self.shape, self.make, self.device = shape, make, device
        on_card = device.type == "cuda"
        parts = split(shape.ranks, sms) if on_card else [None] * shape.ranks
        self.ranks = [BlockRank(number, part) for number, part in enumerate(parts)]
        self.group = LocalGroup(shape.ranks)

    def become(self, load: HotRank, policy: str) -> Plan:
        """Blocks, balancers and tokens anew, for this load; returns the plan that will serve it."""
        loads = even(self.shape) if policy == FORCED else load.draw(self.shape)
        slots, name = (load.slots, policy) if policy == "ultraep" else (0, "none")
        topology = Topology(ranks=self.shape.ranks, experts=self.shape.experts, slots=slots)
        plan = ultraep.plan(loads, topology, BalanceConfig(policy=name))
        self.close()
        for rank in self.ranks:
            ids = ids_with(loads[rank.number], self.shape, seed=rank.number).to(self.device)
            rank.receive(self.make(), ids, self.shape)
        options = self._options(plan)
        self.group.run(
            lambda comm: self.ranks[comm.rank].join(
                policy=name, slots=slots, communicator=comm, **options[comm.rank]
            )
        )
        free()
        return plan

    def capture(self, plan: Plan) -> None:
        """Graphs of the steps. The seam would ask the device for the offsets, which are known."""
        for rank in self.ranks if self.device.type == "cuda" else ():
            known = [0, *accumulate(rows_received(plan, rank.number).sum(axis=0).tolist())]
            with mock.patch.object(MappedRows, "begins", return_value=known):
                rank.graph = graph_on(rank.stream, rank.step)

    def step_ms(self, times: int) -> float:
        """Milliseconds of a step of all ranks, the median of so many."""
        if self.device.type != "cuda":
            run = partial(self.group.run, lambda comm: self.ranks[comm.rank].step())
            return 1e3 * time_call(run, times, warmup=1).p50
        streams = [rank.stream for rank in self.ranks]
        calls = [rank.graph.replay for rank in self.ranks]
        spent = device_us(lambda: together(calls, streams), times, warmup=3, cycles=LAUNCHING)
        torch.cuda.synchronize()
        for rank in self.ranks:
            rank.balancer.check()
        return spent / 1e3

    def run(self, load: HotRank, policy: str, rounds: int) -> CardStep:
        """Time one policy on one load."""
        tell(f"{policy}, {load.name}")
        plan = self.become(load, policy)
        self.capture(plan)
        ms = self.step_ms(rounds)
        return CardStep(ms, plan, [rank.y.detach().clone() for rank in self.ranks])

    def close(self) -> None:
        for rank in self.ranks:
            rank.leave()
        free()

    def _options(self, plan: Plan) -> list[dict[str, Any]]:
        """How the ranks meet: over memory that they share, or by messages."""
        if self.device.type != "cuda":
            return [{"data_plane": "messages"}] * self.shape.ranks
        peers = LocalPeers(self.shape.ranks, self.device)
        same = {"data_plane": "mapped", "tokens": self.shape.tokens, "capacity": capacity_of(plan)}
        return [{"peers": peers.of(rank.number), "share": rank.share} | same for rank in self.ranks]
