"""Buffers and launches of stage 4 on the GPU: counted ids and a plan in, routes out.

Shapes: N rows, E experts, R ranks, S slots of all ranks, L slots of one rank.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import triton.language as tl

from ultraep.arrays import IntArray
from ultraep.backends.triton.counter import ROWS, TOKENS, Counter
from ultraep.backends.triton.kernels import reroute
from ultraep.backends.triton.launch import cdiv, power_of_2, quick


class Planned(Protocol):
    """What is known of a plan: by a `Planner`, or given to `host.reroute`."""

    ranks: int
    experts: int
    num_slots: int
    max_fanout: int  # most copies that one expert can have
    replicas: torch.Tensor
    slot_of_copy: torch.Tensor
    split: torch.Tensor
    num_replicas: torch.Tensor
    home_of_expert: torch.Tensor
    home_slot_of_expert: torch.Tensor
    expert_of_slot: torch.Tensor
    first_slot_of_rank: torch.Tensor


class Rerouter:
    """Reroutes what its counter has counted, by the plans of its planner; allocated once.

    `rows_of_slot`: [S].   `send_counts`: [R].   `unlike`: experts of which the plan knew another
    number of rows, ever.
    """

    def __init__(self, planner: Planned, counter: Counter) -> None:
        self.planner, self.counter = planner, counter
        device = counter.totals.device

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.product = tl.uint32 if counter.rows <= 1 << 16 else tl.int64
        self.strides = torch.from_numpy(strides(counter.rows)).to(device, torch.int32)
        self.away, self.first_copy, self.end_copy = (numbers(planner.experts) for _ in range(3))
        self.first_place = numbers(len(planner.slot_of_copy))
        self.first_place_of_slot = numbers(planner.num_slots)
        self.rows_of_slot = numbers(planner.num_slots)
        self.first_row = numbers(planner.num_slots + 1)
        self.send_counts = numbers(planner.ranks)
        self.unlike = numbers(1)

    def lines(self, loads_RE: torch.Tensor, rank: int) -> None:
        """How the rows of every expert are divided among its slots."""
        planner, slots = self.planner, power_of_2(self.planner.num_slots)
        quick(reroute.lines)[(1,)](
            loads_RE,
            self.counter.totals,
            planner.replicas,
            planner.slot_of_copy,
            planner.split,
            planner.num_replicas,
            planner.home_slot_of_expert,
            planner.first_slot_of_rank,
            self.away,
            self.first_copy,
            self.end_copy,
            self.first_place,
            self.first_place_of_slot,
            self.rows_of_slot,
            self.first_row,
            self.send_counts,
            self.unlike,
            rank,
            planner.ranks,
            planner.experts,
            planner.num_slots,
            loads_RE.stride(0),
            E=power_of_2(planner.experts),
            C=power_of_2(len(planner.slot_of_copy)),
            S=slots,
            R=power_of_2(planner.ranks),
            num_warps=min(16, max(1, slots // 128)),
        )

    def assign(
        self, ids: torch.Tensor, slots: torch.Tensor, order: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """The slot and the position of every row. Needs `lines`."""
        planner, tiles = self.planner, cdiv(ids.numel(), ROWS)
        if not tiles:
            return
        quick(reroute.assign)[(tiles,)](
            ids,
            self.counter.offsets,
            self.counter.totals,
            self.strides,
            planner.home_slot_of_expert,
            self.away,
            self.first_copy,
            self.end_copy,
            self.first_place,
            planner.slot_of_copy,
            self.first_row,
            slots,
            order,
            positions,
            ids.numel(),
            planner.experts,
            planner.num_slots,
            (planner.max_fanout - 1).bit_length(),
            PRODUCT=self.product,
            B=ROWS,
            num_warps=8,
        )

    def assign_to_map(self, routing_map: torch.Tensor, slot_map: torch.Tensor) -> None:
        """Which slots serve each token. Needs `lines`, and a counted map."""
        planner, columns = self.planner, 64
        tiles = cdiv(len(routing_map), TOKENS)
        if not tiles:
            return
        quick(reroute.assign_to_map)[(tiles, cdiv(planner.num_slots, columns))](
            routing_map,
            self.counter.offsets,
            self.counter.totals,
            self.strides,
            planner.expert_of_slot,
            self.away,
            self.first_place_of_slot,
            self.rows_of_slot,
            slot_map,
            len(routing_map),
            planner.experts,
            planner.num_slots,
            routing_map.stride(0),
            PRODUCT=self.product,
            B=TOKENS,
            S=columns,
            num_warps=8,
        )

    def receive(self, loads_RE: torch.Tensor, rank: int, received: torch.Tensor) -> None:
        """[R, L] rows that every rank sends to each slot of this one. Needs a plan, no ids."""
        planner, copies = self.planner, len(self.planner.slot_of_copy)
        C, R = power_of_2(copies), power_of_2(planner.ranks)
        quick(reroute.receive)[(received.shape[1],)](
            loads_RE,
            planner.replicas,
            planner.slot_of_copy,
            planner.split,
            planner.expert_of_slot,
            planner.home_of_expert,
            planner.first_slot_of_rank,
            received,
            rank,
            planner.ranks,
            received.shape[1],
            copies,
            loads_RE.stride(0),
            C=C,
            R=R,
            STEP=max(2, min(16, 4096 // R)),
            num_warps=min(8, max(1, max(R, C) // 128)),
        )


def strides(most: int) -> IntArray:
    """[most + 1] the stride of every number of rows: from its golden section up, and coprime."""
    lengths = np.arange(most + 1)
    steps = np.maximum(1, lengths * 618 // 1000)
    shared = np.gcd(steps, lengths) != 1
    shared[0] = False
    while shared.any():
        steps[shared] += 1
        shared[shared] = np.gcd(steps[shared], lengths[shared]) != 1
    return steps
