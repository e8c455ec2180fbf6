"""A MoE block of transformers as several ranks of one GPU, through the seam, in graphs.

The library's own products serve the rows, so the host must know the rows per expert and waits for
the GPU once per layer. Here one host drives all ranks and could wait for only one of them, so the
row counts come from the plan, which is known because the routing is fixed. Without a GPU, ranks are
threads that exchange messages.

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
from timing import device_us, free, print_progress, time_call

import ultraep
from ultraep import BalanceConfig, LocalGroup, Plan, Topology
from ultraep.integrations.transformers import balance
from ultraep.reroute import rows_received
from ultraep.runtime.mapped.peers import LocalPeers
from ultraep.runtime.mapped.plane import MappedRows
from ultraep.runtime.settings import DeviceShare

MakeBlock = Callable[[], Any]  # with all experts; each rank keeps its own


@dataclass(frozen=True)
class CardStep:
    """Milliseconds of a step of all ranks, its plan and outputs."""

    ms: float
    plan: Plan
    outputs: list[torch.Tensor]


class BlockRank:
    """One rank: its partition, and a block with its home experts."""

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
        """Take a block with all experts, and tokens with these choices."""
        dtype = next(block.parameters()).dtype
        draw = torch.Generator(device=ids.device).manual_seed(self.number)
        drawn = torch.randn(
            2, 1, shape.tokens, shape.hidden, generator=draw, device=ids.device, dtype=dtype
        )
        x, self.dy = drawn
        self.x = x.requires_grad_()
        self.block = block
        self.block.gate = FixedChoices(ids, dtype)

    def join(self, **options: Any) -> None:
        """Keep only the home experts; collective."""
        self.balancer = balance(self.block, **options)
        if self.stream is not None:
            self.balancer.prepare(self.block.gate.ids, self.x[0], self.block.experts.bundle)

    def step(self) -> None:
        """Run forward and backward."""
        self.block.zero_grad(set_to_none=True)
        self.x.grad = self.block.gate.gates.grad = None
        self.y = self.block(self.x)
        self.y.backward(self.dy)


class FixedChoices(torch.nn.Module):
    """A router of the library with fixed choices."""

    def __init__(self, ids: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.ids = ids.long()
        self.gates = torch.full(ids.shape, 1 / ids.shape[1], dtype=dtype, device=ids.device)
        self.gates.requires_grad_()

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tokens, self.gates, self.ids


class Blocks:
    """All ranks, with the same block and their own home experts."""

    def __init__(self, shape: Shape, make: MakeBlock, device: torch.device, sms: int) -> None:
        self.shape, self.make, self.device = shape, make, device
        on_card = device.type == "cuda"
        parts = split(shape.ranks, sms) if on_card else [None] * shape.ranks
        self.ranks = [BlockRank(number, part) for number, part in enumerate(parts)]
        self.group = LocalGroup(shape.ranks)

    def become(self, load: HotRank, policy: str) -> Plan:
        """Create blocks, balancers and tokens for this load; return its plan."""
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
        """Capture the steps, with known offsets in place of a read from the device."""
        for rank in self.ranks if self.device.type == "cuda" else ():
            known = [0, *accumulate(rows_received(plan, rank.number).sum(axis=0).tolist())]
            with mock.patch.object(MappedRows, "begins", return_value=known):
                rank.graph = graph_on(rank.stream, rank.step)

    def step_ms(self, times: int) -> float:
        """Median milliseconds of a step of all ranks."""
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
        print_progress(f"{policy}, {load.name}")
        plan = self.become(load, policy)
        self.capture(plan)
        ms = self.step_ms(rounds)
        return CardStep(ms, plan, [rank.y.detach().clone() for rank in self.ranks])

    def close(self) -> None:
        for rank in self.ranks:
            rank.leave()
        free()

    def _options(self, plan: Plan) -> list[dict[str, Any]]:
        """Options of the balancers: shared GPU memory, or messages."""
        if self.device.type != "cuda":
            return [{"data_plane": "messages"}] * self.shape.ranks
        peers = LocalPeers(self.shape.ranks, self.device)
        same = {"data_plane": "mapped", "tokens": self.shape.tokens, "capacity": capacity_of(plan)}
        return [{"peers": peers.of(rank.number), "share": rank.share} | same for rank in self.ranks]
